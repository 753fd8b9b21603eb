"""NVIDIA ModelOpt's layout: weight U8, weight_scale F8_E4M3, weight_scale_2 and input_scale as multipliers.

Source: NVIDIA/Model-Optimizer, modelopt/torch/export/{quant_utils,convert_hf_config}.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import Linear, QuantConfig
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import Planned, planned

NAME = "modelopt"
HF_QUANT_CONFIG = "hf_quant_config.json"


def matches(folder: ModelFolder) -> bool:
    """By its configuration, or where there is none by the tensors."""
    quant = folder.config.get("quantization_config")
    if isinstance(quant, dict) and quant.get("quant_method"):
        return quant["quant_method"] == NAME
    return folder.json(HF_QUANT_CONFIG) is not None or any(n.endswith(".weight_scale_2") for n in folder)


def linears(folder: ModelFolder) -> dict[str, Linear]:
    """The quantized linears that are on disk, whatever the configuration says."""
    found = {}
    for name in folder:
        if not name.endswith(".weight"):
            continue
        module = name.removesuffix(".weight")
        kind = {"U8": "nvfp4", "F8_E4M3": "fp8"}.get(folder.info(name).dtype)
        scale = f"{module}.weight_scale"
        if kind is None or (kind == "nvfp4" and scale not in folder):
            continue
        found[module] = Linear(
            module,
            kind,
            name,
            _there(folder, scale),
            _there(folder, f"{module}.weight_scale_2"),
            _there(folder, f"{module}.input_scale"),
            _there(folder, f"{module}.pre_quant_scale"),
        )
    return found


def _there(folder: ModelFolder, name: str) -> str | None:
    return name if name in folder else None


def config(folder: ModelFolder) -> QuantConfig:
    """config.json's quantization_config where it speaks, else hf_quant_config.json."""
    inline = folder.config.get("quantization_config")
    return read(inline) if isinstance(inline, dict) else read_file(folder) or QuantConfig(NAME, "", None, [])


def read_file(folder: ModelFolder) -> QuantConfig | None:
    """What hf_quant_config.json says, or None where there is none."""
    file = folder.json(HF_QUANT_CONFIG)
    if file is None:
        return None
    quant = file.get("quantization")
    if not isinstance(quant, dict):
        raise ShardError(
            "config_unreadable", f"{HF_QUANT_CONFIG}: no `quantization` in it", "export again, or --repair"
        )
    return read(quant)


def read(quant: dict[str, Any]) -> QuantConfig:
    """Either spelling of the settings. Fields of the wrong type read as absent."""
    groups = quant.get("config_groups")
    first = next((g for g in groups.values() if isinstance(g, dict)), {}) if isinstance(groups, dict) else {}
    weights = first.get("weights")
    group = weights.get("group_size") if isinstance(weights, dict) else None
    group = quant.get("group_size", group)
    layers = quant.get("quantized_layers")
    layers = {k: v for k, v in layers.items() if isinstance(v, dict)} if isinstance(layers, dict) else {}
    excluded = quant.get("exclude_modules", quant.get("ignore"))
    return QuantConfig(
        method=NAME,
        algo=str(quant.get("quant_algo") or "").upper(),  # some exporters write it small
        group=group if isinstance(group, int) and group > 0 else None,
        excluded=[e for e in excluded if isinstance(e, str)] if isinstance(excluded, list) else [],
        layers={k: str(v.get("quant_algo") or "").upper() for k, v in layers.items()},
        kv_cache=kv_cache(quant),
        raw=quant,
    )


def kv_cache(quant: dict[str, Any]) -> str | None:
    """The cache's format: a word in hf_quant_config.json, number and kind of bits in config.json."""
    scheme = quant.get("kv_cache_scheme")
    if isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8):
        return "FP8"
    named = quant.get("kv_cache_quant_algo")
    return named if isinstance(named, str) else None


def tensors(linear: Linear, folder: ModelFolder) -> list[Planned]:
    """The planned tensors of one linear in this layout."""
    info = folder.info(linear.weight)
    out = [Planned(f"{linear.name}.weight", info.dtype, info.shape, partial(folder.pieces, linear.weight))]
    if linear.format == "fp8":
        if linear.block_scale:
            scale = folder.tensor(linear.block_scale).astype(np.float32)
            out.append(planned(f"{linear.name}.weight_scale", scale.reshape(()) if scale.size == 1 else scale))
    else:
        scales = folder.info(linear.block_scale or "")
        out.append(
            Planned(f"{linear.name}.weight_scale", scales.dtype, scales.shape, partial(folder.pieces, scales.name))
        )
        out.append(planned(f"{linear.name}.weight_scale_2", np.array(linear.tensor_scale(folder), np.float32)))
    given = linear.input_scale(folder)
    if given is not None:
        out.append(planned(f"{linear.name}.input_scale", np.array(given, np.float32)))
    return out


def small_files(
    formats: dict[str, str], excluded: list[str], group: int, with_input: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """quantization_config for config.json, and the JSON files beside it; see `settings`."""
    inline = settings(formats, excluded, group, with_input)
    return inline, {HF_QUANT_CONFIG: companion(inline, group)}


def settings(formats: dict[str, str], excluded: list[str], group: int, with_input: bool) -> dict[str, Any]:
    """quantization_config for config.json. formats: module → "nvfp4" | "w4a16" | "fp8" of what is quantized.

    with_input: whether "nvfp4" means quantized activations too; "w4a16" never does.
    """
    producer = {"name": NAME, "version": "annie_quant"}
    named = {"nvfp4": "NVFP4" if with_input else "W4A16_NVFP4", "w4a16": "W4A16_NVFP4", "fp8": "FP8"}
    algorithms = {m: named[f] for m, f in sorted(formats.items())}
    kinds = set(algorithms.values()) or {named["nvfp4"]}
    if len(kinds) > 1 or "FP8" in kinds:
        layers = {m: {"quant_algo": a} | ({} if a == "FP8" else {"group_size": group}) for m, a in algorithms.items()}
        return {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
            "kv_cache_scheme": None,
            "producer": producer,
            "quant_method": NAME,
        }
    scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": group}
    one = {"weights": dict(scheme), "targets": ["Linear"]}
    if kinds == {"NVFP4"}:
        one = {"input_activations": dict(scheme), **one}
    return {
        "config_groups": {"group_0": one},
        "ignore": excluded,
        "quant_algo": kinds.pop(),
        "kv_cache_scheme": None,
        "producer": producer,
        "quant_method": NAME,
    }


def companion(quantization_config: dict[str, Any], group: int) -> dict[str, Any]:
    """hf_quant_config.json that agrees with a quantization_config of `settings`."""
    quant: dict[str, Any] = {"quant_algo": quantization_config["quant_algo"], "kv_cache_quant_algo": None}
    if "quantized_layers" in quantization_config:
        quant["quantized_layers"] = quantization_config["quantized_layers"]
    else:
        quant |= {"group_size": group, "exclude_modules": quantization_config["ignore"]}
    return {"producer": quantization_config["producer"], "quantization": quant}
