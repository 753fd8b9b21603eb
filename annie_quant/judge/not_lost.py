"""What bf16's own answers leave open: gates that bf16 itself fails, tools that it never calls.

The paired rule (decision/paired.py) counts only what bf16 has and the quantized model lost. These notes say what that leaves out.

How many prompts per gate are needed so that gates which compare with bf16's own answers apply to enough of them.

How many answers such a gate applies to is known only when bf16 has answered: a language, for example, is compared in answers of
six words or more. Without this, such a gate stays undecided although the workloads have more prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from annie_quant.documents import GateResult
from annie_quant.judge.answers import Answer
from annie_quant.judge.gates import REFERENCE_GATES
from annie_quant.judge.workloads import Case, Workload

Judged = tuple[Workload, Case, Answer]
MIN_PROMPTS = 5  # that need a tool; with fewer, no call by bf16 proves nothing


def compares_with_reference(workloads: Iterable[Workload]) -> bool:
    """Return whether a workload has gates that compare with bf16's own answers."""
    return any(set(REFERENCE_GATES) & set(w.gates) for w in workloads)


def reference_notes(answers: Sequence[Judged], reference: Mapping[str, GateResult]) -> list[str]:
    """Return what bf16's own answers leave open, one line each: failing gates, tools that it never calls."""
    lines = [
        f"bf16 itself passes {r.title or name} in {r.passes} of {r.n} answers; this is not lost by quantizing"
        for name, r in reference.items()
        if r.verdict == "fail"
    ]
    called = {str(call.get("name")) for _, _, answer in answers for call in answer.tool_calls}
    expected: dict[str, int] = {}
    n_expected = n_called = 0
    for _, case, answer in answers:
        names = expected_tools(case)
        n_expected += bool(names)
        n_called += bool(names and answer.tool_calls)
        for name in names:
            expected[name] = expected.get(name, 0) + 1
    if n_expected >= MIN_PROMPTS and not n_called:
        return [
            *lines,
            f"bf16 calls no tool in {n_expected} prompts that need one: is the reference the base model, or does its chat "
            "template leave out the tools? Nothing about tools can be judged",
        ]
    for name, n in sorted(expected.items()):
        if name not in called:
            lines.append(f"{name} is never called by bf16 itself ({n} prompts): nothing about it can be judged")
    return lines


def expected_tools(case: Case) -> list[str]:
    """Return the tools that a case expects by its label, or that its log has."""
    expect = case.expect
    names = [str(expect["tool"])] if expect.get("tool") else []
    names += [str(name) for call in expect.get("calls") or () for name in call]
    logged = expect.get("logged")
    return names + [str(name) for name in (logged.get("calls") or () if isinstance(logged, Mapping) else ())]


LEAST_ANSWERS = 60  # a gate without a changed answer keeps from 52 on (judge/decision/paired.py)
MOST_PROMPTS = 4  # times n per gate, at most, to get them


def prompts_per_gate(n: int, reference: Mapping[str, GateResult]) -> int:
    """Return n, or more where a gate that compares with bf16's own answers applies to fewer than LEAST_ANSWERS of n prompts.

    reference: bf16's gates over n prompts per gate. A gate that is too rare to be judged (advisory) does not count.
    """
    fewest = min((g.n for g in reference.values() if g.basis == "reference" and not g.advisory and g.n), default=n)
    if n < LEAST_ANSWERS or fewest >= LEAST_ANSWERS:
        return n
    return min(MOST_PROMPTS * n, math.ceil(n * LEAST_ANSWERS / fewest))
