"""The rule of every decision: does a checkpoint keep what its reference does, on the same prompts (paired non-inferiority).

One gate under one arithmetic (a "member": a numerics profile, a perturbation NAME+..., or a server):

keeps      the reference passes at least LEAST_ANSWERS prompts, and the lower bound of the difference's 90 % score interval is above
           -margin (an error of 5 %). A gate without a margin (leaks, empty answers) keeps when no answer was lost. Where the
           reference has the fault on other prompts (the checkpoint wins some), the usual margin decides.
loses      otherwise, if the upper bound is below 0 and McNemar's mid-p (one-sided), adjusted for all gates, is below 5 %. This
           is the rule for gates without a margin too: a gate with a lost answer does not keep, but the arithmetic's noise
           does that to a checkpoint as good as its reference too, whose own answers are one draw (tests/perf/verdict_rule.py).
undecided  otherwise, with the number of prompts that would decide at the observed rates.

A gate that the reference passes in less than a tenth of its prompts tests nothing and does not decide; the verdict names those
with a label. If no labelled gate is left, nothing keeps.

A gate that compares with the reference's own answer (same_tool, ...) counts changes, and some change between two runs of one model.
Where the reference answered in a second arithmetic too, "lost" are the prompts that only the checkpoint changes, "won" those that
only that arithmetic changes; else every change is a loss. It loses only if the upper bound is below -margin, and the p of more
loss than the margin (instead of McNemar's), adjusted, is below 5 %.

A two-sided gate (the call rate) keeps if the whole interval is within the margin, and loses in either direction.

The p-values of all members' gates and of the pooled verdicts are adjusted together, by Hommel's method: more members give no more
false alarms, and gates that one fault fails together count once. A gate counts if at least 5 of its answers changed: with fewer,
no exact p is below 5 %, and without a difference the number of changes does not depend on their direction. Gates that compare
with the reference's answer always count: their number of changes is what is tested.

A sure loss that is smaller than the margin keeps. All deciding gates together (the pooled verdict) show small losses in many
gates: they lose by the same rule, with a margin of 2 points of the answers.

A member loses if a gate or the pooled verdict loses, keeps if all gates keep and one of them tests a behaviour, and is undecided
otherwise. A gate with fewer than LEAST_ANSWERS does not stand in the way if it lost no more than the margin and its behaviour is
tested by another gate, or if the reference shows it in fewer than RARE_ANSWERS and none was lost; a behaviour that no gate tests
is named in the verdict (pairing.py). A checkpoint is fragile if a gate keeps under one member and loses under another; else it
loses if a member loses, keeps if all keep, else it is undecided.

The functions change none of their arguments.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from annie_quant.documents import (
    Evaluation,
    GateResult,
    GateVerdict,
    Member,
    MemberVerdict,
    NumericsResult,
    OfflineSide,
    Outcome,
    PairedCounts,
    PairedGate,
    PairedVerdict,
    PooledGates,
    SearchNumerics,
    Standing,
)
from annie_quant.judge import statistics as stats
from annie_quant.judge.gates import GATES, LARGE_N, decides
from annie_quant.judge.pairing import (
    LEAST_ANSWERS,
    RARE_ANSWERS,
    answers_per_behaviour,
    describe_coverage,
    is_tested,
    unmet_labels,
)

LEAST_CHANGES = 5  # fewer changed answers give no exact p below 5 %: 1 / 2^4 = 6.25 %
CONFIDENCE = 0.9  # of the interval: 5 % per bound
MARGIN = 0.05
POOLED_MARGIN = 0.02
POOLED = "all"  # the pooled verdict's name among gates
FAILING: tuple[Standing, ...] = ("loses", "fragile")
OUTCOMES: dict[GateVerdict, Outcome] = {"keeps": "pass", "loses": "fail", "undecided": "undecided"}
SHOWN = 4
NOTHING_TESTED = "no gate tests anything that the reference does"
Gates = Mapping[str, PairedGate]
Side = TypeVar("Side", bound=NumericsResult | Member | OfflineSide)


def judge_members(
    members: Mapping[str, Gates], pooled: Mapping[str, PooledGates | None] | None = None
) -> PairedVerdict:
    """Decide about a checkpoint.

    members: name → gate → counts of lost, won and n, and how many the reference passed.
    """
    return verdict_of(*judge_gates(members, pooled))


def judge_gates(
    members: Mapping[str, Gates], pooled: Mapping[str, PooledGates | None] | None = None
) -> tuple[dict[str, dict[str, PairedGate]], dict[str, PooledGates | None]]:
    """Return copies of the counts with interval, p, verdict and n_to_decide."""
    gates = {
        name: {gate: copy.copy(row) for gate, row in rows.items()} for name, rows in members.items()
    }
    together = {name: copy.copy((pooled or {}).get(name)) for name in members}
    for name, rows in gates.items():
        _measure(rows, together[name])
    family = [row for name, rows in gates.items() for row in _testable(rows, together[name])]
    for tested, p_holm in zip(family, stats.hommel([row.p for row in family]), strict=True):
        tested.p_holm = p_holm
    for name, rows in gates.items():
        for gate, row in deciding(rows).items():
            _judge_gate(gate, row, len(family) or 1)
        if (row_of_all := together[name]) is not None:
            row_of_all.verdict = _by_interval(row_of_all, POOLED_MARGIN)
    return gates, together


def verdict_of(
    members: Mapping[str, Gates], pooled: Mapping[str, PooledGates | None]
) -> PairedVerdict:
    """Return the verdict over gates that were judged."""
    verdicts = {name: member_verdict(gates, pooled.get(name)) for name, gates in members.items()}
    by_gate = {name: _verdicts(gates, pooled.get(name)) for name, gates in members.items()}
    profiles: dict[str, list[str]] = {}
    for name in members:
        profiles.setdefault(name.partition("+")[0], []).append(name)
    standing = _standing(members, verdicts, by_gate)
    answers, unmet = answers_per_behaviour(members.values()), unmet_labels(members.values())
    reasons = [
        f"{name}: {describe(gate, members[name][gate])}"
        for name, result in verdicts.items()
        for gate in (*result.loses, *result.undecided)
        if gate in members[name] and not _same_as_profile(name, gate, by_gate)
    ]
    lost_together = {
        name: row
        for name, row in pooled.items()
        if row is not None and POOLED in verdicts[name].loses
    }
    return PairedVerdict(
        verdict=standing,
        sentence=_sentence(standing, verdicts, by_gate, describe_coverage(answers, unmet)),
        reasons=[
            *reasons,
            *(f"{name}: {describe_pooled(row)}" for name, row in lost_together.items()),
        ],
        profiles={
            profile: _standing(names, verdicts, by_gate) for profile, names in profiles.items()
        },
        members=verdicts,
        coverage=answers,
        not_tested=[*unmet, *(behaviour for behaviour, n in answers.items() if n < LEAST_ANSWERS)],
    )


def _same_as_profile(
    member: str, gate: str, by_gate: Mapping[str, Mapping[str, GateVerdict]]
) -> bool:
    """Return whether a perturbed arithmetic ("w4a4+perm1") has its profile's verdict of a gate: one reason is enough for both."""
    profile = member.partition("+")[0]
    return profile != member and by_gate.get(profile, {}).get(gate) == by_gate[member][gate]


def _measure(gates: Gates, pooled: PooledGates | None) -> None:
    """Set what follows from the counts alone."""
    for name, gate in gates.items():
        gate.p, gate.p_holm = p_of_loss(name, gate), None
    for row in [*gates.values(), *([pooled] if pooled else [])]:
        row.difference = (row.won - row.lost) / row.n if row.n else 0.0
        row.low, row.high = stats.score_interval(row.lost, row.won, row.n, CONFIDENCE)


def p_of_loss(name: str, gate: PairedGate) -> float:
    """Return McNemar's mid-p, or the p of a loss above the margin where the gate compares with the reference's answer."""
    if compares_with_reference(name):
        return stats.excess_loss(gate.lost, gate.n, GATES[name].margin, gate.won)
    return (
        stats.two_sided(gate.lost, gate.won)
        if is_two_sided(name)
        else stats.mid_p(gate.lost, gate.won)
    )


def compares_with_reference(name: str) -> bool:
    return name in GATES and GATES[name].basis == "reference"


def is_two_sided(name: str) -> bool:
    return name in GATES and GATES[name].two_sided


def loss_limit(name: str) -> float:
    """Return the difference that the interval's upper bound must be below for a loss."""
    return -GATES[name].margin if compares_with_reference(name) else 0.0


def _testable(gates: Gates, pooled: PooledGates | None) -> list[PairedCounts]:
    rows = deciding(gates).items()
    tested = [
        row
        for name, row in rows
        if row.lost + row.won >= LEAST_CHANGES or compares_with_reference(name)
    ]
    return [*tested, *([pooled] if pooled else [])]


def deciding(gates: Gates) -> dict[str, PairedGate]:
    """Return the gates that decide: known, not advisory, with a prompt, and that the reference passes often enough."""
    return {name: gate for name, gate in gates.items() if decides(name) and is_tested(name, gate)}


def member_verdict(gates: Gates, pooled: PooledGates | None = None) -> MemberVerdict:
    """Return the verdict of one member from its gates' verdicts."""
    by_gate = _verdicts(gates, pooled)
    loses = [name for name, verdict in by_gate.items() if verdict == "loses"]
    loses = [
        name for name in loses if name != POOLED
    ] or loses  # a lost gate explains the pooled loss
    answers = answers_per_behaviour([gates])
    undecided = [
        name
        for name, verdict in by_gate.items()
        if verdict == "undecided"
        and name != POOLED
        and stands_in_the_way(name, gates[name], answers)
    ]
    keeps = tests_a_behaviour(
        [name for name, verdict in by_gate.items() if verdict == "keeps"], gates
    )
    verdict: GateVerdict = "loses" if loses else "undecided" if undecided or not keeps else "keeps"
    return MemberVerdict(verdict=verdict, loses=loses, undecided=undecided)


def tests_a_behaviour(kept: Iterable[str], gates: Gates) -> bool:
    """Return whether gates that were kept show anything: an answer that is not empty, or as many calls, does not show one yet.

    gates: all of the member. Where they have labels, the reference must meet one of them often enough.
    """
    labelled = [
        is_tested(name, gate)
        for name, gate in gates.items()
        if decides(name) and GATES[name].basis == "label"
    ]
    return any(GATES[name].behaviours for name in kept if name in GATES) and (
        any(labelled) or not labelled
    )


def stands_in_the_way(name: str, gate: PairedGate, answers: Mapping[str, int]) -> bool:
    """Return whether an undecided gate forbids "keeps".

    One with too few answers does not, where its behaviour is tested elsewhere and what it lost itself is within the margin.
    """
    if answers_of(gate) >= LEAST_ANSWERS:
        return True
    change = (gate.won - gate.lost) / gate.n
    if change < -MARGIN or (is_two_sided(name) and change > MARGIN):
        return True
    behaviours = GATES[name].behaviours  # without any, no other gate tests the same
    tested_elsewhere = bool(behaviours) and all(
        answers[behaviour] >= LEAST_ANSWERS for behaviour in behaviours
    )
    return not tested_elsewhere and (gate.lost > 0 or answers_of(gate) >= RARE_ANSWERS)


def answers_of(gate: PairedGate) -> int:
    """Return how many answers of the reference the gate tests; files of version 0.2 and older do not say, so all of them."""
    return gate.n if gate.passed is None else gate.passed


def _judge_gate(name: str, gate: PairedGate, n_tests: int) -> None:
    margin, level = GATES[name].margin, stats.LEVEL / n_tests
    gate.margin, gate.n_to_decide = margin, None
    if compares_with_reference(name):
        gate.detectable = stats.detectable_excess(gate.n, margin, level)
    else:
        gate.detectable = stats.detectable_loss(gate.n, round(gate.won / gate.n, 3), level)
    if is_two_sided(name):
        gate.verdict = _two_sided(gate, margin)
    elif _has_margin(name, gate):
        gate.verdict = _by_interval(gate, margin or MARGIN, loss_limit(name))
    elif not gate.lost:
        gate.verdict = "keeps"
    else:
        gate.verdict = "loses" if is_loss(gate, 0.0, stats.LEVEL) else "undecided"
    answers = gate.n if is_two_sided(name) else answers_of(gate)
    if gate.verdict == "keeps" and answers < LEAST_ANSWERS:
        gate.verdict = "undecided"
        gate.n_to_decide = math.ceil(gate.n * LEAST_ANSWERS / max(1, answers))
    elif gate.verdict == "undecided":
        gate.n_to_decide = _n_to_decide(name, gate, level)


def _n_to_decide(name: str, gate: PairedGate, level: float) -> int | None:
    margin = GATES[name].margin
    if is_two_sided(name):
        changes = sorted((gate.lost, gate.won), reverse=True)
        return stats.n_to_decide(*changes, gate.n, margin, None, level)
    return stats.n_to_decide(
        gate.lost,
        gate.won,
        gate.n,
        margin or (MARGIN if gate.won else 0.0),
        loss_limit(name),
        level,
        excess=compares_with_reference(name),
    )


def _two_sided(gate: PairedGate, margin: float) -> GateVerdict:
    if -margin < gate.low and gate.high < margin:
        return "keeps"
    changed = gate.high < 0 or gate.low > 0
    return (
        "loses"
        if changed and gate.p_holm is not None and gate.p_holm < stats.LEVEL
        else "undecided"
    )


def _has_margin(name: str, gate: PairedGate) -> bool:
    """Return whether some loss is accepted: also of leaks and empty answers, where the reference has them on other prompts."""
    return GATES[name].margin > 0 or gate.won > 0


def _by_interval(row: PairedCounts, margin: float, limit: float = 0.0) -> GateVerdict:
    if row.low > -margin:
        return "keeps"
    return "loses" if is_loss(row, limit, stats.LEVEL) else "undecided"


def is_loss(row: PairedCounts, limit: float, level: float) -> bool:
    """Return whether the upper bound is below the limit (loss_limit) and the adjusted p below the level."""
    return row.high < limit and row.p_holm is not None and row.p_holm < level


def decided_at(name: str, gate: PairedGate, level: float) -> bool:
    """Return whether a gate keeps or loses with an error of at most `level`, for a look before all prompts were answered.

    Without a margin: it keeps with no lost answer in as many as the absolute requirements take for many (LARGE_N).
    """
    if answers_of(gate) < LEAST_ANSWERS and not is_two_sided(name):
        return False
    low, high = stats.score_interval(gate.lost, gate.won, gate.n, 1 - 2 * level)
    sure = gate.p_holm is not None and gate.p_holm < level
    if is_two_sided(name):
        return (-GATES[name].margin < low and high < GATES[name].margin) or (
            sure and (high < 0 or low > 0)
        )
    loses = high < loss_limit(name) and sure
    if _has_margin(name, gate):
        return low > -(GATES[name].margin or MARGIN) or loses
    return loses or (not gate.lost and gate.n >= LARGE_N)


def _verdicts(gates: Gates, pooled: PooledGates | None) -> dict[str, GateVerdict]:
    by_gate: dict[str, GateVerdict] = {name: gate.verdict for name, gate in deciding(gates).items()}
    return by_gate | ({POOLED: pooled.verdict} if pooled is not None else {})


def _standing(
    names: Collection[str],
    verdicts: Mapping[str, MemberVerdict],
    by_gate: Mapping[str, Mapping[str, GateVerdict]],
) -> Standing:
    if changing_gates({name: by_gate[name] for name in names}):
        return "fragile"
    return combined([verdicts[name].verdict for name in names])


def combined(verdicts: Collection[GateVerdict | Standing]) -> Standing:
    """Return the standing of several members without a gate that keeps under one and loses under another."""
    order: tuple[Standing, ...] = ("fragile", "loses", "undecided")
    for verdict in order:
        if verdict in verdicts:
            return verdict
    return "keeps" if verdicts else "undecided"


def changing_gates(by_gate: Mapping[str, Mapping[str, GateVerdict]]) -> list[str]:
    """Return the gates that keep under one member and lose under another.

    by_gate: member → gate → verdict.

    The pooled verdict is not a gate: it never makes a checkpoint fragile.
    """
    gates = dict.fromkeys(
        gate for verdicts in by_gate.values() for gate in verdicts if gate != POOLED
    )
    return [
        gate
        for gate in gates
        if {"keeps", "loses"} <= {verdicts.get(gate) for verdicts in by_gate.values()}
    ]


# ---- as text


def title(gate: str) -> str:
    return "all gates together" if gate == POOLED else GATES[gate].title if gate in GATES else gate


def points(value: float) -> str:
    """Return a share as percentage points: +1.2, -24."""
    text = f"{100 * value:+.1f}"
    return "0.0" if float(text) == 0 else text


def describe(name: str, gate: PairedGate) -> str:
    """Return a gate's counts, difference, interval, p and verdict."""
    text = f"{title(name)} {gate.verdict}: {gate.lost} lost and {gate.won} won of {gate.n}, {describe_interval(gate)}"
    if gate.verdict != "undecided":
        return text
    return f"{text}; " + (
        f"n = {gate.n_to_decide} would decide" if gate.n_to_decide else "no n decides at this rate"
    )


def describe_pooled(pooled: PooledGates) -> str:
    counts = f"{pooled.lost} right answers lost and {pooled.won} won of {pooled.n}"
    return f"{title(POOLED)}: {counts}, {describe_interval(pooled)}"


def describe_interval(row: PairedCounts) -> str:
    return f"{points(row.difference)} points (90 % {points(row.low)} to {points(row.high)}, p {row.p:.2g})"


def _sentence(
    verdict: Standing,
    verdicts: Mapping[str, MemberVerdict],
    by_gate: Mapping[str, Mapping[str, GateVerdict]],
    not_tested: str,
) -> str:
    if not verdicts:
        return "Nothing was compared with the reference."
    return f"{_claim(verdict, verdicts, by_gate)}{f'; not tested: {not_tested}' if not_tested else ''}."


def _claim(
    verdict: Standing,
    verdicts: Mapping[str, MemberVerdict],
    by_gate: Mapping[str, Mapping[str, GateVerdict]],
) -> str:
    if verdict == "keeps":
        return f"Keeps every gate under {', '.join(verdicts)}"
    if verdict == "fragile":
        changing = changing_gates(by_gate)
        lost = [
            name
            for name, gates in by_gate.items()
            if any(gates.get(g) == "loses" for g in changing)
        ]
        kept = [
            name
            for name, gates in by_gate.items()
            if any(gates.get(g) == "keeps" for g in changing)
        ]
        keeps = [name for name in kept if name not in lost]
        end = f", keeps under {', '.join(keeps)}" if keeps else " in part of the arithmetics"
        return f"Fragile: loses {_titles(changing)} under {', '.join(lost)}{end}"
    names = {
        gate: [m for m, gates in by_gate.items() if gates.get(gate) == verdict]
        for gate in _gates(verdicts, verdict)
    }
    under = dict.fromkeys(name for members in names.values() for name in members)
    if verdict == "loses":
        return f"Loses {_titles(names)} under {', '.join(under)}"
    if not names:
        return f"Undecided: {NOTHING_TESTED} (annie-quant init makes prompts that do)"
    return f"Undecided with so few prompts: {_titles(names)} under {', '.join(under)}"


def _gates(verdicts: Mapping[str, MemberVerdict], verdict: Standing) -> list[str]:
    lists = [v.loses if verdict == "loses" else v.undecided for v in verdicts.values()]
    return list(dict.fromkeys(gate for gates in lists for gate in gates))


def _titles(gates: Collection[str]) -> str:
    names = [title(gate) for gate in gates if gate != POOLED] or [title(gate) for gate in gates]
    if len(names) > SHOWN:
        names = [*names[:SHOWN], f"{len(names) - SHOWN} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# ---- in documents


def apply(table: Mapping[str, GateResult], paired: Gates) -> dict[str, GateResult]:
    """Return a table with the paired verdict of each deciding gate; `meets` keeps the absolute one."""
    return {name: _with_verdict(name, result, paired.get(name)) for name, result in table.items()}


def _with_verdict(name: str, result: GateResult, gate: PairedGate | None) -> GateResult:
    result = msgspec.structs.replace(
        result, meets=result.verdict if result.meets is None else result.meets
    )
    if gate is None or result.advisory or not decides(name):
        return result
    if not is_tested(name, gate):
        result.verdict, result.n_to_decide = "undecided", None
        result.rule = f"it tests nothing: the reference passes {gate.passed} of {gate.n}"
        return result
    result.verdict, result.n_to_decide = OUTCOMES[gate.verdict], gate.n_to_decide
    interval = f"{points(gate.difference)} points, 90 % {points(gate.low)} to {points(gate.high)}"
    counts = f"{gate.lost} lost, {gate.won} won; {interval}, margin {100 * gate.margin:g}"
    result.rule = f"paired with the reference: {counts}"
    return result


def judge_evaluation(evaluation: Evaluation) -> Evaluation:
    """Return an evaluation with its verdict over all members of its ensembles, and each gate's."""
    sides: dict[str, NumericsResult | Member] = {**evaluation.numerics, **evaluation.members}
    judged, verdict = judge_sides(sides)
    return msgspec.structs.replace(
        evaluation,
        numerics={name: side for name, side in judged.items() if isinstance(side, NumericsResult)},
        members={name: side for name, side in judged.items() if isinstance(side, Member)},
        verdict=blocked(verdict, evaluation.blocking),
    )


def blocked(verdict: PairedVerdict, blocking: Sequence[str]) -> PairedVerdict:
    """Return the verdict with what forbids "keeps"; the reason comes first in the sentence."""
    if not blocking:
        return verdict
    keeps, sentence = (
        verdict.verdict == "keeps",
        f"{blocking[0]}. Undecided, although no gate is lost.",
    )
    return msgspec.structs.replace(
        verdict,
        verdict="undecided" if keeps else verdict.verdict,
        sentence=sentence if keeps else verdict.sentence,
        reasons=[*blocking, *verdict.reasons],
        profiles={k: "undecided" if v == "keeps" else v for k, v in verdict.profiles.items()},
    )


def judge_sides(sides: Mapping[str, Side]) -> tuple[dict[str, Side], PairedVerdict]:
    """Judge a checkpoint's arithmetics together: return them with the verdicts of their gates, and the verdict."""
    gates, pooled = judge_gates(
        {k: v.paired for k, v in sides.items()}, {k: v.pooled for k, v in sides.items()}
    )
    judged = {
        name: msgspec.structs.replace(
            side, gates=apply(side.gates, gates[name]), paired=gates[name], pooled=pooled[name]
        )
        for name, side in sides.items()
    }
    return judged, verdict_of(gates, pooled)


# ---- strategies: when the search drops one before all its prompts were judged, and when it accepts one
#
# A strategy is looked at after few prompts and again after all of them. At the early look it is dropped where a gate has lost so
# many answers that it could not keep even if no other prompt changed, or loses by the rule with its level divided by the number of
# looks (Bonferroni). It is accepted only at the last look, where every gate must keep under every required numerics.

FIRST_LOOK = 30  # prompts per gate


def looks(n: int) -> list[int]:
    """Return the prompts per gate at each look; the last one is n."""
    return [FIRST_LOOK, n] if n >= 2 * FIRST_LOOK else [n]


def failing(gates: Mapping[str, GateResult]) -> list[str]:
    """Return the deciding gates that fail or are undecided."""
    return [
        name for name, result in gates.items() if result.verdict != "pass" and not result.advisory
    ]


def cannot_keep(gate: str, pair: PairedGate, in_all: int, n_looks: int) -> str | None:
    """Return why a gate will not keep any more, seen at an early look; None where it still may.

    in_all: how many prompts it will have at the last look.
    """
    counts = f"{title(gate)} lost {pair.lost} and won {pair.won} of {pair.n}"
    if GATES[gate].margin == 0 and pair.lost and not pair.won:
        return f"{counts}: none may be lost"
    margin = GATES[gate].margin or MARGIN
    n = max(in_all, pair.n)
    if stats.score_interval(pair.lost, pair.won, n, CONFIDENCE)[0] <= -margin:
        return f"{counts}: even without a change in the other {n - pair.n}, it could not keep"
    if pair.low <= -margin and is_loss(pair, loss_limit(gate), stats.LEVEL / n_looks):
        return f"{counts}: a loss (p {pair.p_holm:.2g}, adjusted)"
    return None


def early_reasons(
    sides: Mapping[str, SearchNumerics | Member], counts: Mapping[str, int], n_looks: int
) -> list[str]:
    """Return reasons to drop a strategy at an early look.

    counts: prompts per gate at the last look.
    """
    return [
        f"{numerics.upper()}: {reason}"
        for numerics, side in sides.items()
        for gate, pair in side.paired.items()
        if decides(gate) and (reason := cannot_keep(gate, pair, counts[gate], n_looks))
    ]


def missing_numerics(sides: Mapping[str, object], required: Sequence[str]) -> list[str]:
    """Return a reason for each required numerics that no server can give this checkpoint."""
    return [
        f"{kind.upper()} is not available: the checkpoint is weight-only"
        for kind in required
        if kind not in sides
    ]


def final_reasons(
    verdict: PairedVerdict, sides: Mapping[str, object], required: Sequence[str]
) -> list[str]:
    """Return reasons why a strategy is not accepted at the last look; empty where it is, which needs the verdict "keeps"."""
    reasons = missing_numerics(sides, required)
    if verdict.verdict != "keeps":
        reasons += verdict.reasons or [verdict.sentence]
    return reasons
