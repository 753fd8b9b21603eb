"""Which prompts are used: as many as each gate needs, in equal shares of the workloads and their categories, for every model.

How many answers a gate applies to that compares with bf16's own answers is known only when bf16 has
answered; what bf16 itself fails or never calls is not tested by any number of them, and a note says
so.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from annie_quant.core.errors import UsageError
from annie_quant.documents import Answer, GateResult
from annie_quant.judge.gates import IMPLIED, REFERENCE_GATES, Judged, checks, decides
from annie_quant.judge.workloads import Case, Workload

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
    called: set[str] = set()
    expected: Counter[str] = Counter()
    n_expected = n_answered_by_calls = 0
    for row in answers:
        called |= {str(call.get("name")) for call in row.answer.tool_calls}
        names = expected_tools(row.case)
        # A call that the limit cut says nothing about the model.
        if names and row.answer.finish_reason != "length":
            expected.update(names)
            n_expected += 1
            n_answered_by_calls += bool(row.answer.tool_calls)
    if n_expected >= MIN_PROMPTS and not n_answered_by_calls:
        return [
            *lines,
            f"bf16 calls no tool in {n_expected} prompts that need one: is the reference the base model, or does its chat "
            "template leave out the tools? Nothing about tools can be judged",
        ]
    for name, n in sorted(expected.items()):
        if name not in called:
            lines.append(
                f"{name} is never called by bf16 itself ({n} prompts): nothing about it can be judged"
            )
    return lines


def expected_tools(case: Case) -> list[str]:
    """Return the tools that a case expects by its label, or that its log has."""
    expect = case.expect
    names = [expect["tool"]] if expect.get("tool") else []
    for call in expect.get("calls") or ():
        names += call
    logged = expect.get("logged")
    if isinstance(logged, Mapping):
        names += logged.get("calls") or ()
    return [str(name) for name in names]


MIN_ANSWERS_PER_GATE = (
    60  # a gate without a changed answer keeps from 52 on (judge/decision/rule.py)
)
MAX_FACTOR = 4  # times n per gate, at most, to get them


def prompts_per_gate(n: int, reference: Mapping[str, GateResult]) -> int:
    """Return n, or more where a gate that compares with bf16's own answers applies to fewer than MIN_ANSWERS_PER_GATE of n prompts.

    reference: bf16's gates over n prompts per gate. A gate that is too rare to be judged (advisory)
        does not count.
    """
    fewest = min(
        (g.n for g in reference.values() if g.basis == "reference" and not g.advisory and g.n),
        default=n,
    )
    if n < MIN_ANSWERS_PER_GATE or fewest >= MIN_ANSWERS_PER_GATE:
        return n
    return min(MAX_FACTOR * n, math.ceil(n * MIN_ANSWERS_PER_GATE / fewest))


# An answer that every gate applies to: it has text, and its end is known. The bf16 model may answer
# in words or with a call.
_ANSWER = Answer(
    text="These are the words of an answer that is in English.",
    finish_reason="stop",
    completion_tokens=12,
)
CALLING = msgspec.structs.replace(_ANSWER, tool_calls=[{"id": "", "name": "", "arguments": "{}"}])
REFERENCES = (_ANSWER, CALLING)


def sample(workloads: Sequence[Workload], n_per_gate: int, seed: int = 0) -> list[Workload]:
    """Return the workloads, each with a seeded choice of its cases, so that every deciding gate is judged n_per_gate times.

    The categories of all workloads get cases in turn. Each workload gets a tenth of n_per_gate at
    least (each turn of a conversation counts) and a category more only while one of its deciding
    gates needs cases. A gate for which there are too few cases gets all of them (`shortages` names
    it). Raises UsageError for n_per_gate below 1: an evaluation of nothing would pass.
    """
    if n_per_gate < 1:
        raise UsageError(f"the number of prompts per gate must be 1 or more, got {n_per_gate}")
    chosen: dict[str, list[Case]] = {workload.name: [] for workload in workloads}
    counts: Counter[str] = Counter()
    turns: Counter[str] = Counter()
    min_turns = -(-n_per_gate // 10)
    decks = list(itertools.chain.from_iterable(_decks(w, seed) for w in workloads))
    for cases in itertools.zip_longest(*(deck for _, deck in decks)):
        for (workload, _), case in zip(decks, cases, strict=True):
            if case is None:
                continue
            gates = applying(workload, case)
            needed = any(counts[g] < n_per_gate for g in gates if decides(g))
            if needed or turns[workload.name] < min_turns:
                chosen[workload.name].append(case)
                counts += gates
                turns[workload.name] += case.n_turns
    return [replace(w, cases=tuple(chosen[w.name])) for w in workloads]


def _decks(workload: Workload, seed: int) -> list[tuple[Workload, list[Case]]]:
    """Return the shuffled cases of each category of a workload."""
    cases = list(workload.cases)
    random.Random(f"{seed}:{workload.name}").shuffle(cases)
    by_category: dict[str, list[Case]] = {}
    for case in cases:
        by_category.setdefault(case.category, []).append(case)
    return [(workload, deck) for deck in by_category.values()]


def shortages(workloads: Sequence[Workload], n_per_gate: int) -> Iterator[str]:
    """Yield a line for each deciding gate with a label that the workloads have fewer prompts of than n_per_gate."""
    short = [
        f"{gate} {n}"
        for gate, n in sorted(answers_per_gate(workloads).items())
        if n < n_per_gate and decides(gate) and gate not in REFERENCE_GATES
    ]
    if short:
        yield f"fewer than {n_per_gate} prompts in {', '.join(w.name for w in workloads)}: {', '.join(short)}"


def applying(workload: Workload, case: Case) -> Counter[str]:
    """Return how often each gate of the workload judges this case, at most: what bf16 answers is not known yet."""
    gates: Counter[str] = Counter()
    for turn in range(case.n_turns):
        at_turn = case.at_turn(turn)
        names = {
            name
            for reference in REFERENCES
            for name in checks(_ANSWER, at_turn, workload, reference)
        }
        if (
            "same_arguments" in names
        ):  # the stand-in for bf16's call fits no schema, and is one call
            names |= {"same_validity", "same_several"} & {*workload.gates, *IMPLIED}
        gates.update(names)
    return gates


def answers_per_gate(workloads: Sequence[Workload]) -> Counter[str]:
    """Return how many answers each gate judges when all cases are used."""
    counts: Counter[str] = Counter()
    for workload in workloads:
        for case in workload.cases:
            counts += applying(workload, case)
    return counts
