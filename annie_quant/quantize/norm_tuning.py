"""Tune the norms of a rounded model by distillation, so that its answers come nearer to the source's.

plan, samples → the source's hidden states → steps of AdamW on the norms' weights → QuantizationPlan.weights

A norm's weight has 16 bits in every checkpoint, so what it learns costs neither a byte nor time in a server. The loss is the
KL divergence of the source's next tokens from those of the rounded model, in turn as it is served and with no input rounded.
Gradients pass rounded inputs as if nothing was rounded. Only norms before a rounded linear are tuned, and by so little that the
audit, which judges them with the linears behind them, has no doubt.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch

from annie_quant import models
from annie_quant.checkpoint.linears import HEAD
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.files import replacing
from annie_quant.core.progress import Progress
from annie_quant.offline.engine import split_by_size
from annie_quant.quantize import calibration_samples as text
from annie_quant.quantize.calibration_samples import CalibrationSample
from annie_quant.quantize.formats import NVFP4, W4A16
from annie_quant.quantize.kl_trial import Trial
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import Job, StrategyOptions

STEPS = {"cpu": 48, "cuda": 160}
BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}
LEARNING_RATE = 1e-3  # of relative changes
# Largest relative change of a norm. The audit (checks/folds.py) tolerates the first of every linear, the second of 4-bit ones.
MOST, MOST_IN_FOUR_BITS = 0.01, 0.02
WARM_UP = 3  # steps
# Of a prompt's tokens one in so many is used, with so many times its weight: logits take most of the memory.
PROMPTS = 4


def tuned_norms(
    job: Job[StrategyOptions],
    plan: QuantizationPlan,
    samples: Sequence[CalibrationSample],
    prompt: float,
    progress: Progress,
    file: Path,
) -> dict[str, np.ndarray]:
    """Return tensor name → weight of every tuned norm, float32.

    prompt: weight of a prompt's token relative to a response's.
    file: with the result of an interrupted run, or written.
    """
    if file.is_file():
        return safetensors.numpy.load_file(file)
    tuning = NormTuning(
        Trial(ModelFolder(job.model), ()),
        plan,
        samples,
        {**text.RESPONSE, text.PROMPT: prompt},
        job.seed,
    )
    count = STEPS[tuning.device.type]
    for done, loss in enumerate(tuning.steps(count), 1):
        progress.update(done, count, f"tuning norms: step {done} of {count}, {loss:.3g} nats")
    dtypes = {
        n: tuning.trial.folder.info(n).numpy_dtype for n in tuning.gains
    }  # as they are stored
    result = {
        n: t.detach().cpu().numpy().astype(dtypes[n]).astype(np.float32)
        for n, t in tuning.norms().items()
    }
    with replacing(file) as out:
        out.write(safetensors.numpy.save(result))
    return result


class NormTuning:
    """The norms of a model, its batches of text, and its hidden states for them before it is rounded.

    gains: tensor name of the checkpoint → what the source's norm multiplies by, float32.
    names: tensor name of the checkpoint → name inside the model without its head.
    changes: relative changes of the gains, at most `most`.
    """

    def __init__(
        self,
        trial: Trial,
        plan: QuantizationPlan,
        samples: Sequence[CalibrationSample],
        token_weights: text.TokenWeights,
        seed: int,
    ) -> None:
        self.trial, self.plan, self.model = trial, plan, trial.engine.model.requires_grad_(False)
        self.gains, self.most = dict[str, torch.Tensor](), dict[str, float]()
        for name in trial.folder:
            module = name.removesuffix(".weight")
            readers = self.readers(module)
            if trial.family.in_decoder(module) and any(n in plan.formats for n in readers):
                self.gains[name] = trial.parameter(name).float() + int(trial.family.adds_one(name))
                in_four_bits = all(plan.formats.get(n) in (NVFP4, W4A16) for n in readers)
                self.most[name] = MOST_IN_FOUR_BITS if in_four_bits else MOST
        prefix = f"{self.model.base_model_prefix}."
        self.names = {
            n: trial.family.in_form(n, multimodal=False).removeprefix(prefix) for n in self.gains
        }
        self.changes = {
            n: torch.zeros_like(gain, requires_grad=True) for n, gain in self.gains.items()
        }
        self.device, self.random = trial.engine.device, random.Random(seed)
        self.table = text.weight_table(token_weights, self.device)
        self.head = trial.linear(HEAD).weight
        ordered = sorted(samples, key=lambda s: len(s.ids))
        parts = split_by_size([len(s.ids) for s in ordered], BATCH_TOKENS[self.device.type])
        self.batches = [text.padded([ordered[i] for i in part]) for part in parts]
        with torch.no_grad():
            self.source = [self.hidden(self.ids(i), {}).cpu() for i in range(len(self.batches))]

    def readers(self, module: str) -> list[str]:
        """Return the linears that read the output of a module, if that is a norm."""
        layer, inside = models.layer_of(module), models.in_layer(module)
        sites = [
            site
            for site in self.trial.family.inputs
            if site.fold == "norm" and site.producer == inside
        ]
        names = [f"{layer}.{linear}" for site in sites for linear in site.linears]
        return [n for n in names if f"{n}.weight" in self.trial.folder]

    def ids(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.batches[index].ids).to(self.device)

    def norms(self) -> dict[str, torch.Tensor]:
        """Return tensor name → weight of every norm, float32."""
        adds_one = self.trial.family.adds_one
        return {
            n: gain * (1 + self.changes[n]) - int(adds_one(n)) for n, gain in self.gains.items()
        }

    def hidden(self, ids: torch.Tensor, norms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the last hidden states [B, T, D] with these weights in place of the model's."""
        changed = {self.names[n]: weight.to(self.model.dtype) for n, weight in norms.items()}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            output = torch.func.functional_call(
                self.model.base_model, changed, kwargs={"input_ids": ids, "use_cache": False}
            )
        states: torch.Tensor = output.last_hidden_state
        return states

    def steps(self, count: int) -> Iterator[float]:
        """Train, and yield the loss of each step in nats per token: of one batch as served, and of one with no input rounded."""
        optimizer = torch.optim.AdamW(self.changes.values(), betas=(0.9, 0.99), weight_decay=0.0)
        waiting: list[int] = []
        with self.trial.rounded(self.plan, inputs=False):
            for step in range(count):
                decay = 0.5 * (1 + math.cos(math.pi * step / count))
                optimizer.param_groups[0]["lr"] = (
                    LEARNING_RATE * decay * min(1.0, (step + 1) / WARM_UP)
                )
                total = 0.0
                for inputs in (self.trial.rounded_inputs(self.plan), contextlib.nullcontext()):
                    waiting = waiting or self.random.sample(
                        range(len(self.batches)), len(self.batches)
                    )
                    with inputs:
                        loss = self.loss(waiting.pop()) / 2
                        loss.backward()
                    total += float(loss.detach())
                torch.nn.utils.clip_grad_norm_(self.changes.values(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for name, change in self.changes.items():
                        change.clamp_(-self.most[name], self.most[name])
                yield total

    def loss(self, index: int) -> torch.Tensor:
        """Return the weighted mean of KL(source || rounded model) over a batch's tokens."""
        kinds = torch.from_numpy(self.batches[index].kinds).to(self.device)
        weights = torch.where(kinds == text.PADDING, 0.0, self.table[kinds])
        kept = torch.tensor(
            [self.random.randrange(PROMPTS) == 0 for _ in range(kinds.numel())], device=self.device
        )
        weights = torch.where(
            kinds == text.PROMPT, weights * PROMPTS * kept.view(kinds.shape), weights
        )
        used = weights > 0
        with torch.no_grad():
            source = self.source[index].to(self.device)[used]
            p = torch.log_softmax(torch.nn.functional.linear(source, self.head).float(), -1)
        states = self.hidden(self.ids(index), self.norms())[used]
        q = torch.log_softmax(
            torch.nn.functional.linear(states, self.trial.linear(HEAD).weight).float(), -1
        )
        kl = (p.exp() * (p - q)).sum(-1)
        return (kl * weights[used]).sum() / weights[used].sum().clamp_min(1e-9)
