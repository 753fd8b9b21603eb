"""Give a checkpoint another MTP head: the base's, which fine-tuning loses, or a tuned one.

A head is written in 16 bits, which every server loads: in ModelOpt's layout with mtp.fc and
mtp.layers.0* excluded, in compressed-tensors' with each linear in `ignore`. Its tensors are named
mtp.* in the multimodal form and in the text form. After writing, the bytes are compared with those
that were to be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from annie_quant import models
from annie_quant.checkpoint import writer
from annie_quant.checkpoint.dialects import compressed_tensors, modelopt
from annie_quant.checkpoint.dialects import of as dialect_of
from annie_quant.checkpoint.linears import is_linear
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import Planned, copied, planned
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.core.files import write_json
from annie_quant.core.untrusted import JsonObject

SETTING = "mtp_num_hidden_layers"
EXCLUDED = ("mtp.fc", "mtp.layers.0*")
# Hidden states of several streams, and norms of its own (ggml-org/llama.cpp #27836).
OTHER_HEADS = {"qwen4_exp": "Qwen3.8-Flash-Next"}
# The settings that decide a head's shapes. Not the vocabulary: embedding and output layer are the model's.
SHAPE_SETTINGS = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
SGLANG_FAULT = (
    "SGLang loads no linear of a head in compressed-tensors' layout (sglang#35797) and accepts none of its "
    "drafts: annie-quant convert DIR --to modelopt"
)


def head_tensors(folder: ModelFolder) -> dict[str, str]:
    """Return the tensors of a folder's MTP head: name that is written → name in the folder."""
    family = folder.family
    return {
        name[f".{name}".index(f".{family.mtp}") :]: name for name in folder if family.in_mtp(name)
    }


def find_head(model: ModelFolder, base: ModelFolder | None) -> ModelFolder:
    """Return the folder whose head `model` gets: `base` where it is given, else `model` itself.

    Raises UsageError and CheckpointError for a model whose class of heads is another one, for no head, and for a base whose head
    has other shapes.
    """
    for folder in filter(None, (model, base)):
        _check_class(folder)
    source = base or model
    if not head_tensors(source):
        if base is None:
            message = f"{model.path} has no MTP head, as most fine-tunes do not"
            raise UsageError(message, "--base with the folder of the model that it was tuned from")
        raise CheckpointError(
            f"--base {base.path}: no mtp.* tensor there, so there is no head to graft",
            "give the published base model; a merged or converted copy may have lost its head",
        )
    if base is not None:
        _check_shapes(model, base)
    layers = source.text_config.get(SETTING, 1)
    if layers not in (0, 1, None):
        message = f"{source.path}: {SETTING} is {layers}, and heads of one layer are served here"
        raise CheckpointError(message)
    return source


def _check_class(folder: ModelFolder) -> None:
    """Raise CheckpointError for a family without a head of this class."""
    model_type = str(folder.text_config.get("model_type") or folder.config.get("model_type"))
    other = next((name for kind, name in OTHER_HEADS.items() if model_type.startswith(kind)), None)
    if other is not None:
        raise CheckpointError(
            f"{folder.path}: the MTP head of {other} is of another class (hidden states of several streams)",
            "heads of Qwen3-Next, 3.5, 3.6 and 3.8-27B can be tuned",
        )
    if not models.is_known(folder.config) or not folder.family.mtp_shapes:
        raise CheckpointError(
            f"{folder.path}: model type {model_type} has no MTP head that is known here",
            "heads of Qwen3-Next, 3.5, 3.6 and 3.8-27B can be tuned",
        )


def _check_shapes(model: ModelFolder, base: ModelFolder) -> None:
    """Raise CheckpointError where the base's head does not fit the model. The message names what differs."""
    for name in SHAPE_SETTINGS:
        ours = model.text_config.get(name)
        theirs = base.text_config.get(name)
        if ours != theirs:
            raise CheckpointError(
                f"the head of {base.path} does not fit {model.path}: {name} is {theirs}, expected {ours}",
                "give the model that it was tuned from",
            )


# ---- writing


@dataclass(frozen=True)
class WrittenHead:
    """A written head, compared with what was to be written and with the base's.

    tensors: number of them.
    changed: of them, those whose bytes are not the base's.
    notes: what a server does with it.
    """

    tensors: int
    changed: int
    notes: list[str]


def write_with_head(
    model: ModelFolder, head: Mapping[str, np.ndarray], base: ModelFolder, target: Path
) -> WrittenHead:
    """Write a copy of `model` with another head into the folder `target`.

    head: name → array in the dtype that is written. base: whose head it was.
    """
    replaced = set(head_tensors(model).values())
    tensors: list[Planned] = [copied(model, name) for name in model if name not in replaced]
    tensors += [planned(name, array) for name, array in head.items()]
    writer.write(target, tensors)
    writer.copy_small_files(model, target)
    linears = [n.removesuffix(".weight") for n, array in head.items() if is_linear(n, array.shape)]
    config, exported = settings_with_head(model, linears)
    write_json(target / "config.json", config)
    if exported is not None:
        write_json(target / modelopt.HF_QUANT_CONFIG, exported)
    notes = [SGLANG_FAULT] if dialect_of(model) is compressed_tensors else []
    return compare_head(ModelFolder(target), head, base, notes)


def settings_with_head(
    model: ModelFolder, linears: list[str]
) -> tuple[JsonObject, JsonObject | None]:
    """Return config.json and hf_quant_config.json (None where there is none) of a model with a 16-bit head."""
    config = dict(model.config)
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = config["text_config"] | {SETTING: 1}
    else:
        config[SETTING] = 1
    exclusions = list(EXCLUDED)
    if dialect_of(model) is compressed_tensors:
        # vLLM wants each linear, and the fused ones by an expression.
        exclusions = [*linears, r"re:^mtp\..*"]
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        config["quantization_config"] = without_head(quantization, exclusions)
    exported = model.json(modelopt.HF_QUANT_CONFIG)
    if exported is not None and isinstance(exported.get("quantization"), dict):
        quantization = without_head(exported["quantization"], exclusions)
        exported = exported | {"quantization": quantization}
    return config, exported


def without_head(quantization: JsonObject, exclusions: list[str]) -> JsonObject:
    """Return quantization settings in which the head is excluded, and nothing else changes."""

    def is_of_head(name: object) -> bool:
        return isinstance(name, str) and "mtp." in name.replace("\\", "")

    changed = dict(quantization)
    lists = [key for key in ("ignore", "exclude_modules") if isinstance(changed.get(key), list)]
    for key in lists:
        changed[key] = [n for n in changed[key] if not is_of_head(n)] + exclusions
    layers = changed.get("quantized_layers")
    if isinstance(layers, dict):
        changed["quantized_layers"] = {n: v for n, v in layers.items() if not is_of_head(n)}
    return changed


def compare_head(
    folder: ModelFolder, head: Mapping[str, np.ndarray], base: ModelFolder, notes: list[str]
) -> WrittenHead:
    """Compare the head in a folder with what was to be written. Raises CheckpointError for other bytes."""
    originals = head_tensors(base)
    changed = 0
    for name, array in head.items():
        written = folder.tensor(name)
        if written.dtype != array.dtype or written.tobytes() != array.tobytes():
            raise CheckpointError(f"{folder.path}: {name} was written with other bytes")
        original = originals.get(name)
        same = original is not None and base.tensor(original).tobytes() == array.tobytes()
        changed += not same
    unexpected = head_tensors(folder).keys() - head.keys()
    if unexpected:
        raise CheckpointError(f"{folder.path}: {min(unexpected)} is not part of the head")
    return WrittenHead(len(head), changed, notes)
