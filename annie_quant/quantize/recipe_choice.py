"""Choose how `best` rounds by what each way does to held-out conversations: a recipe's ingredients, tried one after the other.

Part of the calibration conversations is held out. Every recipe rounds the model on the others, and the held-out answers are scored
as served and with no input rounded. The divergence is the mean KL of all answer tokens plus that of the tokens that decide
(offline/prompts.py), summed over both. GPTQ is the start. An ingredient stays only where the divergence falls by more than
the noise, which is the standard error of the difference over conversations. Plain rounding (naive) is compared at the end. So the
recipe is not worse than gptq or naive on that text by more than the noise. The final model is rounded with all conversations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.files import sha256_text
from annie_quant.core.progress import Progress
from annie_quant.documents import HeldOut, Ingredient
from annie_quant.quantize import calibration_samples as text
from annie_quant.quantize import column_sweep, rounding_job
from annie_quant.quantize.calibration_samples import Sample, TokenWeights
from annie_quant.quantize.formats import NVFP4
from annie_quant.quantize.job import Job
from annie_quant.quantize.kl_trial import Trial
from annie_quant.quantize.layer_rounding import Method
from annie_quant.quantize.layerwise import device_and_dtype
from annie_quant.quantize.plan import Plan
from annie_quant.quantize.strategies import gptq

LEAST_CONVERSATIONS = 8  # of which two are held out
HELD_OUT = 4  # one of so many conversations at most
DECISIONS = 2000  # tokens that decide: with fewer only large differences are seen
POSITIONS = {"cpu": 8192, "cuda": 1 << 17}  # held-out tokens at most, prompts included
TOKENS = 8192  # of answers, whose logits stay in memory
BROKEN = 1e6  # divergence of a recipe whose scores are not finite


@dataclass(frozen=True)
class Rounding:
    """A way to round. plain: to nearest, as naive. layers: by layer_rounding.py, on a GPU where there is one, else by gptq.py.
    served: on inputs that are rounded as a server does.

    prompt, markup: weights of these tokens relative to others of answers. The rest are layer_rounding.Method's; gptq.py has
    the damping alone.
    """

    prompt: float = 0.1
    markup: float = 1.0
    fold: str = "none"
    damping: float = 0.05
    plain: bool = False
    layers: bool = False
    served: bool = False
    order: str = "blocks"
    codes: str = "near"
    cross: float = 0.0
    steps: int = 0

    def token_weights(self) -> TokenWeights:
        marks = dict.fromkeys((text.TOOL_MARKUP, text.END_OF_TURN), self.markup)
        return {**text.RESPONSE, **marks, text.PROMPT: self.prompt}

    def round(
        self,
        folder: ModelFolder,
        formats: Mapping[str, str],
        samples: Sequence[Sample],
        job: Job,
        progress: Progress,
        name: str = "layers",
    ) -> Plan:
        """Return the plan with all linears of `formats` rounded. name: of the layers' folder inside the job's."""
        fold = self.fold == "awq"
        if not self.layers:
            plan = Plan(dict(formats), scale="amax" if self.plain else job.scale)
            gptq.round_model(
                folder, plan, samples, self.token_weights(), None if self.plain else self.damping, job, progress, fold
            )
            return plan
        candidates = column_sweep.ALL_CODES if self.codes == "all" else column_sweep.NEAR_CODES
        method = Method(self.damping, self.order, candidates, self.cross or None, self.steps, self.served)
        return rounding_job.round_model(
            folder, formats, samples, job, progress, method, self.token_weights(), fold, name
        )


# Ingredient → its change, and the least effort that tries it. What won most often on real models is first.
EFFORTS = ("fast", "normal", "max")
INGREDIENTS: list[tuple[str, dict[str, Any], str]] = [
    ("AWQ folds", {"fold": "awq"}, "fast"),
    ("prompt tokens at 0", {"prompt": 0.0}, "fast"),
    ("prompt tokens at 1", {"prompt": 1.0}, "normal"),
    ("prompt tokens at .03", {"prompt": 0.03}, "max"),
    ("inputs rounded as served", {"layers": True, "served": True}, "normal"),
    ("damping .01", {"damping": 0.01}, "max"),
    ("damping .1", {"damping": 0.1}, "max"),
    ("all block scales", {"layers": True, "codes": "all"}, "max"),
    ("correction across layers", {"layers": True, "cross": 1.0}, "max"),
    ("learned rounding, 100 steps", {"layers": True, "served": True, "steps": 100}, "normal"),
    ("learned rounding, 1,000 steps", {"layers": True, "served": True, "steps": 1000}, "max"),
]


def ingredients(effort: str, fixed: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield those of an effort, without those that change a setting which the user fixed."""
    for name, changes, least in INGREDIENTS:
        if EFFORTS.index(least) <= EFFORTS.index(effort) and not changes.keys() & set(fixed):
            yield name, changes


def choose(
    folder: ModelFolder,
    formats: Mapping[str, str],
    samples: Sequence[Sample],
    job: Job,
    progress: Progress,
    start: Rounding,
    tried: Iterable[tuple[str, dict[str, Any]]],
) -> Rounding:
    """Return the recipe of the least held-out divergence, and store the comparisons in the job.

    start: GPTQ, with what the user fixed. tried: ingredients in their order. What an interrupted run measured is not
    measured again.
    """
    device = device_and_dtype(folder)[0].partition(":")[0]
    learned, held = hold_out(samples, POSITIONS[device])
    if not held:
        progress.message(
            f"recipes are not compared: {len({s.row for s in samples})} conversations, {LEAST_CONVERSATIONS} or more are needed "
            "(annie-quant data, or init with --logs); plain GPTQ is used"
        )
        return start
    job.held_out = HeldOut(
        len({s.row for s in held}), sum(len(s.answer) for s in held), sum(sum(s.decides) for s in held)
    )
    progress.message(held_out_line(job.held_out, len({s.row for s in samples})))
    if device == "cuda":
        start = replace(start, layers=True)
    trials = Trials(folder, formats, learned, held, job, progress)
    tried = list(tried)
    count = len(tried) + 2
    best = Comparison("GPTQ", start, trials.score(start, f"1 of {count}, GPTQ"))
    job.ingredients = [best.entry(None)]
    for number, (name, changes) in enumerate(tried, 2):
        if all(getattr(best.recipe, k) == v for k, v in changes.items()):
            continue
        recipe = replace(best.recipe, **changes)
        candidate = Comparison(name, recipe, trials.score(recipe, f"{number} of {count}, {name}"))
        best = decide(best, candidate, job, progress)
    plain = Rounding(plain=True)
    naive = Comparison("plain rounding", plain, trials.score(plain, f"{count} of {count}, plain rounding"))
    return decide(best, naive, job, progress).recipe


def hold_out(samples: Sequence[Sample], positions: int) -> tuple[list[Sample], list[Sample]]:
    """Return the samples to round with and those to judge on, whole conversations of all categories in turn.

    Held out are conversations until DECISIONS tokens decide, at most one in HELD_OUT, `positions` tokens and TOKENS of answers.
    """
    rows: dict[int, list[Sample]] = {}
    for sample in samples:
        rows.setdefault(sample.row, []).append(sample)
    if len(rows) < LEAST_CONVERSATIONS:
        return list(samples), []
    by_category = sorted(rows, key=lambda r: (rows[r][0].category, r))
    chosen: set[int] = set()
    decisions = tokens = answers = 0
    for row in (
        by_category[HELD_OUT - 1 :: HELD_OUT]
        if len(rows) < 4 * HELD_OUT
        else spread(by_category[HELD_OUT - 1 :: HELD_OUT])
    ):
        size, length = max(len(s.ids) for s in rows[row]), sum(len(s.answer) for s in rows[row])
        if len(chosen) >= 2 and (tokens + size > positions or answers + length > TOKENS):
            continue
        chosen.add(row)
        tokens, answers = tokens + size, answers + length
        decisions += sum(sum(s.decides) for s in rows[row])
        if decisions >= DECISIONS:
            break
    return [s for s in samples if s.row not in chosen], [s for s in samples if s.row in chosen]


def spread(items: Sequence[int]) -> list[int]:
    """Return all items in an order in which any first ones are spread over the whole: by bit-reversed index."""
    bits = max(1, (len(items) - 1).bit_length())
    order = sorted(range(len(items)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    return [items[i] for i in order]


def held_out_line(held: HeldOut, conversations: int) -> str:
    line = (
        f"held out {held.conversations} of {conversations} conversations: {held.tokens:,} answer tokens, "
        f"{held.decisions:,} of them decide"
    )
    if held.decisions >= DECISIONS:
        return line
    return f"{line}; with fewer than {DECISIONS:,} only large differences count (annie-quant data --n, or init --logs, gives more)"


class Trials:
    """Scores recipes on held-out answers, and keeps the scores for an interrupted run."""

    def __init__(
        self,
        folder: ModelFolder,
        formats: Mapping[str, str],
        samples: Sequence[Sample],
        held: Sequence[Sample],
        job: Job,
        progress: Progress,
    ) -> None:
        self.folder, self.formats, self.job, self.progress = folder, formats, job, progress
        self.samples, self.held = samples, held
        job.work_folder()
        self.file = job.measurements("recipes.json")
        self.scores: dict[str, list[list[float]]] = self.file.load({})
        self.trial: Trial | None = None

    def score(self, recipe: Rounding, title: str) -> list[list[float]]:
        """Return per held-out conversation its parts of four figures: KL and decisions as served, and with no input rounded."""
        key = repr(recipe)
        if key not in self.scores:
            if self.trial is None:
                self.trial = Trial(self.folder, self.held, text.RESPONSE, TOKENS, cut=False)
            self.progress.message(f"recipe {title}")
            # Its own name: a run that is killed before the removal must not continue with the layers of another recipe.
            layers = f"trial-{sha256_text(key)[:12]}"
            plan = recipe.round(self.folder, self.formats, self.samples, self.job, self.progress, layers)
            served = self.trial.divergence_of(plan, inputs=True)
            weights = served
            if NVFP4 in self.formats.values():
                weights = self.trial.divergence_of(plan, inputs=False)
            pairs = zip(served, weights, strict=True)
            self.scores[key] = [[x if math.isfinite(x) else BROKEN for x in (*a, *b)] for a, b in pairs]
            self.file.save(self.scores)
            self.job.remove(layers)
        return self.scores[key]


@dataclass(frozen=True)
class Comparison:
    """A recipe with its parts [conversations][4] of the held-out figures."""

    name: str
    recipe: Rounding
    parts: list[list[float]]

    def change(self, before: Comparison) -> tuple[float, float]:
        """Return the divergence minus that of another recipe, and the standard error of this difference."""
        differences = [sum(a) - sum(b) for a, b in zip(self.parts, before.parts, strict=True)]
        n, mean = len(differences), sum(differences) / len(differences)
        variance = sum((d - mean) ** 2 for d in differences) * n / max(1, n - 1)
        return sum(differences), math.sqrt(variance)

    def entry(self, before: Comparison | None) -> Ingredient:
        """Return the line of the trace. before: the recipe that it was compared with, if any."""
        figures = [sum(part[i] for part in self.parts) for i in range(4)]
        change, noise = (0.0, 0.0) if before is None else self.change(before)
        kl, decisions, kl_w4a16, decisions_w4a16 = figures
        used = before is None or change < -noise
        return Ingredient(self.name, used, kl, decisions, kl_w4a16, decisions_w4a16, change, noise)


def decide(best: Comparison, candidate: Comparison, job: Job, progress: Progress) -> Comparison:
    """Return the candidate where its divergence is less by more than the noise, else `best`; records and reports it."""
    entry = candidate.entry(best)
    job.ingredients.append(entry)
    progress.message(
        f"{'uses' if entry.used else 'refuses'} {entry.name}: held-out KL {entry.kl:.3g}, decisions {entry.decisions:.3g}"
        f" (W4A16 {entry.kl_w4a16:.3g}, {entry.decisions_w4a16:.3g}); change {entry.change:+.2g}, noise {entry.noise:.2g}"
    )
    return candidate if entry.used else best
