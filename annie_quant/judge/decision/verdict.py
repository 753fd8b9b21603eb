"""Give the verdict of an evaluation without a server, and of a run with its roles and confounds.

Roles are stated (roles.py). The reference of a side is the bf16 model on the same prompts, or the
incumbent where bf16 was not measured; a side alone is judged by the absolute requirements. Where a
confound leaves open what was compared, nothing keeps. Speed alone is never a reason to switch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from annie_quant import documents
from annie_quant.core.errors import UsageError
from annie_quant.documents import (
    Aggregates,
    Comparison,
    Confound,
    Evaluation,
    GateResult,
    GateVerdict,
    Member,
    NumericsResult,
    OfflineSide,
    Outcome,
    PairedGate,
    PairedVerdict,
    PooledGates,
    Roles,
    SearchNumerics,
    ServedSide,
    SpeedGate,
    Standing,
    Verdict,
)
from annie_quant.judge.decision import rule, wording
from annie_quant.judge.decision.roles import (
    assign,
    formats_of,
    label_of,
    roles_of,
    sides,
    with_candidate_second,
)
from annie_quant.judge.decision.rule import GateCounts, JudgedGate, Judgement
from annie_quant.judge.gates import decides
from annie_quant.judge.metrics import METRICS
from annie_quant.judge.pairing import (
    MIN_ANSWERS_TO_KEEP,
    answers_per_behaviour,
    is_tested,
    unmet_labels,
)

_SideT = TypeVar("_SideT", bound=NumericsResult | Member | OfflineSide)
VERDICTS: dict[Outcome, GateVerdict] = {
    outcome: verdict for verdict, outcome in wording.OUTCOMES.items()
}
_SEVERITIES = ("confound", "fault", "note")
_CUT_ANSWERS = "cut_answers"  # a code of bench/confounds.py


# ---- an evaluation


def judge_members(
    members: Mapping[str, GateCounts], pooled: Mapping[str, PooledGates | None] | None = None
) -> PairedVerdict:
    """Decide about a checkpoint.

    members: arithmetic → gate → counts of lost, won and n, and how many the reference passed.
    """
    return verdict_of(*rule.judge_gates(members, pooled))


def verdict_of(
    members: Mapping[str, GateCounts], pooled: Mapping[str, PooledGates | None]
) -> PairedVerdict:
    """Return the verdict over gates that were judged."""
    gates: list[JudgedGate] = []
    for place, rows in members.items():
        gates += rule.counted_gates(place, rows, pooled.get(place))
    judged = Judgement(gates)
    answers = answers_per_behaviour(members.values())
    labels = unmet_labels(members.values())
    result = PairedVerdict(
        verdict=judged.verdict,
        sentence="Nothing was compared with the reference.",
        reasons=wording.reasons(gates, ("loses", "undecided")),
        profiles=judged.profiles,
        members={
            place: rule.member_verdict(rows, pooled.get(place)) for place, rows in members.items()
        },
        coverage=answers,
        not_tested=[
            *wording.unmet(labels),
            *(behaviour for behaviour, n in answers.items() if n < MIN_ANSWERS_TO_KEEP),
        ],
    )
    if gates:
        not_tested = wording.coverage(answers, labels)
        result.sentence, result.head = wording.first_screen(
            "", judged, wording.next_step(judged), not_tested
        )
    return result


def judge_evaluation(evaluation: Evaluation) -> Evaluation:
    """Return an evaluation with its verdict over all members of its ensembles, and each gate's."""
    both: dict[str, NumericsResult | Member] = {**evaluation.numerics, **evaluation.members}
    judged, verdict = judge_sides(both)
    if evaluation.blocking:
        profiles = {
            name: "undecided" if own == "keeps" else own for name, own in verdict.profiles.items()
        }
        verdict = replace(
            verdict, profiles=profiles, reasons=[*evaluation.blocking, *verdict.reasons]
        )
        if verdict.verdict == "keeps":
            verdict.verdict = "undecided"
            verdict.sentence = wording.blocked(evaluation.blocking[0])
            verdict.head = wording.blocked_head(profiles)
    return replace(
        evaluation,
        numerics={name: side for name, side in judged.items() if isinstance(side, NumericsResult)},
        members={name: side for name, side in judged.items() if isinstance(side, Member)},
        verdict=verdict,
    )


def judge_sides(both: Mapping[str, _SideT]) -> tuple[dict[str, _SideT], PairedVerdict]:
    """Judge a checkpoint's arithmetics together: return them with their gates' verdicts, and the verdict."""
    gates, pooled = rule.judge_gates(
        {name: side.paired for name, side in both.items()},
        {name: side.pooled for name, side in both.items()},
    )
    judged = {
        name: replace(
            side, gates=apply(side.gates, gates[name]), paired=gates[name], pooled=pooled[name]
        )
        for name, side in both.items()
    }
    return judged, verdict_of(gates, pooled)


def apply(table: Mapping[str, GateResult], paired: GateCounts) -> dict[str, GateResult]:
    """Return a table with the paired verdict of each deciding gate; `meets` keeps the absolute one."""
    return {name: _with_verdict(name, result, paired.get(name)) for name, result in table.items()}


def _with_verdict(name: str, result: GateResult, gate: PairedGate | None) -> GateResult:
    meets = result.absolute_verdict
    if gate is None or result.advisory or not decides(name):
        return replace(result, meets=meets)
    tested = is_tested(name, gate)
    return replace(
        result,
        meets=meets,
        verdict=wording.OUTCOMES[gate.verdict] if tested else "undecided",
        n_to_decide=gate.n_to_decide if tested else None,
        rule=wording.paired_rule(gate)
        if tested
        else f"it tests nothing: the reference passes {gate.passed} of {gate.n}",
    )


# ---- a strategy of a search


def failing(gates: Mapping[str, GateResult]) -> list[str]:
    """Return the deciding gates that fail or are undecided."""
    return [
        name for name, result in gates.items() if result.verdict != "pass" and not result.advisory
    ]


def early_reasons(
    numerics: Mapping[str, SearchNumerics], counts: Mapping[str, int], n_looks: int
) -> list[str]:
    """Return reasons to drop a strategy at an early look.

    counts: prompts per gate at the last look.
    """
    reasons = []
    for kind, side in numerics.items():
        for gate, pair in side.paired.items():
            why = rule.cannot_keep(gate, pair, counts[gate], n_looks) if decides(gate) else None
            if why is not None:
                reasons.append(f"{kind.upper()}: {wording.dropped(gate, pair, counts[gate], why)}")
    return reasons


def missing_numerics(numerics: Mapping[str, object], required: Sequence[str]) -> list[str]:
    """Return a reason for each required numerics that no server can give this checkpoint."""
    return [
        f"{kind.upper()} is not available: the checkpoint is weight-only"
        for kind in required
        if kind not in numerics
    ]


def final_reasons(
    verdict: PairedVerdict, numerics: Mapping[str, object], required: Sequence[str]
) -> list[str]:
    """Return reasons why a strategy is not accepted at the last look; empty where it is accepted."""
    reasons = missing_numerics(numerics, required)
    if verdict.verdict != "keeps":
        reasons += verdict.reasons or [verdict.sentence]
    return reasons


# ---- the gates of a side of a run


def deciding_gates(aggregates: Aggregates, name: str) -> list[JudgedGate]:
    """Return the gates and speed limits that count for a side: served, then offline.

    name: a backend, or a model (then of all backends that serve it). A speed limit that the side's
    reference does not keep either is left out.
    """
    gates: list[JudgedGate] = []
    for place, side in places_of(aggregates, name):
        if is_compared(place, side):
            gates += _compared_gates(place, side)
        else:
            gates += [
                JudgedGate(place, gate, VERDICTS[result.verdict], None, result)
                for gate, result in side.gates.items()
                if not result.advisory
            ]
        if isinstance(side, ServedSide):
            gates += _speed_limits(aggregates, place, side)
    return gates


def places_of(aggregates: Aggregates, name: str) -> Iterator[tuple[str, ServedSide | OfflineSide]]:
    """Yield the places where a backend or model was judged, with its results there."""
    backends = [backend for backend, side in aggregates.served.items() if side.model == name]
    if name in aggregates.served:
        backends = [name]
    for backend in backends:
        place = "served" if len(backends) == 1 else f"served by {backend}"
        yield place, aggregates.served[backend]
    models = [name, *(aggregates.served[backend].model or "" for backend in backends)]
    model = next((m for m in models if m in aggregates.offline), "")
    yield from aggregates.offline.get(model, {}).items()
    yield from aggregates.members.get(model, {}).items()


def is_compared(place: str, side: ServedSide | OfflineSide) -> bool:
    """Return whether the side was compared with a reference.

    The reference itself has no pairs, and neither have evaluations of version 0.1.0, whose results have no `meets`.
    """
    if isinstance(side, ServedSide):
        return bool(side.judged_by)
    if side.paired:
        return True
    return rule.profile_of(place) != "bf16" and all(
        result.meets is not None for result in side.gates.values()
    )


def _compared_gates(place: str, side: ServedSide | OfflineSide) -> list[JudgedGate]:
    """Return the gates that count, with the verdicts that the side's table shows."""
    shown = {
        gate: replace(pair, verdict=VERDICTS[side.gates[gate].verdict])
        if gate in side.gates
        else pair
        for gate, pair in side.paired.items()
    }
    return [
        JudgedGate(place, gate.gate, gate.verdict, gate.counts, side.gates.get(gate.gate))
        for gate in rule.counted_gates(place, shown, side.pooled)
    ]


def _speed_limits(aggregates: Aggregates, place: str, side: ServedSide) -> list[JudgedGate]:
    reference = aggregates.served.get(side.judged_by or "", ServedSide())
    gates = []
    for key, limit in side.speed_gates.items():
        other = reference.speed_gates.get(key)
        if limit.verdict == "pass" or other is None or other.verdict == "pass":
            gates.append(JudgedGate(place, limit.metric, VERDICTS[limit.verdict], None, limit))
    return gates


def standing_of(aggregates: Aggregates, name: str, with_speed: bool = True) -> Standing:
    """Return the verdict of a backend or model over its server and all of its arithmetics.

    with_speed: also its speed limits.
    """
    gates = deciding_gates(aggregates, name)
    if not with_speed:
        gates = [gate for gate in gates if not isinstance(gate.result, SpeedGate)]
    result = Judgement(gates).verdict
    return "undecided" if result == "keeps" and blocking_of(aggregates, name) else result


def blocking_of(aggregates: Aggregates, name: str) -> list[str]:
    """Return the reasons that forbid "keeps" for a backend or model."""
    served = aggregates.served.get(name)
    model = served.model if served and served.model else ""
    return aggregates.blocking.get(name) or aggregates.blocking.get(model) or []


def served_as(aggregates: Aggregates, name: str | None) -> str | None:
    """Return the backend with this name, or the first that serves the model with this name."""
    return next(
        (backend for backend, side in aggregates.served.items() if name in (backend, side.model)),
        None,
    )


# ---- a run


@dataclass(frozen=True)
class Decision:
    """Who is judged against whom, with what result.

    not_tested: as text; "" without a reference.
    """

    candidate: str
    roles: Roles
    judged: Judgement
    confounds: Sequence[Confound]
    not_tested: str

    @property
    def standing(self) -> Standing:
        """The verdict over all places. What a confound leaves open does not keep."""
        verdict = self.judged.verdict
        return "undecided" if verdict == "keeps" and self.confounded else verdict

    @property
    def confounded(self) -> list[str]:
        """The kinds of the confounds between the sides."""
        codes = {c.code for c in self.confounds if c.severity == "confound"}
        return sorted(code.replace("_", " ") for code in codes)


def candidate_decision(aggregates: Aggregates, candidate: str | None = None) -> Decision | None:
    """Return the candidate's gates; None where nothing was measured.

    candidate: a backend or a model, instead of the run's.
    """
    roles = roles_of(aggregates, candidate)
    if roles.candidate is None:
        return None
    if roles.assumed and roles.incumbent:
        swapped = replace(roles, candidate=roles.incumbent, incumbent=roles.candidate)
        ours, theirs = (
            standing_of(aggregates, name) in rule.FAILING
            for name in (roles.candidate, roles.incumbent)
        )
        if theirs and not ours:
            roles = swapped
    assert roles.candidate is not None
    tables = [
        side.paired
        for place, side in places_of(aggregates, roles.candidate)
        if is_compared(place, side) and side.paired
    ]
    not_tested = ""
    if tables:
        not_tested = wording.coverage(answers_per_behaviour(tables), unmet_labels(tables))
    return Decision(
        candidate=roles.candidate,
        roles=roles,
        judged=Judgement(deciding_gates(aggregates, roles.candidate)),
        confounds=[c for c in aggregates.confounds if _concerns(c, roles)],
        not_tested=not_tested,
    )


def _concerns(confound: Confound, roles: Roles) -> bool:
    """Return whether a finding is about these sides: a pair counts for that pair alone."""
    about = set(confound.backends)
    ours = set(roles.names)
    return about <= ours if len(about) == 2 else bool(about & ours)


def run_verdict(
    aggregates: Aggregates | Mapping[str, object],
    candidate: str | None = None,
    *,
    reference: str | None = None,
    incumbent: str | None = None,
) -> Verdict:
    """Return the outcome with its sentence, reasons and caveats; `aggregates` is not changed.

    aggregates: or a mapping of the same form.
    candidate, reference, incumbent: sides, instead of the run's roles. Gates stay compared with what
        they were compared with when the run was aggregated; `annie-quant report DIR --candidate ...`
        compares them again.
    """
    if not isinstance(aggregates, Aggregates):
        aggregates = documents.convert(Aggregates, aggregates, "aggregates", error=UsageError)
    if reference or incumbent:
        stated = Roles(candidate=candidate, reference=reference, incumbent=incumbent)
        roles = assign(sides(aggregates), formats_of(aggregates), stated)
        aggregates = replace(aggregates, roles=roles)
    chosen = candidate_decision(aggregates, candidate)
    if chosen is None:
        return Verdict(
            rule=rule.RULE, sentence="Nothing was measured, so nothing can be concluded."
        )
    roles = chosen.roles
    sentence, head = _first_screen(aggregates, chosen)
    result = Verdict(
        rule=rule.RULE,
        sentence=sentence,
        head=head,
        passed=chosen.standing not in rule.FAILING and not chosen.confounded,
        outcome=chosen.standing,
        badge="confounded" if chosen.confounded else chosen.standing,
        candidate=chosen.candidate,
        incumbent=roles.incumbent,
        comparable=bool(roles.incumbent or roles.reference) and not chosen.confounded,
        reasons=_reasons(aggregates, chosen),
        caveats=_caveats(aggregates, chosen),
    )
    blocking = blocking_of(aggregates, chosen.candidate)
    if blocking:
        result = replace(result, passed=False, reasons=[*blocking, *result.reasons])
        if result.outcome == "keeps":
            result.outcome = "undecided"
            result.badge = "undecided"
            result.sentence = wording.blocked(blocking[0])
            result.head = wording.blocked_head(dict.fromkeys(chosen.judged.profiles, "undecided"))
    return result


def _first_screen(aggregates: Aggregates, chosen: Decision) -> tuple[str, list[str]]:
    label = label_of(aggregates, chosen.candidate)
    incumbent = chosen.roles.incumbent
    cut = [
        c.message for c in chosen.confounds if c.code == _CUT_ANSWERS and c.severity == "confound"
    ]
    if cut:
        next_step = cut[0]
    elif chosen.confounded:
        next_step = wording.CONFOUNDED_NEXT
    elif aggregates.served:
        other = label_of(aggregates, incumbent) if incumbent else ""
        speeds = _significant(aggregates, chosen)
        next_step = wording.next_for_run(chosen.judged, label, other, speeds)
    else:
        next_step = wording.next_step(chosen.judged)
    sentence, head = wording.first_screen(label, chosen.judged, next_step, chosen.not_tested)
    if chosen.confounded:
        other_side = incumbent or chosen.roles.reference
        warning = wording.confounded(chosen.confounded, other_side is not None)
        # A cut answer fails every gate, and says nothing about what the gates are for.
        loses = chosen.judged.having("loses") and not cut
        sentence = f"{warning} {sentence}" if loses else warning
    return sentence, head


def compared_with(
    aggregates: Aggregates, candidate: str, incumbent: str, metric: str
) -> Comparison | None:
    """Return the comparison over all workloads, the candidate second; with one workload alone, that one's."""
    rows = [
        row
        for row in aggregates.comparisons
        if {row.a, row.b} == {candidate, incumbent} and row.metric == metric
    ]
    over_all = [row for row in rows if row.workload == "all"]
    if not over_all and len(rows) == 1:
        over_all = rows
    row = next((row for row in over_all if row.median_difference is not None), None)
    return row and with_candidate_second(row, candidate)


def _significant(aggregates: Aggregates, chosen: Decision) -> list[Comparison]:
    """Return the significant differences from the incumbent whose interval does not have 0 in it."""
    incumbent = chosen.roles.incumbent or ""
    in_verdict = (metric.name for metric in METRICS.values() if metric.in_verdict)
    rows = (compared_with(aggregates, chosen.candidate, incumbent, name) for name in in_verdict)
    significant = [row for row in rows if row is not None and row.significant]
    return [row for row in significant if (row.low or 0.0) * (row.high or 0.0) > 0]


def _reasons(aggregates: Aggregates, chosen: Decision) -> list[str]:
    """Return what is lost, what the other sides lose, and the times that differ."""
    reasons = wording.reasons(chosen.judged.gates, ("loses",))
    for name in sides(aggregates):
        other = Judgement(deciding_gates(aggregates, name) if name != chosen.candidate else [])
        if other.verdict == "loses":
            reasons.append(f"{label_of(aggregates, name)} {wording.claim(other)}")
    incumbent = label_of(aggregates, chosen.roles.incumbent or "")
    reasons += [wording.difference(row, incumbent) for row in _significant(aggregates, chosen)]
    runtimes = [side.runtime for side in _served_sides(aggregates, chosen)]
    if len(runtimes) == 2 and all(runtimes) and runtimes[0] != runtimes[1]:
        reasons.append(wording.operational_change(*map(str, runtimes)))
    return reasons


def _served_sides(aggregates: Aggregates, chosen: Decision) -> list[ServedSide]:
    """Return the incumbent and the candidate, as far as they were served."""
    names = (chosen.roles.incumbent, chosen.candidate)
    return [aggregates.served[name] for name in names if name in aggregates.served]


def peak_bytes(side: ServedSide) -> int | None:
    """Return the highest memory of a side; None where it was not measured."""
    return side.memory_bytes.highest if side.memory_bytes else None


def _caveats(aggregates: Aggregates, chosen: Decision) -> list[str]:
    by_severity = sorted(chosen.confounds, key=lambda c: _SEVERITIES.index(c.severity))
    caveats = [confound.message for confound in by_severity]
    if chosen.roles.assumed:
        judged = f"{chosen.candidate} was judged; choose with --candidate NAME"
        caveats.insert(0, f"nobody stated which side is new: {judged}")
    for gate in chosen.judged.gates if chosen.judged.compared else ():
        # Absolute requirements that a compared candidate misses inform.
        result = gate.result
        if isinstance(result, GateResult) and result.requirement and result.meets == "fail":
            caveats.append(f"misses {result.requirement} by itself: {wording.reason(gate)}")
    caveats += wording.reasons(chosen.judged.gates, ("undecided",))
    both = {chosen.candidate, chosen.roles.incumbent}
    rows = [row for row in aggregates.comparisons if {row.a, row.b} == both]
    decidable = {row.workload for row in rows if not row.too_few}
    few = sorted({row.workload for row in rows} - decidable)
    if few:
        caveats.append(
            f"fewer than 6 prompts cannot show a difference at 5 %, whatever the repeats: {', '.join(few)}"
        )
    return caveats
