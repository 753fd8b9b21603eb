"""Round every decoder layer of a job's model by GPTQ, and store each finished layer, so that an interrupted run can continue.

    job → samples → batches → per layer: stages (layer_stages.py), Hessians, columns → plan

LayerRounder rounds with the C loop, StreamRounder, on a GPU, in torch (gptq.py), with
two streams of hidden states: the source's gives the largest input of each linear, that of the layers rounded so far the Hessians.
No input is rounded in either.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch

from annie_quant import nvfp4
from annie_quant.checkpoint.linears import HEAD, weight_name
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.core.files import replacing
from annie_quant.core.progress import Progress
from annie_quant.models.formats import GROUP, Format
from annie_quant.offline.codec import to_numpy, to_torch
from annie_quant.offline.engine import Row, split_by_size
from annie_quant.quantize import gptq
from annie_quant.quantize.backend import device_kind
from annie_quant.quantize.calibration_samples import PROMPT, RESPONSE, CalibrationSample
from annie_quant.quantize.kl_trial import Trial
from annie_quant.quantize.layer_stages import RoundingStage, stages
from annie_quant.quantize.layerwise import DecoderLayer, DecoderLayers
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.shared_text import arrange
from annie_quant.quantize.strategy import Job, Method, StrategyOptions

log = logging.getLogger(__name__)

OF_EXPERT = re.compile(r"\.experts\.\d+\.")
NUMBER = re.compile(r"\d+")
HESSIAN_BYTES = 6 << 30  # of one pass over the text; 256 experts of 2048 x 512 have 4.6 GB
# Of a weight, relative. Plain rounding changes one by .08 to .13; the audit doubts .2 (checkpoint/checks/source.py).
MAX_WEIGHT_CHANGE = 0.19
RAISED = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)  # factors of the damping


@dataclass
class LayerResult:
    """One rounded layer, by names inside the layer.

    packed: the rounded linears.
    amax: their largest inputs.
    tokens: calibration tokens that reached each group of an expert's linears, by its first linear.
    """

    packed: dict[str, nvfp4.Tensor] = field(default_factory=dict)
    amax: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write a file that has its name only when it is complete."""
        arrays = {f"amax.{name}": np.array(value, np.float64) for name, value in self.amax.items()}
        arrays |= {
            f"tokens.{name}": np.array(count, np.int64) for name, count in self.tokens.items()
        }
        for name, tensor in self.packed.items():
            arrays[f"codes.{name}"] = tensor.codes
            arrays[f"block_scale.{name}"] = tensor.block_scale.view(np.uint8)
            arrays[f"tensor_scale.{name}"] = np.array(tensor.tensor_scale, np.float32)
        with replacing(path) as file:
            file.write(safetensors.numpy.save(arrays))

    @classmethod
    def load(cls, path: Path) -> LayerResult:
        """Read a file of save()."""
        arrays = safetensors.numpy.load_file(path)
        result = cls()
        for key, array in arrays.items():
            field_name, _, name = key.partition(".")
            if field_name == "codes":
                scales = arrays[f"block_scale.{name}"].view(nvfp4.E4M3)
                scale = arrays[f"tensor_scale.{name}"]
                shape = (array.shape[0], array.shape[1] * 2)
                result.packed[name] = nvfp4.Tensor(array, scales, np.float32(scale), shape, GROUP)
            elif field_name == "amax":
                result.amax[name] = float(array)
            elif field_name == "tokens":
                result.tokens[name] = int(array)
        return result


@dataclass(frozen=True)
class RoundingTask:
    """The settings that all layers of a model share.

    linears: full names of those that are rounded.
    table: weight of each kind of token, float32.
    scale: rule by which block scales are chosen; StreamRounder has its own.
    """

    linears: Collection[str]
    table: torch.Tensor
    method: Method
    scale: nvfp4.Scale = "amax"


class LayerRounder:
    """Rounds the linears of one decoder layer with the C loop, those that read one input together."""

    fast = False  # of Hessian

    def __init__(self, layer: DecoderLayer, task: RoundingTask) -> None:
        self.layer = layer
        self.task = task
        self.groups = layer.chosen_groups(task.linears)
        self.result = LayerResult()
        self.warnings: list[str] = []

    def round(self) -> LayerResult:
        """Return the rounded layer. Its outputs become the next layer's inputs, except those of the last layer."""
        result = self.result
        tops = self.largest_weights()
        for stage in stages(self.layer, advance=not self.layer.last):
            for groups in self.passes([g for g in self.groups if g[0] in stage.linears]):
                hessians = self.hessians(stage, groups)
                for group in groups:
                    hessian = hessians.pop(group[0])
                    if self.layer.experts_of(group[0]):
                        result.tokens[group[0]] = hessian.tokens
                    for name, (packed, values) in zip(
                        group, self.round_group(group, hessian, tops), strict=True
                    ):
                        result.packed[name] = packed
                        result.amax.setdefault(name, hessian.amax)
                        weight = self.layer.linears[name].weight
                        weight.data = values.to(weight)
        return result

    def repeat(self, result: LayerResult) -> None:
        """Apply the result of an earlier run in place of `round`."""
        for name, tensor in result.packed.items():
            weight = self.layer.linears[name].weight
            weight.data = to_torch(nvfp4.unpack(tensor, "float32")).to(weight)
        for _ in stages(self.layer, advance=not self.layer.last):
            pass

    def passes(self, groups: Sequence[list[str]]) -> Iterator[list[list[str]]]:
        """Yield the groups of a stage that one pass over the text observes: their Hessians have at most HESSIAN_BYTES."""
        sizes = [4 * self.layer.linears[g[0]].in_features ** 2 for g in groups]
        for run in split_by_size(sizes, HESSIAN_BYTES):
            yield [groups[i] for i in run]

    def hessians(
        self, stage: RoundingStage, groups: Sequence[Sequence[str]]
    ) -> dict[str, gptq.Hessian]:
        """Return the Hessians of the inputs of these groups, by each one's first linear."""
        hessians = {
            group[0]: gptq.Hessian(self.task.table, gptq.LEAST_WEIGHT, fast=self.fast)
            for group in groups
        }
        stage.observe(dict(hessians))
        return hessians

    def round_group(
        self, group: Sequence[str], hessian: gptq.Hessian, tops: Mapping[str, float]
    ) -> Iterator[tuple[nvfp4.Tensor, torch.Tensor]]:
        """Yield each linear of a group, packed, and its values. tops: of largest_weights()."""
        solution = self.solve(group, hessian)
        for name, full_name in zip(group, self.full(group), strict=True):
            tensor_scale = float(nvfp4.tensor_scale(tops[full_name], scale=self.task.scale))
            array = to_numpy(self.layer.linears[name].weight.float().cpu())
            if solution is None:
                packed = nvfp4.pack(array, tensor_scale=tensor_scale, scale=self.task.scale)
                values = nvfp4.unpack(packed, "float32")
            else:
                packed, values = gptq.round_columns(array, solution, tensor_scale, self.task.scale)
            yield packed, to_torch(values)

    def solve(self, group: Sequence[str], hessian: gptq.Hessian) -> gptq.Factor | None:
        """Return the factor of a group's Hessian, or None where no error can be corrected with it."""
        if not hessian.tokens and self.layer.experts_of(
            group[0]
        ):  # reported by the coverage of experts
            return None
        mean = hessian.mean()
        reason = hessian.unusable()
        if mean is not None and not reason:
            try:
                return gptq.factor(mean, self.task.method.damping)
            except gptq.FactorError as error:
                reason = str(error)
        self.warn(group, f"{reason}; rounded without error correction")
        return None

    def full(self, group: Sequence[str]) -> list[str]:
        """Return the full names of linears."""
        return [f"{self.layer.name}.{n}" for n in group]

    def largest_weights(self) -> dict[str, float]:
        """Return the largest magnitude that sets the tensor scale of each linear, by full name."""
        tops = {}
        for group in self.groups:
            for name in group:
                weight = self.layer.linears[name].weight.detach()
                tops[f"{self.layer.name}.{name}"] = float(weight.abs().max())
        return self.layer.model.folder.family.largest_of_group(tops)

    def warn(self, group: Sequence[str], message: str) -> None:
        warning = f"{', '.join(self.full(group))}: {message}"
        if warning not in self.warnings:
            self.warnings.append(warning)


class StreamRounder(LayerRounder):
    """Rounds the linears of one decoder layer in torch.

    source: the source's hidden states before the layer, which become those after it. Those of the rounded model are
        DecoderLayers' own.
    """

    fast = True

    def __init__(self, layer: DecoderLayer, task: RoundingTask, source: list[torch.Tensor]) -> None:
        super().__init__(layer, task)
        self.source = source

    def round(self) -> LayerResult:
        self.measure()
        return super().round()

    def repeat(self, result: LayerResult) -> None:
        self.measure()
        super().repeat(result)

    def measure(self) -> None:
        """Run the source's layer on its own states. Sets the largest inputs, and the groups' order: that in which they run."""
        model = self.layer.model
        top = dict[str, float]()

        def observer(name: str, x: torch.Tensor, kinds: torch.Tensor) -> None:
            largest = x.abs().amax(-1).float()
            finite = largest[largest.isfinite()]
            top[name] = max(top.get(name, 0.0), float(finite.max()) if len(finite) else 0.0)

        rounded, model.states = model.states, self.source
        self.layer.advance({g[0]: partial(observer, g[0]) for g in self.groups})
        model.states = rounded
        running = list(top)
        self.groups.sort(key=lambda g: running.index(g[0]) if g[0] in top else len(running))
        amax: dict[str, float] = {}
        for group in self.groups:
            if group[0] in top:
                amax |= dict.fromkeys(self.full(group), top[group[0]])
        shared = model.folder.family.largest_of_input(amax)
        self.result.amax |= {
            n.removeprefix(f"{self.layer.name}."): value for n, value in shared.items()
        }

    def passes(self, groups: Sequence[list[str]]) -> Iterator[list[list[str]]]:
        """Yield those that read one input: the linears before them are then rounded."""
        for together in by_input(groups):
            yield from super().passes(together)

    def round_group(
        self, group: Sequence[str], hessian: gptq.Hessian, tops: Mapping[str, float]
    ) -> Iterator[tuple[nvfp4.Tensor, torch.Tensor]]:
        """Yield each linear of a group, packed, and its values.

        A linear that changes by MAX_WEIGHT_CHANGE or more has too few tokens in the text: its damping is raised.
        """
        weights = [self.layer.linears[n].weight.detach().float() for n in group]
        sizes = [len(w) for w in weights]
        weight = torch.cat(weights)
        scales = [float(nvfp4.tensor_scale(tops[name])) for name in self.full(group)]
        scale = torch.cat(
            [torch.full((n,), s, device=weight.device) for s, n in zip(scales, sizes, strict=True)]
        )
        mean = hessian.mean()
        reason = hessian.unusable()
        result = None
        for raised in RAISED if mean is not None and not reason else ():
            assert mean is not None
            try:
                result = gptq.sweep(weight, mean, scale, self.task.method.damping * raised)
            except gptq.FactorError as error:
                reason = str(error)
                break
            if largest_change(result.values.split(sizes), weights) < MAX_WEIGHT_CHANGE:
                if raised > 1:
                    self.warn(
                        group,
                        f"{hessian.tokens} calibration tokens are few; damping raised {raised:g} times",
                    )
                break
            result = None
            reason = f"its corrections are {MAX_WEIGHT_CHANGE:.0%} of the weight or more"
        if result is None:
            if hessian.tokens or not self.layer.experts_of(
                group[0]
            ):  # else reported by the coverage of experts
                self.warn(group, f"{reason}; rounded without error correction")
            result = gptq.nearest(weight, scale)
        start = 0
        for size, tensor_scale in zip(sizes, scales, strict=True):
            rounded = result.rows(slice(start, start + size))
            yield rounded.packed(tensor_scale), rounded.values
            start += size


def by_input(groups: Iterable[list[str]]) -> list[list[list[str]]]:
    """Return the groups in lists of those that read one kind of input, as the experts of a layer do."""
    kinds: dict[tuple[str, ...], list[list[str]]] = {}
    for group in groups:
        kinds.setdefault(tuple(n.rpartition(".")[2] for n in group), []).append(group)
    return list(kinds.values())


def largest_change(values: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]) -> float:
    """Return the largest relative change |value - weight| / |weight| of several weights; inf where one is not finite."""
    changes = [
        float((v - w).norm() / w.norm().clamp_min(1e-30))
        for v, w in zip(values, weights, strict=True)
    ]
    return max(c if math.isfinite(c) else math.inf for c in changes)


def round_model(
    job: Job[StrategyOptions],
    formats: Mapping[str, Format],
    samples: Sequence[CalibrationSample],
    method: Method,
    progress: Progress,
    name: str = "layers",
) -> QuantizationPlan:
    """Return the plan with every linear of `formats` rounded.

    name: of the folder inside the job's work folder where finished layers are stored.
    Raises CheckpointError where a linear is in no decoder layer.
    """
    folder = ModelFolder(job.model)
    outside = [n for n in formats if not folder.family.in_decoder(n)]
    if outside:
        raise CheckpointError(
            f"{min(outside)} is in no decoder layer", f"--exclude-layers {min(outside)}"
        )
    plan = QuantizationPlan.of(formats, scale=job.scale)
    store = job.work_folder() / name
    store.mkdir(exist_ok=True)
    shared = arrange(samples)
    model = DecoderLayers(folder, shared.batches)
    table = shared.weight_table({**RESPONSE, PROMPT: method.prompt}, model.device)
    rounder_of: Callable[[DecoderLayer, RoundingTask], LayerRounder] = LayerRounder
    # StreamRounder chooses scales by no other rule.
    if device_kind() == "cuda" and plan.scale == "sweep":
        rounder_of = partial(StreamRounder, source=list(model.states))
    task = RoundingTask(plan.linears.keys(), table, method, plan.scale)
    count = len(model.model.layers)
    for layer in model:
        progress.update(layer.index, count, f"rounding: layer {layer.index + 1} of {count}")
        file = store / f"layer-{layer.index:04d}.safetensors"
        rounder = rounder_of(layer, task)
        if file.is_file():
            result = LayerResult.load(file)
            rounder.repeat(result)
        else:
            result = rounder.round()
            result.save(file)
        for warning in one_per_layer(rounder.warnings):
            log.warning("annie-quant: %s", warning)
        for name, packed in result.packed.items():
            linear = plan.linears[f"{layer.name}.{name}"]
            linear.packed = packed
            linear.input_amax = result.amax.get(name)
            linear.tokens = result.tokens.get(name)
    return plan


def round_head(
    trial: Trial,
    rows: Sequence[Row],
    damping: float,
    scale: nvfp4.Scale,
    file: Path,
    progress: Progress,
) -> nvfp4.Tensor:
    """Return the head in NVFP4, by GPTQ over the answers' tokens: the only positions whose logits are sampled.

    rows: prompts and answers whose hidden states are its inputs.
    file: with the result of an interrupted run, or written.
    """
    if file.is_file():
        return LayerResult.load(file).packed[HEAD]
    head = trial.linear(HEAD)
    hessian = gptq.Hessian(torch.ones(1, device=head.weight.device), fast=head.weight.is_cuda)

    def observe(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1])
        hessian(x, torch.zeros(len(x), dtype=torch.long, device=x.device))

    handle = head.register_forward_pre_hook(observe)
    try:
        for done, _ in enumerate(trial.engine.scores(rows), 1):
            progress.update(done, len(rows), f"head: inputs of {done} of {len(rows)} answers")
    finally:
        handle.remove()
    name = weight_name(trial.folder, HEAD)
    top = max(float(nvfp4.amax(piece)) for piece in trial.folder.rows(name))
    tensor_scale = float(nvfp4.tensor_scale(top, scale=scale))
    try:
        mean = hessian.mean()
        solution = None if mean is None else gptq.factor(mean, damping)
    except gptq.FactorError:
        solution = None
    pieces = []
    for piece in trial.folder.rows(name):
        if solution is None:
            packed = nvfp4.pack(piece, tensor_scale=tensor_scale, scale=scale, group=GROUP)
        else:
            packed, _ = gptq.round_columns(piece, solution, tensor_scale, scale)
        pieces.append(packed)
    codes = np.concatenate([piece.codes for piece in pieces])
    scales = np.concatenate([piece.block_scale for piece in pieces])
    shape = (len(codes), codes.shape[1] * 2)
    packed = nvfp4.Tensor(codes, scales, pieces[0].tensor_scale, shape, GROUP)
    LayerResult({HEAD: packed}).save(file)
    return packed


def one_per_layer(warnings: Sequence[str]) -> list[str]:
    """Return a layer's warnings, with one line for all experts whose warnings differ only in numbers."""
    alike: dict[str, list[str]] = {}
    for warning in warnings:
        alike.setdefault(
            NUMBER.sub("0", warning) if OF_EXPERT.search(warning) else warning, []
        ).append(warning)
    return [
        first if not more else f"{first} ({len(more)} more of this layer's experts: alike)"
        for first, *more in alike.values()
    ]
