"""Loading a model folder, bf16 or NVFP4, with chosen numerics and cache, and a GGUF file as such a folder.

A GGUF file's numbers, tokenizer, chat template and end tokens become a bf16 folder, the source of everything else. transformers'
own reader dequantizes and renames the tensors. What it leaves out of the tokenizer is read from the file here: tokens that are
never split ("<tool_call>"), the digits of SmolLM's pre-tokenizer, and all tokens that end an answer.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError  # a field of config.json has another type
from tokenizers import AddedToken, Regex, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from annie_quant import models
from annie_quant.checkpoint import ModelFolder, dialects
from annie_quant.checkpoint.chat_template import refusing_own_code
from annie_quant.checkpoint.checks.contents import read_input
from annie_quant.checkpoint.conversion import Conversion
from annie_quant.checkpoint.dialects import compressed_tensors, fp8
from annie_quant.checkpoint.gguf import vocabulary
from annie_quant.checkpoint.gguf.reader import gguf_value, open_reader, opened_once
from annie_quant.checkpoint.other_formats import refuse_other_folder
from annie_quant.checkpoint.writer import staged
from annie_quant.core.errors import AnnieError, CheckpointError, EnvironmentFault, UsageError, need
from annie_quant.core.files import follow_umask
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.text import printable
from annie_quant.core.untrusted import JsonObject
from annie_quant.models.formats import FP8_BLOCK
from annie_quant.offline.linears import (
    BlockFP8Linear,
    NamedBlockFP8Linear,
    nvfp4_linears,
    separate,
    set_cache,
    set_numerics,
)
from annie_quant.offline.profiles import PROFILES, UNQUANTIZED
from annie_quant.offline.sentencepiece import gemma_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader


CACHE_BYTES = {
    "packed": 0.0,
    "bf16": 2.0,
    "float32": 4.0,
}  # per weight, in addition to the packed bytes
MEMORY_HINT = 'a smaller cache (packed), another device, or device_map="auto" with offload_folder'


def load(
    model_dir: str | os.PathLike,
    numerics: str | None = None,
    cache: str = "packed",
    dtype: torch.dtype | str = "auto",
    device: str | None = None,
    **options: Any,
) -> Any:
    """Load a folder as a transformers causal LM in eval mode.

    numerics: a profile's name (profiles.py), such as "w4a4", or None for what the checkpoint defines; ignored for a model without
    NVFP4 linears.
    cache: "packed", "bf16" or "float32" (see NVFP4Linear.set_cache). dtype: of everything that is not packed.
    options: for from_pretrained, such as device_map.
    Raises CheckpointError for a folder without a model and for a faulty checkpoint (with the audit's finding),
    EnvironmentFault where memory is too small.
    """
    folder = Path(model_dir)
    if not (folder / "config.json").is_file():
        refuse_other_folder(folder)
        raise CheckpointError(f"{folder} is not a model folder: config.json is missing")
    shards = ModelFolder(folder)
    read_input(shards)
    if "device_map" not in options and device in (None, "cpu"):
        require_memory(shards, cache, dtype)
    quant_config = shards.json("hf_quant_config.json")
    dialect = dialects.of(shards)
    method = BlockFP8Linear.METHOD if dialect is fp8 else ""
    if dialect is compressed_tensors and compressed_tensors.config(shards).algo == FP8_BLOCK:
        method = NamedBlockFP8Linear.METHOD
    settings: JsonObject | None = None
    with one_line_errors(folder):
        if method:
            settings = shards.config.get("quantization_config") or {
                "weight_block_size": list(fp8.BLOCK)
            }
            settings = {**settings, "quant_method": method}
        elif "quantization_config" not in shards.config and quant_config is not None:
            settings = {"quant_method": "modelopt", **quant_config["quantization"]}
            settings["ignore"] = settings.get("exclude_modules", [])
        elif dialect and shards.config.get("quantization_config") != shards.quantization:
            # Of another form or in another place than transformers reads.
            settings = {"quant_method": dialect.NAME, **shards.quantization}
            settings.setdefault("ignore", settings.get("exclude_modules", []))
        if settings is not None:
            options["config"] = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            options["config"].quantization_config = settings
        if device is not None:
            options.setdefault("device_map", device)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, trust_remote_code=False, **options
        )
        model, info = loaded
        check_tensor_names(folder, info)
        separate(model, shards.family)
        model.eval()
        if nvfp4_linears(model):
            if numerics is not None:
                set_numerics(model, numerics)
            set_cache(model, cache)
    return model


def check_tensor_names(folder: Path, info: dict[str, Any]) -> None:
    """Raise CheckpointError where the tensors are not those of the model that config.json describes.

    info: of from_pretrained(output_loading_info=True). Of the tensors that it leaves out only biases are faults: they are
    part of what a linear computes.
    """
    missing = sorted(info["missing_keys"]) + sorted(str(k[0]) for k in info["mismatched_keys"])
    biases = sorted(n for n in info["unexpected_keys"] if n.endswith("_proj.bias"))
    for names, problem in (
        (missing, "lacks"),
        (biases, "holds what config.json excludes (attention_bias, mlp_bias?):"),
    ):
        if names:
            more = f" and {len(names) - 1} more tensors" if names[1:] else ""
            raise CheckpointError(
                f"{folder.name} {problem} {names[0]}{more}", "annie-quant audit DIR"
            )


def memory_bytes(shards: ModelFolder, cache: str, dtype: torch.dtype | str) -> float:
    """Return the bytes of a model's weights in memory."""
    size = 0.0
    for info in shards.tensors.values():
        size += info.size_bytes
        if info.dtype == "U8":
            size += 2 * info.elements * CACHE_BYTES.get(cache, 0)
        elif str(dtype) == "torch.float32" and info.dtype in ("BF16", "F16"):
            size += info.size_bytes
    return size


def share_equal_tensors(model: nn.Module, other: nn.Module) -> None:
    """Let a model use another one's parameters where their names and values are the same."""
    twins = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        twin = twins.get(name)
        if twin is None or twin.dtype != parameter.dtype or twin.device != parameter.device:
            continue
        if torch.equal(twin, parameter):
            parameter.data = twin.data


def require_memory(shards: ModelFolder, cache: str, dtype: torch.dtype | str) -> None:
    """Raise EnvironmentFault where the free memory is too small: Linux would end the process without a message."""
    size = memory_bytes(shards, cache, dtype)
    free = psutil.virtual_memory().available
    if size > free:
        raise EnvironmentFault(
            f"{shards.path.name} needs {size / 1e9:.1f} GB of memory this way and {free / 1e9:.1f} GB are free",
            'cache="packed" and dtype="auto" need least; device_map="auto" with offload_folder uses the disk',
        )


@contextmanager
def one_line_errors(folder: Path) -> Iterator[None]:
    """Turn exceptions of transformers and torch about a folder into a CheckpointError or EnvironmentFault of one line."""
    try:
        with refusing_own_code(folder):
            yield
    except AnnieError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise EnvironmentFault(
            f"{folder.name} does not fit into memory: {first_line(error)}", MEMORY_HINT
        ) from error
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        StrictDataclassError,
    ) as error:
        if "not enough memory" in str(error):
            raise EnvironmentFault(
                f"{folder.name} does not fit into memory", MEMORY_HINT
            ) from error
        raise CheckpointError(
            f"{folder.name} cannot be loaded: {type(error).__name__}: {first_line(error)}",
            "annie-quant audit DIR",
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of a message, with the second one where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return "no reason given"
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])[:200]


def numerics_of(model: nn.Module) -> list[str]:
    """Return the activation formats that the checkpoint defines.

    ["bf16"] without NVFP4 linears, ["w4a4", "w4a16"] if any linear has an input scale, else ["w4a16"].
    """
    linears = nvfp4_linears(model).values()
    if not linears:
        return [UNQUANTIZED.name]
    return ["w4a4", "w4a16"] if any(m.has_input_scale for m in linears) else ["w4a16"]


def profiles_of(model: nn.Module) -> list[str]:
    """Return all numerics profiles that the model can compute with; those with the checkpoint's input scales need one."""
    formats = numerics_of(model)
    if formats == [UNQUANTIZED.name]:
        return formats
    return [
        name
        for name, profile in PROFILES.items()
        if "w4a4" in formats or not profile.needs_input_scale
    ]


# ---- a GGUF file

PLAIN_GGUF_TYPES = ("F32", "F16", "BF16")
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
_TEMPLATE = "give one: --chat-template FILE (Jinja)"


def convert_gguf(
    path: Path,
    output: Path | None,
    force: bool = False,
    progress: Progress = SILENT,
    chat_template: Path | None = None,
) -> Conversion:
    """Write a GGUF file as a model folder in bf16.

    chat_template: file of a Jinja template that replaces the file's, or is the one of a base model, which has none.

    Raises CheckpointError for a file that is cut or has unknown types, for an architecture that is not read here or not by
    transformers, and for a file without a chat template.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not a file", "give a GGUF file")
    reader = open_reader(path)
    template = None if chat_template is None else read_template(chat_template)
    architecture = check_gguf(path, reader, needs_template=template is None)
    target = output or path.with_suffix("")
    kinds = Counter(t.tensor_type.name for t in reader.tensors)
    progress.message(
        f"{path.name}: {architecture}, {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}"
    )
    with (
        staged(target, force=force, inputs=(path,)) as part,
        one_line_errors(path),
        opened_once(reader),
    ):
        tokenizer = read_tokenizer(path, reader)
        if template is not None:
            tokenizer.chat_template = template
        config = AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        )
        if hasattr(config, "head_dim") and (
            width := gguf_value(reader, f"{architecture}.attention.key_length")
        ):
            config.head_dim = width  # transformers 5.14 takes the class's default
            if hasattr(config, "query_pre_attn_scalar"):
                config.query_pre_attn_scalar = width  # llama.cpp's scale of attention for Gemma 3
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent,
            config=config,
            dtype=torch.bfloat16,
            output_loading_info=True,
            gguf_file=path.name,
            trust_remote_code=False,
        )
        model, info = loaded
        check_tensor_names(path, info)
        model.generation_config = generation_config(model.config, tokenizer)
        model.config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        follow_umask(part)
    size_bytes = sum(f.stat().st_size for f in target.glob("*.safetensors"))
    rounded = {kind: n for kind, n in kinds.items() if kind not in PLAIN_GGUF_TYPES}
    loss = []
    if rounded:
        text = ", ".join(f"{n} {kind}" for kind, n in rounded.items())
        loss.append(
            f"nothing now, and before: {text} tensors were rounded already, so this reference is as good as the file and not "
            f"as the model that it was made from (annie-quant compare {shlex.quote(str(target))} {shlex.quote(str(path))})"
        )
    return Conversion(str(target), size_bytes, len(reader.tensors), loss)


def read_template(file: Path) -> str:
    """Return the chat template in a file. Raises UsageError where it is none."""
    if not file.is_file():
        raise UsageError(f"--chat-template {file}: no such file")
    text = file.read_text(encoding="utf-8", errors="replace")
    if "{%" not in text and "{{" not in text:
        raise UsageError(
            f"--chat-template {file}: expected a Jinja template, which has {{% or {{{{"
        )
    return text


def check_gguf(path: Path, reader: GGUFReader, needs_template: bool = True) -> str:
    """Return the architecture. Raises CheckpointError where the file cannot become a folder."""
    gguf = need("gguf", "serve")
    architecture = str(gguf_value(reader, "general.architecture", ""))
    known = [f.gguf.architecture for f in models.families() if f.gguf and not f.experts]
    served = f"annie-quant serve {shlex.quote(str(path))} --runtime llama.cpp, and bench, take it"
    if architecture not in known:
        raise CheckpointError(
            f"{path}: architecture {printable(architecture, 40)!r} is not read here, expected one of: {', '.join(known)}",
            served,
        )
    try:
        from transformers.modeling_gguf_pytorch_utils import (
            GGUF_SUPPORTED_ARCHITECTURES as readable,
        )
    except ImportError:
        readable = []
    if architecture not in readable:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} does not read {architecture} from GGUF",
            served,
        )
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        if kind.name == "NVFP4" or (
            kind.name not in PLAIN_GGUF_TYPES and kind not in gguf.quants._type_traits
        ):
            raise CheckpointError(
                f"{path}: {printable(tensor.name, 80)} has type {kind.name}, which is not dequantized here",
                served,
            )
    scaling = gguf_value(reader, f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or any(t.name == "rope_freqs.weight" for t in reader.tensors):
        raise CheckpointError(
            f"{path}: its rotary embedding is scaled, and transformers' reader would drop that",
            "start from the model's own folder",
        )
    if needs_template and not gguf_value(reader, "tokenizer.chat_template", ""):
        raise CheckpointError(
            f"{path}: no chat template, so conversations cannot be rendered", _TEMPLATE
        )
    return architecture


def read_tokenizer(path: Path, reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Return the file's tokenizer, with the tokens that are never split and the end token that the file names."""
    is_gemma = str(gguf_value(reader, "general.architecture", "")).startswith("gemma")
    if is_gemma and gguf_value(reader, "tokenizer.ggml.model", "") == "llama":
        return gemma_tokenizer(path, reader)
    tokenizer: Any = AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, trust_remote_code=False
    )
    tokens = gguf_value(reader, "tokenizer.ggml.tokens", [])
    kinds = gguf_value(reader, "tokenizer.ggml.token_type", [])
    for kind, special in ((vocabulary.CONTROL, True), (vocabulary.USER_DEFINED, False)):
        whole = [t for t, k in zip(tokens, kinds, strict=False) if k == kind]
        tokenizer.add_tokens(
            [AddedToken(t, special=special, normalized=False) for t in whole],
            special_tokens=special,
        )
    steps = pre_tokenizer(str(gguf_value(reader, "tokenizer.ggml.pre", "")))
    if steps is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = steps
    end = gguf_value(reader, "tokenizer.ggml.eos_token_id")
    if isinstance(end, int) and 0 <= end < len(tokens):
        tokenizer.eos_token = tokens[end]
    return tokenizer


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer | None:
    """Return the pre-tokenizer that llama.cpp calls `name`; None for one that is not known here."""
    expression = next((e for e, known in vocabulary.PRE_TOKENIZERS.items() if known == name), None)
    if expression is not None:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if name not in vocabulary.STEP_KINDS.values():
        return None
    digits = (
        [pre_tokenizers.Digits(individual_digits=True)]
        if name == vocabulary.STEP_KINDS["Digits", "ByteLevel"]
        else []
    )
    return pre_tokenizers.Sequence(
        [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )


def generation_config(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> GenerationConfig:
    """Return greedy decoding that ends at each token that ends an answer in llama.cpp."""
    ids = tokenizer.get_added_vocab()  # "</s>" may also be plain text of a vocabulary
    ends = [tokenizer.eos_token_id, *(ids[t] for t in ENDS if t in ids)]
    ends = list(dict.fromkeys(i for i in ends if i is not None))
    return GenerationConfig(
        do_sample=False,
        bos_token_id=config.bos_token_id,
        pad_token_id=config.pad_token_id,
        eos_token_id=ends,
    )
