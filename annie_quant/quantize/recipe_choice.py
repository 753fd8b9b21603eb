"""Choose how `best` rounds, by the effect of each ingredient of a recipe on held-out conversations.

Some of the calibration conversations are held out. Each recipe rounds the model with the others, and the held-out answers are
scored as served and with no input rounded. The divergence is the mean KL of all answer tokens plus that of the tokens that decide
(offline/prompts.py), summed over both ways of serving. gptq is the start. An ingredient stays only where it lowers the divergence
by more than the noise, the standard error of the difference over conversations. Plain rounding (naive) is compared last, so the
recipe is worse than gptq or naive on that text by no more than the noise. The final model is rounded with all conversations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from annie_quant.core.files import sha256_text
from annie_quant.core.progress import Progress
from annie_quant.documents import HeldOut, Ingredient
from annie_quant.quantize.backend import device_kind
from annie_quant.quantize.calibration_samples import CalibrationSample
from annie_quant.quantize.formats import NVFP4
from annie_quant.quantize.kl_trial import MOST_TOKENS, StoredTrials, answers_to_score
from annie_quant.quantize.rounding import Method, round_model
from annie_quant.quantize.strategy import Job, StrategyOptions

LEAST_CONVERSATIONS = 8  # of which two are held out
HELD_OUT = 4  # at most one conversation of this many
DECISIONS = 2000  # tokens that decide; with fewer, only large differences are detected
POSITIONS = {"cpu": 8192, "cuda": 1 << 17}  # held-out tokens at most, prompts included

Changes = dict[str, Any]  # settings of a Method
EFFORTS = ("fast", "normal", "max")
# Ingredient, its change, and the smallest effort that tries it. On Qwen2.5-Coder none lowers the divergence by more than the noise;
# on tiny-annie a weight of 0 for prompt tokens lowered the KL (tests/perf/strategies.md).
INGREDIENTS: list[tuple[str, Changes, str]] = [
    ("prompt tokens at 0", {"prompt": 0.0}, "fast"),
    ("prompt tokens at 1", {"prompt": 1.0}, "normal"),
    ("prompt tokens at .03", {"prompt": 0.03}, "max"),
    ("damping .01", {"damping": 0.01}, "max"),
    ("damping .1", {"damping": 0.1}, "max"),
    ("norms tuned", {"norms": True}, "max"),
]


def ingredients(effort: str, fixed: Iterable[str]) -> Iterator[tuple[str, Changes]]:
    """Yield the ingredients that an effort tries, without those that change a setting of the user."""
    for name, changes, least in INGREDIENTS:
        if EFFORTS.index(least) <= EFFORTS.index(effort) and not changes.keys() & set(fixed):
            yield name, changes


@dataclass(frozen=True)
class RecipeChoice:
    """The method with the least held-out divergence, and the comparison. held_out: None where nothing was compared."""

    method: Method
    held_out: HeldOut | None = None
    ingredients: Sequence[Ingredient] = ()


def choose_method(
    job: Job[StrategyOptions],
    formats: Mapping[str, str],
    samples: Sequence[CalibrationSample],
    start: Method,
    tried: Iterable[tuple[str, Changes]],
    progress: Progress,
) -> RecipeChoice:
    """Return the method with the least held-out divergence.

    start: GPTQ with the user's settings.
    tried: ingredients in their order. Scores of an interrupted run are used again.
    """
    learned, held = hold_out(samples, POSITIONS[device_kind()])
    conversations = len({s.row for s in samples})
    if not held:
        progress.message(
            f"recipes are not compared: {conversations} conversations, {LEAST_CONVERSATIONS} or more are needed "
            "(annie-quant data, or init with --logs); plain GPTQ is used"
        )
        return RecipeChoice(start)
    held_out = HeldOut(
        len({s.row for s in held}),
        sum(len(s.answer) for s in held),
        sum(sum(s.decides) for s in held),
    )
    progress.message(held_out_line(held_out, conversations))
    trials = Trials(job, formats, learned, held, progress)
    tried = list(tried)
    count = len(tried) + 2
    best = ScoredMethod("GPTQ", start, trials.score(start, f"1 of {count}, GPTQ"))
    trace = [best.entry(None)]
    defaults: Changes = {f.name: f.default for f in fields(Method)}
    waiting = [*tried, ("plain rounding", defaults | {"plain": True})]
    for number, (name, changes) in enumerate(waiting, 2):
        method = replace(best.method, **changes)
        if method == best.method:
            continue
        candidate = ScoredMethod(name, method, trials.score(method, f"{number} of {count}, {name}"))
        entry = candidate.entry(best)
        progress.message(entry_line(entry))
        trace.append(entry)
        best = candidate if entry.used else best
    return RecipeChoice(best.method, held_out, trace)


def hold_out(
    samples: Sequence[CalibrationSample], positions: int
) -> tuple[list[CalibrationSample], list[CalibrationSample]]:
    """Return the samples to round with and those to judge on, whole conversations of all categories in turn.

    Conversations are held out until DECISIONS tokens decide: at most one in HELD_OUT, `positions` tokens, and MOST_TOKENS of
    answers.
    """
    rows: dict[int, list[CalibrationSample]] = {}
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
        if len(chosen) >= 2 and (tokens + size > positions or answers + length > MOST_TOKENS):
            continue
        chosen.add(row)
        tokens, answers = tokens + size, answers + length
        decisions += sum(sum(s.decides) for s in rows[row])
        if decisions >= DECISIONS:
            break
    return [s for s in samples if s.row not in chosen], [s for s in samples if s.row in chosen]


def spread(items: Sequence[int]) -> list[int]:
    """Return the items by bit-reversed index: the first n of them are spread over all, for any n."""
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


class Trials(StoredTrials):
    """Scores methods on held-out answers. samples: to round with."""

    def __init__(
        self,
        job: Job[StrategyOptions],
        formats: Mapping[str, str],
        samples: Sequence[CalibrationSample],
        held: Sequence[CalibrationSample],
        progress: Progress,
    ) -> None:
        super().__init__(job, "recipes.json", answers_to_score(held, MOST_TOKENS, cut=False))
        self.job, self.formats, self.samples, self.progress = job, formats, samples, progress

    def score(self, method: Method, title: str) -> np.ndarray:
        """Return each conversation's share of KL and decisions, as served and with no input rounded [conversations, 4]."""

        def measure() -> np.ndarray:
            self.progress.message(f"recipe {title}")
            # A name per recipe: a run that is killed before the removal must not continue with the layers of another one.
            layers = f"trial-{sha256_text(key)[:12]}"
            plan = round_model(self.job, self.formats, self.samples, method, self.progress, layers)
            served = unrounded = self.trial.shares(plan)
            if NVFP4 in self.formats.values():
                unrounded = self.trial.shares(plan, inputs=False)
            self.job.remove(layers)
            return np.concatenate((served[:, :2], unrounded[:, :2]), 1)

        # Formats differ between runs with other limits that continue the same measurements.
        key = f"{method!r} {sha256_text(json.dumps(sorted(self.formats.items())))[:12]}"
        return self.stored(key, measure)


@dataclass(frozen=True)
class ScoredMethod:
    """A method, and each conversation's share of the four held-out figures. parts: float64 [conversations, 4]."""

    name: str
    method: Method
    parts: np.ndarray

    def change(self, before: ScoredMethod) -> tuple[float, float]:
        """Return the divergence minus that of another recipe, and the standard error of this difference."""
        pairs = zip(self.parts.tolist(), before.parts.tolist(), strict=True)
        return with_noise([sum(a) - sum(b) for a, b in pairs])

    def entry(self, before: ScoredMethod | None) -> Ingredient:
        """Return the line of the trace. before: the recipe that it was compared with, if any."""
        change, noise = (0.0, 0.0) if before is None else self.change(before)
        kl, decisions, kl_w4a16, decisions_w4a16 = (float(figure) for figure in self.parts.sum(0))
        used = before is None or change < -noise
        return Ingredient(self.name, used, kl, decisions, kl_w4a16, decisions_w4a16, change, noise)


def with_noise(differences: Sequence[float]) -> tuple[float, float]:
    """Return the sum of differences, one per conversation, and its standard error."""
    n, mean = len(differences), sum(differences) / len(differences)
    return sum(differences), math.sqrt(
        sum((d - mean) ** 2 for d in differences) * n / max(1, n - 1)
    )


def entry_line(entry: Ingredient) -> str:
    return (
        f"{'uses' if entry.used else 'refuses'} {entry.name}: held-out KL {entry.kl:.3g}, decisions {entry.decisions:.3g}"
        f" (W4A16 {entry.kl_w4a16:.3g}, {entry.decisions_w4a16:.3g}); change {entry.change:+.2g}, noise {entry.noise:.2g}"
    )
