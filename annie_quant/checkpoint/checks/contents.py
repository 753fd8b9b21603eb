"""Check that everything in a folder is understood, before a command makes something of it.

Every tensor is a weight of the model, belongs to a quantized linear or scales the KV cache; every file of weights is read; every
token has a row in the embedding; and one tensor is the head. The audit reports all of it, and `quantize`, `convert` and `eval`
refuse what they would misread (read_input).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from annie_quant import models
from annie_quant.checkpoint import dialects, other_formats, prompt_files
from annie_quant.checkpoint.checks import CODES, fault, finding_of
from annie_quant.checkpoint.checks.completeness import check_complete
from annie_quant.checkpoint.checks.settings import KV_ENDS, unread_method
from annie_quant.checkpoint.checks.source import same_tensor
from annie_quant.checkpoint.dialects import QuantizedFolder
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import HEAD, QUANTIZER, existing
from annie_quant.checkpoint.shards import (
    GENERATION,
    TEMPLATE,
    TOKENIZER,
    JsonReader,
    ModelFolder,
    read_object,
    text_settings,
)
from annie_quant.core.errors import CheckpointError
from annie_quant.core.text import printable
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import Finding

PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")
BUFFER_DTYPES = ("BOOL", "I64")  # of position ids and masks, in families that are not known here
# Ends of the names of a quantized linear's codes and scales: an orphan of them belongs to a linear that is incomplete.
ORPHANS = (*(end for end in QUANTIZER if not end.startswith(".input")), ".weight_packed")
# Names of codes, scales and overlays of other layouts, whatever the family.
FOREIGN_NAME = re.compile(
    r"(_scale(_2|_inv)?|_packed|[._](scales|biases|qweight|qzeros|zero_point|weight_shape|g_idx|absmax|quant_map)"
    r"|\.lora_[AB](\.\w+)?\.weight)$"
)
TOKEN_FIELDS = ("eos_token_id", "bos_token_id", "pad_token_id")
NOT_REFUSED = {"file_unread"}  # no loader reads such a file; a command names it as left out


def check_contents(
    model: QuantizedFolder, read_json: JsonReader = read_object
) -> Iterator[Finding]:
    """Check the tensors' names and types, the files, the token ids and the head.

    read_json: reads the files with token ids.
    """
    folder = model.folder
    for name in model.unowned:
        yield from check_tensor(folder, name)
    yield from check_repeated(model)
    for file, reason in folder.unread.items():
        if other_formats.separate_file(file) is None:
            yield fault("file_unread", file, reason)
    yield from check_unread_settings(folder)
    yield from check_tokens(folder, read_json)
    yield from check_head(model)


def check_unread_settings(folder: ModelFolder) -> Iterator[Finding]:
    """Check for settings of compressed-tensors by which the stored codes are other weights than they are read as here."""
    quant = folder.quantization
    if quant.get("transform_config"):
        problem = "transform_config rotates weights and activations, which is not read here"
        yield fault("settings_unread", "config.json", problem)
    sparsity = quant.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        problem = f"sparsity_config has the format {printable(str(sparsity['format']), 40)}, which is not read here"
        yield fault("settings_unread", "config.json", problem)
    groups = quant.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("symmetric") is False:
            problem = "its weights have zero points (symmetric: false), which are not read here"
            yield fault("settings_unread", "config.json", problem)
            return


def read_input(folder: ModelFolder) -> QuantizedFolder:
    """Return a folder as its dialect reads it.

    Raises CheckpointError where something in it is not understood, and would be copied or rounded as a weight.
    """
    model = dialects.read(folder)
    unread = unread_method(model)
    findings = [unread] if unread else [*check_contents(model), *check_complete(model)]
    for finding in findings:
        if finding.code not in NOT_REFUSED:
            raise CheckpointError(f"{folder.path}: {finding.message}", CODES[finding.code].fix)
    return model


def check_tensor(folder: ModelFolder, name: str) -> Iterator[Finding]:
    """Check that a tensor outside of the quantized linears is a weight of the model, or a scale of the KV cache."""
    info = folder.info(name)
    family = folder.family
    is_known = models.is_known(folder.config)
    layout = f"{info.dtype} {list(info.shape)}"
    if name.endswith(KV_ENDS) and info.dtype in PLAIN_DTYPES:
        if is_known and not models.is_attention(name):
            yield fault(
                "tensor_unknown", name, "a scale of the KV cache outside of attention layers"
            )
        return
    if name.endswith(ORPHANS):
        problem = "belongs to a quantized linear, and that linear's other tensors are missing"
        yield fault("orphan_scale", name, problem)
    elif info.dtype == "U8" and name.endswith(".weight"):
        problem = "packed codes, and their weight_scale is missing"
        yield fault("block_scale_missing", name, problem)
    elif name.endswith(QUANTIZER):
        return  # an input scale without its linear; a conversion names it as left out
    elif FOREIGN_NAME.search(name):
        yield fault(
            "tensor_unknown", name, f"{layout}, codes or scales of a layout that is not read here"
        )
    elif is_known and not family.has_tensor(name):
        yield fault("tensor_unknown", name, f"{layout}, and {family.name} has no such tensor")
    elif info.dtype not in PLAIN_DTYPES and (is_known or info.dtype not in BUFFER_DTYPES):
        experts = " of all experts" if len(info.shape) == 3 and family.experts else ""
        problem = f"codes{experts} in a layout that is not read here"
        yield fault("tensor_unknown", name, f"{layout}, {problem}")


def check_repeated(model: QuantizedFolder) -> Iterator[Finding]:
    """Check that no weight is stored twice: as codes and as a number, under both prefixes, or merged and single."""
    names: dict[str, str] = {}
    for weight in model.weights:
        short = models.short_name(weight).removesuffix(".weight")
        if short in names:
            yield fault("tensor_repeated", weight, f"stored twice, also as {names[short]}")
        names[short] = weight


# ---- token ids


def check_tokens(folder: ModelFolder, read_json: JsonReader) -> Iterator[Finding]:
    """Check that every token id has a row in the embedding. read_json: reads the files."""
    rows = embedding_rows(folder)
    if rows is None:
        return
    size = folder.text_config.get("vocab_size")
    if type(size) is int and size != rows:
        yield fault(
            "vocab_size", "config.json", f"vocab_size {size}, and the embedding has {rows} rows"
        )
    for file, read in (
        (TOKENIZER, prompt_files.vocabulary),
        ("added_tokens.json", _ids_of_names),
        ("tokenizer_config.json", _added_decoder),
        (GENERATION, _special_ids),
        ("config.json", _special_ids),
    ):
        try:
            content = read_json(folder.path / file)
            ids = read(text_settings(content)) if content else {}
            token, largest = max(ids.items(), key=lambda pair: pair[1], default=("", -1))
        except ShardError as error:
            yield finding_of(error, file)
            continue
        except (AttributeError, KeyError, TypeError, ValueError, IndexError):
            yield fault("config_unreadable", file, "its tokens have fields of another type")
            continue
        if largest >= rows:
            shown = printable(repr(token), 40)
            written = ", which the chat template writes" if _in_template(folder, token) else ""
            problem = f"token id {largest} ({shown}{written}), and the embedding has {rows} rows"
            yield fault("vocab_size", file, problem)
            return  # the other files have the same token


def embedding_rows(folder: ModelFolder) -> int | None:
    """Return the number of rows of the embedding, or None where it has another name."""
    names = [
        n for n in folder if n.endswith("embed_tokens.weight") and not folder.family.is_auxiliary(n)
    ]
    shapes = [folder.info(name).shape for name in names]
    return shapes[0][0] if len(shapes) == 1 and shapes[0] else None


def _ids_of_names(content: JsonObject) -> dict[str, int]:
    return {token: number for token, number in content.items() if type(number) is int}


def _added_decoder(content: JsonObject) -> dict[str, int]:
    tokens = content.get("added_tokens_decoder") or {}
    return {token["content"]: int(number) for number, token in tokens.items()}


def _special_ids(content: JsonObject) -> dict[str, int]:
    ids = {}
    for name in TOKEN_FIELDS:
        value = content.get(name)
        numbers = value if isinstance(value, list) else [value]
        ids[name] = max((n for n in numbers if type(n) is int), default=-1)
    return ids


def _in_template(folder: ModelFolder, token: str) -> bool:
    path = folder.path / TEMPLATE
    return path.is_file() and token in path.read_text(encoding="utf-8", errors="replace")


# ---- the head


def check_head(model: QuantizedFolder) -> Iterator[Finding]:
    """Check that a model whose embedding is the head has no other tensor as its head.

    Sources: vLLM's and SGLang's load_weights skip lm_head where tie_word_embeddings is set; transformers' tie_weights does
    not tie tensors that are both on disk and differ.
    """
    folder = model.folder
    text = folder.config.get("text_config")
    settings = [folder.config, text if isinstance(text, dict) else {}]
    ties = any(values.get("tie_word_embeddings") is True for values in settings)
    head = existing(folder, f"{HEAD}.weight")
    if not ties or not (head or HEAD in model.linears):
        return
    embedding = next((n for n in folder if models.short_name(n) == "embed_tokens.weight"), None)
    plain = head is not None and HEAD not in model.linears
    if plain and embedding and head and same_tensor(folder, head, folder, embedding):
        return
    problem = (
        "tie_word_embeddings is true, and this tensor is not the embedding: vLLM and SGLang compute with the embedding, "
        "transformers and llama.cpp with this tensor"
    )
    yield fault("head_ambiguous", head or HEAD, problem)
