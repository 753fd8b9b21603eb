"""The verdict: which side is judged, whether it keeps what its reference does, and why.

Roles are stated (roles.py). The reference of a side is the bf16 model on the same prompts, or the incumbent where bf16 was not
measured; a side alone is judged by the absolute requirements. Where a confound leaves open what was compared, nothing keeps.
Speed alone is never a reason to switch: gates come first, then what differs between the two sides, then what changes in operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from annie_quant import documents
from annie_quant.core.errors import UsageError
from annie_quant.documents import (
    Aggregates,
    Comparison,
    Confound,
    GateResult,
    Outcome,
    Roles,
    ServedSide,
    Standing,
    Verdict,
)
from annie_quant.judge.decision import rule
from annie_quant.judge.decision.judged import (
    JudgedGate,
    blocking_of,
    by_title,
    deciding_gates,
    gate_tables,
    standing,
    standing_of,
)
from annie_quant.judge.decision.roles import (
    RULE,
    assign,
    formats_of,
    label_of,
    model_row,
    roles_of,
    sides,
    with_candidate_second,
)
from annie_quant.judge.metrics import METRICS, three_digits
from annie_quant.judge.pairing import answers_per_behaviour, describe_coverage, unmet_labels

_SEVERITIES = ("confound", "fault", "note")


@dataclass(frozen=True)
class Decision:
    """Who is judged against whom, and the candidate's deciding gates by outcome."""

    candidate: str
    roles: Roles
    gates: Mapping[Outcome, Sequence[JudgedGate]]
    confounds: Sequence[Confound]
    not_tested: str  # by the answers that its gates were compared with; "" without a reference

    @property
    def incumbent(self) -> str | None:
        return self.roles.incumbent

    @property
    def standing(self) -> Standing:
        """The verdict over all members: each numerics, and the server. What a confound leaves open does not keep."""
        verdict = standing([gate for gates in self.gates.values() for gate in gates])
        return "undecided" if verdict == "keeps" and self.confounded else verdict

    @property
    def confounded(self) -> list[str]:
        """The kinds of the confounds between the sides."""
        return sorted(
            {c.code.replace("_", " ") for c in self.confounds if c.severity == "confound"}
        )

    @property
    def compared(self) -> bool:
        """Whether any gate was judged against a reference."""
        return any(gate.compared for gates in self.gates.values() for gate in gates)

    @property
    def comparable(self) -> bool:
        return bool(self.roles.incumbent or self.roles.reference) and not self.confounded


def combined(outcomes: Collection[Outcome]) -> Outcome:
    """Return the outcome of several: one failure fails; without a failure, one undecided leaves all undecided."""
    return "fail" if "fail" in outcomes else "undecided" if "undecided" in outcomes else "pass"


def decision(aggregates: Aggregates, candidate: str | None = None) -> Decision | None:
    """Sort the candidate's gates; None where nothing was measured.

    candidate: a backend or a model, instead of the run's.
    """
    roles = roles_of(aggregates, candidate)
    if roles.candidate is None:
        return None
    if roles.assumed and roles.incumbent:
        fail = [
            standing_of(aggregates, name) in rule.FAILING
            for name in (roles.candidate, roles.incumbent)
        ]
        if fail == [False, True]:
            roles = replace(roles, candidate=roles.incumbent, incumbent=roles.candidate)
    assert roles.candidate is not None
    gates: dict[Outcome, list[JudgedGate]] = {"pass": [], "fail": [], "undecided": []}
    for gate in deciding_gates(aggregates, roles.candidate):
        gates[gate.outcome].append(gate)
    confounds = [c for c in aggregates.confounds if _concerns(c, roles)]
    tables = [pairs for _, _, pairs, _ in gate_tables(aggregates, roles.candidate) if pairs]
    not_tested = (
        describe_coverage(answers_per_behaviour(tables), unmet_labels(tables)) if tables else ""
    )
    return Decision(roles.candidate, roles, gates, confounds, not_tested)


def verdict(
    aggregates: Aggregates | Mapping[str, object],
    candidate: str | None = None,
    *,
    reference: str | None = None,
    incumbent: str | None = None,
) -> Verdict:
    """Return the outcome with its sentence, reasons and caveats; `aggregates` (or a mapping of the same form) is not changed.

    candidate, reference, incumbent: sides, instead of the run's roles. Gates stay compared with what they were compared with
    when the run was aggregated; `annie-quant report DIR --candidate ...` compares them again.
    """
    if not isinstance(aggregates, Aggregates):
        aggregates = documents.convert(Aggregates, aggregates, "aggregates", error=UsageError)
    if reference or incumbent:
        stated = Roles(candidate=candidate, reference=reference, incumbent=incumbent)
        aggregates = replace(
            aggregates, roles=assign(sides(aggregates), formats_of(aggregates), stated)
        )
    chosen = decision(aggregates, candidate)
    if chosen is None:
        return Verdict(rule=RULE, sentence="Nothing was measured, so nothing can be concluded.")
    result = Verdict(
        rule=RULE,
        sentence=_sentence(aggregates, chosen),
        passed=chosen.standing not in rule.FAILING and not chosen.confounded,
        outcome=chosen.standing,
        badge=badge(chosen) + ("" if chosen.standing in rule.FAILING else _not_tested(chosen)),
        candidate=chosen.candidate,
        incumbent=chosen.incumbent,
        comparable=chosen.comparable,
        reasons=_reasons(aggregates, chosen),
        caveats=_caveats(aggregates, chosen),
    )
    return blocked(result, blocking_of(aggregates, chosen.candidate))


def blocked(result: Verdict, blocking: Sequence[str]) -> Verdict:
    """Return a verdict that does not keep where something forbids it; the reason comes first."""
    if not blocking:
        return result
    result = replace(result, passed=False, reasons=[*blocking, *result.reasons])
    if result.outcome == "keeps":
        result.outcome, result.badge = "undecided", "undecided: not a sound export"
        result.sentence = f"{blocking[0]}. Undecided, although no gate is lost."
    return result


def _concerns(confound: Confound, roles: Roles) -> bool:
    """Return whether a finding is about these sides: one about a pair counts for it alone, one about single sides for each."""
    about, ours = set(confound.backends), set(roles.names)
    return about <= ours if len(about) == 2 else bool(about & ours)


# ---- sentence


def _sentence(aggregates: Aggregates, chosen: Decision) -> str:
    label, failing, undecided = (
        label_of(aggregates, chosen.candidate),
        chosen.gates["fail"],
        chosen.gates["undecided"],
    )
    end = "."
    if failing:
        fragile = chosen.standing == "fragile"
        verb = "is fragile: it loses" if fragile else "loses" if chosen.compared else "fails"
        lost = by_title(failing)
        head = f"{label} {verb} {_count(len(lost), 'gate')}: {'; '.join(lost[: rule.SHOWN])}"
        head += f"; and {len(lost) - rule.SHOWN} more" if len(lost) > rule.SHOWN else ""
        head += f", and {_other_places(chosen)}" if fragile else ""
        end = f". {_replacement(aggregates, chosen)}" if chosen.incumbent else "."
    elif undecided:
        verb = "loses" if chosen.compared else "fails"
        head = f"{label} {verb} no gate, but "
        if {gate.title for gate in undecided} == {rule.NOTHING_TESTED}:
            head += f"{rule.NOTHING_TESTED} (annie-quant init makes prompts that do)"
        else:
            head += (
                f"{_count(len(by_title(undecided)), 'gate')} cannot be decided with so few answers"
            )
    else:
        head = f"{label} {'keeps' if chosen.compared else 'passes'} every gate"
    head += _not_tested(chosen)
    if chosen.confounded:
        other = chosen.roles.incumbent or chosen.roles.reference
        effect = "the sides cannot be compared" if other else "nothing is decided"
        return f"CONFOUNDED ({', '.join(chosen.confounded)}): {effect}." + (
            f" {head}{end}" if failing else ""
        )
    return f"{head}{end}{'' if failing else _speed(aggregates, chosen)}"


def _other_places(chosen: Decision) -> str:
    """Where a fragile side keeps what it loses elsewhere: arithmetics that lose none of these gates, if there are any."""
    lost = {gate.title for gate in chosen.gates["fail"]}
    losing = {gate.where for gate in chosen.gates["fail"]}
    kept = [
        gate for gate in chosen.gates["pass"] if gate.title in lost and gate.where not in losing
    ]
    places = dict.fromkeys(gate.where for gate in kept)
    if not places:
        return f"keeps {'part of them' if len(lost) > 1 else 'it'} in other arithmetics"
    return f"keeps {'them' if len(lost) > 1 else 'it'} ({', '.join(places)})"


def _replacement(aggregates: Aggregates, chosen: Decision) -> str:
    """Whether the candidate's losses are its own, or the incumbent has them too."""
    incumbent = str(chosen.incumbent)
    own = [gate for gate in deciding_gates(aggregates, incumbent) if gate.outcome == "fail"]
    lost = {gate.title for gate in chosen.gates["fail"]}
    if lost <= {gate.title for gate in own}:
        return (
            f"{label_of(aggregates, incumbent)} {'loses' if own[0].compared else 'fails'} the same."
        )
    return f"It cannot replace {label_of(aggregates, incumbent)}."


def _not_tested(chosen: Decision) -> str:
    return f"; not tested: {chosen.not_tested}" if chosen.not_tested else ""


def badge(chosen: Decision) -> str:
    """Return the decision in a few words."""
    if chosen.standing in rule.FAILING:
        lost = list(dict.fromkeys(gate.title for gate in chosen.gates["fail"]))
        verb = (
            "fragile:" if chosen.standing == "fragile" else "loses" if chosen.compared else "fails"
        )
        return f"{verb} {', '.join(lost[:2])}" + (
            f" and {len(lost) - 2} more" if len(lost) > 2 else ""
        )
    if chosen.standing == "undecided":
        return f"undecided: {', '.join(chosen.confounded) or 'too few answers'}"
    return "gates kept" if chosen.compared else "gates passed"


def _speed(aggregates: Aggregates, chosen: Decision) -> str:
    if not chosen.incumbent:
        return ""
    parts = []
    for metric in ("ttft_content_ms", "decode_tok_s"):
        row = compared_with(aggregates, chosen.candidate, chosen.incumbent, metric)
        if row and row.median_a is not None and row.median_b is not None:
            sure = "" if row.significant else " (no significant difference)"
            title, unit = METRICS[metric].title, METRICS[metric].unit
            parts.append(
                f"{title} {three_digits(row.median_b)} {unit} against {three_digits(row.median_a)}{sure}"
            )
    return (
        f" Against {label_of(aggregates, chosen.incumbent)}: {' and '.join(parts)}."
        if parts
        else ""
    )


def compared_with(
    aggregates: Aggregates, candidate: str, incumbent: str, metric: str
) -> Comparison | None:
    """Return the comparison over all workloads with a = incumbent and b = candidate; with one workload alone, that one's."""
    rows = [
        r
        for r in aggregates.comparisons
        if {r.a, r.b} == {candidate, incumbent} and r.metric == metric
    ]
    rows = [r for r in rows if r.workload == "all"] or (rows if len(rows) == 1 else [])
    row = next((r for r in rows if r.median_difference is not None), None)
    return row and with_candidate_second(row, candidate)


# ---- reasons and caveats


def _reasons(aggregates: Aggregates, chosen: Decision) -> list[str]:
    reasons = [
        f"{'loses' if gate.compared else 'fails'} {gate}: {gate.evidence}"
        for gate in chosen.gates["fail"]
    ]
    if not reasons:
        places: dict[int, list[str]] = {}  # number of gates → where so many are kept
        for where, n_gates in Counter(gate.where for gate in chosen.gates["pass"]).items():
            places.setdefault(n_gates, []).append(where)
        verb = "keeps" if chosen.compared else "passes"
        reasons = [
            f"{verb} {_count(n, 'gate')} ({', '.join(names)})" for n, names in places.items()
        ]
    for name in sides(aggregates):
        failing = [g for g in deciding_gates(aggregates, name) if g.outcome == "fail"]
        if failing and name != chosen.candidate:
            verb = "loses" if failing[0].compared else "fails"
            reasons.append(
                f"{label_of(aggregates, name)} {verb} {'; '.join(by_title(failing)[: rule.SHOWN])}"
            )
    if chosen.incumbent:
        reasons += _differences(aggregates, chosen.candidate, chosen.incumbent)
        reasons += _operation(aggregates, chosen.candidate, chosen.incumbent)
    return reasons


def _differences(aggregates: Aggregates, candidate: str, incumbent: str) -> list[str]:
    differences = []
    for metric in METRICS.values():
        row = (
            compared_with(aggregates, candidate, incumbent, metric.name)
            if metric.in_verdict
            else None
        )
        if (
            row is None
            or not row.significant
            or row.median_difference is None
            or row.low is None
            or row.high is None
        ):
            continue
        if row.low <= 0 <= row.high:
            continue  # ranks differ, and the middle of the differences is 0: nothing that a reader could use
        words = {
            "lower": ("better", "worse"),
            "higher": ("worse", "better"),
            "neither": ("shorter", "longer"),
        }
        kind = words[metric.better][row.median_difference > 0]
        differences.append(
            f"{metric.title} is {kind} than {label_of(aggregates, incumbent)}'s by {three_digits(abs(row.median_difference))} "
            f"{metric.unit} (95 % {three_digits(row.low)} to {three_digits(row.high)}, {row.n_prompts} prompts, "
            f"Holm p {row.p_holm:.2g})"
        )
    return differences


def _operation(aggregates: Aggregates, candidate: str, incumbent: str) -> list[str]:
    changes = []
    ours, theirs = (aggregates.served.get(name) or ServedSide() for name in (candidate, incumbent))
    if ours.runtime and theirs.runtime and ours.runtime != theirs.runtime:
        runtimes = f"{theirs.runtime} → {ours.runtime}"
        changes.append(
            f"operational change: {runtimes} (another server to install, start and monitor)"
        )
    sizes = [model_row(aggregates, name).size_bytes for name in (candidate, incumbent)]
    if sizes[0] and sizes[1]:
        changes.append(f"size {sizes[0] / 1e6:.3g} MB against {sizes[1] / 1e6:.3g} MB")
    memory = [side.memory_bytes.highest if side.memory_bytes else None for side in (ours, theirs)]
    if memory[0] and memory[1]:
        changes.append(f"highest memory {memory[0] / 1e6:.4g} MB against {memory[1] / 1e6:.4g} MB")
    return changes


def _caveats(aggregates: Aggregates, chosen: Decision) -> list[str]:
    caveats = [
        c.message for c in sorted(chosen.confounds, key=lambda c: _SEVERITIES.index(c.severity))
    ]
    if chosen.roles.assumed:
        judged = f"{chosen.candidate} was judged; choose with --candidate NAME"
        caveats.insert(0, f"nobody stated which side is new: {judged}")
    caveats += _missed(aggregates, chosen)
    for gate in chosen.gates["undecided"]:
        advice = ""
        if isinstance(gate.result, GateResult):
            needed = gate.result.n_to_decide
            advice = (
                f"about {needed} answers would decide it"
                if needed
                else "no number of answers decides this rate"
            )
            advice = f"; {advice}"
        caveats.append(f"undecided: {gate}{advice}")
    rows = [r for r in aggregates.comparisons if {r.a, r.b} == {chosen.candidate, chosen.incumbent}]
    few = sorted({r.workload for r in rows} - {r.workload for r in rows if not r.too_few})
    if few:
        caveats.append(
            f"fewer than 6 prompts cannot show a difference at 5 %, whatever the repeats: {', '.join(few)}"
        )
    return caveats


def _missed(aggregates: Aggregates, chosen: Decision) -> list[str]:
    """Absolute requirements that a compared candidate misses: they inform."""
    return [
        f"misses {result.requirement} by itself: {gate}"
        for gates in (chosen.gates.values() if chosen.compared else ())
        for gate in gates
        if isinstance(result := gate.result, GateResult)
        and result.requirement
        and result.meets == "fail"
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
