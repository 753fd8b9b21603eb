"""Writing what a strategy decided as a plain servable checkpoint in ModelOpt's layout: NVFP4, W4A16, FP8, bf16, mixed.

A strategy says which linear becomes what, the largest input of those whose activations are quantized, and whatever
it changed (folded or trained weights, importance for the scale search, or finished codes). Linears that a server fuses
share their tensor scale and input scale here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from annie_quant import nvfp4
from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.linears import fused_groups, is_linear
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import Planned, planned, write
from annie_quant.errors import CheckpointError
from annie_quant.files import write_json
from annie_quant.quantize.job import Job, Report

NVFP4, W4A16, FP8 = "nvfp4", "w4a16", "fp8"
ALGORITHM = {NVFP4: "NVFP4", W4A16: "W4A16_NVFP4", FP8: "FP8"}
GROUP = 16
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST_E4M3 = 448.0
# Bits of one weight, block scales included; the two scalars of a linear are counted apart.
BITS = {NVFP4: 4.5, W4A16: 4.5, FP8: 8.0}
SCALARS_BYTES = {NVFP4: 8, W4A16: 4, FP8: 8}


@dataclass
class Decided:
    """formats: linear → "nvfp4" (W4A4), "w4a16" or "fp8"; what is not in it stays as it was.

    amax: largest |input| of the linears with quantized activations.  scale: rule of the block scales.
    importance: linear → float32 [K].  weights: tensor name → array in the source tensor's place (any float dtype; an
    unquantized one is rounded to the source's dtype).  packed: linear → finished codes.  tensor_amax: linear → what its
    tensor scale is made from, where that is not its weight's own largest value.
    """

    formats: dict[str, str]
    amax: dict[str, float] = field(default_factory=dict)
    scale: nvfp4.Scale = "amax"
    importance: dict[str, np.ndarray] = field(default_factory=dict)
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    packed: dict[str, nvfp4.Tensor] = field(default_factory=dict)
    tensor_amax: dict[str, float] = field(default_factory=dict)


def expected_bytes(folder: ModelFolder, formats: Mapping[str, str]) -> int:
    """Size of the tensors that the output will have."""
    total = 0
    for name in folder:
        info, kind = folder.info(name), formats.get(name.removesuffix(".weight"))
        total += info.size_bytes if kind is None else quantized_bytes(info.elements, kind)
    return total


def quantized_bytes(elements: int, kind: str) -> int:
    return int(elements * BITS[kind] / 8) + SCALARS_BYTES[kind]


def effective_bits(folder: ModelFolder, formats: Mapping[str, str]) -> float:
    """Bits a weight over the linears of the decoder: what a mixed-precision constraint is stated over."""
    weights = {n: folder.info(f"{n}.weight").elements for n in decoder_linears(folder)}
    bits = sum(n * BITS.get(formats.get(m, ""), 16.0) for m, n in weights.items())
    return bits / max(1, sum(weights.values()))


def decoder_linears(folder: ModelFolder) -> list[str]:
    return [n for n in linears_of(folder) if ".layers." in n and not n.startswith("mtp.")]


def say_size(folder: ModelFolder, formats: Mapping[str, str], job: Job, report: Report) -> None:
    """Report what the output will weigh, before any work."""
    job.expected_bytes = expected_bytes(folder, formats)
    count = {kind: sum(f == kind for f in formats.values()) for kind in ALGORITHM}
    kinds = ", ".join(f"{n} linears {ALGORITHM[kind]}" for kind, n in count.items() if n)
    report(f"expected size {job.expected_bytes / 1e6:,.1f} MB: {kinds}")


def choose(folder: ModelFolder, job: Job) -> list[str]:
    """The linears that a strategy may quantize: ModelOpt's default exclusions and the user's are left out."""
    from annie_quant.quantize.strategies import direct

    return direct.choose(folder, linears_of(folder), job)


def linears_of(folder: ModelFolder) -> list[str]:
    return [n.removesuffix(".weight") for n in folder if is_linear(n, folder.info(n).shape)]


def export(folder: ModelFolder, job: Job, decided: Decided) -> None:
    """Write tensors and configuration into job.output."""
    check(folder, decided)
    scales = tensor_scales(folder, decided)
    inputs = input_scales(decided)
    plan = [t for name in folder for t in plan_tensor(folder, name, decided, scales, inputs)]
    write(job.output, plan)
    settings = quantization_config(decided.formats, sorted(set(linears_of(folder)) - set(decided.formats)))
    write_json(job.output / "config.json", folder.config | {"quantization_config": settings})
    write_json(job.output / modelopt.HF_QUANT_CONFIG, modelopt.companion(settings, GROUP))


def check(folder: ModelFolder, decided: Decided) -> None:
    """Fused linears have one format, and whoever quantizes activations knows their largest value."""
    for group in fused_groups(set(linears_of(folder))):
        kinds = {decided.formats.get(n) for n in group}
        if len(kinds) > 1:
            raise CheckpointError(
                f"{', '.join(group)} are served as one matrix and would differ in format",
                "exclude or quantize them together",
            )
    missing = [n for n, f in decided.formats.items() if f in (NVFP4, FP8) and not decided.amax.get(n)]
    if missing:
        raise CheckpointError(f"{missing[0]}: no input was seen, so there is no input scale", "give more --calib-data")


def source_weight(folder: ModelFolder, name: str, decided: Decided) -> np.ndarray:
    given = decided.weights.get(name)
    return folder.tensor(name) if given is None else given


def tensor_scales(folder: ModelFolder, decided: Decided) -> dict[str, np.float32]:
    """Module → the multiplier of its whole tensor (weight_scale_2; FP8: amax / 448), one for a fused group."""
    largest = {}
    for module in sorted(decided.formats.keys() - decided.packed.keys()):
        given = decided.tensor_amax.get(module)
        weight = source_weight(folder, f"{module}.weight", decided)
        largest[module] = float(nvfp4.amax(weight)) if given is None else given
        folder.release(f"{module}.weight")
    scales = {m: np.float32(t.tensor_scale) for m, t in decided.packed.items()}
    for module, top in shared(largest).items():
        if decided.formats[module] == FP8:
            scales[module] = np.float32(top) / np.float32(LARGEST_E4M3) if top > 0 else np.float32(1)
        else:
            scales[module] = np.float32(nvfp4.tensor_scale(top, scale=decided.scale))
    return scales


def input_scales(decided: Decided) -> dict[str, np.float32]:
    amax = shared({n: decided.amax[n] for n, f in decided.formats.items() if f in (NVFP4, FP8)})
    span = {NVFP4: np.float32(6 * LARGEST_E4M3), FP8: np.float32(LARGEST_E4M3)}
    return {n: np.float32(a) / span[decided.formats[n]] for n, a in amax.items()}


def shared(values: dict[str, float]) -> dict[str, float]:
    """The largest value of its fused group for every member."""
    found = dict(values)
    for group in fused_groups(set(values)):
        found |= dict.fromkeys(group, max(values[m] for m in group))
    return found


def plan_tensor(
    folder: ModelFolder,
    name: str,
    decided: Decided,
    scales: Mapping[str, np.float32],
    inputs: Mapping[str, np.float32],
) -> list[Planned]:
    info, module = folder.info(name), name.removesuffix(".weight")
    kind = decided.formats.get(module) if name.endswith(".weight") else None
    if kind is None:
        given = decided.weights.get(name)
        if given is None:
            return [Planned(name, info.dtype, info.shape, lambda: folder.pieces(name))]
        dtype = folder.tensor(name).dtype
        return [Planned(name, info.dtype, info.shape, lambda: given.astype(dtype))]
    beside = [planned(f"{module}.input_scale", np.array(inputs[module]))] if module in inputs else []
    rows, columns = info.shape
    if kind == FP8:
        scale = scales[module]
        return [
            Planned(name, "F8_E4M3", (rows, columns), lambda: fp8(source_weight(folder, name, decided), scale)),
            planned(f"{module}.weight_scale", np.array(scale)),
            *beside,
        ]
    found: list[nvfp4.Tensor] = []

    def codes() -> np.ndarray:
        packed = decided.packed.get(module)
        if packed is None:
            weight = source_weight(folder, name, decided)
            packed = nvfp4.pack(
                weight,
                tensor_scale=float(scales[module]),
                scale=decided.scale,
                group=GROUP,
                importance=decided.importance.get(module),
            )
        found[:] = [packed]
        return packed.codes

    def block_scales() -> Iterable[np.ndarray]:
        yield found.pop().block_scale.view(E4M3)  # the codes stand before the scales in the file and are made first

    return [
        Planned(name, "U8", (rows, columns // 2), codes),
        Planned(f"{module}.weight_scale", "F8_E4M3", (rows, columns // GROUP), block_scales),
        planned(f"{module}.weight_scale_2", np.array(scales[module])),
        *beside,
    ]


def fp8(weight: np.ndarray, scale: np.float32) -> np.ndarray:
    """E4M3 codes under a multiplier: ModelOpt's FP8 of a linear's weight."""
    return np.clip(weight.astype(np.float32) / scale, -LARGEST_E4M3, LARGEST_E4M3).astype(E4M3)


def quantization_config(formats: Mapping[str, str], left: list[str]) -> dict[str, Any]:
    """config.json's quantization_config; more than one format is ModelOpt's MIXED_PRECISION."""
    kinds = set(formats.values())
    if len(kinds) == 1 and kinds <= {NVFP4, W4A16}:
        return modelopt.settings(dict.fromkeys(formats, "nvfp4"), left, GROUP, kinds == {NVFP4})
    mixed = modelopt.settings(dict.fromkeys(formats, "fp8"), left, GROUP, with_input=True)
    layers = {
        n: {"quant_algo": ALGORITHM[f]} | ({} if f == FP8 else {"group_size": GROUP})
        for n, f in sorted(formats.items())
    }
    return mixed | {"quantized_layers": layers}
