"""The gates of a side that decide, in all the places where it was judged: its server, each numerics and its further members."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from annie_quant.documents import (
    Aggregates,
    GateResult,
    GateVerdict,
    OfflineSide,
    Outcome,
    PairedGate,
    PooledGates,
    ServedSide,
    SpeedGate,
    Standing,
)
from annie_quant.judge.decision import rule
from annie_quant.judge.gates import Threshold, decide, tabulate
from annie_quant.judge.metrics import METRICS
from annie_quant.judge.pairing import LEAST_ANSWERS, answers_per_behaviour

VERDICTS: dict[Outcome, GateVerdict] = {
    outcome: by_gate for by_gate, outcome in rule.OUTCOMES.items()
}


@dataclass(frozen=True)
class JudgedGate:
    """One deciding gate of a side.

    where: "served" or the numerics, in capitals.
    pair: its answers paired with the reference's.
    """

    where: str
    title: str
    result: GateResult | SpeedGate | PooledGates
    pair: PairedGate | None = None

    @property
    def outcome(self) -> Outcome:
        return (
            rule.OUTCOMES[self.result.verdict]
            if isinstance(self.result, PooledGates)
            else self.result.verdict
        )

    @property
    def verdict(self) -> GateVerdict | Outcome:
        """keeps, loses or undecided of a comparison; pass, fail or undecided of a requirement of the side alone."""
        return VERDICTS[self.outcome] if self.compared else self.outcome

    @property
    def compared(self) -> bool:
        """Whether it was judged against a reference."""
        return self.pair is not None or isinstance(self.result, PooledGates)

    def __str__(self) -> str:
        result = self.result
        if isinstance(result, PooledGates):
            return f"{self.title} {rule.points(result.difference)} points ({self.where})"
        if isinstance(result, SpeedGate):
            value = f"{result.value:.4g} {METRICS[result.metric].unit}"
            return f"{self.title} {value}, limit {result.limit:g} ({self.where})"
        if not result.n:
            return f"{self.title} ({self.where})"
        text = f"{self.title} {result.passes} of {result.n}"
        if self.pair is not None and self.pair.n == result.n:
            text += f" against {result.passes + self.pair.lost - self.pair.won}"
        return f"{text} ({self.where})"

    @property
    def evidence(self) -> str:
        """The interval, and the rule that was applied to it."""
        result = self.result
        if isinstance(result, PooledGates):
            return rule.describe_pooled(result)
        if self.compared:
            return result.rule if isinstance(result, GateResult) else ""
        interval = "too few answers for an interval"
        if result.low is not None and result.high is not None:
            form = ".1%" if isinstance(result, GateResult) else ".4g"
            interval = f"95 % interval {result.low:{form}} to {result.high:{form}}"
        return f"{interval}, {result.rule}" if isinstance(result, GateResult) else interval


def deciding_gates(aggregates: Aggregates, name: str) -> Iterator[JudgedGate]:
    """Gates and speed limits of a side that are not advisory: served ones, then offline ones by numerics and further members.

    name: a backend, or a model (then of all backends that serve it). A speed limit that the side's reference does not keep either
    is left out, and so is a pooled verdict where a gate is lost.
    """
    for where, table, pairs, side in gate_tables(aggregates, name):
        yield from _judged(where, table, pairs, side)
        if not isinstance(side, ServedSide):
            continue
        reference = aggregates.served.get(side.judged_by or "") or ServedSide()
        for key, limit in side.speed_gates.items():
            other = reference.speed_gates.get(key)
            if limit.verdict == "pass" or other is None or other.verdict == "pass":
                yield JudgedGate(where, METRICS[limit.metric].title, limit)


Table = tuple[
    str, Mapping[str, GateResult], Mapping[str, PairedGate] | None, ServedSide | OfflineSide
]


def gate_tables(aggregates: Aggregates, name: str) -> Iterator[Table]:
    """Yield (where, gates, the same paired with the reference, side) of a backend or model; None where there is no reference."""
    backends = (
        [name]
        if name in aggregates.served
        else [b for b, s in aggregates.served.items() if s.model == name]
    )
    for backend in backends:
        served, where = (
            aggregates.served[backend],
            "served" if len(backends) == 1 else f"served by {backend}",
        )
        yield where, served.gates, served.paired if served.judged_by else None, served
    models = [name, *(aggregates.served[backend].model or "" for backend in backends)]
    model = next((m for m in models if m in aggregates.offline), "")
    for member, side in (
        aggregates.offline.get(model, {}) | aggregates.members.get(model, {})
    ).items():
        numerics, plus, suffix = member.partition("+")
        # The reference itself has no pairs, and neither have evaluations of version 0.1.0, whose results have no `meets`.
        alone = not side.paired and (
            numerics == "bf16" or any(r.meets is None for r in side.gates.values())
        )
        yield f"{numerics.upper()}{plus}{suffix}", side.gates, None if alone else side.paired, side


def _judged(
    where: str,
    gates: Mapping[str, GateResult],
    pairs: Mapping[str, PairedGate] | None,
    side: ServedSide | OfflineSide,
) -> Iterator[JudgedGate]:
    """Without a reference the absolute requirements decide; with one, the gates that decide in rule.py.

    Where the reference has nothing to compare with, everything is undecided.
    """
    if pairs is None:
        for gate, result in gates.items():
            if not result.advisory:
                yield JudgedGate(where, result.title or gate, result)
        return
    deciding = rule.deciding(pairs)
    rows = {gate: gates.get(gate) or _unanswered(gate, pair) for gate, pair in deciding.items()}
    kept = [gate for gate, result in rows.items() if result.verdict == "pass"]
    answers, shown = answers_per_behaviour([deciding]), False
    for gate, result in rows.items():
        if (
            result.verdict != "undecided"
            or not kept
            or rule.stands_in_the_way(gate, deciding[gate], answers)
        ):
            shown |= result.verdict != "pass"
            yield JudgedGate(where, result.title or gate, result, deciding[gate])
    lost = any(result.verdict == "fail" for result in rows.values())
    if side.pooled is not None and side.pooled.verdict == "loses" and not lost:
        yield JudgedGate(where, rule.title(rule.POOLED), side.pooled)
    elif not shown and not rule.tests_a_behaviour(kept, pairs):
        yield JudgedGate(
            where,
            rule.NOTHING_TESTED,
            decide(0, 0, Threshold("all", LEAST_ANSWERS)),
            PairedGate(0, 0, 0),
        )


def _unanswered(gate: str, pair: PairedGate) -> GateResult:
    """Return the result of a gate that applies to answers of the reference, and to none of the candidate's."""
    table = tabulate([{gate: False}] * pair.n)
    return rule.apply(table, {gate: pair})[gate]


def standing(gates: Sequence[JudgedGate]) -> Standing:
    """Return the verdict over gates of several places."""
    by_gate: dict[str, dict[str, GateVerdict]] = {}
    for gate in gates:
        by_gate.setdefault(gate.where, {})[gate.title] = VERDICTS[gate.outcome]
    if rule.changing_gates(by_gate):
        return "fragile"
    return rule.combined([verdict for titles in by_gate.values() for verdict in titles.values()])


def standing_of(aggregates: Aggregates, name: str, with_speed: bool = True) -> Standing:
    """Return the verdict of a backend or model over its server and all of its arithmetics.

    with_speed: also its speed limits.
    """
    gates = deciding_gates(aggregates, name)
    result = standing([g for g in gates if with_speed or not isinstance(g.result, SpeedGate)])
    return "undecided" if result == "keeps" and blocking_of(aggregates, name) else result


def blocking_of(aggregates: Aggregates, name: str) -> list[str]:
    """Return the reasons that forbid "keeps" for a backend or model."""
    served = aggregates.served.get(name)
    return (
        aggregates.blocking.get(name)
        or aggregates.blocking.get((served.model if served else None) or "")
        or []
    )


def by_title(gates: Sequence[JudgedGate]) -> list[str]:
    """Return one text per gate: its counts in the first place, and the other places with the same outcome."""
    places: dict[str, list[JudgedGate]] = {}
    for gate in gates:
        places.setdefault(gate.title, []).append(gate)
    return [
        str(first)
        if not more
        else f"{str(first).removesuffix(')')}; also {', '.join(g.where for g in more)})"
        for first, *more in places.values()
    ]
