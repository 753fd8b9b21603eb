"""A GGUF file as the source of everything else: its numbers, tokenizer, chat template and end tokens as a bf16 model folder.

transformers' own reader dequantizes and renames the tensors. What it leaves out of the tokenizer is read from the file here:
tokens that are never split ("<tool_call>"), the digits of SmolLM's pre-tokenizer, and all tokens that end an answer.
"""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import AddedToken, Regex, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from annie_quant import models
from annie_quant.checkpoint.conversion import Conversion
from annie_quant.checkpoint.gguf import vocabulary
from annie_quant.checkpoint.gguf.reader import check_header
from annie_quant.checkpoint.writer import staged
from annie_quant.core.errors import CheckpointError, UsageError, need
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.text import printable
from annie_quant.offline.loading import check_names, one_line_errors

if TYPE_CHECKING:
    from gguf import GGUFReader

PLAIN = ("F32", "F16", "BF16")
# Tokens that end an answer in llama.cpp, whatever the file's eos_token_id is (src/llama-vocab.cpp, special_eog_ids).
ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "</s>",
)
TEMPLATE = "add one: gguf_new_metadata.py --chat-template-file FILE (llama.cpp's gguf-py)"


def convert(path: Path, output: Path | None, force: bool = False, progress: Progress = SILENT) -> Conversion:
    """Write a GGUF file as a model folder in bf16.

    Raises CheckpointError for a file that is cut or has unknown types, for an architecture that is not read here or not by
    transformers, and for a file without a chat template.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not a file", "give a GGUF file")
    reader = opened(path)
    architecture = check(path, reader)
    target = output or path.with_suffix("")
    kinds = Counter(t.tensor_type.name for t in reader.tensors)
    progress.message(f"{path.name}: {architecture}, {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}")
    with staged(target, force=force, inputs=(path,)) as part, one_line_errors(path):
        tokenizer = read_tokenizer(path, reader)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        if hasattr(config, "head_dim") and (width := value(reader, f"{architecture}.attention.key_length")):
            config.head_dim = width  # transformers 5.14 takes the class's default
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent,
            config=config,
            dtype=torch.bfloat16,
            output_loading_info=True,
            gguf_file=path.name,
            trust_remote_code=False,
        )
        model, info = loaded
        check_names(path, info)
        model.generation_config = generation(model.config, tokenizer)
        model.config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
    size_bytes = sum(f.stat().st_size for f in target.glob("*.safetensors"))
    rounded = {kind: n for kind, n in kinds.items() if kind not in PLAIN}
    loss = []
    if rounded:
        text = ", ".join(f"{n} {kind}" for kind, n in rounded.items())
        loss.append(
            f"nothing now, and before: {text} tensors were rounded already, so this reference is as good as the file and not "
            f"as the model that it was made from (annie-quant compare {shlex.quote(str(target))} {shlex.quote(str(path))})"
        )
    return Conversion(str(target), size_bytes, len(reader.tensors), loss)


def opened(path: Path) -> GGUFReader:
    """Return the package's reader. Raises CheckpointError for anything else than a whole GGUF file."""
    gguf = need("gguf", "serve")
    check_header(path)
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # it raises whatever its parsing runs into
        reason = printable(str(error), 80)
        raise CheckpointError(f"{path}: cut, or of types that are not known ({reason})", "download it again") from None


def check(path: Path, reader: GGUFReader) -> str:
    """Return the architecture. Raises CheckpointError where the file cannot become a folder."""
    gguf = need("gguf", "serve")
    architecture = str(value(reader, "general.architecture", ""))
    # transformers 5.14 gives a family with windows its class's default scale of attention, whatever the file's heads are.
    known = [f.gguf.architecture for f in models.families() if f.gguf and not f.experts and not f.gguf.window_pattern]
    served = f"annie-quant serve {shlex.quote(str(path))} --runtime llama.cpp, and bench, take it"
    if architecture not in known:
        raise CheckpointError(
            f"{path}: architecture {printable(architecture, 40)!r} is not read here, expected one of: {', '.join(known)}",
            served,
        )
    try:
        from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES as readable
    except ImportError:
        readable = []
    if architecture not in readable:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} does not read {architecture} from GGUF",
            served,
        )
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        if kind.name == "NVFP4" or (kind.name not in PLAIN and kind not in gguf.quants._type_traits):
            raise CheckpointError(
                f"{path}: {printable(tensor.name, 80)} has type {kind.name}, which is not dequantized here", served
            )
    scaling = value(reader, f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or any(t.name == "rope_freqs.weight" for t in reader.tensors):
        raise CheckpointError(
            f"{path}: its rotary embedding is scaled, and transformers' reader would drop that",
            "start from the model's own folder",
        )
    if not value(reader, "tokenizer.chat_template", ""):
        raise CheckpointError(f"{path}: no chat template, so conversations cannot be rendered", TEMPLATE)
    return architecture


def value(reader: GGUFReader, name: str, default: Any = None) -> Any:
    """Return one of the file's settings."""
    field = reader.get_field(name)
    return default if field is None else field.contents()


def read_tokenizer(path: Path, reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Return the file's tokenizer, with the tokens that are never split and the end token that the file names."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    tokens, kinds = value(reader, "tokenizer.ggml.tokens", []), value(reader, "tokenizer.ggml.token_type", [])
    for kind, special in ((vocabulary.CONTROL, True), (vocabulary.USER_DEFINED, False)):
        whole = [t for t, k in zip(tokens, kinds, strict=False) if k == kind]
        tokenizer.add_tokens([AddedToken(t, special=special, normalized=False) for t in whole], special_tokens=special)
    if (steps := pre_tokenizer(str(value(reader, "tokenizer.ggml.pre", "")))) is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = steps
    end = value(reader, "tokenizer.ggml.eos_token_id")
    if isinstance(end, int) and 0 <= end < len(tokens):
        tokenizer.eos_token = tokens[end]
    return tokenizer


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer | None:
    """Return the pre-tokenizer that llama.cpp calls `name`; None for one that is not known here."""
    expression = next((e for e, known in vocabulary.PRE_TOKENIZERS.items() if known == name), None)
    if expression is not None:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if name not in vocabulary.STEPS.values():
        return None
    digits = [pre_tokenizers.Digits(individual_digits=True)] if name == vocabulary.STEPS["Digits", "ByteLevel"] else []
    return pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


def generation(config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Return greedy decoding that ends at each token that ends an answer in llama.cpp."""
    ids = tokenizer.get_added_vocab()  # "</s>" may also be plain text of a vocabulary
    ends = [tokenizer.eos_token_id, *(ids[t] for t in ENDS if t in ids)]
    ends = list(dict.fromkeys(i for i in ends if i is not None))
    return GenerationConfig(
        do_sample=False, bos_token_id=config.bos_token_id, pad_token_id=config.pad_token_id, eos_token_id=ends
    )
