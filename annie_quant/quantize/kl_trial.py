"""KL divergence of answers between a model and the same model with some linears rounded: the harm of a format.

The bf16 model is loaded once, and its logits for the scored answers are kept. A trial rounds the weights and inputs of some
linears as a server would, runs the same answers, and restores the model.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch

from annie_quant import nvfp4
from annie_quant.checkpoint.linears import weight_name
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.models.formats import FP8_CHANNEL, LARGEST_E4M3, LARGEST_NVFP4, NVFP4
from annie_quant.offline import codec
from annie_quant.offline.engine import Engine, Row
from annie_quant.offline.linears import token_scales
from annie_quant.offline.loading import load
from annie_quant.quantize.backend import device_and_dtype
from annie_quant.quantize.calibration_samples import CalibrationSample
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.shared_text import DistinctPositions
from annie_quant.quantize.strategy import Job, StrategyOptions

MIN_ANSWERS = 8  # that share a trial's tokens
BROKEN = 1e6  # a figure that is not finite


@dataclass(frozen=True)
class TrialAnswer:
    """An answer and its prompt.

    decides: whether a token of the answer decides about a call or the end, bool [T].
    conversation: index of the answer's conversation.
    """

    row: Row
    decides: torch.Tensor
    conversation: int


def answers_to_score(
    samples: Sequence[CalibrationSample], tokens: int, positions: float = math.inf, cut: bool = True
) -> list[TrialAnswer]:
    """Return answers of all categories in turn.

    tokens: of all answers, at most; every trial is a pass over them, and their logits stay in memory.
    positions: of these answers with their prompts, at most; a prefix that several share counts once, and the first prompt not at
        all, so that a long prompt does not leave one answer.
    cut: cut answers that are longer than a MIN_ANSWERS-th of `tokens`.
    """
    answers: list[TrialAnswer] = []
    tokens_left: float = tokens
    positions_left = positions
    counted = DistinctPositions()
    longest = max(1, tokens // MIN_ANSWERS) if cut else tokens
    for sample in in_turn_by_category(samples):
        answer = sample.answer[:longest] if cut else sample.answer
        row = (*sample.prompt, *answer)
        size = counted.new(row) if answers else len(answer)
        if len(answer) > tokens_left or (answers and size > positions_left):
            continue
        tokens_left -= len(answer)
        positions_left -= size
        counted.add(row)
        decides = sample.decides or (False,) * len(answer)
        scored = Row(sample.prompt, answer)
        answers.append(TrialAnswer(scored, torch.tensor(decides[: len(answer)]), sample.row))
    return answers


class Trial:
    """A model, and its own logits for some answers as the reference.

    Raises CheckpointError where the model's own probabilities are not finite.
    """

    def __init__(self, folder: ModelFolder, answers: Sequence[TrialAnswer]) -> None:
        device, dtype = device_and_dtype(folder)
        self.folder = folder
        self.family = folder.family
        self.model: torch.nn.Module = load(folder.path, dtype=dtype, device=device)
        self.engine = Engine(self.model)
        self.rows = [a.row for a in answers]
        self.answers = [replace(a, decides=a.decides.to(device)) for a in answers]
        # float16 halves the memory for large vocabularies; the reference is also compared with itself, rounded like this.
        self.reference = {
            i: torch.log_softmax(logits, -1).half() for i, logits in self.engine.scores(self.rows)
        }
        if any(bool(reference.isnan().any()) for reference in self.reference.values()):
            raise CheckpointError(
                f"{folder.path}: the probabilities of the calibration answers are not finite",
                f"annie-quant audit {folder.path}",
            )

    def shares(self, plan: QuantizationPlan, inputs: bool = True) -> np.ndarray:
        """Return each conversation's share of three figures with a plan's weights and inputs, float64 [conversations, 3].

        They are the mean KL(source || plan) in nats per token, that of tokens that decide, and the share of these whose most
        probable token is another one. A plan without packed weights rounds inputs alone.

        inputs: round them where the plan's formats do.
        """
        tokens = sum(len(a.decides) for a in self.answers)
        decisions = max(1, sum(int(a.decides.sum()) for a in self.answers))
        conversations = sorted({a.conversation for a in self.answers})
        parts = {conversation: np.zeros(3) for conversation in conversations}
        with torch.inference_mode(), self.rounded(plan, inputs):
            for i, logits in self.engine.scores(self.rows):
                answer = self.answers[i]
                p = self.reference[i].float()
                q = torch.log_softmax(logits, -1)
                kl = (p.exp() * (p - q)).sum(-1).clamp_min(0).double()
                flips = (p.argmax(-1) != q.argmax(-1))[answer.decides].sum()
                parts[answer.conversation] += [
                    float(kl.sum()) / tokens,
                    float(kl[answer.decides].sum()) / decisions,
                    int(flips) / decisions,
                ]
        return np.array(list(parts.values()))

    @contextlib.contextmanager
    def rounded(self, plan: QuantizationPlan, inputs: bool = True) -> Iterator[None]:
        """Give the model the weights, the norms and, with `inputs`, the rounded inputs of a plan; restore them at the end."""
        weights: dict[str, torch.Tensor] = {}
        for name, linear in plan.linears.items():
            if linear.packed is not None:
                weights[name] = codec.to_torch(nvfp4.unpack(linear.packed, "float32"))
            elif linear.format == FP8_CHANNEL:
                weights[name] = fp8_rows(self.parameter(weight_name(self.folder, name)))
        with contextlib.ExitStack() as changes:
            changes.enter_context(self.changed(weights))
            changes.enter_context(self.changed_norms(plan.tensors))
            if inputs:
                changes.enter_context(self.rounded_inputs(plan))
            yield

    def largest_inputs(self, names: Iterable[str]) -> dict[str, float]:
        """Return linear → its largest |input| over the scored answers and their prompts, if it had any."""
        largest: dict[str, float] = {}

        def observe(name: str, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if args[0].numel():
                largest[name] = max(largest.get(name, 0.0), float(args[0].detach().abs().max()))

        with contextlib.ExitStack() as hooks, torch.inference_mode():
            for name in names:
                hook = partial(observe, name)
                hooks.enter_context(self.linear(name).register_forward_pre_hook(hook))
            for _ in self.engine.scores(self.rows):
                pass
        return largest

    def linear(self, name: str) -> torch.nn.Linear:
        """Return a linear of the model by its name in the checkpoint."""
        linear = self.model.get_submodule(self.family.in_form(name, multimodal=False))
        assert isinstance(linear, torch.nn.Linear)
        return linear

    def parameter(self, name: str) -> torch.Tensor:
        """Return a parameter of the model by its name in the checkpoint."""
        return self.model.get_parameter(self.family.in_form(name, multimodal=False)).data

    @contextlib.contextmanager
    def changed(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Give linears other weights; restore them at the end."""
        with contextlib.ExitStack() as undo:
            for name, weight in weights.items():
                # A parameter of its own: a tied head and the embedding are one.
                linear = self.linear(name)
                undo.callback(setattr, linear, "weight", linear.weight)
                changed = weight.to(linear.weight)
                linear.weight = torch.nn.Parameter(changed, requires_grad=False)
            yield

    @contextlib.contextmanager
    def changed_norms(self, tensors: Mapping[str, np.ndarray]) -> Iterator[None]:
        """Give the norms among these tensors of the checkpoint other weights; restore them at the end."""
        before: dict[str, torch.Tensor] = {}
        for name, array in tensors.items():
            if array.ndim == 1:
                parameter = self.parameter(name)
                before[name] = parameter.clone()
                parameter.copy_(torch.from_numpy(array))
        try:
            yield
        finally:
            for name, weight in before.items():
                self.parameter(name).copy_(weight)

    @contextlib.contextmanager
    def rounded_inputs(self, plan: QuantizationPlan) -> Iterator[None]:
        """Round the inputs of linears where the plan's formats do: to NVFP4, or to FP8 with a scale per token."""

        def rounds(linear: str, rounded: Callable[[torch.Tensor], torch.Tensor]) -> None:
            def hook(module: object, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
                x = args[0]
                result = rounded(x.detach())
                if torch.is_grad_enabled() and x.requires_grad:
                    result = x + (result - x).detach()  # the gradient of x
                return result, *args[1:]

            undo.enter_context(self.linear(linear).register_forward_pre_hook(hook))

        amax: dict[str, float] = {}
        with contextlib.ExitStack() as undo:
            for name, linear in plan.linears.items():
                if linear.format == NVFP4 and linear.input_amax is not None:
                    amax[name] = linear.input_amax
                if linear.format == FP8_CHANNEL:
                    rounds(name, lambda x: codec.fake_quant_fp8(x, token_scales(x)))
            for name, top in self.family.largest_of_input(amax).items():
                rounds(name, partial(codec.fake_quant, tensor_scale=top / LARGEST_NVFP4))
            yield


class StoredTrials:
    """Figures of trials on some answers, stored for an interrupted run. The model is loaded when a figure is missing.

    file: in the job's work folder.
    """

    def __init__(
        self, job: Job[StrategyOptions], file: str, answers: Sequence[TrialAnswer]
    ) -> None:
        self.folder = ModelFolder(job.model)
        self.answers = answers
        self.file = job.measurements(file)
        self.figures: dict[str, list[list[float]]] = self.file.load({})

    @cached_property
    def trial(self) -> Trial:
        return Trial(self.folder, self.answers)

    def stored(self, key: str, measure: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the figures called `key`, measured where there are none."""
        if key not in self.figures:
            self.figures[key] = np.nan_to_num(measure(), nan=BROKEN, posinf=BROKEN).tolist()
            self.file.save(self.figures)
        return np.array(self.figures[key])

    def shares(self, key: str, plan: QuantizationPlan) -> np.ndarray:
        """Return Trial.shares of a plan, stored as `key`."""
        return self.stored(key, lambda: self.trial.shares(plan))


def loss_of(shares: np.ndarray) -> float:
    """Return the mean KL plus that of the tokens that decide. shares: of Trial.shares."""
    return float(shares[:, :2].sum())


def fp8_rows(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [N, K] rounded to E4M3 and back under a multiplier per row, amax / 448."""
    amax = weight.float().abs().amax(-1, keepdim=True)
    return codec.fake_quant_fp8(weight, torch.where(amax > 0, amax / LARGEST_E4M3, 1.0))


def in_turn_by_category(samples: Sequence[CalibrationSample]) -> Iterator[CalibrationSample]:
    """Yield samples of all categories in turn, so that the first n have equal numbers of each category, for any n."""
    by_category: dict[str, list[CalibrationSample]] = {}
    for sample in samples:
        by_category.setdefault(sample.category, []).append(sample)
    for turn in itertools.zip_longest(*by_category.values()):
        yield from filter(None, turn)
