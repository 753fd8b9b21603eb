"""Pair the answers of a checkpoint with its reference's answers to the same prompts: counts per gate, and all gates together.

A gate counts where it applies to the reference's answer. The checkpoint's answer fails where the gate does not apply to it, and
fails every gate where it is not complete: an error, a time-out, a cut, or an end without a reason. A prompt that the reference did
not answer completely tests nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from annie_quant.documents import Answer, PairedGate, PooledGates, RequestRecord
from annie_quant.judge.gates import BEHAVIOURS, GATES, REFERENCE_GATES, decides
from annie_quant.judge.statistics import mcnemar

if TYPE_CHECKING:
    from annie_quant.judge.workloads import Workload

Checks = Mapping[str, bool]  # gate → passed, for the gates that apply to one answer
# Of one answer: whether it is right (+1 won, -1 lost, 0 neither), and the same of each of its deciding gates that changed.
Change = tuple[int, Mapping[str, int]]
FLIPS = 4999  # random sign flips of a permutation test


def is_complete(answer: Answer) -> bool:
    """Return whether the answer arrived and ended by itself."""
    return not answer.fault


def deciding_checks(row: Checks, answer: Answer, workload: Workload) -> dict[str, bool]:
    """Return the checks that count for a verdict: none for an incomplete answer, none that the workload's author left out."""
    return (
        {gate: ok for gate, ok in row.items() if gate not in workload.informative}
        if is_complete(answer)
        else {}
    )


def with_floor(row: Checks, noisy: Checks) -> dict[str, bool]:
    """Return the reference's checks of an answer, those that compare with itself taken from its answer in a second arithmetic."""
    return {
        gate: noisy.get(gate, False) if gate in REFERENCE_GATES else ok for gate, ok in row.items()
    }


def checks_by_prompt(
    records: Sequence[RequestRecord], greedy: Collection[str]
) -> dict[Hashable, dict[str, bool]]:
    """Return one backend's checks per answer. Greedy answers to one prompt are one answer: it passes if all its repeats do."""
    return {unit: checks for unit, (checks, _) in _by_prompt(records, greedy).items()}


def deciding_by_prompt(
    records: Sequence[RequestRecord], greedy: Collection[str]
) -> dict[Hashable, dict[str, bool]]:
    """Return checks_by_prompt for pairs: an answer that is not complete has none, so that it fails all of its reference's."""
    return {
        unit: checks if complete else {}
        for unit, (checks, complete) in _by_prompt(records, greedy).items()
    }


def _by_prompt(
    records: Sequence[RequestRecord], greedy: Collection[str]
) -> dict[Hashable, tuple[dict[str, bool], bool]]:
    """Return per answer its checks and whether it is complete, in all repeats."""
    answers: dict[Hashable, tuple[dict[str, bool], bool]] = {}
    repeats: Counter[Hashable] = Counter()
    for record in records:
        unit: tuple[Hashable, ...] = record.prompt
        if record.workload not in greedy:
            unit = (
                *record.prompt,
                record.load.level.label,
                repeats[record.prompt, record.load.level.label],
            )
            repeats[record.prompt, record.load.level.label] += 1
        merged, complete = answers.get(unit, ({}, True))
        for gate, passed in record.judgement.checks.items():
            merged[gate] = merged.get(gate, True) and passed
        answers[unit] = merged, complete and is_complete(record.answer)
    return answers


def pair_by_prompt(
    before: Mapping[Hashable, Checks], after: Mapping[Hashable, Checks], bf16: bool = True
) -> tuple[dict[str, PairedGate], PooledGates | None]:
    """Pair two sides' checks over the prompts that both have.

    before: the reference's.

    bf16: whether the reference is the bf16 model. Compared with another build, more right calls are a gain: a rate then
    counts only where no label decides.
    """
    rows = before if bf16 else {prompt: _labelled_first(row) for prompt, row in before.items()}
    return pair_checks((rows[prompt], row) for prompt, row in after.items() if prompt in rows)


def has_label(row: Checks) -> bool:
    return any(GATES[gate].basis == "label" for gate in row if gate in GATES)


def _labelled_first(row: Checks) -> Checks:
    labelled = has_label(row)
    return {
        gate: passed
        for gate, passed in row.items()
        if not (labelled and decides(gate) and GATES[gate].two_sided)
    }


def pair_checks(
    pairs: Iterable[tuple[Checks, Checks]],
) -> tuple[dict[str, PairedGate], PooledGates | None]:
    """Return (gate → counts, all deciding gates together) of (reference's checks, checkpoint's checks) per prompt.

    A gate that the second does not have fails there. The pooled gates are None where no deciding gate applies. Gates that
    compare with the reference's own answer, or with a rate, are not in them: a change is always a loss in the first, and neither
    right nor wrong in the others.
    """
    counts: dict[str, list[int]] = {}
    changes: list[Change | None] = []
    for old, new in pairs:
        for gate, passed in old.items():
            row = counts.setdefault(gate, [0, 0, 0, 0])
            row[0] += 1
            row[1] += passed and not new.get(gate, False)
            row[2] += new.get(gate, False) and not passed
            row[3] += passed or gate in REFERENCE_GATES
        changes.append(change_of(old, new))
    gates = {
        gate: PairedGate(n, lost, won, passed=passed)
        for gate, (n, lost, won, passed) in sorted(counts.items())
    }
    pooled = [change for change in changes if change is not None]
    return gates, pool(pooled) if pooled else None


def change_of(old: Checks, new: Checks) -> Change | None:
    """Return how an answer changed by the gates of the pooled verdict; None where none of them applies."""
    pooled = [g for g in old if decides(g) and g not in REFERENCE_GATES and not GATES[g].two_sided]
    if not pooled:
        return None
    passed = all(new.get(gate, False) for gate in pooled)
    whole = passed - all(old[gate] for gate in pooled)
    changed = [gate for gate in pooled if new.get(gate, False) != old[gate]]
    return whole, {gate: new.get(gate, False) - old[gate] for gate in changed}


def pool(changes: Sequence[Change]) -> PooledGates:
    """Return all gates together, of the changes of all answers."""
    p_largest, p_fisher, p = sign_flips([change for change in changes if change[1]])
    right = Counter(whole for whole, _ in changes)
    lost = right[-1]
    won = right[1]
    return PooledGates(
        n=len(changes),
        lost=lost,
        won=won,
        p_sum=mcnemar(lost, won),
        p_largest=p_largest,
        p_fisher=p_fisher,
        p=p,
    )


def sign_flips(
    changes: Sequence[Change], flips: int = FLIPS, seed: int = 0
) -> tuple[float, float, float]:
    """Return p of the largest loss of a gate, of Fisher's combination of all gates, and of all tests together (one-sided).

    Without a difference between the sides each answer's changes have either sign with the same probability, all gates of the
    answer together: gates of one answer are not independent. The p of all tests (the sum of right answers is the third) is that
    of the smallest of their p under the same flips (Westfall and Young 1993).
    """
    import numpy as np
    from scipy.stats import binom, rankdata

    gates = sorted(set().union(*(change for _, change in changes)))
    if not gates:
        return 1.0, 1.0, 1.0
    # The order of the answers does not matter.
    changes = sorted(changes, key=lambda change: (change[0], sorted(change[1].items())))
    # Sums of small counts are exact in float32, whose products are several times as fast.
    matrix = np.zeros((len(changes), 1 + len(gates)), dtype=np.float32)
    for row, (whole, change) in zip(matrix, changes, strict=True):
        row[0] = whole
        row[1:] = [change.get(gate, 0) for gate in gates]
    signs = np.random.default_rng(seed).integers(0, 2, (flips, len(changes)), dtype=np.int8) * 2 - 1
    # Won - lost; the first row is observed.
    sums = np.vstack([matrix.sum(0), signs.astype(np.float32) @ matrix])
    sums_of_answers = sums[:, 0]
    sums = sums[:, 1:]
    n_changed = np.abs(matrix[:, 1:]).sum(0)
    fisher = np.zeros(len(sums))
    for column, total in enumerate(n_changed.astype(int)):
        table = -2 * binom.logsf(np.arange(total + 1) - 1, total, 0.5)  # of P(lost or more)
        fisher += table[((total - sums[:, column]) / 2).astype(int)]
    statistics = (-sums_of_answers, (-sums / np.sqrt(n_changed)).max(1), fisher)
    p = np.array([rankdata(-s.round(6), method="max") / len(s) for s in statistics])
    smallest = p.min(0)
    return float(p[1, 0]), float(p[2, 0]), float((smallest <= smallest[0]).mean())


# ---- coverage: which behaviours an evaluation tests, counted over the answers of the reference that show them
#
# What bf16 itself does not do cannot be lost, and what it did in few answers was hardly looked at. A behaviour is tested by a gate
# that bf16 passes in at least MIN_ANSWERS_TO_KEEP prompts: so many without a loss keep at a margin of 5 points.

# Without a loss: the lower bound of score_interval(0, 0, 52) is above -0.05, that of 51 is not.
MIN_ANSWERS_TO_KEEP = 52
RARE_ANSWERS = 10  # of a behaviour: more of the same prompts would not test it
MIN_SHARE_TO_TEST = 0.1  # of its prompts: what bf16 passes less often tests nothing


def is_tested(name: str, gate: PairedGate) -> bool:
    """Return whether the reference passes the gate often enough for a loss to show."""
    if not gate.n or gate.passed is None or GATES[name].two_sided:
        return gate.n > 0
    return gate.passed > 0 and gate.passed >= MIN_SHARE_TO_TEST * gate.n


def answers_of(gate: PairedGate) -> int:
    """Return how many answers of the reference the gate tests; old files do not say, so all of them."""
    return gate.n if gate.passed is None else gate.passed


def answers_per_behaviour(members: Iterable[Mapping[str, PairedGate]]) -> dict[str, int]:
    """Return for each behaviour the answers of the reference that show it, by the gate with most; the least of all members."""
    tables = [_answers(gates) for gates in members]
    if not tables:
        return dict.fromkeys(BEHAVIOURS, 0)
    return {behaviour: min(map(itemgetter(behaviour), tables)) for behaviour in BEHAVIOURS}


def _answers(gates: Mapping[str, PairedGate]) -> dict[str, int]:
    answers = dict.fromkeys(BEHAVIOURS, 0)
    for name, gate in gates.items():
        if decides(name):
            for behaviour in GATES[name].behaviours:
                answers[behaviour] = max(answers[behaviour], answers_of(gate))
    return answers


def unmet_labels(members: Iterable[Mapping[str, PairedGate]]) -> dict[str, PairedGate]:
    """Return the labelled gates that the reference passes too rarely; they test and keep nothing."""
    unmet: dict[str, PairedGate] = {}
    for gates in members:
        for name, gate in gates.items():
            labelled = decides(name) and GATES[name].basis == "label"
            if labelled and gate.n and not is_tested(name, gate):
                unmet.setdefault(name, gate)
    return unmet
