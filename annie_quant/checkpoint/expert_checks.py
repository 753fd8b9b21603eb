"""Checks of an audit on mixtures of experts: complete, quantized alike, with scales, and in one range.

Sources of the faults: ModelOpt leaves merged experts unquantized without a message (#1340) and writes dead experts and
scales that underflow (#1382, #1421); vLLM drops the scales of merged experts when it loads them (#49638).
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from annie_quant import models
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import Linear, QuantConfig, covering_pattern
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.documents import Audit

# Largest factor between a scale of one expert and the layer's median. Weights of trained experts differ by about ten;
# activations by more, but an expert that saw no token has an input scale of some epsilon.
TENSOR_SCALE_RANGE = 100.0
INPUT_SCALE_RANGE = 1000.0
PACKED = ("U8", "I8", "F8_E4M3")
# Ends of the names of a merged tensor's codes, and of its block scales or scales per expert.
CODES = ("", ".weight", "_packed", ".weight_packed", "_weight_packed")
SCALES = ("_weight_scale", "_scale", ".weight_scale", "_scale_inv")


def check(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig, audit: Audit) -> None:
    """Check the experts of every layer. Does nothing for a dense model."""
    experts = folder.family.experts
    if experts is None:
        return
    single: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))  # layer → linear → numbers
    for name in folder:
        expert = experts.split(name)
        if expert and name.endswith((".weight", ".weight_packed")):
            single[expert[0]][expert[2]].add(expert[1])
    expected = folder.text_config.get(experts.count)
    for layer in sorted(single):
        module = f"{layer}.{experts.module}"
        check_numbers(module, single[layer], experts.linears, expected, audit)
        check_all_or_none(folder, module, linears, config, audit)
        check_ranges(folder, module, linears, audit)
    for name in folder:
        check_router(folder, name, expected, audit)
    for name in sorted(linears):
        if models.in_layer(name) == experts.router or name.endswith("shared_expert_gate"):
            audit.fault("router_quantized", name, "a quantized router chooses other experts; it must stay in 16 bits")
    check_merged(folder, config, bool(linears), expected, audit)


def check_numbers(
    module: str, numbers: dict[str, set[int]], names: tuple[str, ...], expected: object, audit: Audit
) -> None:
    """Check that the experts of a layer are 0..n-1, that each has every linear, and that n is the configuration's."""
    largest = max(max(n) for n in numbers.values()) + 1
    count = expected if isinstance(expected, int) and expected > 0 else largest
    for name in names:
        there = numbers.get(name, set())
        missing = sorted(set(range(min(count, 1 << 16))) - there)
        if missing or len(there) != count:
            which = f"expert {missing[0]} has no {name}" if missing else f"expert {max(there)} is one too many"
            audit.fault("expert_count", module, f"{len(there)} of {count} experts with {name}; {which}")


def check_all_or_none(
    folder: ModelFolder, module: str, linears: dict[str, Linear], config: QuantConfig, audit: Audit
) -> None:
    """Check that all experts of a layer have one format: servers run them as one matrix multiplication."""
    formats = defaultdict(list)
    experts = folder.family.experts
    for name in folder:
        expert = experts.split(name) if experts and name.startswith(f"{module}.") else None
        if expert and name.endswith((".weight", ".weight_packed")):
            linear = name.rpartition(".")[0]
            formats[linears[linear].format if linear in linears else folder.info(name).dtype].append(linear)
    if len(formats) > 1:
        fewest = min(formats, key=lambda f: (len(formats[f]), f))
        others = ", ".join(f"{len(n)} linears {f}" for f, n in sorted(formats.items()))
        audit.fault("experts_mixed", module, f"served together with different formats ({others}); {formats[fewest][0]}")


def check_ranges(folder: ModelFolder, module: str, linears: dict[str, Linear], audit: Audit) -> None:
    """Check that no expert's scale is far from those of the layer's other experts."""
    experts = folder.family.experts
    inside = [x for n, x in linears.items() if experts and n.startswith(f"{module}.") and experts.split(n)]
    for kind, limit in (("tensor", TENSOR_SCALE_RANGE), ("input", INPUT_SCALE_RANGE)):
        by_linear: dict[str, dict[str, float]] = defaultdict(dict)
        for x in inside:
            try:
                scale = x.input_scale(folder) if kind == "input" else x.tensor_scale(folder) if x.global_scale else None
            except ShardError:
                continue  # reported by the check of the linear itself
            value = float(scale.multiplier) if scale else 0.0
            if np.isfinite(value) and value > 0:
                by_linear[x.name.rpartition(".")[2]][x.name] = value
        for values in by_linear.values():
            median = float(np.median(list(values.values())))
            for name, value in values.items():
                if not median / limit <= value <= median * limit:
                    audit.fault(
                        "expert_scale_range",
                        name,
                        f"{kind} scale {value:.3g}, and the median of the layer's experts is {median:.3g}; "
                        f"{'it saw no token in calibration' if kind == 'input' else 'is this expert dead?'}",
                    )


def check_router(folder: ModelFolder, name: str, expected: object, audit: Audit) -> None:
    """Check that a router has one row per expert."""
    experts = folder.family.experts
    if experts is None or models.in_layer(name) != f"{experts.router}.weight" or not isinstance(expected, int):
        return
    shape = folder.info(name).shape
    if len(shape) == 2 and folder.info(name).dtype not in PACKED and shape[0] != expected:
        audit.fault("expert_count", name, f"a router for {shape[0]} experts, and the configuration has {expected}")


def check_merged(folder: ModelFolder, config: QuantConfig, quantized: bool, expected: object, audit: Audit) -> None:
    """Check merged experts: their number, their scales where they are packed, and that plain ones are excluded."""
    experts = folder.family.experts
    for name in folder:
        base = codes_base(folder, name)
        if experts is None or base is None:
            continue
        info = folder.info(name)
        if isinstance(expected, int) and info.shape[0] != expected:
            audit.fault("expert_count", name, f"{info.shape[0]} experts, and the configuration has {expected}")
        if info.dtype in PACKED:
            scale = next((base + end for end in SCALES if base + end in folder), None)
            if scale is None:
                audit.fault(
                    "expert_scales_missing", name, f"{info.dtype} codes of all experts, and their scales are missing"
                )
            elif scale.endswith("_weight_scale") and info.dtype == "U8" and f"{scale}_2" not in folder:
                audit.fault("expert_scales_missing", name, f"{info.dtype} codes, and {scale}_2 is missing")
            elif folder.info(scale).shape[:1] != info.shape[:1]:
                audit.fault(
                    "expert_scales_missing",
                    scale,
                    f"shape {list(folder.info(scale).shape)} for {info.shape[0]} experts",
                )
        elif (
            quantized
            and not folder.family.is_auxiliary(name)
            and not config.layers
            and not any(covering_pattern(n, config.excluded) for n in (name, base, base.rpartition(".")[0]))
        ):
            audit.fault(
                "experts_unquantized",
                name,
                f"experts in {info.dtype}, not listed as excluded; ModelOpt leaves merged experts out without a message",
            )


def codes_base(folder: ModelFolder, name: str) -> str | None:
    """Return the name without its end, of a three-dimensional tensor with all experts of a layer; None of any other."""
    experts = folder.family.experts
    if experts is None or len(folder.info(name).shape) != 3:
        return None
    bases = (name.removesuffix(end) for end in CODES if name.endswith(end))
    return next((b for b in bases if experts.merged_part(b)), None)
