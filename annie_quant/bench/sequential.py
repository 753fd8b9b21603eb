"""Stop a run early without more false findings: interim looks (group-sequential), of which the early ones use little alpha.

LOOKS looks at the 5 % level would report chance as a difference in far more than 5 of 100 runs. Each of the LOOKS - 1 early looks
is made at LEVEL, 1 % together, and the end at the usual 5 % (Haybittle-Peto; tests/perf/verdict_rule.py --looks simulates it). A
run stops when everything is decided: each deciding gate keeps or loses by the paired rule (judge/decision/rule.py) at LEVEL,
and each compared time differs significantly or is equivalent (its interval is within EQUIVALENT of the other side's median). The
gates of a single backend are compared with their absolute requirements.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from annie_quant.bench.aggregates import gate_counts, judged_pairs, timed, values_by_prompt
from annie_quant.documents import PairedGate, PairedResult, RequestRecord, Roles
from annie_quant.judge import decision
from annie_quant.judge.gates import GATES, LARGE_N, Threshold, decides
from annie_quant.judge.pairing import deciding_by_prompt
from annie_quant.judge.statistics import compare, holm, wilson

LOOKS = 5
LEVEL = 0.0025  # of each early look; 1 % for all of them
EQUIVALENT = 0.03
METRICS = ("ttft_content_ms", "tpot_ms")


def looks(visits: int, block: int) -> list[int]:
    """Return after how many visits to look, in whole blocks: LOOKS - 1 times (the last look is the end)."""
    marks = {visits * k // LOOKS // block * block for k in range(1, LOOKS)}
    return sorted(mark for mark in marks if 0 < mark < visits)


def open_questions(
    records: Sequence[RequestRecord], backends: Sequence[str], greedy: Collection[str], roles: Roles | None = None
) -> list[str]:
    """Return what the records cannot decide yet; empty when everything is decided.

    roles: None: those that follow from the order of the backends.
    """
    undecided = [*_open_gates(records, backends, greedy, roles)]
    pairs = [
        (f"{a} against {b}: {metric}", result)
        for a, b, metric, result in compared_times(records, backends, confidence=1 - LEVEL)
    ]
    for (title, result), p in zip(pairs, holm([result.p for _, result in pairs]), strict=True):
        if not (p is not None and p < LEVEL) and not _equivalent(result):
            undecided.append(title)
    return undecided


def compared_times(
    records: Sequence[RequestRecord], backends: Sequence[str], confidence: float = 0.95
) -> Iterator[tuple[str, str, str, PairedResult]]:
    """Yield (a, b, metric, result) of each compared time that both backends have, one request in flight."""
    fit = [r for r in timed(records) if r.alone]
    for a, b in itertools.combinations(backends, 2):
        for metric in METRICS:
            x, y = (values_by_prompt((r for r in fit if r.backend == name), metric) for name in (a, b))
            if x and y:
                yield a, b, metric, compare(x, y, confidence=confidence)


def paired_gates(
    records: Sequence[RequestRecord], backends: Sequence[str], greedy: Collection[str], roles: Roles | None
) -> Iterator[tuple[str, Mapping[str, PairedGate]]]:
    """Yield each backend that has a reference, with its judged gates that decide."""
    roles = roles or decision.assign(backends, {})
    own = {name: [r for r in records if r.backend == name] for name in backends}
    for name in backends:
        reference = decision.other_side(roles, name)
        if reference is not None:
            before, after = (deciding_by_prompt(own[side], greedy) for side in (reference, name))
            gates, _ = judged_pairs(before, after, bf16=reference == roles.reference)
            yield name, decision.deciding(gates)


def _open_gates(
    records: Sequence[RequestRecord], backends: Sequence[str], greedy: Collection[str], roles: Roles | None
) -> Iterator[str]:
    for name, gates in paired_gates(records, backends, greedy, roles):
        for gate, pair in gates.items():
            if not decision.decided_at(gate, pair, LEVEL):
                yield f"{name}: {gate} (lost {pair.lost} and won {pair.won} of {pair.n})"
    if len(backends) == 1:
        name = backends[0]
        for gate, (passes, n) in gate_counts([r for r in records if r.backend == name], greedy).items():
            if decides(gate) and not _gate_decided(passes, n, GATES[gate].threshold):
                yield f"{name}: {gate} ({passes} of {n})"


def _gate_decided(passes: int, n: int, threshold: Threshold) -> bool:
    if threshold.kind == "zero":
        return passes < n or n >= LARGE_N
    low, high = wilson(passes, n, 1 - LEVEL)
    return low >= threshold.limit or high < threshold.limit


def _equivalent(result: PairedResult) -> bool:
    if result.low is None or result.high is None or not result.median_a:
        return False
    margin = EQUIVALENT * result.median_a
    return -margin <= result.low and result.high <= margin
