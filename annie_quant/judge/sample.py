"""Choosing cases: as many prompts as each gate needs, spread evenly over the workloads, the same for every model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from annie_quant.judge.answers import Answer
from annie_quant.judge.tabulation import advisory, checks
from annie_quant.judge.workloads import Case, Workload


def sample(workloads: Sequence[Workload], n_per_gate: int, seed: int = 0) -> list[Workload]:
    """The workloads, each with a seeded choice of its cases, so that every gate is judged at least n_per_gate times.

    Cases are dealt round by round, one a workload; a workload gets a tenth of n_per_gate in any case (a conversation
    counts a turn at a time) and then goes on only while one of its deciding gates still needs cases. A gate that the workloads
    cannot fill gets all that they hold.
    """
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
            turns_dealt = sum(c.n_turns for c in mine)
            if turns_dealt < least or any(counted[g] < n_per_gate for g in gates if not advisory(g)):
                mine.append(case)
                counted += gates
    return [replace(w, cases=tuple(mine)) for w, mine in zip(workloads, chosen, strict=True)]


def applying(workload: Workload, case: Case) -> Counter[str]:
    """How often each gate of the workload would judge this case."""
    # The answer must be one that every gate has something to say about: text, and an end of its own.
    answer = Answer(text="words", finish_reason="stop")
    gates: Counter[str] = Counter()
    for turn in range(case.n_turns):
        gates.update(checks(answer, case.at_turn(turn), workload).keys())
    return gates
