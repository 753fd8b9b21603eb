"""Stopping a run early without fooling oneself: a few planned looks, each at a level that allows for all of them.

Looking LOOKS times at 5 % each would call chance a finding far more often than in 5 of 100 runs. Each look here is made
at 5 % / LOOKS (Bonferroni): whatever the correlation between the looks, the whole stays at 5 % or below. A run stops when
nothing is open: each deciding gate's interval has left its threshold, and each compared time differs for sure or is sure
to lie within EQUIVALENT of the other side's.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from annie_quant.judge.intervals import wilson
from annie_quant.judge.paired import LEVEL as FAMILY_LEVEL
from annie_quant.judge.paired import compare, holm
from annie_quant.judge.rules import ALL_RATE, LARGE_N, Threshold
from annie_quant.judge.tabulation import advisory, threshold

LOOKS = 5
LEVEL = FAMILY_LEVEL / LOOKS
EQUIVALENT = 0.03
METRICS = ("ttft_content_ms", "tpot_ms")


def looks(visits: int, block: int) -> list[int]:
    """After how many visits to look: LOOKS - 1 times on the way (the last look is the end), whole blocks each."""
    marks = {visits * k // LOOKS // block * block for k in range(1, LOOKS)}
    return sorted(mark for mark in marks if 0 < mark < visits)


def open_questions(rows: Sequence[Mapping[str, Any]], backends: Sequence[str], greedy: Collection[str]) -> list[str]:
    """What the records cannot decide yet, in words; empty when all is decided."""
    from annie_quant.bench.aggregate import gate_counts, timed, values_by_prompt
    from annie_quant.bench.load_profile import alone

    found = []
    for name in backends:
        own = [row for row in rows if row["backend"] == name]
        for gate, (passes, n) in gate_counts(own, greedy).items():
            if not advisory(gate) and not _gate_decided(passes, n, threshold(gate)):
                found.append(f"{name}: {gate} ({passes} of {n})")
    fit = [row for row in timed(rows) if alone(row)]
    pairs = []
    for a, b in itertools.combinations(backends, 2):
        for metric in METRICS:
            x, y = (values_by_prompt((r for r in fit if r["backend"] == name), metric) for name in (a, b))
            if x and y:
                pairs.append((f"{a} against {b}: {metric}", compare(x, y, confidence=1 - LEVEL)))
    for (title, row), p in zip(pairs, holm([row["p"] for _, row in pairs]), strict=True):
        if not (p is not None and p < LEVEL) and not _equivalent(row):
            found.append(title)
    return found


def _gate_decided(passes: int, n: int, wanted: Threshold) -> bool:
    if wanted.kind == "zero":
        return passes < n or n >= LARGE_N
    low, high = wilson(passes, n, 1 - LEVEL)
    rate = ALL_RATE if wanted.kind == "all" else wanted.rate
    return low >= rate or high < rate


def _equivalent(row: Mapping[str, Any]) -> bool:
    if row["low"] is None or not row["median_a"]:
        return False
    margin = EQUIVALENT * row["median_a"]
    return bool(-margin <= row["low"] and row["high"] <= margin)
