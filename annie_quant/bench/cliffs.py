"""The cliff of a server on a ladder (data/workloads.py): the level from which its answers are wrong.

A prompt counts as right at a level where all its k repeats are right (pass^k). The cliff is the step of a binomial likelihood with
one rate before it and one from it on. It is reported where the largest fall of the rate is larger than in 95 % of permutations of
each prompt's levels. Its interval holds the steps whose likelihood is at most exp(LIKELY) times smaller: for known rates, Ville's
inequality on either side of the true step gives that at least 95 % of such intervals hold it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from annie_quant.bench.findings import finding
from annie_quant.documents import Cliff, Confound, Ladder, LadderPoint, RequestRecord
from annie_quant.judge.statistics import LEVEL, holm, mcnemar, wilson

PREFIX = "ladder_"
MAX_LOG_RATIO = math.log(2 / 0.05)
CLIFF_PERMUTATIONS = 999
MIN_LADDER_PROMPTS = 5
AXES = {
    "tools": "{} tools",
    "tokens": "{} tokens of context",
    "poisoned": "{} malformed calls before the request",
    "steps": "step {} of a chain",
}

RightByLevel = Mapping[int, Mapping[str, bool]]  # level → case → right in all repeats


@dataclass(frozen=True)
class MeasuredLadder:
    """One backend's answers on one axis."""

    backend: str
    ladder: Ladder
    right: RightByLevel


def level_of(record: RequestRecord) -> tuple[str, int] | None:
    """Return (axis, level) of a request of a ladder."""
    axis, _, level = record.workload.removeprefix(PREFIX).partition("_")
    if not record.workload.startswith(PREFIX) or axis not in AXES:
        return None
    return axis, int(level) if level.isdigit() else record.turn + 1


def measured_ladders(records: Iterable[RequestRecord]) -> list[MeasuredLadder]:
    """Return the ladders in measured records, by backend and axis."""
    answers: dict[tuple[str, str], dict[int, dict[str, list[bool]]]] = {}
    for record in records:
        place = level_of(record)
        right = record.judgement.right
        if place is not None and right is not None:
            axis, level = place
            levels = answers.setdefault((record.backend, axis), {})
            levels.setdefault(level, defaultdict(list))[record.case].append(right)
    ladders = []
    for (backend, axis), levels in answers.items():
        ladders.append(_measured_ladder(backend, axis, dict(sorted(levels.items()))))
    return ladders


def _measured_ladder(
    backend: str, axis: str, levels: Mapping[int, Mapping[str, Sequence[bool]]]
) -> MeasuredLadder:
    right: dict[int, dict[str, bool]] = {}
    points = []
    n_repeats: list[int] = []
    for level, cases in levels.items():
        right[level] = {case: all(repeats) for case, repeats in cases.items()}
        passes = sum(right[level].values())
        low, high = wilson(passes, len(cases))
        rate = statistics.fmean(itertools.chain.from_iterable(cases.values()))
        point = LadderPoint(
            level=level,
            passes=passes,
            n=len(cases),
            low=low,
            high=high,
            rate=rate,
        )
        points.append(point)
        n_repeats += map(len, cases.values())
    cliff = find_cliff(points, right)
    ladder = Ladder(
        axis=axis,
        repeats=min(n_repeats),
        points=points,
        cliff=cliff,
    )
    return MeasuredLadder(backend, ladder, right)


def find_cliff(points: Sequence[LadderPoint], right: RightByLevel) -> Cliff | None:
    """Return the step after which prompts are right less often; None where that is not shown."""
    likelihoods: dict[int, float] = {}
    for index in range(1, len(points)):
        likelihood = _log_likelihood(points, index)
        if likelihood is not None:
            likelihoods[index] = likelihood
    if not likelihoods:
        return None
    best = max(likelihoods, key=likelihoods.__getitem__)
    p = _fall_p(right)
    if p >= LEVEL:
        return None
    likely = []
    for index, likelihood in likelihoods.items():
        if likelihoods[best] - likelihood <= MAX_LOG_RATIO:
            likely.append(points[index].level)
    return Cliff(
        holds=points[best - 1].level,
        breaks=points[best].level,
        earliest=min(likely),
        latest=max(likely),
        p=p,
    )


def _log_likelihood(points: Sequence[LadderPoint], index: int) -> float | None:
    """Return the log likelihood of one rate before `index` and one from it on; None where the rate does not fall."""
    before, n_before = _total(points[:index])
    after, n_after = _total(points[index:])
    if before * n_after <= after * n_before:
        return None
    return _binomial_log_likelihood(before, n_before) + _binomial_log_likelihood(after, n_after)


def _binomial_log_likelihood(passes: int, n: int) -> float:
    terms = (k * math.log(k / n) for k in (passes, n - passes) if k)
    return sum(terms)


def _fall_p(right: RightByLevel) -> float:
    """Return the share of permutations of each prompt's levels with at least the largest fall of the true order."""
    cases = sorted(set.intersection(*map(set, right.values())))
    if len(cases) < MIN_LADDER_PROMPTS:
        return 1.0
    columns = []
    for answers in right.values():
        columns.append([answers[case] for case in cases])
    table = np.array(columns, dtype=np.float64).T
    rng = np.random.default_rng(0)
    rates = [table.mean(axis=0)]
    for _ in range(CLIFF_PERMUTATIONS):
        rates.append(rng.permuted(table, axis=1).mean(axis=0))
    falls = -steps(np.vstack(rates)).min(axis=1)
    return float((falls >= falls[0] - 1e-12).mean())


def steps(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (mean after - mean before) each split in units of its standard error, [rows, splits]."""
    columns = rows.shape[1]
    n_before = np.arange(1, columns)
    n_after = columns - n_before
    total = np.cumsum(rows, axis=1)
    before = total[:, :-1] / n_before
    after = (total[:, -1:] - total[:, :-1]) / n_after
    return (after - before) / np.sqrt(1 / n_before + 1 / n_after)


def _total(points: Iterable[LadderPoint]) -> tuple[int, int]:
    passes = 0
    n = 0
    for point in points:
        passes += point.passes
        n += point.n
    return passes, n


def _shares(right: RightByLevel, levels: Iterable[int]) -> dict[str, float]:
    """Return the share of the levels at which each prompt is right."""
    answers: dict[str, list[bool]] = defaultdict(list)
    for level in levels:
        for case, passed in right.get(level, {}).items():
            answers[case].append(passed)
    return {case: statistics.fmean(values) for case, values in answers.items()}


def _worse_p(better: MeasuredLadder, worse: MeasuredLadder, levels: Sequence[int]) -> float:
    """Return p of the one-sided exact sign test that a ladder's shares are smaller, over the prompts of both."""
    ours = _shares(better.right, levels)
    theirs = _shares(worse.right, levels)
    changes = [theirs[case] - ours[case] for case in ours.keys() & theirs.keys()]
    return mcnemar(sum(change < 0 for change in changes), sum(change > 0 for change in changes))


# ---- in words


def cliff_findings(rows: Sequence[MeasuredLadder]) -> list[Confound]:
    """Return one sentence per backend and axis, and one per backend that breaks where another one does not."""
    findings = [_sentence(row.backend, row.ladder) for row in rows]
    tests = []
    p_values = []
    for worse, better in itertools.permutations(rows, 2):
        cliff = worse.ladder.cliff
        if worse.ladder.axis == better.ladder.axis and cliff is not None:
            levels = [p.level for p in worse.ladder.points if p.level >= cliff.breaks]
            tests.append((worse, better, levels))
            p_values.append(_worse_p(better, worse, levels))
    for (worse, better, levels), p in zip(tests, holm(p_values), strict=True):
        if p is not None and p < LEVEL:
            sides = (worse.ladder, better.ladder)
            x, y = (_counts(_points_at(side, levels)) for side in sides)
            start = AXES[worse.ladder.axis].format(f"{levels[0]:,}")
            names = {"other": better.backend, "at": start}
            findings.append(
                finding(
                    "earlier_cliff",
                    worse.backend,
                    **names,
                    x=x,
                    y=y,
                    p=p,
                )
            )
    return findings


def _points_at(ladder: Ladder, levels: Collection[int]) -> list[LadderPoint]:
    return [point for point in ladder.points if point.level in levels]


def _sentence(backend: str, ladder: Ladder) -> Confound:
    axis = AXES[ladder.axis]
    points = ladder.points
    cliff = ladder.cliff
    power = f" (pass^{ladder.repeats})" if ladder.repeats > 1 else ""
    if cliff is None:
        last = axis.format(f"{points[-1].level:,}")
        ends = {"first": _counts(points[:1]), "at_last": _counts(points[-1:])}
        return finding(
            "no_cliff",
            backend,
            last=last,
            k=power,
            **ends,
        )
    breaks = axis.format(f"{cliff.breaks:,}")
    if cliff.earliest != cliff.latest:
        breaks += f" (95 %: {cliff.earliest:,} to {cliff.latest:,})"
    before = _counts(point for point in points if point.level <= cliff.holds)
    after = _counts(point for point in points if point.level >= cliff.breaks)
    figures = {"before": before, "after": after, "p": cliff.p}
    return finding(
        "cliff",
        backend,
        breaks=breaks,
        holds=f"{cliff.holds:,}",
        k=power,
        **figures,
    )


def _counts(points: Iterable[LadderPoint]) -> str:
    passes, n = _total(points)
    low, high = wilson(passes, n)
    return f"{passes} of {n} [{low:.0%}, {high:.0%}]"
