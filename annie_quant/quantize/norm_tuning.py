"""Tune the norms of a rounded model, so that its answers are the source's again.

    plan, samples → the source's hidden states → steps of AdamW on the norms → plan.tensors

Rounding shifts the few logits that open a call, end it or decline, in one direction that depends on the draw of the calibration
rows (tests/perf/calibration_lottery.md). The divergence of the source's answers from the rounded model's has the shift in its
gradient, and norms are stored in 16 bits in every checkpoint: taking it out costs no byte and no time of a server.

Inputs that a server rounds are rounded in every second batch, because a server may also compute without; gradients pass them as
if nothing was rounded. A norm changes by so little that the audit, which judges it with the linears behind it, has no doubt. The
result is used where held-out answers are nearer to the source's with it.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from torch.utils.checkpoint import checkpoint

from annie_quant import models
from annie_quant.checkpoint.linears import HEAD
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.files import replacing
from annie_quant.core.progress import Progress
from annie_quant.documents import HeldOut, Ingredient
from annie_quant.offline.engine import split_by_size
from annie_quant.quantize.backend import device_kind, free_memory_bytes
from annie_quant.quantize.calibration_samples import PROMPT, CalibrationSample
from annie_quant.quantize.held_out import divergences, hold_out, key_of, sum_and_standard_error
from annie_quant.quantize.kl_trial import Trial, answers_to_score
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import (
    TRIAL_POSITIONS,
    TRIAL_TOKENS,
    TUNING_NUMBERS,
    TUNING_PASSES,
    TUNING_STEPS,
    TUNING_TOKENS,
    Job,
    StrategyOptions,
)

NORM_LEARNING_RATE = 2e-4  # of changes relative to a norm's mean gain
WARM_UP_STEPS = 5
# Largest change of a norm, relative to its gain. The audit (checks/folds.py) allows more before linears that are all in 4 bits.
MAX_CHANGE = 0.01
MAX_CHANGE_IN_FOUR_BITS = 0.02
# Tokens whose logits are compared at once, in float32; they are computed again for the gradient, as every layer is.
TOKENS_PER_LOSS = 512
GRADIENT_MEMORY_SHARE = 0.3  # of the free memory, for what the gradient of a batch needs
NOTHING_HELD_OUT = "norms are not tuned: too few conversations to hold some out"
TOO_LONG = "norms are not tuned: memory holds none of the conversations (--calib-tokens)"


def tune_norms(
    job: Job[StrategyOptions],
    plan: QuantizationPlan,
    samples: Sequence[CalibrationSample],
    progress: Progress,
) -> None:
    """Add tuned norms to a plan whose linears are rounded, where held-out answers are better with them."""
    learned, held = hold_out(samples)
    if not held:
        progress.message(NOTHING_HELD_OUT)
        return
    kind = device_kind()
    answers = answers_to_score(held, TRIAL_TOKENS[kind], TRIAL_POSITIONS[kind])
    trial = Trial(ModelFolder(job.model), answers)
    before = _divergence(trial, plan)
    # Other limits may choose other formats in the same folder.
    file = job.work_folder() / f"norms-{key_of(plan.formats)}.safetensors"
    if file.is_file():
        norms = safetensors.numpy.load_file(file)
    else:
        norms = _tuned(trial, plan, learned, job.seed, progress)
        with replacing(file) as out:
            out.write(safetensors.numpy.save(norms))
    untuned = plan.tensors
    plan.tensors = untuned | norms
    after = _divergence(trial, plan)
    change, noise = sum_and_standard_error((after - before).sum(1).tolist())
    better = change < 0
    if not better:
        plan.tensors = untuned
    if not plan.ingredients:
        plan.ingredients.append(Ingredient("GPTQ", True, *divergences(before), 0.0, 0.0))
    plan.ingredients.append(Ingredient("tuned norms", better, *divergences(after), change, noise))
    if plan.held_out is None:
        tokens = sum(len(answer.decides) for answer in answers)
        decisions = sum(int(answer.decides.sum()) for answer in answers)
        plan.held_out = HeldOut(len({a.conversation for a in answers}), tokens, decisions)
    share = change / max(float(before.sum()), 1e-12)
    outcome = "they are used" if better else "they are not used"
    progress.message(
        f"tuned norms change the held-out divergence by {share:+.0%} (noise {noise:.2g}): {outcome}"
    )


def _divergence(trial: Trial, plan: QuantizationPlan) -> np.ndarray:
    """Return each conversation's share of KL and KL at decisions, as served and with no input rounded [conversations, 4]."""
    served = trial.shares(plan)[:, :2]
    unrounded = trial.shares(plan, inputs=False)[:, :2] if _rounds_inputs(plan) else served
    return np.concatenate((served, unrounded), 1)


def _rounds_inputs(plan: QuantizationPlan) -> bool:
    return any(linear.format.calibrated for linear in plan.linears.values())


def _tuned(
    trial: Trial,
    plan: QuantizationPlan,
    samples: Sequence[CalibrationSample],
    seed: int,
    progress: Progress,
) -> dict[str, np.ndarray]:
    """Return tensor name → weight of every tuned norm, float32 with values of the checkpoint's dtype."""
    tuning = NormTuning(trial, plan, samples, seed)
    count = tuning.count
    if not count:
        progress.message(TOO_LONG)
    for done, loss in enumerate(tuning.steps(), 1):
        progress.update(done, count, f"tuning norms: step {done} of {count}, {loss:.3g} nats")
    with torch.no_grad():
        return {name: norm.weight().cpu().numpy() for name, norm in tuning.norms.items()}


@dataclass
class Norm:
    """A norm that is tuned.

    module: of the model.
    gain: what the source's norm multiplies by, float32 [D].
    adds_one: whether the norm computes (1 + w) * x.
    dtype: of the stored weight.
    limit: largest change, relative to the gain.
    change: what is learned, relative to the mean gain, float32 [D].
    """

    module: torch.nn.Module
    gain: torch.Tensor
    adds_one: bool
    dtype: torch.dtype
    limit: float
    change: torch.Tensor

    def weight(self) -> torch.Tensor:
        """Return the weight as the checkpoint stores it, in float32; its gradient is that of the unrounded weight."""
        exact = self.gain + self.change * self.gain.abs().mean() - int(self.adds_one)
        stored = exact.to(self.dtype).float()
        return exact + (stored - exact).detach()

    def clamp(self) -> None:
        """Keep the change within its limit."""
        largest = self.limit * self.gain.abs() / self.gain.abs().mean().clamp_min(1e-20)
        self.change.clamp_(-largest, largest)


@dataclass(frozen=True)
class AnswerBatch:
    """Conversations that are computed together.

    ids: int64 [B, T].
    answered: positions that predict a token of an answer, bool [B, T].
    source: the source's hidden states there, [n, D].
    """

    ids: torch.Tensor
    answered: torch.Tensor
    source: torch.Tensor


class NormTuning:
    """The norms of a model, its batches of text, and the source's hidden states.

    norms: tensor name of the checkpoint → norm.
    count: number of steps.
    """

    def __init__(
        self,
        trial: Trial,
        plan: QuantizationPlan,
        samples: Sequence[CalibrationSample],
        seed: int,
    ) -> None:
        self.trial = trial
        self.plan = plan
        self.model: Any = trial.engine.model.requires_grad_(False)
        self.device = trial.engine.device
        self.random = random.Random(seed)
        self.head = trial.linear(HEAD).weight
        self.norms = {name: self.norm(name) for name in trial.folder if self.is_norm(name)}
        tokens = TUNING_TOKENS[self.device.type]
        longest = self.tokens_in_memory()
        batch_tokens = min(tokens, longest)
        fitting = sorted((s for s in samples if len(s.ids) <= longest), key=_length)
        self.batches: list[AnswerBatch] = []
        for part in split_by_size([len(s.ids) for s in fitting], batch_tokens):
            self.batches.append(self.batch([fitting[i] for i in part]))
        self.batches_per_step = max(1, tokens // batch_tokens)
        passes = TUNING_PASSES * len(self.batches) // self.batches_per_step
        self.count = min(TUNING_STEPS[self.device.type], max(1, passes)) if self.batches else 0

    def is_norm(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint is the weight of a norm of the decoder."""
        family = self.trial.family
        if not name.endswith(".weight") or family.is_auxiliary(name):
            return False
        module = family.in_form(name, multimodal=False).removesuffix(".weight")
        try:
            kind = type(self.model.get_submodule(module)).__name__
        except AttributeError:
            return False
        return "Norm" in kind

    def norm(self, name: str) -> Norm:
        family = self.trial.family
        weight = self.trial.parameter(name)
        adds_one = family.adds_one(name)
        gain = weight.float() + int(adds_one)
        readers = self.readers(name.removesuffix(".weight"))
        formats = self.plan.formats
        in_four_bits = all(n in formats and formats[n].in_four_bits for n in readers)
        module = family.in_form(name, multimodal=False).removesuffix(".weight")
        return Norm(
            self.model.get_submodule(module),
            gain,
            adds_one,
            getattr(torch, self.trial.folder.info(name).numpy_dtype.name),
            MAX_CHANGE_IN_FOUR_BITS if in_four_bits else MAX_CHANGE,
            torch.zeros_like(gain, requires_grad=True),
        )

    def readers(self, module: str) -> list[str]:
        """Return the linears that read the output of a norm."""
        layer = models.layer_of(module)
        names: list[str] = []
        for site in self.trial.family.inputs:
            if site.fold == "norm" and site.producer == models.in_layer(module):
                names += [f"{layer}.{linear}" for linear in site.linears]
        return [n for n in names if f"{n}.weight" in self.trial.folder]

    def tokens_in_memory(self) -> int:
        """Return how many tokens have room for what their gradient needs."""
        config = self.trial.engine.config
        of_token = (TUNING_NUMBERS + config.num_hidden_layers) * config.hidden_size
        of_token *= self.model.dtype.itemsize
        free = free_memory_bytes()
        return max(512, int(GRADIENT_MEMORY_SHARE * free / of_token))

    def batch(self, samples: Sequence[CalibrationSample]) -> AnswerBatch:
        """Return samples padded on the right, where no real token sees it, with the source's states."""
        width = max(len(s.ids) for s in samples)
        ids = torch.zeros(len(samples), width, dtype=torch.long)
        answered = torch.zeros(len(samples), width, dtype=torch.bool)
        for row, sample in enumerate(samples):
            ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
            kinds = torch.tensor(sample.kinds)
            answered[row, : len(sample.ids)] = kinds != PROMPT
        with torch.no_grad():
            states = self.states(ids)[answered.to(self.device)]
        return AnswerBatch(ids, answered, states.cpu())

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states [B, T, D]."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            output = self.model.base_model(input_ids=ids.to(self.device), use_cache=False)
        states: torch.Tensor = output.last_hidden_state
        return states

    @contextlib.contextmanager
    def tuned(self) -> Iterator[None]:
        """Let the model's norms use what is learned; restore them at the end. Layers are computed again for the gradient."""
        before = {name: norm.module.weight for name, norm in self.norms.items()}
        for name in before:
            del self.norms[
                name
            ].module.weight  # a parameter; a tensor with a gradient takes its place
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()
            self.model.gradient_checkpointing_disable()
            for name, weight in before.items():
                module = self.norms[name].module
                if "weight" in module.__dict__:
                    del module.weight
                module.weight = weight

    def steps(self) -> Iterator[float]:
        """Train, and yield the loss of each step in nats per token of an answer."""
        changes = [norm.change for norm in self.norms.values()]
        optimizer = torch.optim.AdamW(changes, betas=(0.9, 0.98), weight_decay=0.0)
        alternates = _rounds_inputs(self.plan)
        waiting: list[int] = []
        turn = 0
        with self.trial.rounded(self.plan, inputs=False), self.tuned():
            for step in range(self.count):
                decay = 0.5 * (1 + math.cos(math.pi * step / self.count))
                warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
                optimizer.param_groups[0]["lr"] = NORM_LEARNING_RATE * decay * warm_up
                total = 0.0
                for _ in range(self.batches_per_step):
                    if not waiting:
                        waiting = self.random.sample(range(len(self.batches)), len(self.batches))
                    inputs: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
                    if alternates and turn % 2 == 0:
                        inputs = self.trial.rounded_inputs(self.plan)
                    turn += 1
                    with inputs:
                        loss = self.loss(self.batches[waiting.pop()]) / self.batches_per_step
                        loss.backward()
                    total += float(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for norm in self.norms.values():
                        norm.clamp()
                yield total

    def loss(self, batch: AnswerBatch) -> torch.Tensor:
        """Return the mean of KL(source || rounded model) over the tokens of the answers, inside of tuned()."""
        for norm in self.norms.values():
            norm.module.weight = norm.weight().to(self.model.dtype)
        states = self.states(batch.ids)[batch.answered.to(self.device)]
        source = batch.source.to(self.device)
        head = self.trial.linear(HEAD).weight
        total = torch.zeros((), device=self.device)
        parts = zip(source.split(TOKENS_PER_LOSS), states.split(TOKENS_PER_LOSS), strict=True)
        for source_part, part in parts:
            total = total + checkpoint(
                divergence_of_states, source_part, part, self.head, head, use_reentrant=False
            )
        return total / max(1, len(states))


def divergence_of_states(
    source: torch.Tensor,
    states: torch.Tensor,
    source_head: torch.Tensor,
    head: torch.Tensor,
) -> torch.Tensor:
    """Return the sum of KL(source || model) over tokens, in nats. source, states: final hidden states [n, D]."""
    p = torch.log_softmax(torch.nn.functional.linear(source, source_head).float(), -1)
    q = torch.log_softmax(torch.nn.functional.linear(states.to(head.dtype), head).float(), -1)
    return (p.exp() * (p - q)).sum()


def _length(sample: CalibrationSample) -> int:
    return len(sample.ids)
