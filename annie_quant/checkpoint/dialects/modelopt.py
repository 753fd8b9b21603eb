"""The dialect of NVIDIA ModelOpt: names, settings and tensors of its checkpoints.

Weight U8, weight_scale F8_E4M3, weight_scale_2 and input_scale as multipliers.

It is also the layout in which linears are quantized here (nvfp4_tensors, fp8_tensors).

Source: NVIDIA/Model-Optimizer, modelopt/torch/export/{quant_utils,convert_hf_config}.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np

from annie_quant import nvfp4
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import (
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
from annie_quant.models.formats import GROUP, LARGEST_E4M3, MIXED, Format

NAME = "modelopt"
VLLM_NAME = "modelopt_fp4"  # vLLM's and SGLang's name of the same layout
HF_QUANT_CONFIG = "hf_quant_config.json"
KV_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}  # FP8 as config.json names it


def matches(folder: ModelFolder) -> bool:
    """Return whether a folder is in this dialect.

    The configuration names it, or names none and the tensors are in its layout.
    """
    method = folder.quantization.get("quant_method")
    return (
        method == VLLM_NAME
        or names_dialect(folder, NAME, ".weight_scale_2")
        or (not method and folder.json(HF_QUANT_CONFIG) is not None)
    )


def linears(folder: ModelFolder) -> dict[str, Linear]:
    """Return the quantized linears on disk, whatever the configuration lists."""
    quantized = {}
    for name in folder:
        module, _, suffix = name.rpartition(".")
        dtype = folder.info(name).dtype
        if suffix != "weight" or dtype not in ("U8", "F8_E4M3"):
            continue
        block_scale = existing(folder, f"{module}.weight_scale")
        if dtype == "U8" and not block_scale:
            continue
        quantized[module] = Linear(
            module,
            "fp8" if dtype == "F8_E4M3" else "nvfp4",
            name,
            block_scale,
            existing(folder, f"{module}.weight_scale_2"),
            existing(folder, f"{module}.input_scale"),
            existing(folder, f"{module}.pre_quant_scale"),
        )
    return quantized


def config(folder: ModelFolder) -> QuantConfig:
    """Return the settings of config.json, or where it has none of hf_quant_config.json.

    The KV cache's format is in hf_quant_config.json alone in some releases, such as
    nvidia/Qwen3.6-35B-A3B-NVFP4.
    """
    inline = folder.quantization
    if not inline:
        return read_file(folder) or QuantConfig(NAME, "", None, [])
    settings = read(inline)
    if settings.kv_cache is None:
        with contextlib.suppress(ShardError):  # the audit reports a faulty file
            second = read_file(folder)
            settings.kv_cache = second.kv_cache if second else None
    return settings


def read_file(folder: ModelFolder) -> QuantConfig | None:
    """Return the settings of hf_quant_config.json, or None if the file is missing."""
    file = folder.json(HF_QUANT_CONFIG)
    if file is None:
        return None
    quant = file.get("quantization")
    if not isinstance(quant, dict):
        message = f"{HF_QUANT_CONFIG}: it has no `quantization`"
        raise ShardError("config_unreadable", message, "export again, or --repair")
    return read(quant)


class LayerSettings(msgspec.Struct):
    """One module of a mixed checkpoint."""

    quant_algo: object = None


class ModeloptSettings(msgspec.Struct):
    """quantization_config of config.json, or `quantization` of hf_quant_config.json."""

    quant_algo: object = None
    group_size: int | None = None
    config_groups: dict[str, ConfigGroup] = {}
    quantized_layers: dict[str, LayerSettings] = {}
    exclude_modules: list[str] | None = None
    ignore: list[str] = []


def read(quant: JsonObject) -> QuantConfig:
    """Read either spelling of the settings. Fields of another type than expected read as absent."""
    settings = read_struct(ModeloptSettings, quant)
    groups = settings.config_groups.values()
    sizes = [g.weights.group_size for g in groups if g.weights and g.weights.group_size]
    group = next(iter(sizes), None) if settings.group_size is None else settings.group_size
    layers = {
        name: str(layer.quant_algo or "").upper()
        for name, layer in settings.quantized_layers.items()
    }
    algo = str(settings.quant_algo or "").upper()  # some exporters write it in lower case
    if algo == MIXED and not layers:
        layers = algorithms_of_targets(groups)
    return QuantConfig(
        method=NAME,
        algo=algo,
        group=group if group and group > 0 else None,
        excluded=settings.ignore if settings.exclude_modules is None else settings.exclude_modules,
        layers=layers,
        kv_cache=kv_format(quant),
        raw=quant,
    )


def kv_scale(layer: str, end: str, value: np.ndarray) -> Planned:
    """Plan a layer's scale of keys or values, float32 []. end: "k_scale" or "v_scale"."""
    return planned(f"{attention_of(layer)}.{end[0]}_proj.{end}", value.reshape(()))


def tensors(linear: Linear, folder: ModelFolder) -> list[Planned]:
    """Plan the tensors of one linear in this layout; codes and block scales stay as they are."""
    out = [copied(folder, linear.weight, f"{linear.name}.weight")]
    if linear.format == "nvfp4":
        out.append(copied(folder, linear.block_scale or "", f"{linear.name}.weight_scale"))
        tensor_scale = linear.tensor_scale(folder).multiplier
        out.append(planned(f"{linear.name}.weight_scale_2", np.array(tensor_scale, np.float32)))
    elif linear.block_scale:
        scale = folder.tensor(linear.block_scale).astype(np.float32)
        out.append(
            planned(f"{linear.name}.weight_scale", scale.reshape(() if scale.size == 1 else -1))
        )
    input_scale = linear.input_scale(folder)
    return out + input_scale_tensors(linear.name, input_scale.multiplier if input_scale else None)


def settings(
    formats: Mapping[str, Format], excluded: list[str], group: int, kv_cache: str | None = None
) -> QuantSettings:
    """Return quantization_config for config.json, and hf_quant_config.json.

    Parameters: those of WritableDialect.
    """
    producer = {"name": NAME, "version": "annie_quant"}
    kinds = set(formats.values())
    common: JsonObject = {"producer": producer, "quant_method": NAME}
    common |= {"kv_cache_scheme": KV_SCHEME} if kv_cache == "FP8" else {}
    inline: JsonObject
    companion: JsonObject = {"kv_cache_quant_algo": kv_cache}
    if len(kinds) > 1 or not all(kind.in_four_bits for kind in kinds):
        algo = MIXED
        layers: dict[str, JsonObject] = {}
        for module in sorted(formats):
            layers[module] = {"quant_algo": formats[module].modelopt}
            if formats[module].in_four_bits:
                layers[module]["group_size"] = group
        inline = {"quant_algo": algo, "quantized_layers": layers, **common}
        companion["quantized_layers"] = layers
    else:
        (kind,) = kinds
        algo = kind.modelopt
        scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": group}
        config_group = {"weights": dict(scheme), "targets": ["Linear"]}
        if kind.calibrated:
            config_group = {"input_activations": dict(scheme), **config_group}
        inline = {
            "config_groups": {"group_0": config_group},
            "ignore": excluded,
            "quant_algo": algo,
            **common,
        }
        companion |= {"group_size": group, "exclude_modules": excluded}
    quantization = {"quant_algo": algo, **companion}
    return QuantSettings(
        inline, {HF_QUANT_CONFIG: {"producer": producer, "quantization": quantization}}
    )


# ---- linears that are quantized here; a linear is packed when it is written


def nvfp4_tensors(
    module: str,
    shape: tuple[int, int],
    pack: Callable[[], Iterator[nvfp4.Tensor]],
    tensor_scale: Callable[[], np.float32],
    group: int = GROUP,
    input_scale: np.float32 | None = None,
    source_bytes: int | None = None,
) -> list[Planned]:
    """Plan an NVFP4 linear.

    Weight, weight_scale, weight_scale_2, and input_scale where it is given.

    shape: [out, in] of the weight.
    pack: yields the packed rows in order, in one or more pieces.
    tensor_scale: returns the multiplier of the whole tensor.
    source_bytes: bytes that are read for the weight, for progress.
    """
    rows, columns = shape
    scales_source = None if source_bytes is None else 0  # read together with the weight
    block_scales: list[np.ndarray] = []

    def codes() -> Iterator[np.ndarray]:
        block_scales.clear()
        for packed in pack():
            block_scales.append(packed.block_scale)
            yield packed.codes

    def scales() -> Iterator[np.ndarray]:
        # The codes come first in the file and leave the scales here, unless they are in an earlier
        # shard.
        if not block_scales:
            for _ in codes():
                pass
        yield from block_scales
        block_scales.clear()

    return [
        Planned(f"{module}.weight", "U8", (rows, columns // 2), codes, source_bytes),
        Planned(
            f"{module}.weight_scale", "F8_E4M3", (rows, columns // group), scales, scales_source
        ),
        Planned(
            f"{module}.weight_scale_2", "F32", (), lambda: np.array(tensor_scale(), np.float32)
        ),
        *input_scale_tensors(module, input_scale),
    ]


def fp8_tensors(
    module: str,
    shape: tuple[int, int],
    weight: Callable[[], np.ndarray],
    scale: Callable[[], np.float32],
    input_scale: np.float32 | None = None,
) -> list[Planned]:
    """Plan an FP8 linear: weight, weight_scale, and input_scale where it is given.

    weight: returns the array [out, in].  scale: returns its multiplier.
    """
    return [
        Planned(f"{module}.weight", "F8_E4M3", shape, lambda: fp8_codes(weight(), scale())),
        Planned(f"{module}.weight_scale", "F32", (), lambda: np.array(scale(), np.float32)),
        *input_scale_tensors(module, input_scale),
    ]


def fp8_channel_tensors(
    module: str, shape: tuple[int, int], rows: Callable[[], Iterator[np.ndarray]]
) -> list[Planned]:
    """Plan an FP8 linear with a scale per row.

    rows: yields the weight's rows in order, in one or more pieces.
    """
    return [
        Planned(
            f"{module}.weight",
            "F8_E4M3",
            shape,
            lambda: (fp8_codes(r, fp8_row_scales(r)) for r in rows()),
        ),
        Planned(
            f"{module}.weight_scale",
            "F32",
            shape[:1],
            lambda: (fp8_row_scales(r)[:, 0] for r in rows()),
            0,
        ),
    ]


def fp8_row_scales(rows: np.ndarray) -> np.ndarray:
    """Return the multipliers of rows [n, K] in FP8, float32 [n, 1]."""
    amax = np.abs(rows.astype(np.float32)).max(1, keepdims=True)
    return np.where(amax > 0, amax / np.float32(LARGEST_E4M3), np.float32(1))


def input_scale_tensors(module: str, input_scale: np.float32 | None) -> list[Planned]:
    """Plan the input scale of a linear, or nothing for None."""
    return (
        []
        if input_scale is None
        else [planned(f"{module}.input_scale", np.array(input_scale, np.float32))]
    )


def fp8_scale(amax: float) -> np.float32:
    """Return the multiplier of an FP8 tensor whose largest magnitude is `amax`."""
    return np.float32(amax) / np.float32(LARGEST_E4M3) if amax > 0 else np.float32(1)


def fp8_codes(weight: np.ndarray, scale: np.float32 | np.ndarray) -> np.ndarray:
    """Return the E4M3 codes of a weight, as ModelOpt rounds an FP8 linear's weight.

    scale: a multiplier, or one per row [n, 1].
    """
    return np.clip(weight.astype(np.float32) / scale, -LARGEST_E4M3, LARGEST_E4M3).astype(
        nvfp4.E4M3
    )
