"""Judge a server's answers and the offline evaluation's to the same prompts by the same rule, and say how the verdicts agree."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from annie_quant import judge
from annie_quant.judge.decision import judge_members
from annie_quant.judge.gates import REFERENCE_GATES, Judged, checks
from annie_quant.judge.pairing import deciding_checks, pair_checks, with_floor
from annie_quant.offline.decoding import Completion
from annie_quant.offline.judging import judged, reference_answers
from annie_quant.offline.prompts import Answered, OfflineRequest, Template

GATES = (
    "tool_call", "factual", "reasoning", "abstention", "no_markdown", "tool_schema", "tool_selection", "tool_values",
)  # fmt: skip


class Prompts:
    """Prompts with bf16's answers: judges other answers to them."""

    def __init__(
        self,
        template: Template,
        requests: Sequence[OfflineRequest],
        reference: Sequence[Completion],
        floor: Sequence[Completion] | None = None,
        compares: bool = True,
    ) -> None:
        """compares: with the gates that compare with bf16's own answers, as an evaluation; False: without, as a benchmark."""
        self.template = template
        self.requests = [with_reference_gates(r) for r in requests] if compares else list(requests)
        self.before = reference_answers(template, self.answered(reference)).judged
        self.floor = None if floor is None else self.judged(floor)

    def answered(self, completions: Sequence[Completion]) -> list[Answered]:
        return [Answered(r, c) for r, c in zip(self.requests, completions, strict=True)]

    def judged(self, completions: Sequence[Completion]) -> list[Judged]:
        rows = [judged(self.template, answered) for answered in self.answered(completions)]
        pairs = zip(rows, self.before, strict=True)
        return [row._replace(reference=before.reference) for row, before in pairs]

    def counts(self, completions: Sequence[Completion]) -> dict[str, int]:
        table = judge.gate_table(self.judged(completions))
        return {gate: row.passes for gate, row in table.items() if gate in GATES}

    def changes(self, completions: Sequence[Completion]) -> dict[str, list[int]]:
        """Return gate → [answers, lost, won]."""
        rows = pair_answers(self.before, self.judged(completions), self.floor)[0]
        return {gate: [row.n, row.lost, row.won] for gate, row in rows.items()}

    def verdict(self, members: Mapping[str, Sequence[Completion]]) -> str:
        """Return the rule's verdict over these members' answers."""
        paired: dict[str, Any] = {}
        pooled: dict[str, Any] = {}
        for name, completions in members.items():
            paired[name], pooled[name] = pair_answers(
                self.before, self.judged(completions), self.floor
            )
        return judge_members(paired, pooled).verdict


def pair_answers(
    before: Sequence[Judged], after: Sequence[Judged], floor: Sequence[Judged] | None
) -> tuple[dict, Any]:
    """Pair two models' answers to the same prompts, in the same order.

    before: the reference's. after: the checkpoint's. floor: the reference's in another arithmetic.
    """
    rows, noisy, others = (
        [deciding_checks(checks(a, c, w, r), a, w) for w, c, a, r in side or ()]
        for side in (before, floor, after)
    )
    if floor is not None:
        rows = [with_floor(*pair) for pair in zip(rows, noisy, strict=True)]
    return pair_checks(zip(rows, others, strict=True))


def with_reference_gates(request: OfflineRequest) -> OfflineRequest:
    """Return the request with the gates that compare with bf16's own answer, as an evaluation judges it."""
    gates = tuple(dict.fromkeys((*request.workload.gates, *REFERENCE_GATES)))
    return replace(request, workload=replace(request.workload, gates=gates))


def agreement(served: str, ensemble: str, members: Collection[str]) -> str:
    """Return how the verdict of one served run agrees with the offline one. members: the verdict of each member judged alone.

    A run is one arithmetic, so it can be compared with a member, but not with "fragile", which needs several.
    same          the ensemble's verdict
    member        the verdict of one of its members, judged alone as the run is
    by a degree   neither, and "undecided" is one of the two sides' verdicts or lies between them
    reversed      neither, and one side keeps what the other loses
    """
    if served == ensemble:
        return "same"
    if served in members:
        return "member"
    reverse = {"keeps": "loses", "loses": "keeps"}.get(served)
    return "reversed" if reverse in (ensemble, *members) else "by a degree"


def first_difference(one: Completion, other: Completion) -> int:
    """Return the number of tokens before two answers part."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(other.tokens))
    )


def agreed(
    members: Sequence[Sequence[Completion]], served: Sequence[Completion]
) -> tuple[int, int]:
    """Return how many answers all members give alike, and how many of these are the served ones."""
    alike = [all(a == own[0] for a in own) for own in zip(*members, strict=True)]
    right = [same and a == b for same, a, b in zip(alike, members[0], served, strict=True)]
    return sum(alike), sum(right)


def verdicts(
    offline: Prompts,
    runs: Mapping[str, Sequence[Completion]],
    members: Mapping[str, Sequence[Completion]],
    profile: str,
    served: Prompts | None = None,
) -> dict[str, Any]:
    """Return the verdicts of the served runs, of the ensemble and of each member alone, and how they agree.

    served: what the runs are compared with, if it is not what the members are compared with.
    """
    served_verdicts = [(served or offline).verdict({profile: run}) for run in runs.values()]
    offline_verdict = offline.verdict(members)
    alone = {key: offline.verdict({profile: own}) for key, own in members.items()}
    return {
        "served_verdicts": served_verdicts,
        "offline_verdict": offline_verdict,
        "member_verdicts": alone,
        "agreement": [agreement(one, offline_verdict, alone.values()) for one in served_verdicts],
    }
