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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from annie_quant.bench.findings import finding
from annie_quant.bench.stability import steps
from annie_quant.documents import Cliff, Confound, Ladder, LadderPoint, RequestRecord
from annie_quant.judge.statistics import LEVEL, holm, mcnemar, wilson

PREFIX = "ladder_"
LIKELY = math.log(2 / 0.05)
PERMUTATIONS = 999
LEAST_PROMPTS = 5
UNITS = {
    "tools": "{} tools",
    "tokens": "{} tokens of context",
    "poisoned": "{} malformed calls before the request",
    "steps": "step {} of a chain",
}

Right = Mapping[int, Mapping[str, bool]]  # level → case → right in all repeats


@dataclass(frozen=True)
class MeasuredLadder:
    """One backend's answers on one axis."""

    backend: str
    ladder: Ladder
    right: Right


def level_of(record: RequestRecord) -> tuple[str, int] | None:
    """Return (axis, level) of a request of a ladder."""
    axis, _, level = record.workload.removeprefix(PREFIX).partition("_")
    if not record.workload.startswith(PREFIX) or axis not in UNITS:
        return None
    return axis, int(level) if level.isdigit() else record.turn + 1


def measured_ladders(records: Iterable[RequestRecord]) -> list[MeasuredLadder]:
    """Return the ladders in measured records, by backend and axis."""
    answers: dict[tuple[str, str], dict[int, dict[str, list[bool]]]] = {}
    for record in records:
        at = level_of(record)
        if at is not None and record.judgement.right is not None:
            levels = answers.setdefault((record.backend, at[0]), {})
            levels.setdefault(at[1], defaultdict(list))[record.case].append(record.judgement.right)
    return [_measured(*key, dict(sorted(levels.items()))) for key, levels in answers.items()]


def _measured(
    backend: str, axis: str, levels: Mapping[int, Mapping[str, Sequence[bool]]]
) -> MeasuredLadder:
    right: dict[int, dict[str, bool]] = {}
    points = []
    n_repeats: list[int] = []
    for level, cases in levels.items():
        right[level] = {case: all(answers) for case, answers in cases.items()}
        passes = sum(right[level].values())
        n = len(cases)
        low, high = wilson(passes, n)
        answers = [answer for repeats in cases.values() for answer in repeats]
        rate = statistics.fmean(answers)
        points.append(LadderPoint(level=level, passes=passes, n=n, low=low, high=high, rate=rate))
        n_repeats += map(len, cases.values())
    cliff = find_cliff(points, right)
    ladder = Ladder(axis=axis, repeats=min(n_repeats), points=points, cliff=cliff)
    return MeasuredLadder(backend, ladder, right)


def find_cliff(points: Sequence[LadderPoint], right: Right) -> Cliff | None:
    """Return the step after which prompts are right less often; None where that is not shown."""
    levels = [point.level for point in points]
    fits = {
        at: fit for at in range(1, len(points)) if (fit := _log_likelihood(points, at)) is not None
    }
    if not fits:
        return None
    best = max(fits, key=fits.__getitem__)
    p = _fall_p(right)
    if p >= LEVEL:
        return None
    likely = [at for at, fit in fits.items() if fits[best] - fit <= LIKELY]
    first = levels[min(likely)]
    last = levels[max(likely)]
    return Cliff(holds=levels[best - 1], breaks=levels[best], earliest=first, latest=last, p=p)


def _log_likelihood(points: Sequence[LadderPoint], at: int) -> float | None:
    """Return the log likelihood of one rate before index `at` and one from it on; None where the rate does not fall."""
    (x, n), (y, m) = (_total(part) for part in (points[:at], points[at:]))
    if x * m <= y * n:
        return None
    return sum(
        k * math.log(k / total) for k, total in ((x, n), (n - x, n), (y, m), (m - y, m)) if k
    )


def _fall_p(right: Right) -> float:
    """Return the share of permutations of each prompt's levels with at least the largest fall of the true order."""
    cases = set.intersection(*(set(cases) for cases in right.values()))
    columns = []
    for answers in right.values():
        columns.append([answers[case] for case in sorted(cases)])
    table = np.array(columns, dtype=np.float64).T
    if len(table) < LEAST_PROMPTS:
        return 1.0
    rng = np.random.default_rng(0)
    orders = (rng.permuted(table, axis=1).mean(axis=0) for _ in range(PERMUTATIONS))
    rates = np.vstack([table.mean(axis=0), *orders])
    largest = -steps(rates).min(axis=1)
    return float((largest >= largest[0] - 1e-12).mean())


def _total(points: Sequence[LadderPoint]) -> tuple[int, int]:
    return sum(p.passes for p in points), sum(p.n for p in points)


def _shares(right: Right, levels: Iterable[int]) -> dict[str, float]:
    """Return the share of the levels at which each prompt is right."""
    answers: dict[str, list[bool]] = defaultdict(list)
    for level in levels:
        for case, passed in right.get(level, {}).items():
            answers[case].append(passed)
    return {case: statistics.fmean(values) for case, values in answers.items()}


def _worse_p(better: Mapping[str, float], worse: Mapping[str, float]) -> float:
    """Return p of the one-sided exact sign test that the second shares are smaller, over the prompts of both."""
    changes = [worse[case] - better[case] for case in better.keys() & worse.keys()]
    return mcnemar(sum(change < 0 for change in changes), sum(change > 0 for change in changes))


# ---- in words


def cliff_findings(rows: Sequence[MeasuredLadder]) -> list[Confound]:
    """Return one sentence per backend and axis, and one per backend that breaks where another one does not."""
    findings = [_sentence(row.backend, row.ladder) for row in rows]
    tests = []
    for a, b in itertools.permutations(rows, 2):
        if a.ladder.axis == b.ladder.axis and a.ladder.cliff is not None:
            levels = [p.level for p in a.ladder.points if p.level >= a.ladder.cliff.breaks]
            tests.append(
                (a, b, levels, _worse_p(_shares(b.right, levels), _shares(a.right, levels)))
            )
    for (a, b, levels, _), p in zip(tests, holm([p for *_, p in tests]), strict=True):
        if p is not None and p < LEVEL:
            x = _counts([point for point in a.ladder.points if point.level in levels])
            y = _counts([point for point in b.ladder.points if point.level in levels])
            at = UNITS[a.ladder.axis].format(f"{levels[0]:,}")
            findings.append(
                finding("earlier_cliff", a.backend, other=b.backend, at=at, x=x, y=y, p=p)
            )
    return findings


def _sentence(backend: str, ladder: Ladder) -> Confound:
    unit = UNITS[ladder.axis]
    points = ladder.points
    cliff = ladder.cliff
    power = f" (pass^{ladder.repeats})" if ladder.repeats > 1 else ""
    if cliff is None:
        last = unit.format(f"{points[-1].level:,}")
        return finding(
            "no_cliff",
            backend,
            first=_counts(points[:1]),
            last=last,
            at_last=_counts(points[-1:]),
            k=power,
        )
    within = (
        "" if cliff.earliest == cliff.latest else f" (95 %: {cliff.earliest:,} to {cliff.latest:,})"
    )
    breaks = unit.format(f"{cliff.breaks:,}") + within
    before = _counts([p for p in points if p.level <= cliff.holds])
    figures = {
        "before": before,
        "after": _counts([p for p in points if p.level >= cliff.breaks]),
        "p": cliff.p,
    }
    return finding("cliff", backend, breaks=breaks, holds=f"{cliff.holds:,}", k=power, **figures)


def _counts(points: Sequence[LadderPoint]) -> str:
    passes, n = _total(points)
    low, high = wilson(passes, n)
    return f"{passes} of {n} [{low:.0%}, {high:.0%}]"
