"""What distillation of weights or codes gains where every input has 4 bits: KL, KL at decisions and flips there, W4A4 and W4A16.

    python tests/perf/own_answers.py DIR rows.jsonl own.jsonl --n 600 --max-tokens 256
    python tests/perf/trained_with_rounded_inputs.py DIR own.jsonl --samples 512 --steps 240 --weights 3e-6 --codes .006 --cases 400

All linears are rounded by `gptq` (W4A4). Then, each from there and with NormTuning's loss, batches and steps:

  norms    the norms alone (annie_quant/quantize/norm_tuning.py)
  codes    the codes, too: a latent value per code, in units of its block scale, which begins between the code and the source's
           weight (half of the way to the neighbour's range at most), steps of AdamW of the rate --codes, rounded straight through
  weights  the source's weights, unrounded, by AdamW of the rate --weights with rounded inputs; gptq rounds them; then the norms

Scored are the source's own answers to --cases prompts of BFCL, none of which is among the rows of bfcl_rows.py (0: labels of
other rows).
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from best_ingredients import chosen_workloads
from norms_tuned import HELD, drawn, show

from annie_quant import nvfp4
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import SILENT
from annie_quant.data.rows import read_conversations
from annie_quant.offline.engine import Row
from annie_quant.offline.pair import EvaluationJob, open_pair
from annie_quant.quantize import calibration_samples as text
from annie_quant.quantize import kl_trial, norm_tuning
from annie_quant.quantize.formats import GROUP, NVFP4, choose
from annie_quant.quantize.kl_trial import Trial, TrialAnswer
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.rounding import Method, round_model
from annie_quant.quantize.strategy import Job

BETAS = (0.9, 0.99)
PROMPT = 0.1  # weight of a prompt's token


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest values of E2M1."""
    a = x.abs().clamp(max=6.0)
    steps = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.copysign((a / steps).round() * steps, x)


class Straight(torch.autograd.Function):
    """Latent values [N, K] and block scales [N, K / 16] → weights; gradients pass the rounding as if it was not there."""

    @staticmethod
    def forward(ctx: Any, latent: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scales)
        return scaled(e2m1(latent), scales)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scaled(gradient, *ctx.saved_tensors), None


def scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (values.view(len(values), -1, GROUP) * scales[:, :, None]).view(values.shape)


class Training(norm_tuning.NormTuning):
    """NormTuning with trained weights [N, K] or, with `scales`, latent codes, by linear."""

    def __init__(
        self, trial: Trial, plan: QuantizationPlan, samples: Any, seed: int, what: str
    ) -> None:
        super().__init__(trial, plan, samples, {**text.RESPONSE, text.PROMPT: PROMPT}, seed)
        prefix = f"{self.model.base_model_prefix}."
        for name in plan.formats:  # where hidden() finds a trained linear
            self.names[name] = trial.family.in_form(
                f"{name}.weight", multimodal=False
            ).removeprefix(prefix)
        self.scales = (
            {n: self.block_scales(t) for n, t in plan.packed.items()} if what == "codes" else {}
        )
        self.trained: dict[str, torch.Tensor] = {}
        for name in plan.formats if what in ("codes", "weights") else ():
            weight = trial.parameter(f"{name}.weight").float().clone()
            self.trained[name] = (
                self.latent(name, weight) if self.scales else weight
            ).requires_grad_()

    def block_scales(self, tensor: nvfp4.Tensor) -> torch.Tensor:
        scales = torch.from_numpy(tensor.block_scale.astype(np.float32)) * float(
            tensor.tensor_scale
        )
        return scales.clamp_min(1e-12).to(self.device)

    def latent(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the code of each weight, moved towards the weight by at most half of the way to where another code begins."""
        scales = 1 / self.scales[name]
        code = scaled(
            torch.from_numpy(nvfp4.unpack(self.plan.packed[name], "float32")).to(self.device),
            scales,
        )
        size, sign = code.abs(), torch.where(code < 0, -1.0, 1.0)
        outward = torch.where(
            size < 2, 0.25, torch.where(size < 4, 0.5, torch.where(size < 6, 1.0, 10.0))
        )
        inward = torch.where(size <= 2, 0.25, torch.where(size <= 4, 0.5, 1.0))
        offset = (scaled(weight, scales) - code) * sign
        return code + sign * torch.maximum(torch.minimum(offset, outward / 2), -inward / 2)

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            n: Straight.apply(t, self.scales[n]) if self.scales else t
            for n, t in self.trained.items()
        }

    def hidden(self, ids: torch.Tensor, norms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """As the base's, with the trained weights where there are norms: without, the source's own states are asked for."""
        return super().hidden(ids, {**norms, **self.weights()} if norms else {})

    def train(self, steps: int, rate: float, norm_rate: float) -> Iterator[float]:
        """Yield the loss of each step."""
        groups = [
            {"params": list(p.values()), "lr": r}
            for p, r in ((self.trained, rate), (self.changes, norm_rate))
            if p and r
        ]
        optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, eps=1e-12)
        rates, waiting = [g["lr"] for g in optimizer.param_groups], list[int]()
        for step in range(steps):
            decay = (
                0.5
                * (1 + math.cos(math.pi * step / steps))
                * min(1.0, (step + 1) / norm_tuning.WARM_UP)
            )
            for group, most in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = most * decay
            waiting = waiting or self.random.sample(range(len(self.batches)), len(self.batches))
            with self.trial.rounded_inputs(self.plan):
                loss = self.loss(waiting.pop())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for name, change in self.changes.items():
                    change.clamp_(-self.most[name], self.most[name])
            yield float(loss.detach())


class Scorer:
    """Answers that are scored, and the source, loaded once."""

    def __init__(self, folder: ModelFolder, answers: list[TrialAnswer], draw: int) -> None:
        self.trial, self.draw, self.start = Trial(folder, answers), draw, time.monotonic()

    def show(
        self, name: str, plan: QuantizationPlan, weights: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Print a plan's figures. weights: of linears, in place of the plan's."""
        scored = replace(plan, packed={}) if weights else plan
        with self.trial.changed(weights or {}):
            show(self.draw, name, self.trial, scored, time.monotonic() - self.start)


def own_answers(model: Path, cases: int, cache: Path) -> list[TrialAnswer]:
    """Return the source's own answers to `cases` prompts of BFCL."""
    with open_pair(EvaluationJob(checkpoint=model, reference=model, cache=cache)) as pair:
        scored = pair.scored(pair.reference.answer(chosen_workloads("bfcl", cases), pair.progress))
        decides = [torch.tensor(pair.template.decisions(s.target, s.thinking)) for s in scored]
    return [
        TrialAnswer(Row(s.prompt, s.target), d, i)
        for i, (s, d) in enumerate(zip(scored, decides, strict=True))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--draw", type=int, default=0)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--weights", type=float, default=3e-6, help="rate; 0: not tried")
    parser.add_argument("--codes", type=float, default=0.006, help="rate; 0: not tried")
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--cache", type=Path, default=Path("runs/ingredients-cache"))
    a = parser.parse_args()
    folder, work = ModelFolder(a.model), Path(tempfile.mkdtemp(prefix="trained-"))
    formats = dict.fromkeys(choose(folder, ()), NVFP4)
    learned, held = drawn(a.model, read_conversations(a.rows), a.draw, a.samples, HELD)
    answers = kl_trial.answers_to_score(held, kl_trial.MOST_TOKENS, cut=False)
    scorer = Scorer(folder, own_answers(a.model, a.cases, a.cache) if a.cases else answers, a.draw)

    def rounded(model: Path) -> QuantizationPlan:
        (work / model.name).mkdir()
        job = Job(
            model,
            work / model.name / "out",
            scale="sweep",
            seed=a.draw,
            work=work / model.name / "work",
        )
        return round_model(job, formats, learned, Method(PROMPT), SILENT)

    def training(what: str, plan: QuantizationPlan) -> Training:
        return Training(Trial(folder, ()), plan, learned, a.draw, what)

    def tuned(plan: QuantizationPlan, name: str) -> None:
        own = training("norms", plan)
        with own.trial.rounded(plan, inputs=False):
            for _ in own.train(a.steps, 0, norm_tuning.LEARNING_RATE):
                pass
        scorer.show(name, replace(plan, weights=norms_of(own)))

    plan = rounded(a.model)
    scorer.show("gptq", plan)
    scorer.show("inputs alone", replace(plan, packed={}))
    tuned(plan, "norms")
    if a.codes:
        own = training("codes", plan)
        first = {n: e2m1(t.detach()) for n, t in own.trained.items()}
        for _ in own.train(a.steps, a.codes, norm_tuning.LEARNING_RATE):
            pass
        changed = sum(int((e2m1(t) != first[n]).sum()) for n, t in own.trained.items()) / sum(
            t.numel() for t in first.values()
        )
        values = {n: t.detach() for n, t in own.weights().items()}
        scorer.show(
            f"codes and norms ({changed:.2%} of the codes changed)",
            replace(plan, weights=norms_of(own)),
            values,
        )
    if a.weights:
        own = training("weights", plan)
        for _ in own.train(a.steps, a.weights, 0):
            pass
        scorer.show("weights, unrounded", plan, {n: t.detach() for n, t in own.trained.items()})
        source = work / "source" / "trained"  # rounded() works in a folder of its name
        own.trial.model.load_state_dict(
            {
                own.trial.family.in_form(f"{n}.weight", multimodal=False): t.detach()
                for n, t in own.trained.items()
            },
            strict=False,
        )
        own.trial.model.save_pretrained(source)
        for file in a.model.iterdir():
            if not (source / file.name).exists() and file.suffix != ".safetensors":
                (source / file.name).write_bytes(file.read_bytes())
        plan = rounded(source)
        scorer.show("weights, then gptq", plan)
        tuned(plan, "weights, gptq, norms")


def norms_of(training: Training) -> dict[str, np.ndarray]:
    return {n: t.detach().float().cpu().numpy() for n, t in training.norms().items()}


if __name__ == "__main__":
    main()
