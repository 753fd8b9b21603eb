"""Coverage: which behaviours an evaluation tests, counted over the answers of the reference that show them.

What bf16 itself does not do cannot be lost, and what it did in few answers was hardly looked at. A behaviour is tested by a gate
that bf16 passes in at least LEAST_ANSWERS prompts: so many without a loss keep at a margin of 5 points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from annie_quant.documents import PairedGate
from annie_quant.judge.gates import BEHAVIOURS, GATES, decides

LEAST_ANSWERS = 52  # without a loss: score_interval(0, 0, 52) is above -0.05, score_interval(0, 0, 51) is not
RARE_ANSWERS = 10  # of a behaviour that bf16 shows so rarely that more of the same prompts would not test it
LEAST_SHARE = 0.1  # of its prompts: what bf16 passes less often tests nothing


def is_tested(name: str, gate: PairedGate) -> bool:
    """Return whether the reference passes the gate often enough for a loss to show."""
    if not gate.n or gate.passed is None or GATES[name].two_sided:
        return gate.n > 0
    return gate.passed > 0 and gate.passed >= LEAST_SHARE * gate.n


def answers_per_behaviour(members: Iterable[Mapping[str, PairedGate]]) -> dict[str, int]:
    """Return for each behaviour the answers of the reference that show it, by the gate with most; the least of all members."""
    tables = [_answers(gates) for gates in members]
    return {behaviour: min((table[behaviour] for table in tables), default=0) for behaviour in BEHAVIOURS}


def _answers(gates: Mapping[str, PairedGate]) -> dict[str, int]:
    answers = dict.fromkeys(BEHAVIOURS, 0)
    for name, gate in gates.items():
        if decides(name):
            for behaviour in GATES[name].behaviours:
                answers[behaviour] = max(answers[behaviour], gate.n if gate.passed is None else gate.passed)
    return answers


def unmet_labels(members: Iterable[Mapping[str, PairedGate]]) -> list[str]:
    """Return the labelled gates that the reference passes too rarely, each with its counts; they test and keep nothing."""
    return list(
        dict.fromkeys(
            f"{GATES[name].title} (the reference passes {gate.passed} of {gate.n})"
            for gates in members
            for name, gate in gates.items()
            if decides(name) and GATES[name].basis == "label" and gate.n and not is_tested(name, gate)
        )
    )


def describe_coverage(answers: Mapping[str, int], unmet: Sequence[str] = ()) -> str:
    """Return what is not tested: labels that the reference does not meet, and behaviours with too few answers, fewest first.

    "tool calls (the reference passes 2 of 60), decline, several calls (0 answers), stop (40 answers)"
    """
    by_number: dict[int, list[str]] = {}
    for behaviour, n in answers.items():
        if n < LEAST_ANSWERS:
            by_number.setdefault(n, []).append(behaviour)
    behaviours = [f"{', '.join(names)} ({n} answer{'' if n == 1 else 's'})" for n, names in sorted(by_number.items())]
    return ", ".join([*unmet, *behaviours])
