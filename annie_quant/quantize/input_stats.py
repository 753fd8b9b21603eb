"""What goes into each linear while conversations run through: the largest value, and second moments by weight.

One pass, layer by layer; linears that read the same tensor share one measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import CheckpointError, need
from annie_quant.quantize.calibration_samples import END_OF_TURN, Text, batches
from annie_quant.quantize.job import Report
from annie_quant.quantize.layerwise import See, Walk


@dataclass
class Moments:
    """By linear (full name): amax, the largest |x| of any token; second, weighted mean of x_k^2, float32 [K]."""

    amax: dict[str, float] = field(default_factory=dict)
    second: dict[str, np.ndarray] = field(default_factory=dict)


class Gather:
    """Hears the inputs [n, K] of one linear."""

    def __init__(self, by_mark: Mapping[int, float], device: str) -> None:
        torch = need("torch", "quantize")
        self.table = torch.tensor([by_mark.get(m, 0.0) for m in range(END_OF_TURN + 1)], device=device)
        self.weight = 0.0
        self.total: Any = None
        self.largest: Any = None

    def __call__(self, x: Any, marks: Any) -> None:
        if not len(x):
            return
        top = x.abs().amax(0).float()
        self.largest = top if self.largest is None else need("torch", "quantize").maximum(self.largest, top)
        weight = self.table[marks]
        squares = (x.float().square() * weight[:, None]).sum(0).double()
        self.total = squares if self.total is None else self.total + squares
        self.weight += float(weight.sum())

    def amax(self, scale: Any = None) -> float:
        """Largest |x|, or |x / scale| for a scale [K]."""
        top = float((self.largest if scale is None else self.largest / scale).max())
        if not np.isfinite(top):
            raise CheckpointError("NaN or inf among a linear's inputs", "annie-quant audit the model")
        return top

    def second(self) -> np.ndarray:
        return (self.total / max(self.weight, 1e-30)).float().cpu().numpy()


def gather(folder: ModelFolder, texts: Sequence[Text], by_mark: Mapping[int, float], report: Report) -> Moments:
    """Moments of every linear of every decoder layer."""
    found = Moments()
    walk = Walk(folder, batches(texts), report, "calibrating")
    for layer in walk:
        groups = layer.groups()
        hear: dict[str, Gather] = {group[0]: Gather(by_mark, walk.device) for group in groups}
        see: dict[str, See] = dict(hear)
        layer.advance(see)
        for group in groups:
            amax, second = hear[group[0]].amax(), hear[group[0]].second()
            for name in group:
                found.amax[f"{layer.name}.{name}"] = amax
                found.second[f"{layer.name}.{name}"] = second
    return found
