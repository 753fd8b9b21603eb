"""The rule: counts in, verdicts out. It decides whether a checkpoint keeps what its reference does.

Both answer the same prompts. Of each gate, "lost" are the prompts that only the reference passes,
and "won" those that only the checkpoint passes. A gate in one arithmetic, or behind one server:

keeps      The reference passes at least MIN_ANSWERS_TO_KEEP prompts, and the lower bound of the
           difference's 90 % score interval is above -margin. A gate without a margin (leaks, empty
           answers) keeps when no answer was lost. Where the reference has the fault on other
           prompts, the usual margin decides.
loses      Otherwise, if the upper bound is below 0 and McNemar's mid-p (one-sided), adjusted for
           all gates, is below 5 %. This holds for gates without a margin too: rounding noise alone
           can lose one answer, so one lost answer does not prove a loss.
undecided  Otherwise, with the number of prompts that would decide at the observed rates.

A gate that the reference passes in less than a tenth of its prompts tests nothing and does not
decide. If no labelled gate is left, nothing keeps.

A gate that compares with the reference's own answer (same_tool, ...) counts changes, and two runs
of one model differ too. Where the reference answered in a second arithmetic, "lost" are the
prompts that only the checkpoint changes, "won" those that only that arithmetic changes; else
every change is a loss. Such a gate loses only if the upper bound is below -margin and the p of
more loss than the margin, adjusted, is below 5 %. A two-sided gate (the call rate) keeps if the
whole interval is within the margin, and loses in either direction.

The p-values of all arithmetics are adjusted together, by Hommel's method: more arithmetics give no
more false alarms. A gate counts if at least MIN_CHANGES answers changed: with fewer, no exact p is
below 5 %. Gates that compare with the reference's answer always count.

A sure loss that is smaller than the margin keeps. The pooled verdict (all deciding gates together,
with a margin of 2 points) finds small losses in many gates.

A numerics profile, or a server, is judged with its further arithmetics (PROFILE+NAME):

loses      a gate is lost in the profile's own arithmetic, or in one of the others and kept in none
fragile    otherwise, if a gate is lost in one arithmetic and kept in another
undecided  otherwise, if anything is undecided that blocks "keeps"
keeps      otherwise

A checkpoint has the verdict of the worst of its profiles, in this order. A profile that no server
computes (NOT_SERVED) counts only where there is no other.

The functions change none of their arguments.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from annie_quant.documents import (
    GateResult,
    GateVerdict,
    MemberVerdict,
    PairedCounts,
    PairedGate,
    PooledGates,
    SpeedGate,
    Standing,
)
from annie_quant.judge import statistics as stats
from annie_quant.judge.gates import GATES, decides
from annie_quant.judge.pairing import (
    MIN_ANSWERS_TO_KEEP,
    RARE_ANSWERS,
    answers_of,
    answers_per_behaviour,
    is_tested,
)

RULE = 6  # the version of this rule, in every stored verdict
WORST_FIRST: tuple[Standing, ...] = ("loses", "fragile", "undecided", "keeps")
FAILING: tuple[Standing, ...] = ("loses", "fragile")
NOT_SERVED = ("float32",)
MIN_CHANGES = 5  # fewer changed answers give no exact p below 5 %: 1 / 2^4 is 6.25 %
MARGIN = 0.05
POOLED_MARGIN = 0.02
POOLED = "all"  # the name of the pooled verdict among gates
NOTHING_TESTED = "nothing"  # stands for the gates of a side of which none tests anything
GateCounts = Mapping[str, PairedGate]


@dataclass(frozen=True)
class JudgedGate:
    """A gate that counts for a verdict, in one place.

    place: "served", "served by NAME", a numerics profile, or a further arithmetic (PROFILE+NAME).
    gate: its name, POOLED or NOTHING_TESTED; the metric of a speed limit.
    counts: compared with a reference; None for a requirement of the side alone.
    result: the side's own figures; None where only the counts are known.
    """

    place: str
    gate: str
    verdict: GateVerdict
    counts: PairedCounts | None = None
    result: GateResult | SpeedGate | None = None

    @property
    def profile(self) -> str:
        return profile_of(self.place)

    @property
    def compared(self) -> bool:
        return self.counts is not None


# ---- a gate


def judge_gates(
    members: Mapping[str, GateCounts], pooled: Mapping[str, PooledGates | None] | None = None
) -> tuple[dict[str, dict[str, PairedGate]], dict[str, PooledGates | None]]:
    """Return copies of the counts with interval, p, verdict and n_to_decide.

    members: place → gate → counts of lost, won and n, and how many the reference passed.
    """
    gates = copy.deepcopy({place: dict(rows) for place, rows in members.items()})
    together = {place: copy.copy((pooled or {}).get(place)) for place in members}
    family: list[PairedCounts] = []
    for place, rows in gates.items():
        _measure(rows, together[place])
        family += _testable(rows, together[place])
    adjusted = stats.hommel([row.p for row in family])
    for tested, p_holm in zip(family, adjusted, strict=True):
        tested.p_holm = p_holm
    for place, rows in gates.items():
        for name, gate in deciding_pairs(rows).items():
            _judge_gate(name, gate, len(family) or 1)
        row_of_all = together[place]
        if row_of_all is not None:
            row_of_all.verdict = _pooled_verdict(row_of_all)
    return gates, together


def _pooled_verdict(row: PooledGates) -> GateVerdict:
    if row.low > -POOLED_MARGIN:
        return "keeps"
    return "loses" if is_loss(row, 0.0, stats.LEVEL) else "undecided"


def deciding_pairs(gates: GateCounts) -> dict[str, PairedGate]:
    """Return the gates that decide: known, not advisory, and passed by the reference often enough."""
    return {name: gate for name, gate in gates.items() if decides(name) and is_tested(name, gate)}


def _measure(gates: GateCounts, pooled: PooledGates | None) -> None:
    """Set what follows from the counts alone."""
    for name, gate in gates.items():
        gate.p = p_of_loss(name, gate)
        gate.p_holm = None
    for row in (*gates.values(), pooled):
        if row is not None:
            row.difference = (row.won - row.lost) / row.n if row.n else 0.0
            row.low, row.high = stats.score_interval(row.lost, row.won, row.n)


def p_of_loss(name: str, gate: PairedGate) -> float:
    """Return McNemar's mid-p; of a gate that compares with the reference, the p of an excess loss."""
    if _compares_with_reference(name):
        return stats.excess_loss(gate.lost, gate.n, GATES[name].margin, gate.won)
    if is_two_sided(name):
        return stats.two_sided(gate.lost, gate.won)
    return stats.mid_p(gate.lost, gate.won)


def _compares_with_reference(name: str) -> bool:
    return name in GATES and GATES[name].basis == "reference"


def is_two_sided(name: str) -> bool:
    return name in GATES and GATES[name].two_sided


def loss_limit(name: str) -> float:
    """Return the difference that the interval's upper bound must be below for a loss."""
    return -GATES[name].margin if _compares_with_reference(name) else 0.0


def _testable(gates: GateCounts, pooled: PooledGates | None) -> list[PairedCounts]:
    tested: list[PairedCounts] = [
        row
        for name, row in deciding_pairs(gates).items()
        if row.lost + row.won >= MIN_CHANGES or _compares_with_reference(name)
    ]
    if pooled is not None:
        tested.append(pooled)
    return tested


def _judge_gate(name: str, gate: PairedGate, n_tests: int) -> None:
    level = stats.LEVEL / n_tests
    gate.margin = GATES[name].margin
    gate.n_to_decide = None
    if _compares_with_reference(name):
        gate.detectable = stats.detectable_excess(gate.n, gate.margin, level)
    else:
        gate.detectable = stats.detectable_loss(gate.n, round(gate.won / gate.n, 3), level)
    gate.verdict = _gate_verdict(name, gate)
    answers = gate.n if is_two_sided(name) else answers_of(gate)
    if gate.verdict == "keeps" and answers < MIN_ANSWERS_TO_KEEP:
        gate.verdict = "undecided"
        gate.n_to_decide = math.ceil(gate.n * MIN_ANSWERS_TO_KEEP / max(1, answers))
    elif gate.verdict == "undecided":
        gate.n_to_decide = _n_to_decide(name, gate, level)


def _n_to_decide(name: str, gate: PairedGate, level: float) -> int | None:
    if is_two_sided(name):
        fewer, more = sorted((gate.lost, gate.won))
        return stats.paired_n_to_decide(more, fewer, gate.n, gate.margin, None, level)
    return stats.paired_n_to_decide(
        gate.lost,
        gate.won,
        gate.n,
        gate.margin or (MARGIN if gate.won else 0.0),
        loss_limit(name),
        level,
        excess=_compares_with_reference(name),
    )


def _gate_verdict(name: str, gate: PairedGate, level: float = stats.LEVEL) -> GateVerdict:
    margin = GATES[name].margin
    if is_two_sided(name):
        if -margin < gate.low and gate.high < margin:
            return "keeps"
        changed = gate.high < 0 or gate.low > 0
        return "loses" if changed and _is_sure(gate, level) else "undecided"
    kept = not gate.lost
    if _has_margin(name, gate):
        kept = gate.low > -(margin or MARGIN)
    if kept:
        return "keeps"
    return "loses" if is_loss(gate, loss_limit(name), level) else "undecided"


def _has_margin(name: str, gate: PairedGate) -> bool:
    """Return whether some loss is accepted; also of faults that the reference has elsewhere."""
    return GATES[name].margin > 0 or gate.won > 0


def is_loss(row: PairedCounts, limit: float, level: float) -> bool:
    """Return whether the upper bound is below the limit (loss_limit) and the adjusted p below the level."""
    return row.high < limit and _is_sure(row, level)


def _is_sure(row: PairedCounts, level: float) -> bool:
    return row.p_holm is not None and row.p_holm < level


# ---- one arithmetic


def counted_gates(
    place: str, gates: GateCounts, pooled: PooledGates | None = None
) -> list[JudgedGate]:
    """Return the gates of one place that count for its verdict; never empty.

    An undecided gate is left out where it does not block "keeps". A lost gate explains a pooled loss.
    """
    rows = deciding_pairs(gates)
    kept = [name for name, row in rows.items() if row.verdict == "keeps"]
    answers = answers_per_behaviour([gates])
    counted = [
        JudgedGate(place, name, row.verdict, row)
        for name, row in rows.items()
        if row.verdict != "undecided" or not kept or blocks_keep(name, row, answers)
    ]
    verdict = _worst(gate.verdict for gate in counted)
    if verdict != "loses" and pooled is not None and pooled.verdict == "loses":
        counted.append(JudgedGate(place, POOLED, "loses", pooled))
    elif len(counted) == len(kept) and not tests_a_behaviour(kept, gates):
        counted.append(JudgedGate(place, NOTHING_TESTED, "undecided", PairedGate(0, 0, 0)))
    return counted


def member_verdict(gates: GateCounts, pooled: PooledGates | None = None) -> MemberVerdict:
    """Return the verdict of one arithmetic from its gates' verdicts."""
    counted = counted_gates("", gates, pooled)
    loses = [gate.gate for gate in counted if gate.verdict == "loses"]
    undecided = [
        gate.gate for gate in counted if gate.verdict == "undecided" and gate.gate != NOTHING_TESTED
    ]
    verdict: GateVerdict = "keeps"
    if loses:
        verdict = "loses"
    elif any(gate.verdict == "undecided" for gate in counted):
        verdict = "undecided"
    return MemberVerdict(verdict=verdict, loses=loses, undecided=undecided)


def tests_a_behaviour(kept: Iterable[str], gates: GateCounts) -> bool:
    """Return whether gates that were kept show anything; as many calls as before do not show one yet.

    gates: all of the arithmetic. Where they have labels, the reference must meet one of them often enough.
    """
    labelled = [
        is_tested(name, gate)
        for name, gate in gates.items()
        if decides(name) and GATES[name].basis == "label"
    ]
    shows_one = any(GATES[name].behaviours for name in kept)
    return shows_one and (any(labelled) or not labelled)


def blocks_keep(name: str, gate: PairedGate, answers: Mapping[str, int]) -> bool:
    """Return whether an undecided gate forbids "keeps".

    One with too few answers does not, where its behaviour is tested elsewhere and its own loss is within the margin.
    """
    if answers_of(gate) >= MIN_ANSWERS_TO_KEEP:
        return True
    change = (gate.won - gate.lost) / gate.n
    if change < -MARGIN or (is_two_sided(name) and change > MARGIN):
        return True
    behaviours = GATES[name].behaviours
    if behaviours and all(answers[each] >= MIN_ANSWERS_TO_KEEP for each in behaviours):
        return False
    return gate.lost > 0 or answers_of(gate) >= RARE_ANSWERS


# ---- several arithmetics


def profile_of(place: str) -> str:
    """Return the numerics profile of an arithmetic, or the server."""
    return place if place.startswith("served") else place.partition("+")[0]


def _over_places(
    gates: Iterable[JudgedGate],
) -> dict[tuple[str, str], dict[str, JudgedGate]]:
    """Return (profile, gate) → place → the judged gate."""
    groups: dict[tuple[str, str], dict[str, JudgedGate]] = {}
    for gate in gates:
        groups.setdefault((gate.profile, gate.gate), {})[gate.place] = gate
    return groups


def _over_arithmetics(profile: str, places: Mapping[str, JudgedGate]) -> Standing:
    """Return the verdict of one gate over the arithmetics of a profile."""
    verdicts = {gate.verdict for gate in places.values()}
    lost_itself = profile in places and places[profile].verdict == "loses"
    if {"loses", "keeps"} <= verdicts and not lost_itself:
        return "fragile"
    return _worst(verdicts)


def _worst(verdicts: Iterable[Standing]) -> Standing:
    """Return the worst of several verdicts; "undecided" of none."""
    return min(verdicts, key=WORST_FIRST.index, default="undecided")


@dataclass(frozen=True)
class Judgement:
    """The gates of a checkpoint that count, in all places, and what follows from them."""

    gates: Sequence[JudgedGate]

    @cached_property
    def profiles(self) -> dict[str, Standing]:
        """The verdict of each profile and server."""
        verdicts: dict[str, list[Standing]] = {}
        for (profile, _), places in _over_places(self.gates).items():
            verdicts.setdefault(profile, []).append(_over_arithmetics(profile, places))
        return {profile: _worst(own) for profile, own in verdicts.items()}

    @property
    def verdict(self) -> Standing:
        """That of the worst profile that a server computes."""
        served = [own for name, own in self.profiles.items() if name not in NOT_SERVED]
        return _worst(served or self.profiles.values())

    @property
    def compared(self) -> bool:
        """Whether any gate was judged against a reference."""
        return any(gate.compared for gate in self.gates)

    def having(self, verdict: GateVerdict) -> list[JudgedGate]:
        return [gate for gate in self.gates if gate.verdict == verdict]

    def causes(self) -> list[JudgedGate]:
        """Return the gates behind the verdict, in the profiles that have it; none where it keeps.

        Of a gate that is lost in its profile's own arithmetic, only that one is returned.
        """
        verdict = self.verdict
        result: GateVerdict = "undecided" if verdict == "undecided" else "loses"
        causes: list[JudgedGate] = []
        for (profile, _), places in _over_places(self.gates).items():
            if {self.profiles[profile], _over_arithmetics(profile, places)} == {verdict}:
                having = [gate for gate in places.values() if gate.verdict == result]
                own = places.get(profile)
                causes += [own] if own in having else having
        return causes


# ---- early looks of a search
#
# A strategy is judged after few prompts and again after all of them. At the early look it is
# dropped where a gate could not keep even if no other prompt changed, or loses with the level
# divided by the number of looks (Bonferroni). It is accepted only at the last look, where every
# gate must keep under every required numerics.

FIRST_LOOK = 30  # prompts per gate


def looks(n: int) -> list[int]:
    """Return the prompts per gate at each look; the last one is n."""
    return [FIRST_LOOK, n] if n >= 2 * FIRST_LOOK else [n]


def cannot_keep(name: str, gate: PairedGate, n_at_last_look: int, n_looks: int) -> str | None:
    """Return why a gate will not keep any more ("no margin", "out of reach", "a loss"), or None."""
    margin = GATES[name].margin
    if margin == 0 and gate.lost and not gate.won:
        return "no margin"
    n = max(n_at_last_look, gate.n)
    margin = margin or MARGIN
    if stats.score_interval(gate.lost, gate.won, n)[0] <= -margin:
        return "out of reach"
    if gate.low <= -margin and is_loss(gate, loss_limit(name), stats.LEVEL / n_looks):
        return "a loss"
    return None
