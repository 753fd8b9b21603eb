"""KL divergence on response tokens between a model and the same model with some linears rounded: the harm of a format.

The bf16 model is loaded once, and its logits for the scored answers are kept. A trial rounds the weights and inputs of some
linears as a server would, runs the same answers, and restores the model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from annie_quant import nvfp4
from annie_quant.checkpoint.dialects.modelopt import LARGEST_NVFP4
from annie_quant.checkpoint.linears import weight_name
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.offline import codec
from annie_quant.offline.engine import Engine, Row
from annie_quant.offline.loading import load as load_model
from annie_quant.quantize import fake_quant
from annie_quant.quantize.backend import device_and_dtype
from annie_quant.quantize.calibration_samples import CalibrationSample, TokenWeights
from annie_quant.quantize.formats import FP8, FP8_CHANNEL, QUANTIZED_INPUTS
from annie_quant.quantize.plan import QuantizationPlan

LEAST_ANSWERS = 8  # that share a trial's tokens


@dataclass(frozen=True)
class TrialAnswer:
    """An answer and its prompt.

    weights: how much each token of the answer counts, float32 [T].
    decides: whether it decides about a call or the end, bool [T].
    conversation: index of the answer's conversation.
    """

    row: Row
    weights: torch.Tensor
    decides: torch.Tensor
    conversation: int


def answers_to_score(
    samples: Sequence[CalibrationSample],
    token_weights: TokenWeights,
    tokens: int,
    positions: float = math.inf,
    cut: bool = True,
) -> list[TrialAnswer]:
    """Return answers of all categories in turn.

    token_weights: how much a token counts, by its kind.
    tokens: of all answers, at most; every trial is a pass over them, and their logits stay in memory.
    positions: of these answers with their prompts, at most.
    cut: cut answers that are longer than a LEAST_ANSWERS-th of `tokens`.
    """
    answers, total, length = list[TrialAnswer](), 0, 0
    for sample in spread(samples):
        answer = sample.answer[: max(1, tokens // LEAST_ANSWERS)] if cut else sample.answer
        size = len(sample.prompt) + len(answer)
        if total + len(answer) > tokens or (answers and length + size > positions):
            continue
        total, length = total + len(answer), length + size
        kinds = sample.kinds[len(sample.prompt) - 1 :][: len(answer)]
        weights = torch.tensor([token_weights.get(k, 0.0) for k in kinds])
        decides = torch.tensor((sample.decides or (False,) * len(answer))[: len(answer)])
        answers.append(TrialAnswer(Row(sample.prompt, answer), weights, decides, sample.row))
    return answers


class Trial:
    """A model, and its own logits for some answers as the reference.

    Raises CheckpointError where the model's own probabilities are not finite.
    """

    def __init__(self, folder: ModelFolder, answers: Sequence[TrialAnswer]) -> None:
        self.folder, self.family, self.model = folder, folder.family, load(folder)
        self.engine = Engine(self.model)
        device = next(self.model.parameters()).device
        self.rows = [a.row for a in answers]
        self.answers = [replace(a, weights=a.weights.to(device), decides=a.decides.to(device)) for a in answers]
        # float16 halves the memory for large vocabularies; the reference is also compared with itself, rounded like this.
        self.reference = {i: torch.log_softmax(logits, -1).half() for i, logits in self.engine.scores(self.rows)}
        if any(bool(reference.isnan().any()) for reference in self.reference.values()):
            raise CheckpointError(
                f"{folder.path}: the probabilities of the calibration answers are not finite",
                f"annie-quant audit {folder.path}",
            )

    def divergences(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield index and KL(reference || model as it is now) of every row, in nats per token."""
        for i, logits in self.engine.scores(self.rows):
            p, q = self.reference[i].float(), torch.log_softmax(logits, -1)
            yield i, (p.exp() * (p - q)).sum(-1).clamp_min(0)

    def divergence(self) -> float:
        """Return the weighted mean of all tokens plus that of the tokens that decide, if there are any."""
        rows = list(self.divergences())
        total = sum(float((kl * self.answers[i].weights).sum()) for i, kl in rows)
        weight = sum(float(a.weights.sum()) for a in self.answers)
        decisions = sum(float(kl[self.answers[i].decides].sum()) for i, kl in rows)
        return total / max(weight, 1e-30) + decisions / self.count_decisions()

    def count_decisions(self) -> int:
        """Return the number of tokens that decide, at least 1."""
        return max(1, sum(int(a.decides.sum()) for a in self.answers))

    def divergence_of(self, plan: QuantizationPlan, inputs: bool) -> list[list[float]]:
        """Return each conversation's share of two figures with a plan's weights: the mean KL, and that of tokens that decide.

        inputs: round them where the plan's formats do.
        """
        return self.shares(plan, inputs)[:, :2].tolist()

    def shares(self, plan: QuantizationPlan, inputs: bool = True) -> np.ndarray:
        """Return each conversation's share of three figures, float64 [conversations, 3].

        They are the mean KL, that of tokens that decide, and the share of these whose most probable token is another one.
        """
        name_of = partial(weight_name, self.folder)
        weights = {f"{n}.weight": codec.to_torch(nvfp4.unpack(t, "float32")) for n, t in plan.packed.items()}
        rows = [n for n, f in plan.formats.items() if f == FP8_CHANNEL]
        weights |= {f"{n}.weight": fake_quant.fp8_rows(self.parameter(name_of(n))) for n in rows}
        amax = {n: plan.amax[n] for n, f in plan.formats.items() if f in QUANTIZED_INPUTS and n in plan.amax}
        tokens, count = sum(len(a.weights) for a in self.answers), self.count_decisions()
        parts = {conversation: np.zeros(3) for conversation in sorted({a.conversation for a in self.answers})}
        with self.changed(weights, amax if inputs else {}, tokens=rows if inputs else ()):
            for i, logits in self.engine.scores(self.rows):
                answer, p, q = self.answers[i], self.reference[i].float(), torch.log_softmax(logits, -1)
                kl = (p.exp() * (p - q)).sum(-1).clamp_min(0).double()
                flips = (p.argmax(-1) != q.argmax(-1))[answer.decides].sum()
                parts[answer.conversation] += [
                    float(kl.sum()) / tokens, float(kl[answer.decides].sum()) / count, int(flips) / count
                ]  # fmt: skip
        return np.array(list(parts.values()))

    def cost(
        self,
        formats: Mapping[str, str],
        amax: Mapping[str, float],
        scale: nvfp4.Scale,
        importance: Mapping[str, np.ndarray],
    ) -> float:
        """Return the divergence with these linears rounded to nearest. All keys are the checkpoint's names of linears."""
        before = {n: self.linear(n).weight.data for n in formats}
        tops = self.family.largest_of_group({n: float(w.abs().max()) for n, w in before.items()})
        after = {}
        for name, kind in formats.items():
            if kind == FP8:
                after[f"{name}.weight"] = fake_quant.fp8(before[name], tops[name])
            else:
                tensor_scale = tops[name] / LARGEST_NVFP4
                after[f"{name}.weight"] = fake_quant.nvfp4_weight(
                    before[name], tensor_scale, scale, importance.get(name)
                )
        narrow = {n: amax[n] for n, f in formats.items() if f in QUANTIZED_INPUTS}
        with self.changed(after, narrow, {n for n, f in formats.items() if f == FP8}):
            return self.divergence()

    def cost_of_inputs(self, amax: Mapping[str, float]) -> float:
        """Return the divergence with only inputs rounded, to NVFP4. amax: linear → its largest |input|."""
        with self.changed({}, amax):
            return self.divergence()

    def largest_inputs(self, names: Sequence[str]) -> dict[str, float]:
        """Return linear → its largest |input| over the scored answers and their prompts, if it had any."""
        largest: dict[str, float] = {}

        def observe(name: str, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if args[0].numel():
                largest[name] = max(largest.get(name, 0.0), float(args[0].detach().abs().max()))

        with contextlib.ExitStack() as hooks, torch.inference_mode():
            for name in names:
                hooks.enter_context(self.linear(name).register_forward_pre_hook(partial(observe, name)))
            self.divergence()
        return largest

    def linear(self, name: str) -> Any:
        """Return a linear of the model by its name in the checkpoint."""
        return self.model.get_submodule(self.family.in_form(name, multimodal=False))

    def parameter(self, name: str) -> torch.Tensor:
        """Return a parameter of the model by its name in the checkpoint."""
        parameter: torch.Tensor = self.model.get_parameter(self.family.in_form(name, multimodal=False))
        return parameter.data

    @contextlib.contextmanager
    def changed(
        self,
        weights: Mapping[str, torch.Tensor],
        amax: Mapping[str, float],
        in_fp8: Collection[str] = (),
        tokens: Collection[str] = (),
    ) -> Iterator[None]:
        """Give the model other weights and rounded inputs; restore it at the end.

        weights: by tensor names of the checkpoint.
        amax: linear → largest input that sets the scale of its inputs, which are rounded to NVFP4.
        in_fp8: linears whose inputs are rounded to FP8.
        tokens: linears whose inputs are rounded to FP8 with a scale per token.
        """
        with contextlib.ExitStack() as undo, torch.inference_mode():
            for name, weight in weights.items():
                # A parameter of its own: a tied head and the embedding are one.
                linear = self.linear(name.removesuffix(".weight"))
                undo.callback(setattr, linear, "weight", linear.weight)
                linear.weight = torch.nn.Parameter(weight.to(linear.weight), requires_grad=False)
            for name in tokens:
                undo.enter_context(self.linear(name).register_forward_pre_hook(fake_quant.fp8_tokens))
            for name, top in self.family.largest_of_input(amax).items():
                rounder = fake_quant.fp8 if name in in_fp8 else fake_quant.nvfp4_input
                undo.enter_context(self.linear(name).register_forward_pre_hook(fake_quant.input_hook(rounder, top)))
            yield


def spread(samples: Sequence[CalibrationSample]) -> Iterator[CalibrationSample]:
    """Yield samples of all categories in turn, so that the first n have equal numbers of each category, for any n."""
    by_category: dict[str, list[CalibrationSample]] = {}
    for sample in samples:
        by_category.setdefault(sample.category, []).append(sample)
    for index in range(max(map(len, by_category.values()))):
        yield from (rows[index] for rows in by_category.values() if index < len(rows))


def load(folder: ModelFolder) -> Any:
    """Load the source model: on a GPU where there is one, else on the CPU."""
    device, dtype = device_and_dtype(folder)
    return load_model(folder.path, dtype=dtype, device=device)
