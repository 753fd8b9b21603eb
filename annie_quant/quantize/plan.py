"""What a strategy decided: the format of every linear, its scales, and the changed weights. export.py writes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from annie_quant import nvfp4
from annie_quant.checkpoint.dialects.modelopt import LARGEST_E4M3, LARGEST_NVFP4
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import Progress
from annie_quant.models import Family
from annie_quant.quantize.formats import ALGORITHM, BITS, FP8, NVFP4, PLAIN_BITS, QUANTIZED_INPUTS, quantized_bytes
from annie_quant.quantize.job import Job
from annie_quant.quantize.select import decoder_linears


@dataclass
class Plan:
    """The output of a strategy. Keys are full names of linears, except in `weights`.

    formats: "nvfp4" (W4A4), "w4a16" or "fp8"; all other tensors stay as they are.
    amax: largest |input| of the linears with quantized activations; an expert that saw no token may be left out as long
        as another expert of its layer is there.
    scale: how block scales are chosen.  importance: float32 [K], weights of the squared error in that choice.
    weights: tensor name → array that replaces the source's tensor, in any float dtype; an unquantized one is rounded to
    the source's dtype.
    packed: finished codes.
    tensor_amax: what the tensor scale is computed from, where that is not the weight's own largest magnitude.
    given_input_scales: multipliers instead of those from `amax`.
    """

    formats: dict[str, str]
    amax: dict[str, float] = field(default_factory=dict)
    scale: nvfp4.Scale = "amax"
    importance: dict[str, np.ndarray] = field(default_factory=dict)
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    packed: dict[str, nvfp4.Tensor] = field(default_factory=dict)
    tensor_amax: dict[str, float] = field(default_factory=dict)
    given_input_scales: dict[str, np.float32] = field(default_factory=dict)

    def input_scales(self, family: Family) -> dict[str, np.float32]:
        """Return the multiplier of the activations of every linear that quantizes them, one per fused group."""
        span = {NVFP4: np.float32(LARGEST_NVFP4), FP8: np.float32(LARGEST_E4M3)}
        is_expert = family.experts.split if family.experts else lambda name: None
        needed = {
            n: self.amax.get(n, 0.0)
            for n, f in self.formats.items()
            if f in QUANTIZED_INPUTS and (n in self.amax or is_expert(n))
        }
        scales = {n: np.float32(a) / span[self.formats[n]] for n, a in family.largest_of_input(needed).items()}
        return scales | self.given_input_scales


def expected_bytes(folder: ModelFolder, formats: Mapping[str, str]) -> int:
    """Return the size of the tensors that the output will have."""
    total = 0
    for tensor in folder:
        for name in folder.parts_of(tensor) or [tensor]:
            info, kind = folder.info(name), formats.get(name.removesuffix(".weight"))
            total += info.size_bytes if kind is None else quantized_bytes(info.elements, kind)
    return total


def effective_bits(folder: ModelFolder, formats: Mapping[str, str]) -> float:
    """Return the bits per weight over the decoder's linears, for which mixed-precision budgets are given.

    Of a mixture's experts only the share counts that a token passes (active bits).
    """
    weights = active_weights(folder, decoder_linears(folder))
    bits = sum(n * BITS.get(formats.get(m, ""), PLAIN_BITS) for m, n in weights.items())
    return bits / max(1, sum(weights.values()))


def active_weights(folder: ModelFolder, linears: Iterable[str]) -> dict[str, float]:
    """Return linear → the number of its weights, for an expert's linear times the share of experts that a token passes."""
    experts = folder.family.experts
    share = experts.active_share(folder.text_config) if experts else 1.0
    return {n: folder.info(f"{n}.weight").elements * (share if experts and experts.split(n) else 1.0) for n in linears}


def announce_size(folder: ModelFolder, formats: Mapping[str, str], job: Job, progress: Progress) -> None:
    """Report the output's size before the work starts, and keep it in job.expected_bytes."""
    job.expected_bytes = expected_bytes(folder, formats)
    count = {kind: sum(f == kind for f in formats.values()) for kind in ALGORITHM}
    kinds = ", ".join(f"{n} linears {ALGORITHM[kind]}" for kind, n in count.items() if n)
    progress.message(f"expected size {job.expected_bytes / 1e6:,.1f} MB: {kinds}")
