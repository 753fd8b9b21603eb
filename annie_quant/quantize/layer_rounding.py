"""Round a model one decoder layer at a time, with GPTQ on the inputs that the rounded model really has.

Two streams of hidden states pass through the layers: those of the source, and those of the layers rounded so far, with rounded
activations where the format has them. Inside a layer the linears are rounded in the order in which they run; each group that
reads one input sees what the groups before it put out. `cross` starts each group from weights that correct the difference
between the two streams (column_sweep.corrected), `learn` then learns the rounding of the whole layer (learned_rounding.py).

A layer's result is stored before the next one begins; an interrupted run passes the stored layers' text again and continues.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from annie_quant import nvfp4
from annie_quant.offline.engine import split_by_size
from annie_quant.offline.experts import SingleExperts
from annie_quant.quantize import column_sweep, fake_quant
from annie_quant.quantize.formats import NVFP4
from annie_quant.quantize.gptq_solver import LEAST_WEIGHT, FactorError, Sampling
from annie_quant.quantize.input_stats import by_input
from annie_quant.quantize.kl_trial import input_hook
from annie_quant.quantize.layerwise import DecoderLayer, DecoderLayers, real_inputs
from annie_quant.quantize.matmul_precision import tensor_cores

HESSIAN_BYTES = 6 << 30  # of one pass over the text
# Of a weight, relative. Plain rounding changes one by .08 to .13; the audit doubts .2 (checkpoint/checks/source.py).
MAX_CHANGE = 0.19
RAISED = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)  # factors of the damping


@dataclass(frozen=True)
class Method:
    """How weights are rounded. damping, order, candidates: of the sweep.  cross: damping of the correction for the inputs'
    difference, or None.  steps: of learned rounding.  served: rounded inputs enter the Hessians where a server has them.
    """

    damping: float = 0.05
    order: str = "blocks"
    candidates: Sequence[int] = column_sweep.NEAR_CODES
    cross: float | None = 0.1
    steps: int = 0
    served: bool = True


class Moments:
    """Weighted sums of x~ x~^T and x~ x^T over tokens, for inputs x~ [n, K] and, where there are any, true inputs x [n, K].

    Tokens with NaN or inf are counted in `not_finite` and left out.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table, self.weight, self.not_finite, self.tokens = table, 0.0, 0, 0
        self.sampling = Sampling(table, LEAST_WEIGHT)
        self.hessian: torch.Tensor | None = None
        self.cross: torch.Tensor | None = None

    def add(self, x: torch.Tensor, kinds: torch.Tensor, true: torch.Tensor | None = None) -> None:
        self.tokens += len(x)
        weight = self.sampling(self.table[kinds])
        finite = x.isfinite().all(-1)
        if true is not None:
            finite &= true.isfinite().all(-1)
        self.not_finite += int((~finite).sum())
        used = finite & (weight > 0)
        weight = weight[used]
        if not len(weight):
            return
        self.weight += float(weight.sum())
        root = None if bool((weight == 1).all()) else weight.sqrt()[:, None]
        rows = x[used]
        self.hessian = add_product(self.hessian, rows, rows, root)
        if true is not None:
            self.cross = add_product(self.cross, rows, true[used], root)


def add_product(
    total: torch.Tensor | None, x: torch.Tensor, y: torch.Tensor, root: torch.Tensor | None
) -> torch.Tensor:
    """Return total + x^T y, float32 [K, K], of inputs [n, K], each times its root [n, 1] if there are any.

    On a GPU, inputs in bfloat16 without roots are multiplied as they are, others in TF32; sums are float32 in both.
    """
    if root is None and x.dtype == torch.bfloat16 and x.is_cuda:
        product = torch.mm(x.T, y, out_dtype=torch.float32)
        return product if total is None else total.add_(product)
    left, right = x.float(), y.float()
    if root is not None:
        left, right = left * root, right * root
    with tensor_cores(x.dtype == torch.bfloat16):
        return left.T @ right if total is None else total.addmm_(left.T, right)


class _Reached(Exception):
    """The forward pass has reached the last linear that is observed."""


class LayerRounder:
    """One decoder layer: the source's module `true`, and `fake`, whose linears are rounded one group after the other.

    formats: full name of each linear that is rounded → "nvfp4" where a server rounds its inputs, too, or "w4a16".
    """

    def __init__(self, layer: DecoderLayer, formats: Mapping[str, str], table: torch.Tensor, method: Method) -> None:
        self.layer, self.formats, self.table, self.method = layer, formats, table, method
        self.groups = [
            g for g in ([n for n in group if f"{layer.name}.{n}" in formats] for group in layer.groups()) if g
        ]
        self.amax: dict[str, float] = {}
        self.rounded: dict[str, column_sweep.Rounded] = {}
        self.tensor_scales: dict[str, float] = {}
        self.warnings: list[str] = []
        self.tokens: dict[str, int] = {}  # that reached each expert
        # Block of `fake` of which everything is rounded → batch → its output, which later passes need again.
        self.outputs: dict[str, dict[int, Any]] = {}
        self.start()

    def start(self) -> None:
        """Take the layer's weights as they are now."""
        self.true = self.layer.module
        self.fake = copy.deepcopy(self.layer.module)

    def set_amax(self, amax: Mapping[str, float]) -> None:
        """Set largest inputs, by full name; linears that servers round with one scale get the same."""
        prefix = f"{self.layer.name}."
        self.amax |= {n.removeprefix(prefix): a for n, a in amax.items()}
        full = self.layer.model.folder.family.largest_of_input({f"{prefix}{n}": a for n, a in self.amax.items()})
        self.amax = {n.removeprefix(prefix): a for n, a in full.items() if n.removeprefix(prefix) in self.amax}

    def linear(self, module: torch.nn.Module, name: str) -> torch.nn.Linear:
        linear = module.get_submodule(name)
        assert isinstance(linear, torch.nn.Linear)
        return linear

    def measure(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the source's layer on its own states: sets the largest input of every group, and the order in which they run.

        Returns the outputs.
        """
        top: dict[str, float] = {}

        def observer(name: str, x: torch.Tensor, kinds: torch.Tensor) -> None:
            finite = x.abs().amax(-1).float()
            finite = finite[finite.isfinite()]
            top[name] = max(top.get(name, 0.0), float(finite.max()) if len(finite) else 0.0)

        heads = [g[0] for g in self.groups]
        outputs = [
            self.run(self.true, state, kinds, {n: partial(observer, n) for n in heads})
            for state, kinds in self.batches(states)
        ]
        running = list(top)
        self.groups.sort(key=lambda g: running.index(g[0]) if g[0] in top else len(running))
        self.set_amax({f"{self.layer.name}.{n}": top[g[0]] for g in self.groups if g[0] in top for n in g})
        return outputs

    def batches(self, states: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        model = self.layer.model
        for state, batch in zip(states, model.batches, strict=True):
            yield state, torch.from_numpy(batch.kinds).to(model.device)

    def run(
        self,
        module: torch.nn.Module,
        state: torch.Tensor,
        kinds: torch.Tensor,
        observers: Mapping[str, Callable[[torch.Tensor, torch.Tensor], None]],
        last: str | None = None,
    ) -> torch.Tensor:
        """Return a module's outputs; observers get the inputs of the real tokens. last: stop when this linear is reached."""

        def hook(name: str, observer: Callable[..., None], module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            observer(*real_inputs(args[0], kinds, self.experts(owner, name)))
            if name == last:
                raise _Reached

        owner = module
        handles = [self.linear(module, n).register_forward_pre_hook(partial(hook, n, f)) for n, f in observers.items()]
        try:
            with torch.inference_mode():
                return self.layer.model.forward(module, state)
        except _Reached:
            return state
        finally:
            for handle in handles:
                handle.remove()

    def experts(self, module: torch.nn.Module, name: str) -> SingleExperts | None:
        """Return the experts that a linear of a module belongs to, or None."""
        prefix = next((n for n in self.layer.experts if name.startswith(f"{n}.")), None)
        return None if prefix is None else module.get_submodule(prefix)  # type: ignore[return-value]

    def stages(self) -> Iterator[list[list[str]]]:
        """Yield the groups that one pass over the text measures: each dense group alone, experts many at a time."""
        waiting: list[list[str]] = []
        for group in self.groups:
            if self.layer.experts_of(group[0]) is None:
                yield [group]
            else:
                waiting.append(group)
        for groups in by_input(waiting):
            sizes = [4 * self.layer.linears[g[0]].in_features ** 2 for g in groups]
            yield from ([groups[i] for i in run] for run in split_by_size(sizes, HESSIAN_BYTES))

    def quantize(self, true_states: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> None:
        """Round all groups, in the order in which they run."""
        weights = {n: self.linear(self.true, n).weight for g in self.groups for n in g}
        full = {f"{self.layer.name}.{n}": float(w.detach().abs().max()) for n, w in weights.items()}
        tops = self.layer.model.folder.family.largest_of_group(full)
        for groups in self.stages():
            self.outputs |= {block: {} for block in self.finished() if block not in self.outputs}
            moments = self.moments(groups, true_states, states)
            for group in groups:
                self.round_group(group, moments[group[0]], tops)

    def finished(self) -> list[str]:
        """Return the layer's blocks (attention, MLP) whose chosen linears are all rounded."""
        names = [n for g in self.groups for n in g]
        blocks = dict.fromkeys(n.partition(".")[0] for n in names)
        return [b for b in blocks if all(n in self.rounded for n in names if n.startswith(f"{b}."))]

    @contextlib.contextmanager
    def finished_once(self, batch: int) -> Iterator[None]:
        """Compute the finished blocks of `fake` once per batch: what runs before them is finished, so their inputs stay."""
        blocks = [(self.fake.get_submodule(name), stored) for name, stored in self.outputs.items()]

        def forward(original: Callable[..., Any], stored: dict[int, Any], *args: Any, **options: Any) -> Any:
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

    def moments(
        self, groups: Sequence[Sequence[str]], true_states: Sequence[torch.Tensor], states: Sequence[torch.Tensor]
    ) -> dict[str, Moments]:
        """Return the moments of the inputs of these groups, by each one's first linear."""
        result = {g[0]: Moments(self.table) for g in groups}
        experts = self.layer.experts_of(groups[0][0]) is not None
        last = None if experts else groups[0][0]
        for group in groups:
            self.round_inputs(group)
        for i, ((true_state, kinds), state) in enumerate(zip(self.batches(true_states), states, strict=True)):
            true: dict[str, torch.Tensor] = {}
            if self.method.cross is not None and not experts:  # the router sends other tokens to an expert
                self.run(self.true, true_state, kinds, {n: partial(store, true, n) for n in result}, last)
            add = {n: partial(add_inputs, moments, true, n) for n, moments in result.items()}
            with self.finished_once(i):
                self.run(self.fake, state, kinds, add, last)
        return result

    def round_inputs(self, group: Sequence[str]) -> None:
        """Let the linears of a group round their inputs from now on, where a server does and the method follows it."""
        for name in group if self.method.served else ():
            if self.formats[f"{self.layer.name}.{name}"] == NVFP4 and (top := self.amax.get(name)):
                self.linear(self.fake, name).register_forward_pre_hook(input_hook(fake_quant.nvfp4_input, top))

    def round_group(self, group: Sequence[str], moments: Moments, tops: Mapping[str, float]) -> None:
        """Round the linears that read one input together.

        Where a linear changes by MAX_CHANGE or more, the text has too few tokens for its inputs: the damping is raised.
        """
        names = [f"{self.layer.name}.{n}" for n in group]
        if self.layer.experts_of(group[0]):
            self.tokens[group[0]] = moments.tokens
        weights = [self.linear(self.true, n).weight.detach().float() for n in group]
        sizes = [len(w) for w in weights]
        reason = self.unusable(moments)
        result, factor = None, 1.0
        for factor in RAISED if not reason else ():
            try:
                result, scale = self.solve(names, weights, moments, tops, factor)
            except FactorError as error:
                result, reason = None, str(error)
                break
            if largest_change(result.values.split(sizes), weights) < MAX_CHANGE:
                break
            result, reason = None, f"its corrections are {MAX_CHANGE:.0%} of the weight or more"
        if result is None:
            if not (self.layer.experts_of(group[0]) and not moments.tokens):  # reported by the coverage of experts
                self.warnings.append(f"{', '.join(names)}: {reason}; rounded without error correction")
            scale = row_scales([tops[n] for n in names], sizes, weights[0].device)
            result = column_sweep.nearest(torch.cat(weights), scale)
        elif factor > 1:
            self.warnings.append(
                f"{', '.join(names)}: {moments.tokens} calibration tokens are few; damping raised {factor:g} times"
            )
        start = 0
        for name, size in zip(group, sizes, strict=True):
            self.tensor_scales[name] = float(scale[start])
            self.set_rounded(name, result.rows(slice(start, start + size)))
            start += size

    def solve(
        self,
        names: Sequence[str],
        weights: Sequence[torch.Tensor],
        moments: Moments,
        tops: Mapping[str, float],
        factor: float,
    ) -> tuple[column_sweep.Rounded, torch.Tensor]:
        """Return the weights, one after the other, rounded with `factor` times the method's damping, and their rows' scales."""
        assert moments.hessian is not None
        method, weight, sizes = self.method, torch.cat(list(weights)), [len(w) for w in weights]
        hessian = moments.hessian / moments.weight
        top = {n: tops[n] for n in names}
        if dead := int((hessian.diagonal() <= 0).sum()):
            warning = (
                f"{', '.join(names)}: {dead} of {len(hessian)} inputs are always 0 in calibration; their weights are "
                "rounded to nearest"
            )
            self.warnings += [warning] if warning not in self.warnings else []
        if method.cross is not None and moments.cross is not None:
            weight = column_sweep.corrected(weight, hessian, moments.cross / moments.weight, method.cross * factor)
            largest = {n: float(w.abs().max()) for n, w in zip(names, weight.split(sizes), strict=True)}
            top = self.layer.model.folder.family.largest_of_group({n: max(t, largest[n]) for n, t in top.items()})
        scale = row_scales([top[n] for n in names], sizes, weight.device)
        damping = method.damping * factor
        return column_sweep.sweep(weight, hessian, scale, damping, method.order, method.candidates), scale

    def set_rounded(self, name: str, rounded: column_sweep.Rounded) -> None:
        """Replace the rounding of a linear."""
        self.rounded[name] = rounded
        self.outputs.pop(name.partition(".")[0], None)
        linear = self.linear(self.fake, name)
        linear.weight.data = rounded.values.to(linear.weight)

    def forward_with(self, weights: Mapping[str, torch.Tensor], state: torch.Tensor) -> torch.Tensor:
        """Return the rounded layer's outputs with other weights for some linears; gradients reach the weights."""
        dtype = self.layer.model.dtype
        named = {f"{n}.weight": w.to(dtype) for n, w in weights.items()}
        return self.layer.model.forward(
            lambda *args, **kwargs: torch.func.functional_call(self.fake, named, args, kwargs), state.clone()
        )

    def unusable(self, moments: Moments) -> str:
        """Return why the moments cannot be used, or ""."""
        if moments.not_finite:
            return f"{moments.not_finite} of its calibration inputs hold NaN or inf"
        if moments.hessian is None:
            return "no calibration input reached it" if not moments.tokens else "all its inputs are 0"
        return ""


def store(inputs: dict[str, torch.Tensor], name: str, x: torch.Tensor, kinds: torch.Tensor) -> None:
    inputs[name] = x


def add_inputs(
    moments: Moments, true: Mapping[str, torch.Tensor], name: str, x: torch.Tensor, kinds: torch.Tensor
) -> None:
    moments.add(x, kinds, true.get(name))


def row_scales(top: Sequence[float], sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the tensor scale of every row, float32, of linears with these largest magnitudes and numbers of rows."""
    scales = [float(nvfp4.tensor_scale(t)) for t in top]
    return torch.cat([torch.full((n,), s, device=device) for s, n in zip(scales, sizes, strict=True)])


def largest_change(values: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]) -> float:
    """Return the largest relative change |value - weight| / |weight| of several weights; inf where one is not finite."""
    changes = [float((v - w).norm() / w.norm().clamp_min(1e-30)) for v, w in zip(values, weights, strict=True)]
    return max(c if math.isfinite(c) else math.inf for c in changes)


class Streams:
    """The hidden states of the source and of the rounded model, before the current layer."""

    def __init__(self, model: DecoderLayers) -> None:
        self.model = model
        self.true = [s.clone() for s in model.states]

    def advance(self, rounder: LayerRounder, true_outputs: list[torch.Tensor]) -> None:
        for i, (state, kinds) in enumerate(rounder.batches(self.model.states)):
            with rounder.finished_once(i):
                self.model.states[i] = rounder.run(rounder.fake, state, kinds, {})
        self.true = true_outputs
