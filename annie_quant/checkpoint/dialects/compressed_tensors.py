"""compressed-tensors' `nvfp4-pack-quantized` layout: weight_packed, weight_scale, and global scales as divisors.

Also its FP8 with a scale per tensor, per row or per block (llm-compressor's FP8_BLOCK).

Source: vllm-project/compressed-tensors, compressors/nvfp4/ and quantization/quant_scheme.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from annie_quant.checkpoint.linears import FP8_BLOCK, FP8_DYNAMIC, Linear, QuantConfig, kv_format
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import Planned, QuantSettings, copied, planned
from annie_quant.models import attention_of

NAME = "compressed-tensors"
# A scale per tensor, as its settings describe an FP8 weight, its activations or the KV cache.
FP8_TENSOR: dict[str, object] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
NVFP4_FORMAT, FP8_FORMAT = "nvfp4-pack-quantized", "float-quantized"


def matches(folder: ModelFolder) -> bool:
    """Return whether the configuration names this dialect, or where it names none, the tensors are in its layout."""
    quant = folder.quantization
    if quant.get("quant_method"):
        return quant["quant_method"] == NAME
    return any(n.endswith(".weight_packed") for n in folder)


def linears(folder: ModelFolder) -> dict[str, Linear]:
    """Return the quantized linears on disk, whatever the configuration lists."""
    quantized = {}
    block = block_size(folder.quantization)
    for name in folder:
        module, _, suffix = name.rpartition(".")
        existing = {
            k: f"{module}.{k}" if f"{module}.{k}" in folder else None
            for k in ("weight_scale", "weight_global_scale", "input_global_scale", "input_scale")
        }
        if suffix == "weight_packed":
            quantized[module] = Linear(
                module,
                "nvfp4",
                name,
                existing["weight_scale"],
                existing["weight_global_scale"],
                existing["input_global_scale"],
                reciprocal=True,
            )
        elif suffix == "weight" and folder.info(name).dtype == "F8_E4M3":
            scale = existing["weight_scale"]
            new = Linear(module, "fp8", name, scale, None, existing["input_scale"])
            other = scale is not None and (folder.info(scale).elements == 1 or new.per_channel(folder))
            quantized[module] = new if other else dataclasses.replace(new, block=block)
    return quantized


def block_size(quant: dict[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale in a group of FP8 weights in blocks, None without such a group."""
    groups = quant.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("strategy") == "block":
            size = weights.get("block_structure")
            if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
                return size[0], size[1]
    return None


def config(folder: ModelFolder) -> QuantConfig:
    """Return the settings of config.json's quantization_config."""
    return read(folder.quantization)


def read(quant: dict[str, Any]) -> QuantConfig:
    """Read the settings. Fields of another type than expected read as absent."""
    groups = quant.get("config_groups")
    groups = [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    kinds = {group_algo(g) for g in groups} - {""}
    sizes = [g["weights"].get("group_size") for g in groups if "NVFP4" in group_algo(g)]
    size = sizes[0] if sizes else None
    layers: dict[str, str] = {}
    for group in groups if len(kinds) > 1 else ():
        targets = group.get("targets")
        for target in targets if isinstance(targets, list) else ():
            if isinstance(target, str):
                layers.setdefault(target, group_algo(group))  # the first group that names a linear has it
    ignore = quant.get("ignore")
    return QuantConfig(
        method=NAME,
        algo="MIXED_PRECISION" if len(kinds) > 1 else next(iter(kinds), ""),
        group=size if isinstance(size, int) and size > 0 else None,
        excluded=[e for e in ignore if isinstance(e, str)] if isinstance(ignore, list) else [],
        layers=layers,
        kv_cache=kv_format(quant),
        raw=quant,
    )


def group_algo(group: dict[str, Any]) -> str:
    """Return ModelOpt's name of one config group's algorithm; "" for any other format."""
    weights = group.get("weights")
    bits = weights.get("num_bits") if isinstance(weights, dict) else None
    activations = group.get("input_activations")
    if bits == 8 and weights is not None and weights.get("strategy") == "block":
        return FP8_BLOCK
    if bits == 8:
        per_token = isinstance(activations, dict) and activations.get("dynamic") is True
        return FP8_DYNAMIC if per_token else "FP8"
    if bits == 4:
        return "NVFP4" if isinstance(activations, dict) else "W4A16_NVFP4"
    return ""


def tensors(linear: Linear, folder: ModelFolder) -> list[Planned]:
    """Plan the tensors of one linear in this layout; exact except for the reciprocal of the global scales."""
    input_scale = linear.input_scale(folder)
    if linear.format == "fp8":
        out = [copied(folder, linear.weight, f"{linear.name}.weight")]
        if linear.block_scale:
            weight_scale = folder.tensor(linear.block_scale).astype(np.float32)
            shape = (-1, 1) if linear.per_channel(folder) else (-1,)
            out.append(planned(f"{linear.name}.weight_scale", weight_scale.reshape(shape)))
        if input_scale:
            out.append(planned(f"{linear.name}.input_scale", np.array([input_scale.multiplier], np.float32)))
        return out
    out = [copied(folder, linear.weight, f"{linear.name}.weight_packed")]
    out.append(copied(folder, linear.block_scale or "", f"{linear.name}.weight_scale"))
    divisor = linear.tensor_scale(folder).divisor
    out.append(planned(f"{linear.name}.weight_global_scale", np.array([divisor], np.float32)))
    if input_scale:
        out.append(planned(f"{linear.name}.input_global_scale", np.array([input_scale.divisor], np.float32)))
    return out


def kv_scale(layer: str, end: str, value: np.ndarray) -> Planned:
    """Plan a layer's scale of keys or values, float32 [1]. end: "k_scale" or "v_scale"."""
    return planned(f"{attention_of(layer)}.{end}", value.reshape(1))


def settings(formats: Mapping[str, str], excluded: list[str], group: int, kv_cache: str | None = None) -> QuantSettings:
    """Return quantization_config for config.json. Parameters: those of WritableDialect."""
    kinds = sorted(set(formats.values()), key=("nvfp4", "w4a16", "fp8", "fp8_channel").index)
    groups: dict[str, dict[str, object]] = {}
    for i, kind in enumerate(kinds):
        targets = ["Linear"] if len(kinds) == 1 else sorted(m for m, f in formats.items() if f == kind)
        groups[f"group_{i}"] = scheme(kind, group) | {"targets": targets}
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


def scheme(kind: str, group: int) -> dict[str, object]:
    """Return one config group's settings: weights, activations, format."""
    weights, activations = FP8_TENSOR, FP8_TENSOR
    if kind == "fp8_channel":  # one scale per row; activations are scaled per token while serving
        weights = FP8_TENSOR | {"strategy": "channel"}
        activations = FP8_TENSOR | {"strategy": "token", "dynamic": True}
    if kind in ("fp8", "fp8_channel"):
        return {"weights": weights, "input_activations": activations, "format": FP8_FORMAT}
    weights = FP8_TENSOR | {"num_bits": 4, "strategy": "tensor_group", "group_size": group}
    activations = weights | {"dynamic": "local"}
    return {
        "weights": weights,
        "input_activations": activations if kind == "nvfp4" else None,
        "format": NVFP4_FORMAT,
    }
