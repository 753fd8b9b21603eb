"""The verdict: which side is judged, whether it passes, and why.

The candidate is the NVFP4 side (of several, the best); the incumbent is what it would replace. Speed alone is never a reason
to switch: gates come first, then what differs between the two sides, then what changes in operation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from annie_quant import schema
from annie_quant.errors import UsageError
from annie_quant.judge.metrics import METRICS
from annie_quant.schema import (
    Aggregates,
    Comparison,
    Confound,
    GateResult,
    ModelRow,
    Outcome,
    ServedSide,
    SpeedGate,
    Verdict,
)

SHOWN = 4  # failing gates that a sentence names
_SEVERITIES = ("confound", "fault", "note")


@dataclass(frozen=True)
class JudgedGate:
    """One deciding gate of a side. where: "served" or the numerics, in capitals."""

    where: str
    title: str
    result: GateResult | SpeedGate

    def __str__(self) -> str:
        result = self.result
        if isinstance(result, GateResult):
            return f"{self.title} {result.passes} of {result.n} ({self.where})"
        unit = METRICS[result.metric].unit
        return f"{self.title} {result.value:.4g} {unit}, limit {result.limit:g} ({self.where})"

    @property
    def interval(self) -> str:
        result = self.result
        if result.low is None or result.high is None:
            return "none"
        if isinstance(result, GateResult):
            return f"{result.low:.1%} to {result.high:.1%}"
        return f"{result.low:.4g} to {result.high:.4g}"

    @property
    def rule(self) -> str:
        return self.result.rule if isinstance(self.result, GateResult) else "limit"


@dataclass(frozen=True)
class Decision:
    """Who is judged against whom, and the candidate's deciding gates by outcome."""

    candidate: str
    incumbent: str | None
    gates: Mapping[Outcome, Sequence[JudgedGate]]
    confounds: Sequence[Confound]

    @property
    def outcome(self) -> Outcome:
        return combined([outcome for outcome, gates in self.gates.items() if gates])

    @property
    def comparable(self) -> bool:
        return self.incumbent is not None and not any(c.severity == "confound" for c in self.confounds)


def combined(outcomes: Collection[Outcome]) -> Outcome:
    """Return the outcome of several: one failure fails; without a failure, one undecided leaves all undecided."""
    return "fail" if "fail" in outcomes else "undecided" if "undecided" in outcomes else "pass"


def decision(aggregates: Aggregates, candidate: str | None = None) -> Decision | None:
    """Choose candidate and incumbent, and sort the candidate's gates; None where nothing was measured.

    candidate: a served backend or an offline model; default: the NVFP4 side that fails and leaves open the fewest gates,
    else the first backend.
    """
    names = sides(aggregates)
    if not names:
        return None

    def rank(name: str) -> tuple[int, int]:
        outcomes = [gate.result.verdict for gate in deciding_gates(aggregates, name)]
        return outcomes.count("fail"), outcomes.count("undecided")

    candidate = candidate or min(_candidates(aggregates, names), key=rank)
    incumbent = _incumbent(aggregates, names, candidate)
    gates: dict[Outcome, list[JudgedGate]] = {"pass": [], "fail": [], "undecided": []}
    for gate in deciding_gates(aggregates, candidate):
        gates[gate.result.verdict].append(gate)
    confounds = [c for c in aggregates.confounds if _concerns(c, candidate, incumbent)]
    return Decision(candidate, incumbent, gates, confounds)


def verdict(aggregates: Aggregates | Mapping[str, Any], candidate: str | None = None) -> Verdict:
    """The outcome with its sentence, reasons and caveats. aggregates: a run's, or a mapping of the same form."""
    if not isinstance(aggregates, Aggregates):
        aggregates = schema.convert(Aggregates, aggregates, "aggregates", error=UsageError)
    chosen = decision(aggregates, candidate)
    if chosen is None:
        return Verdict(sentence="Nothing was measured, so nothing can be concluded.")
    return Verdict(
        sentence=_sentence(aggregates, chosen),
        passed=chosen.outcome != "fail",
        candidate=chosen.candidate,
        incumbent=chosen.incumbent,
        comparable=chosen.comparable,
        reasons=_reasons(aggregates, chosen),
        caveats=_caveats(aggregates, chosen),
    )


# ---- sides


def sides(aggregates: Aggregates) -> list[str]:
    """Served backends, then models that were only evaluated offline."""
    return list(dict.fromkeys([*aggregates.served, *aggregates.offline]))


def _model(aggregates: Aggregates, name: str) -> ModelRow:
    """The model of a side; a backend may have another name than the model that it serves."""
    models = {m.name: m for m in aggregates.models}
    served = aggregates.served.get(name)
    return models.get(name) or models.get((served.model if served else None) or "") or ModelRow(name=name)


def label_of(aggregates: Aggregates, name: str) -> str:
    return _model(aggregates, name).label or name


def _format(aggregates: Aggregates, name: str) -> str:
    return (_model(aggregates, name).format or name).upper()


def _candidates(aggregates: Aggregates, names: Sequence[str]) -> list[str]:
    nvfp4 = [n for n in names if "NVFP4" in _format(aggregates, n)]
    return [n for n in nvfp4 if n in aggregates.served] or nvfp4 or [names[0]]


def _incumbent(aggregates: Aggregates, names: Sequence[str], candidate: str) -> str | None:
    others = [n for n in names if n != candidate and n in aggregates.served]
    q4 = [n for n in others if "Q4" in _format(aggregates, n)]
    return (q4 or others)[-1] if others else None


def deciding_gates(aggregates: Aggregates, name: str) -> Iterator[JudgedGate]:
    """Gates and speed limits of a side that are not advisory: served ones, then offline ones by numerics."""
    served = aggregates.served.get(name) or ServedSide()
    for gate, result in served.gates.items():
        if not result.advisory:
            yield JudgedGate("served", result.title or gate, result)
    for limit in served.speed_gates.values():
        yield JudgedGate("served", METRICS[limit.metric].title, limit)
    model = name if name in aggregates.offline else served.model or ""
    for numerics, side in aggregates.offline.get(model, {}).items():
        for gate, result in side.gates.items():
            if not result.advisory:
                yield JudgedGate(numerics.upper(), result.title or gate, result)


def _concerns(confound: Confound, candidate: str, incumbent: str | None) -> bool:
    """A finding about a pair counts for this pair alone; one about single sides, for each of them."""
    about, ours = set(confound.backends), {candidate, incumbent}
    return about <= ours if len(about) == 2 else bool(about & ours)


# ---- sentence


def _sentence(aggregates: Aggregates, chosen: Decision) -> str:
    label, failing, undecided = label_of(aggregates, chosen.candidate), chosen.gates["fail"], chosen.gates["undecided"]
    end = "."
    if failing:
        head = f"{label} fails {_count(len(failing), 'gate')}: {'; '.join(map(str, failing[:SHOWN]))}"
        head += f"; and {len(failing) - SHOWN} more" if len(failing) > SHOWN else ""
        end = f". It cannot replace {label_of(aggregates, chosen.incumbent)}." if chosen.incumbent else "."
    elif undecided:
        head = f"{label} fails no gate, but {_count(len(undecided), 'gate')} cannot be decided with so few answers"
    else:
        head = f"{label} passes every gate"
    codes = sorted({c.code.replace("_", " ") for c in chosen.confounds if c.severity == "confound"})
    if codes and chosen.incumbent:
        return f"CONFOUNDED ({', '.join(codes)}): the two sides cannot be compared. {head}{end}"
    return f"{head}{'' if failing else _speed(aggregates, chosen)}{end}"


def _speed(aggregates: Aggregates, chosen: Decision) -> str:
    if not chosen.incumbent:
        return ""
    parts = []
    for metric in ("ttft_content_ms", "decode_tok_s"):
        row = compared_with(aggregates, chosen.candidate, chosen.incumbent, metric)
        if row:
            sure = "" if row.significant else " (no significant difference)"
            title, unit = METRICS[metric].title, METRICS[metric].unit
            parts.append(f"{title} {row.median_b:.3g} {unit} against {row.median_a:.3g}{sure}")
    return f", with {' and '.join(parts)} of {label_of(aggregates, chosen.incumbent)}" if parts else ""


def compared_with(aggregates: Aggregates, candidate: str, incumbent: str, metric: str) -> Comparison | None:
    """The comparison over all workloads with a = incumbent and b = candidate; with one workload alone, that one's."""
    rows = [r for r in aggregates.comparisons if {r.a, r.b} == {candidate, incumbent} and r.metric == metric]
    rows = [r for r in rows if r.workload == "all"] or (rows if len(rows) == 1 else [])
    row = next((r for r in rows if r.median_difference is not None), None)
    if row is None or row.median_difference is None or row.b == candidate:
        return row
    return msgspec.structs.replace(
        row,
        a=incumbent,
        b=candidate,
        median_a=row.median_b,
        median_b=row.median_a,
        median_difference=-row.median_difference,
        low=None if row.high is None else -row.high,
        high=None if row.low is None else -row.low,
    )


# ---- reasons and caveats


def _reasons(aggregates: Aggregates, chosen: Decision) -> list[str]:
    reasons = [f"fails {gate}: 95 % interval {gate.interval}, {gate.rule}" for gate in chosen.gates["fail"]]
    if not reasons:
        places = [gate.where for gate in chosen.gates["pass"]]
        reasons = [f"passes {_count(places.count(where), 'gate')} ({where})" for where in dict.fromkeys(places)]
    reasons += _worse_than_bf16(aggregates, chosen.candidate)
    for name in sides(aggregates):
        failing = [g for g in deciding_gates(aggregates, name) if g.result.verdict == "fail"]
        if failing and name != chosen.candidate:
            reasons.append(f"{label_of(aggregates, name)} fails {'; '.join(map(str, failing[:SHOWN]))}")
    if chosen.incumbent:
        reasons += _differences(aggregates, chosen.candidate, chosen.incumbent)
        reasons += _operation(aggregates, chosen.candidate, chosen.incumbent)
    return reasons


def _worse_than_bf16(aggregates: Aggregates, candidate: str) -> list[str]:
    """Gates whose interval is entirely below that of the served bf16 model: what quantization took."""
    served = aggregates.served
    bf16 = next((n for n in served if "BF16" in _format(aggregates, n)), None)
    if bf16 is None or candidate not in served or bf16 == candidate:
        return []
    worse = []
    for gate, row in served[candidate].gates.items():
        reference = served[bf16].gates.get(gate)
        if reference and row.high < reference.low:
            worse.append(
                f"{row.title or gate} is significantly worse than {label_of(aggregates, bf16)}'s: "
                f"{row.passes} of {row.n} against {reference.passes} of {reference.n}"
            )
    return worse


def _differences(aggregates: Aggregates, candidate: str, incumbent: str) -> list[str]:
    differences = []
    for metric in METRICS.values():
        row = compared_with(aggregates, candidate, incumbent, metric.name) if metric.in_verdict else None
        if row is None or not row.significant or row.median_difference is None:
            continue
        words = {"lower": ("better", "worse"), "higher": ("worse", "better"), "neither": ("shorter", "longer")}
        kind = words[metric.better][row.median_difference > 0]
        differences.append(
            f"{metric.title} is {kind} than {label_of(aggregates, incumbent)}'s by {abs(row.median_difference):.3g} "
            f"{metric.unit} (95 % {row.low:.3g} to {row.high:.3g}, {row.n_prompts} prompts, Holm p {row.p_holm:.2g})"
        )
    return differences


def _operation(aggregates: Aggregates, candidate: str, incumbent: str) -> list[str]:
    changes = []
    ours, theirs = (aggregates.served.get(name) or ServedSide() for name in (candidate, incumbent))
    if ours.runtime and theirs.runtime and ours.runtime != theirs.runtime:
        changes.append(
            f"operational change: {theirs.runtime} → {ours.runtime} (another server to install, start and monitor)"
        )
    sizes = [_model(aggregates, name).size_bytes for name in (candidate, incumbent)]
    if sizes[0] and sizes[1]:
        changes.append(f"size {sizes[0] / 1e6:.3g} MB against {sizes[1] / 1e6:.3g} MB")
    memory = [side.memory_bytes.five if side.memory_bytes else None for side in (ours, theirs)]
    if memory[0] and memory[1]:
        changes.append(f"memory with five requests {memory[0] / 2**20:.4g} MiB against {memory[1] / 2**20:.4g} MiB")
    return changes


def _caveats(aggregates: Aggregates, chosen: Decision) -> list[str]:
    caveats = [c.message for c in sorted(chosen.confounds, key=lambda c: _SEVERITIES.index(c.severity))]
    for gate in chosen.gates["undecided"]:
        advice = ""
        if isinstance(gate.result, GateResult):
            needed = gate.result.n_to_decide
            advice = (
                f"; about {needed} answers would decide it" if needed else "; no number of answers decides this rate"
            )
        caveats.append(f"undecided: {gate}{advice}")
    rows = [r for r in aggregates.comparisons if {r.a, r.b} == {chosen.candidate, chosen.incumbent}]
    few = sorted({r.workload for r in rows} - {r.workload for r in rows if not r.too_few})
    if few:
        caveats.append(f"fewer than 6 prompts cannot show a difference at 5 %, whatever the repeats: {', '.join(few)}")
    return caveats


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
