"""compressed-tensors' `nvfp4-pack-quantized` layout.

weight_packed, weight_scale, and global scales as divisors.

Also its FP8 with a scale per tensor, per row or per block (llm-compressor's FP8_BLOCK).

Source: vllm-project/compressed-tensors, compressors/nvfp4/ and quantization/quant_scheme.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec
import numpy as np

from annie_quant.checkpoint.linears import (
    HEAD,
    LINEAR_CLASS,
    ConfigGroup,
    Linear,
    QuantConfig,
    algorithms_of_targets,
    existing,
    kv_format,
    names_dialect,
    read_struct,
)
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import Planned, QuantSettings, copied, planned
from annie_quant.core.untrusted import JsonObject
from annie_quant.models import attention_of
from annie_quant.models.formats import (
    MIXED,
    QUANTIZED,
    Format,
)

NAME = "compressed-tensors"
# A scale per tensor, as its settings describe an FP8 weight, its activations or the KV cache.
FP8_TENSOR: JsonObject = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}


class CompressedSettings(msgspec.Struct):
    """quantization_config of config.json."""

    config_groups: dict[str, ConfigGroup] = {}
    ignore: list[str] = []
    format: str | None = None


NVFP4_FORMAT = "nvfp4-pack-quantized"
FP8_FORMAT = "float-quantized"


def matches(folder: ModelFolder) -> bool:
    """Return whether a folder is in this dialect.

    The configuration names it, or names none and the tensors are in its layout.
    """
    return names_dialect(folder, NAME, ".weight_packed")


def linears(folder: ModelFolder) -> dict[str, Linear]:
    """Return the quantized linears on disk, whatever the configuration lists."""
    quantized = {}
    block = block_size(folder.quantization)
    for name in folder:
        module, _, suffix = name.rpartition(".")
        scale = existing(folder, f"{module}.weight_scale")
        dtype = folder.info(name).dtype
        if suffix == "weight_packed" and dtype == "U8":
            ends = ("weight_global_scale", "input_global_scale")
            tensor_scale, input_scale = (existing(folder, f"{module}.{end}") for end in ends)
            quantized[module] = Linear(
                module, "nvfp4", name, scale, tensor_scale, input_scale, reciprocal=True
            )
        elif suffix == "weight" and dtype == "F8_E4M3":
            linear = Linear(
                module, "fp8", name, scale, None, existing(folder, f"{module}.input_scale")
            )
            in_blocks = scale is None or (
                folder.info(scale).elements != 1 and not linear.per_channel(folder)
            )
            quantized[module] = dataclasses.replace(linear, block=block) if in_blocks else linear
    return quantized


def block_size(quant: JsonObject) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale of FP8 weights in blocks.

    None where no group has blocks.
    """
    groups = read_struct(CompressedSettings, quant).config_groups.values()
    sizes = (
        g.weights.block_structure for g in groups if g.weights and g.weights.strategy == "block"
    )
    return next((size for size in sizes if size), None)


def config(folder: ModelFolder) -> QuantConfig:
    """Return the settings of config.json's quantization_config."""
    return read(folder.quantization)


def read(quant: JsonObject) -> QuantConfig:
    """Read the settings. Fields of another type than expected read as absent."""
    settings = read_struct(CompressedSettings, quant)
    groups = list(settings.config_groups.values())
    kinds = {g.algorithm for g in groups} - {""}
    sizes = [g.weights.group_size for g in groups if g.weights and "NVFP4" in g.algorithm]
    takes_all = any(LINEAR_CLASS in group.targets for group in groups) or not groups
    layers = {} if len(kinds) <= 1 and takes_all else algorithms_of_targets(groups)
    return QuantConfig(
        method=NAME,
        algo=MIXED if len(kinds) > 1 else next(iter(kinds), ""),
        group=sizes[0] if sizes else None,
        excluded=settings.ignore,
        layers=layers,
        kv_cache=kv_format(quant),
        raw=quant,
    )


def tensors(linear: Linear, folder: ModelFolder) -> list[Planned]:
    """Plan the tensors of one linear in this layout.

    Exact except for the reciprocal of the global scales.
    """
    input_scale = linear.input_scale(folder)
    if linear.format == "fp8":
        out = [copied(folder, linear.weight, f"{linear.name}.weight")]
        if linear.block_scale:
            weight_scale = folder.tensor(linear.block_scale).astype(np.float32)
            shape = (-1, 1) if linear.per_channel(folder) else (-1,)
            out.append(planned(f"{linear.name}.weight_scale", weight_scale.reshape(shape)))
        if input_scale:
            out.append(
                planned(
                    f"{linear.name}.input_scale", np.array([input_scale.multiplier], np.float32)
                )
            )
        return out
    out = [copied(folder, linear.weight, f"{linear.name}.weight_packed")]
    out.append(copied(folder, linear.block_scale or "", f"{linear.name}.weight_scale"))
    divisor = linear.tensor_scale(folder).divisor
    out.append(planned(f"{linear.name}.weight_global_scale", np.array([divisor], np.float32)))
    if input_scale:
        out.append(
            planned(
                f"{linear.name}.input_global_scale", np.array([input_scale.divisor], np.float32)
            )
        )
    return out


def kv_scale(layer: str, end: str, value: np.ndarray) -> Planned:
    """Plan a layer's scale of keys or values, float32 [1] or one per head. end: "k_scale" or "v_scale"."""
    shaped = value if value.size > 1 else value.reshape(1)
    return planned(f"{attention_of(layer)}.{end}", shaped)


def settings(
    formats: Mapping[str, Format], excluded: list[str], group: int, kv_cache: str | None = None
) -> QuantSettings:
    """Return quantization_config for config.json. Parameters: those of WritableDialect."""
    kinds = sorted(set(formats.values()), key=QUANTIZED.index)
    groups: JsonObject = {}
    for i, kind in enumerate(kinds):
        targets = sorted(m for m, f in formats.items() if f == kind)
        if len(kinds) == 1:  # a head is not a Linear in vLLM
            targets = [LINEAR_CLASS, *(m for m in formats if m == HEAD)]
        groups[f"group_{i}"] = _scheme(kind, group) | {"targets": targets}
    stored = {g["format"] for g in groups.values()}
    inline = {
        "config_groups": groups,
        "format": stored.pop() if len(stored) == 1 else "mixed-precision",
        "ignore": excluded,
        "kv_cache_scheme": FP8_TENSOR if kv_cache == "FP8" else None,
        "quant_method": NAME,
        "quantization_status": "compressed",
    }
    return QuantSettings(inline, {})


def _scheme(kind: Format, group: int) -> JsonObject:
    """Return one config group's settings: weights, activations, format."""
    activations: JsonObject | None = None
    if kind.in_four_bits:
        weights = FP8_TENSOR | {"num_bits": 4, "strategy": "tensor_group", "group_size": group}
        if kind.calibrated:
            activations = weights | {"dynamic": "local"}
    elif kind.calibrated:
        weights = activations = FP8_TENSOR
    else:
        weights = FP8_TENSOR | {"strategy": "channel"}
        activations = FP8_TENSOR | {"strategy": "token", "dynamic": True}
    stored_as = NVFP4_FORMAT if kind.in_four_bits else FP8_FORMAT
    return {"weights": weights, "input_activations": activations, "format": stored_as}
