"""Round a model's layers with GPTQ in torch, each linear for the inputs that the rounded linears before it produce.

Two streams of hidden states pass through the layers. The source's stream gives the largest input of each linear and the order in
which the linears run. The stream of the layers rounded so far gives the Hessians. No input is rounded in either.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from annie_quant import nvfp4
from annie_quant.quantize.column_sweep import nearest, sweep
from annie_quant.quantize.hessian import LEAST_WEIGHT, FactorError, Hessian
from annie_quant.quantize.layer_rounder import LayerResult, LayerRounder, RoundingTask
from annie_quant.quantize.layerwise import DecoderLayer, Observer, inputs_of

# Of a weight, relative. Plain rounding changes one by .08 to .13; the audit doubts .2 (checkpoint/checks/source.py).
MAX_CHANGE = 0.19
RAISED = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)  # factors of the damping


@dataclass
class SourceStream:
    """The source's hidden states before the current layer; those of the rounded model are DecoderLayers' own."""

    states: list[torch.Tensor]


class StreamRounder(LayerRounder):
    """Rounds one decoder layer: a copy, `fake`, whose linears are rounded one group after the other."""

    def __init__(self, layer: DecoderLayer, task: RoundingTask, source: SourceStream) -> None:
        super().__init__(layer, task)
        self.source = source
        # Block of `fake` whose linears are all rounded → batch → its output, which later passes use again.
        self.outputs: dict[str, dict[int, object]] = {}
        self.fake = DecoderLayer(layer.model, layer.index, copy.deepcopy(layer.module))

    def round(self) -> LayerResult:
        self.source.states = self.measure()
        self.quantize()
        self.advance()
        return LayerResult(self.packed, self.amax, self.tokens)

    def repeat(self, result: LayerResult) -> None:
        self.source.states = self.measure()
        self.restore(self.fake.module, result)
        self.advance()

    def advance(self) -> None:
        """Let the rounded model's hidden states pass the rounded layer."""
        states = self.layer.model.states
        for i, (state, kinds) in enumerate(self.batches(states)):
            with self.finished_once(i):
                states[i] = self.run(self.fake, state, kinds)

    def share_amax(self) -> None:
        """Give linears that servers round with one scale the same largest input."""
        prefix = f"{self.layer.name}."
        full = self.layer.model.folder.family.largest_of_input({f"{prefix}{n}": a for n, a in self.amax.items()})
        self.amax = {n.removeprefix(prefix): a for n, a in full.items() if n.removeprefix(prefix) in self.amax}

    def measure(self) -> list[torch.Tensor]:
        """Run the source's layer on its own states, and return the outputs.

        Sets the largest input of every group, and the order in which the groups run.
        """
        top: dict[str, float] = {}

        def observer(name: str, x: torch.Tensor, kinds: torch.Tensor) -> None:
            finite = x.abs().amax(-1).float()
            finite = finite[finite.isfinite()]
            top[name] = max(top.get(name, 0.0), float(finite.max()) if len(finite) else 0.0)

        heads = [g[0] for g in self.groups]
        outputs = [
            self.run(self.layer, state, kinds, {n: partial(observer, n) for n in heads})
            for state, kinds in self.batches(self.source.states)
        ]
        running = list(top)
        self.groups.sort(key=lambda g: running.index(g[0]) if g[0] in top else len(running))
        self.amax |= {n: top[g[0]] for g in self.groups if g[0] in top for n in g}
        self.share_amax()
        return outputs

    def batches(self, states: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        model = self.layer.model
        for state, batch in zip(states, model.batches, strict=True):
            yield state, torch.from_numpy(batch.kinds).to(model.device)

    def run(
        self,
        layer: DecoderLayer,
        state: torch.Tensor,
        kinds: torch.Tensor,
        observers: Mapping[str, Observer] | None = None,
        last: str | None = None,
    ) -> torch.Tensor:
        """Return a layer's outputs; observers get the inputs of the real tokens.

        last: stop when this linear is reached, and return its input.
        """
        forward = partial(layer.model.forward, layer.module, state)
        with layer.observed(observers or {}, kinds), torch.inference_mode():
            return forward() if last is None else inputs_of(layer.linears[last], forward)

    def stages(self) -> Iterator[list[list[str]]]:
        """Yield the groups that one pass over the text measures: each dense group alone, experts many at a time."""
        waiting: list[list[str]] = []
        for group in self.groups:
            if self.layer.experts_of(group[0]) is None:
                yield [group]
            else:
                waiting.append(group)
        for groups in by_input(waiting):
            yield from self.in_memory(groups)

    def quantize(self) -> None:
        """Round all groups, in the order in which they run."""
        tops = self.largest_weights()
        for groups in self.stages():
            self.outputs |= {block: {} for block in self.finished() if block not in self.outputs}
            hessians = self.hessians(groups)
            for group in groups:
                self.round_group(group, hessians[group[0]], tops)

    def finished(self) -> list[str]:
        """Return the layer's blocks (attention, MLP) whose chosen linears are all rounded."""
        names = [n for g in self.groups for n in g]
        blocks = dict.fromkeys(n.partition(".")[0] for n in names)
        return [b for b in blocks if all(n in self.packed for n in names if n.startswith(f"{b}."))]

    @contextlib.contextmanager
    def finished_once(self, batch: int) -> Iterator[None]:
        """Compute the finished blocks of `fake` once per batch: the blocks before them are finished, so their inputs stay."""
        blocks = [(self.fake.module.get_submodule(name), stored) for name, stored in self.outputs.items()]

        def forward(
            original: Callable[..., object], stored: dict[int, object], *args: object, **options: object
        ) -> object:
            if batch not in stored:
                stored[batch] = original(*args, **options)
            return stored[batch]

        for block, stored in blocks:
            block.forward = partial(forward, block.forward, stored)
        try:
            yield
        finally:
            for block, _ in blocks:
                del block.forward

    def hessians(self, groups: Sequence[Sequence[str]]) -> dict[str, Hessian]:
        """Return the Hessians of the inputs of these groups, by each one's first linear."""
        result = {g[0]: Hessian(self.task.table, LEAST_WEIGHT, fast=True) for g in groups}
        last = None if self.layer.experts_of(groups[0][0]) else groups[0][0]
        for i, (state, kinds) in enumerate(self.batches(self.layer.model.states)):
            with self.finished_once(i):
                self.run(self.fake, state, kinds, result, last)
        return result

    def round_group(self, group: Sequence[str], hessian: Hessian, tops: Mapping[str, float]) -> None:
        """Round the linears that read one input together.

        A linear that changes by MAX_CHANGE or more has too few tokens in the text: its damping is raised.
        """
        if self.layer.experts_of(group[0]):
            self.tokens[group[0]] = hessian.tokens
        weights = [self.layer.linears[n].weight.detach().float() for n in group]
        sizes, weight = [len(w) for w in weights], torch.cat(weights)
        scales = [float(nvfp4.tensor_scale(tops[name])) for name in self.full(group)]
        scale = torch.cat([torch.full((n,), s, device=weight.device) for s, n in zip(scales, sizes, strict=True)])
        mean, reason, result = hessian.mean(), hessian.unusable(), None
        if mean is not None and not reason and (dead := int((mean.diagonal() <= 0).sum())):
            self.warn(
                group, f"{dead} of {len(mean)} inputs are always 0 in calibration; their weights are rounded to nearest"
            )
        for factor in RAISED if mean is not None and not reason else ():
            assert mean is not None
            try:
                result = sweep(weight, mean, scale, self.task.method.damping * factor)
            except FactorError as error:
                reason = str(error)
                break
            if largest_change(result.values.split(sizes), weights) < MAX_CHANGE:
                if factor > 1:
                    self.warn(group, f"{hessian.tokens} calibration tokens are few; damping raised {factor:g} times")
                break
            result, reason = None, f"its corrections are {MAX_CHANGE:.0%} of the weight or more"
        if result is None:
            if hessian.tokens or not self.layer.experts_of(group[0]):  # else reported by the coverage of experts
                self.warn(group, f"{reason}; rounded without error correction")
            result = nearest(weight, scale)
        start = 0
        for name, size in zip(group, sizes, strict=True):
            rounded = result.rows(slice(start, start + size))
            self.packed[name] = rounded.packed(float(scale[start]))
            fake = self.fake.linears[name].weight
            fake.data = rounded.values.to(fake)
            start += size


def by_input(expert_groups: Iterable[list[str]]) -> list[list[list[str]]]:
    """Return the groups of experts' linears, with the groups of all experts that read the same kind of input in one list."""
    kinds: dict[tuple[str, ...], list[list[str]]] = {}
    for group in expert_groups:
        kinds.setdefault(tuple(n.rpartition(".")[2] for n in group), []).append(group)
    return list(kinds.values())


def largest_change(values: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]) -> float:
    """Return the largest relative change |value - weight| / |weight| of several weights; inf where one is not finite."""
    changes = [float((v - w).norm() / w.norm().clamp_min(1e-30)) for v, w in zip(values, weights, strict=True)]
    return max(c if math.isfinite(c) else math.inf for c in changes)
