"""Statistics of each linear's inputs over calibration text: the largest value, and the weighted second moment.

One pass, layer by layer; linears that read the same input share one measurement.

Routed experts that saw no calibration token have no scales of their own: their activation scale is the layer's largest, which
servers use for all experts anyway (Plan.input_scales), and their weights are rounded without statistics. The output folder gets
expert_coverage.json with the number of tokens of every expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.core.files import write_json
from annie_quant.core.progress import Progress
from annie_quant.quantize.calibration_samples import KINDS, PADDING, PROMPT, Sample, TokenWeights, make_batches
from annie_quant.quantize.layerwise import DecoderLayers

COVERAGE_FILE = "expert_coverage.json"
OF_EXPERT, NUMBER = re.compile(r"\.experts\.\d+\."), re.compile(r"\d+")
FEW = 16  # tokens; as many as a block has columns


@dataclass
class Coverage:
    """tokens: module of a layer's experts ("model.layers.3.mlp.experts") → expert → tokens that it saw."""

    tokens: dict[str, dict[int, int]] = field(default_factory=dict)

    def add(self, layer: str, groups: Sequence[Sequence[str]], tokens: Mapping[str, int]) -> None:
        """Add the tokens that experts saw.

        groups: linears of experts by their names inside the layer ("mlp.experts.3.up_proj").  tokens: by the first of each.
        """
        for group in groups:
            module, number, _ = group[0].rsplit(".", 2)
            self.tokens.setdefault(f"{layer}.{module}", {})[int(number)] = tokens[group[0]]

    def unseen(self) -> dict[str, list[int]]:
        """Return module → experts that saw no token, where there are any."""
        unseen = {m: [i for i, n in sorted(counts.items()) if not n] for m, counts in self.tokens.items()}
        return {m: numbers for m, numbers in unseen.items() if numbers}

    def report(self, folder: Path, progress: Progress) -> None:
        """Write the report into `folder`, and one line about experts without or with few tokens. Nothing for dense models."""
        if not self.tokens:
            return
        unseen = self.unseen()
        counts = [n for of_layer in self.tokens.values() for n in of_layer.values()]
        write_json(
            folder / COVERAGE_FILE,
            {
                "schema_version": 1,
                "counted": True,
                "tokens": {m: [n for _, n in sorted(of_layer.items())] for m, of_layer in self.tokens.items()},
                "unseen": unseen,
                "rule": "an unseen expert has its layer's largest input scale; its weights are rounded without statistics",
            },
        )
        progress.message(
            f"expert coverage: {sum(n >= FEW for n in counts)} of {len(counts)} experts saw {FEW} tokens or more"
            + (
                f"; {sum(map(len, unseen.values()))} saw none ({example(unseen)}), see {COVERAGE_FILE}"
                if unseen
                else ""
            )
        )


def example(unseen: Mapping[str, Sequence[int]]) -> str:
    module, numbers = next(iter(unseen.items()))
    return f"{module}.{numbers[0]}"


def one_per_layer(warnings: Sequence[str]) -> list[str]:
    """Return a layer's warnings, with one line for its experts where theirs differ in nothing but numbers."""
    alike: dict[str, list[str]] = {}
    for warning in warnings:
        alike.setdefault(NUMBER.sub("0", warning) if OF_EXPERT.search(warning) else warning, []).append(warning)
    return [
        first if not more else f"{first} ({len(more)} more of this layer's experts: alike)"
        for first, *more in alike.values()
    ]


@dataclass
class InputStats:
    """By full name of a linear. amax: largest |x| of any token.  second: weighted mean of x_k^2, float32 [K].

    coverage: what the routed experts saw. One without tokens has the layer's largest `amax` and mean `second` of the others.
    """

    amax: dict[str, float] = field(default_factory=dict)
    second: dict[str, np.ndarray] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)


def weight_table(token_weights: TokenWeights, device: str | torch.device) -> torch.Tensor:
    """Return the weight of every kind of token, float32 [KINDS]."""
    return torch.tensor([token_weights.get(k, 0.0) for k in range(KINDS)], device=device)


def with_padding(table: torch.Tensor) -> torch.Tensor:
    """Return a weight table with one element more, the last, which is PADDING's: 0."""
    assert PADDING == -1
    return torch.cat([table, table.new_zeros(1)])


class LargestInput:
    """The largest |x| of each column of one input, from calls with x [n, K] and kinds [n]. name: for messages."""

    def __init__(self, name: str) -> None:
        self.name, self.tokens = name, 0
        self.largest: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, kinds: torch.Tensor) -> None:
        self.add(x)

    def add(self, x: torch.Tensor) -> None:
        """Take inputs [n, K] of any kind."""
        if not len(x):
            return
        self.tokens += len(x)
        top = x.abs().amax(0).float()
        self.largest = top if self.largest is None else torch.maximum(self.largest, top)

    def amax(self, scale: torch.Tensor | None = None) -> float:
        """Return the largest |x|, or |x / scale| for a scale [K]; 0 before any token. Raises CheckpointError for NaN and inf."""
        if self.largest is None:
            return 0.0
        top = float((self.largest if scale is None else self.largest / scale).max())
        if not np.isfinite(top):
            raise CheckpointError(f"{self.name}: NaN or inf among its inputs", "annie-quant audit the model")
        return top


class InputObserver(LargestInput):
    """Accumulates the statistics of one input from calls with x [n, K] and kinds [n]. name: for messages."""

    def __init__(self, token_weights: TokenWeights, device: str, name: str = "a linear") -> None:
        super().__init__(name)
        self.table, self.weight = weight_table(token_weights, device), 0.0
        self.total: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, kinds: torch.Tensor) -> None:
        self.add(x)
        if not len(x):
            return
        weight = self.table[kinds]
        squares = (x.float().square() * weight[:, None]).sum(0).double()
        self.total = squares if self.total is None else self.total + squares
        self.weight += float(weight.sum())

    def second(self) -> np.ndarray:
        """Return the weighted mean of x_k^2, float32 [K]."""
        assert self.total is not None
        return (self.total / max(self.weight, 1e-30)).float().cpu().numpy()


class InputSampler(InputObserver):
    """Also keeps inputs of prompts' and of responses' tokens, and the mean |x|, in which both kinds of token count the same.

    totals: how many tokens of prompts and of responses will come.  rows: inputs that are kept of each, evenly spread.
    """

    def __init__(self, token_weights: TokenWeights, device: str, name: str, totals: tuple[int, int], rows: int) -> None:
        super().__init__(token_weights, device, name)
        self.strides = [max(1, total // rows) for total in totals]
        self.counts = [0, 0]
        self.sampled: list[torch.Tensor] = []
        self.magnitudes: list[torch.Tensor | None] = [None, None]

    def __call__(self, x: torch.Tensor, kinds: torch.Tensor) -> None:
        super().__call__(x, kinds)
        for part, used in enumerate((kinds == PROMPT, kinds > PROMPT)):
            rows = x[used].float()
            first = -self.counts[part] % self.strides[part]
            self.counts[part] += len(rows)
            self.sampled.append(rows[first :: self.strides[part]].clone())
            magnitude, before = rows.abs().sum(0).double(), self.magnitudes[part]
            self.magnitudes[part] = magnitude if before is None else before + magnitude

    def mean(self) -> torch.Tensor:
        """Return the mean |x_k|, float32 [K]."""
        pairs = zip(self.magnitudes, self.counts, strict=True)
        means = [magnitude / count for magnitude, count in pairs if magnitude is not None and count]
        return torch.stack(means).mean(0).float()

    def inputs(self) -> torch.Tensor:
        """Return the kept inputs, float32 [n, K]."""
        return torch.cat(self.sampled)


def collect_stats(
    folder: ModelFolder, samples: Sequence[Sample], token_weights: TokenWeights, progress: Progress
) -> InputStats:
    """Return the statistics of every linear of every decoder layer."""
    stats = InputStats()
    model = DecoderLayers(folder, make_batches(samples), progress, "calibrating")
    for layer in model:
        groups = layer.groups()
        observers = {g[0]: InputObserver(token_weights, model.device, f"{layer.name}.{g[0]}") for g in groups}
        layer.advance(observers)
        for group in groups:
            observer = observers[group[0]]
            if observer.tokens or not layer.experts_of(group[0]):
                for name in group:
                    stats.amax[f"{layer.name}.{name}"] = observer.amax()
                    stats.second[f"{layer.name}.{name}"] = observer.second()
        for groups_of_one in by_input(layer.expert_groups()):
            stats.coverage.add(layer.name, groups_of_one, {g[0]: observers[g[0]].tokens for g in groups_of_one})
            fill_unseen(stats, layer.name, groups_of_one, observers)
    return stats


def by_input(expert_groups: Iterable[list[str]]) -> list[list[list[str]]]:
    """Return the groups of the experts' linears, those of all experts that read the same kind of input together."""
    kinds: dict[tuple[str, ...], list[list[str]]] = {}
    for group in expert_groups:
        kinds.setdefault(tuple(n.rpartition(".")[2] for n in group), []).append(group)
    return list(kinds.values())


def fill_unseen(
    stats: InputStats, layer: str, groups: Sequence[Sequence[str]], observers: Mapping[str, InputObserver]
) -> None:
    """Give experts without tokens the largest input of the layer's other experts, and the mean of their second moments."""
    top = max((observers[g[0]].amax() for g in groups if observers[g[0]].tokens), default=0.0)
    stats.amax |= {f"{layer}.{name}": top for g in groups if not observers[g[0]].tokens for name in g}
    moments = [observers[g[0]].second() for g in groups if observers[g[0]].weight > 0]
    if not moments:
        return
    mean = np.mean(moments, axis=0)
    for group in groups:
        if observers[group[0]].weight <= 0:
            stats.second |= {f"{layer}.{name}": mean for name in group}
