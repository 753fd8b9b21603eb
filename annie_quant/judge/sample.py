"""Choose cases: as many prompts as each gate needs, evenly over the workloads, the same for every model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from annie_quant.errors import UsageError
from annie_quant.judge.answers import Answer
from annie_quant.judge.gates import checks, decides
from annie_quant.judge.workloads import Case, Workload

# An answer that every gate applies to: it has text, and its end is known. The bf16 model may answer in words or with a call.
ANSWER = Answer(text="These are the words of an answer that is in English.", finish_reason="stop", completion_tokens=12)
REFERENCES = (ANSWER, replace(ANSWER, tool_calls=[{"id": "", "name": "", "arguments": "{}"}]))


def sample(workloads: Sequence[Workload], n_per_gate: int, seed: int = 0) -> list[Workload]:
    """Return the workloads, each with a seeded choice of its cases, so that every gate is judged n_per_gate times.

    The workloads get cases in turn. Each gets a tenth of n_per_gate at least (each turn of a conversation counts) and more
    only while one of its deciding gates needs cases. A gate for which there are too few cases gets all of them.
    Raises UsageError for n_per_gate below 1: an evaluation of nothing would pass.
    """
    if n_per_gate < 1:
        raise UsageError(f"the number of prompts per gate must be 1 or more, got {n_per_gate}")
    decks = []
    for workload in workloads:
        cases = list(workload.cases)
        random.Random(f"{seed}:{workload.name}").shuffle(cases)
        decks.append(cases)
    chosen: list[list[Case]] = [[] for _ in workloads]
    counted: Counter[str] = Counter()
    least = -(-n_per_gate // 10)
    for index in range(max(map(len, decks), default=0)):
        for workload, deck, mine in zip(workloads, decks, chosen, strict=True):
            if index >= len(deck):
                continue
            case = deck[index]
            gates = applying(workload, case)
            if sum(c.n_turns for c in mine) < least or any(counted[g] < n_per_gate for g in gates if decides(g)):
                mine.append(case)
                counted += gates
    return [replace(w, cases=tuple(mine)) for w, mine in zip(workloads, chosen, strict=True)]


def applying(workload: Workload, case: Case) -> Counter[str]:
    """Return how often each gate of the workload judges this case, at most: what bf16 answers is not known yet."""
    gates: Counter[str] = Counter()
    for turn in range(case.n_turns):
        at_turn = case.at_turn(turn)
        names = {
            name for reference in REFERENCES for name in checks(ANSWER, replace(at_turn, reference=reference), workload)
        }
        if "same_arguments" in names:  # the stand-in for bf16's call fits no schema
            names |= {"same_validity"} & set(workload.gates)
        gates.update(names)
    return gates


def answers_per_gate(workloads: Sequence[Workload]) -> Counter[str]:
    """Return how many answers each gate judges when all cases are used."""
    counts: Counter[str] = Counter()
    for workload in workloads:
        for case in workload.cases:
            counts += applying(workload, case)
    return counts
