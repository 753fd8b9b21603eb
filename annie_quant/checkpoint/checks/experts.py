"""Check mixtures of experts: complete, in one format, with scales, and with scales of similar size.

Sources of the faults: ModelOpt leaves merged experts unquantized without a message (#1340) and writes dead experts and
scales that underflow (#1382, #1421); vLLM drops the scales of merged experts when it loads them (#49638).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from annie_quant import models
from annie_quant.checkpoint.checks import fault
from annie_quant.checkpoint.dialects import QuantizedFolder
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import covering_pattern
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.documents import Finding
from annie_quant.models import Experts

# Largest factor between a scale of one expert and the layer's median. Weights of trained experts differ by about ten;
# activations by more, but an expert that saw no token has an input scale of some epsilon.
SCALE_RANGES = {"tensor": 100.0, "input": 1000.0}
PACKED = ("U8", "I8", "F8_E4M3")
# Ends of the names of a merged tensor's codes, and of its block scales or scales per expert.
CODES = ("", ".weight", "_packed", ".weight_packed", "_weight_packed")
SCALES = ("_weight_scale", "_scale", ".weight_scale", "_scale_inv")


def check(model: QuantizedFolder) -> Iterator[Finding]:
    """Check the experts of every layer. Yields nothing for a dense model."""
    folder, experts = model.folder, model.folder.family.experts
    if experts is None:
        return
    weights: dict[str, list[str]] = defaultdict(list)  # layer → names of single experts' weights
    for name in folder:
        expert = experts.split(name)
        if expert and name.endswith((".weight", ".weight_packed")):
            weights[expert[0]].append(name)
    expected = folder.text_config.get(experts.count)
    for layer, names in sorted(weights.items()):
        module = f"{layer}.{experts.module}"
        yield from check_numbers(module, experts, names, expected)
        yield from check_formats(model, module, names)
        yield from check_ranges(model, module, experts)
    for name in folder:
        yield from check_router(folder, name, experts, expected)
    for name in sorted(model.linears):
        if models.in_layer(name) == experts.router or name.endswith("shared_expert_gate"):
            yield fault("router_quantized", name, "a quantized router chooses other experts; it must stay in 16 bits")
    for name in folder:
        base = codes_base(folder, name, experts)
        if base is not None:
            yield from check_merged(model, name, base, expected)


def check_numbers(module: str, experts: Experts, weights: list[str], expected: object) -> Iterator[Finding]:
    """Check that the experts of a layer are 0..n-1, that each has every linear, and that n is the configuration's."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for expert in map(experts.split, weights):
        if expert:
            numbers[expert[2]].add(expert[1])
    largest = max(max(n) for n in numbers.values()) + 1
    count = expected if isinstance(expected, int) and expected > 0 else largest
    for name in experts.linears:
        stored = numbers[name]
        missing = sorted(set(range(min(count, 1 << 16))) - stored)
        if missing or len(stored) != count:
            which = f"expert {missing[0]} has no {name}" if missing else f"expert {max(stored)} is one too many"
            yield fault("expert_count", module, f"{len(stored)} of {count} experts with {name}; {which}")


def check_formats(model: QuantizedFolder, module: str, weights: list[str]) -> Iterator[Finding]:
    """Check that all experts of a layer have one format: servers run them as one matrix multiplication."""
    formats = defaultdict(list)
    for name in weights:
        linear = name.rpartition(".")[0]
        quantized = model.linears.get(linear)
        formats[quantized.format if quantized else model.folder.info(name).dtype].append(linear)
    if len(formats) > 1:
        fewest = min(formats, key=lambda f: (len(formats[f]), f))
        others = ", ".join(f"{len(n)} linears {f}" for f, n in sorted(formats.items()))
        yield fault("experts_mixed", module, f"served together with different formats ({others}); {formats[fewest][0]}")


def check_ranges(model: QuantizedFolder, module: str, experts: Experts) -> Iterator[Finding]:
    """Check that no expert's scale is far from those of the layer's other experts."""
    folder = model.folder
    inside = [x for n, x in model.linears.items() if n.startswith(f"{module}.") and experts.split(n)]
    for kind, limit in SCALE_RANGES.items():
        by_linear: dict[str, dict[str, float]] = defaultdict(dict)
        for x in inside:
            try:
                scale = x.input_scale(folder) if kind == "input" else x.tensor_scale(folder) if x.global_scale else None
            except ShardError:
                continue  # reported by the check of the linear itself
            value = float(scale.multiplier) if scale else 0.0
            if np.isfinite(value) and value > 0:
                by_linear[x.name.rpartition(".")[2]][x.name] = value
        reason = "it saw no token in calibration" if kind == "input" else "is this expert dead?"
        for values in by_linear.values():
            median = float(np.median(list(values.values())))
            for name, value in values.items():
                if not median / limit <= value <= median * limit:
                    others = f"the median of the layer's experts is {median:.3g}"
                    yield fault("expert_scale_range", name, f"{kind} scale {value:.3g}, and {others}; {reason}")


def check_router(folder: ModelFolder, name: str, experts: Experts, expected: object) -> Iterator[Finding]:
    """Check that a router has one row per expert."""
    if models.in_layer(name) != f"{experts.router}.weight" or not isinstance(expected, int):
        return
    info = folder.info(name)
    if len(info.shape) == 2 and info.dtype not in PACKED and info.shape[0] != expected:
        problem = f"a router for {info.shape[0]} experts, and the configuration has {expected}"
        yield fault("expert_count", name, problem)


def check_merged(model: QuantizedFolder, name: str, base: str, expected: object) -> Iterator[Finding]:
    """Check merged experts: their number, their scales where they are packed, and that plain ones are excluded."""
    folder, config = model.folder, model.config
    info = folder.info(name)
    if isinstance(expected, int) and info.shape[0] != expected:
        yield fault("expert_count", name, f"{info.shape[0]} experts, and the configuration has {expected}")
    if info.dtype in PACKED:
        scale, about, problem = next((base + end for end in SCALES if base + end in folder), None), name, ""
        if scale is None:
            problem = f"{info.dtype} codes of all experts, and their scales are missing"
        elif scale.endswith("_weight_scale") and info.dtype == "U8" and f"{scale}_2" not in folder:
            problem = f"{info.dtype} codes, and {scale}_2 is missing"
        elif folder.info(scale).shape[:1] != info.shape[:1]:
            about, problem = scale, f"shape {list(folder.info(scale).shape)} for {info.shape[0]} experts"
        if problem:
            yield fault("expert_scales_missing", about, problem)
        return
    listed = config.layers or any(covering_pattern(n, config.excluded) for n in (name, base, base.rpartition(".")[0]))
    if model.linears and not listed and not folder.family.is_auxiliary(name):
        reason = "ModelOpt leaves merged experts out without a message"
        yield fault("experts_unquantized", name, f"experts in {info.dtype}, not listed as excluded; {reason}")


def codes_base(folder: ModelFolder, name: str, experts: Experts) -> str | None:
    """Return the name without its end, of a three-dimensional tensor with all experts of a layer; None of any other."""
    if len(folder.info(name).shape) != 3:
        return None
    bases = (name.removesuffix(end) for end in CODES if name.endswith(end))
    return next((b for b in bases if experts.merged_part(b)), None)
