"""Could the candidate take the incumbent's place? The founding documents' drop-in checklist, filled with this run's evidence.

Each line is pass, fail or undecided, and says from what. What a benchmark cannot know stays undecided, with the command
that settles it.
"""

from __future__ import annotations

from dataclasses import dataclass

from annie_quant.report import recount
from annie_quant.report.charts.gates import rate
from annie_quant.report.format import count, size
from annie_quant.report.pages.tables import signed
from annie_quant.report.run import Run, Side

NO_LATER = 0.05  # of the incumbent's median
BUDGET_BYTES = 110e9  # the founding documents' peak for everything that runs on the machine


@dataclass(frozen=True)
class Line:
    item: str
    verdict: str
    evidence: str


def checklist(run: Run) -> tuple[str, list[Line]]:
    """(title, lines); no lines where the verdict names no candidate that a server was measured with."""
    verdict = run.doc["verdict"]
    candidate, incumbent = (_side(run, verdict.get(k)) for k in ("candidate", "incumbent"))
    if candidate is None:
        return "", []
    lines = [_api(run, candidate), _tools(candidate), _thinking(run, candidate), _memory(candidate)]
    if incumbent is not None:
        lines += [_latency(run, candidate, incumbent), _quality(run, candidate, incumbent)]
    lines.append(
        Line("the start script can launch it", "undecided", "annie-quant serve MODEL_DIR --dry-run prints how")
    )
    other = f" in place of {run.label(incumbent.model)}" if incumbent else ""
    return f"{run.label(candidate.model)}{other}", lines


def _side(run: Run, chosen: str | None) -> Side | None:
    return next((s for s in run.of("served") if chosen in (s.key.split("/", 1)[1], s.model)), None)


def _own(run: Run, side: Side) -> list[recount.Row]:
    return [r for r in run.measured if r["backend"] == side.key.split("/", 1)[1]]


def _api(run: Run, side: Side) -> Line:
    rows = _own(run, side)
    fine = sum(not r["error"] for r in rows)
    verdict = "undecided" if not rows else "pass" if fine == len(rows) else "fail"
    return Line("speaks the OpenAI API", verdict, f"{count(fine)} of {count(len(rows))} chat completions went well")


def _gate(side: Side, gate: str, item: str) -> Line:
    row = side.gates.get(gate)
    if row is None:
        return Line(item, "undecided", "not asked in this run")
    return Line(item, row["verdict"], f"{count(row['passes'])} of {count(row['n'])}, served")


def _tools(side: Side) -> Line:
    return _gate(side, "tool_call", "calls tools")


def _thinking(run: Run, side: Side) -> Line:
    """Off means off (the leak gate), and on means that reasoning comes, apart from the answer."""
    line = _gate(side, "thinking_leak", "thinking can be switched")
    aloud = {w["name"] for w in run.inputs if w["thinking"]}
    rows = [r for r in _own(run, side) if r["workload"] in aloud and not r["error"]]
    if not rows:
        return Line(line.item, "fail" if line.verdict == "fail" else "undecided", f"off: clean in {line.evidence}")
    thought = sum(bool(r.get("reasoning")) for r in rows)
    evidence = f"off: clean in {line.evidence}; on: reasoning came in {count(thought)} of {count(len(rows))}"
    return Line(line.item, line.verdict if thought == len(rows) else "fail", evidence)


def _memory(side: Side) -> Line:
    peak = max((side.data["memory_bytes"].get(k) or 0 for k in ("idle", "one", "five")), default=0)
    if not peak:
        return Line("fits the memory budget", "undecided", "memory was not measured")
    verdict = "pass" if peak < BUDGET_BYTES else "fail"
    return Line(
        "fits the memory budget", verdict, f"{size(peak)} at its highest, of {size(BUDGET_BYTES)} for everything"
    )


def _latency(run: Run, candidate: Side, incumbent: Side) -> Line:
    """No later: the interval of the paired difference ends below 5 % of the incumbent's median."""
    item, names = "answers no later", [s.key.split("/", 1)[1] for s in (candidate, incumbent)]
    for row in run.aggregates["comparisons"]:
        known = {"median_difference", "low", "high", "median_a", "median_b"} <= row.keys()
        if (
            known
            and (row["workload"], row["metric"]) == ("all", "ttft_content_ms")
            and {row["a"], row["b"]} == set(names)
        ):
            sign, theirs = (1, row["median_a"]) if row["b"] == names[0] else (-1, row["median_b"])
            low, high = sorted(sign * row[k] for k in ("low", "high"))
            verdict = "pass" if high <= NO_LATER * theirs else "fail" if low > 0 and row["significant"] else "undecided"
            later = signed(sign * row["median_difference"])
            evidence = f"content TTFT {later} ms ({signed(low)} to {signed(high)}), paired, {count(row.get('n_prompts'))} prompts"
            return Line(item, verdict, evidence)
    return Line(item, "undecided", "no paired comparison of the two over all workloads")


def _quality(run: Run, candidate: Side, incumbent: Side) -> Line:
    """Worse means: intervals that do not overlap, on a gate that decides."""
    item = "answers no worse"
    shared = [g for g in candidate.gates if g in incumbent.gates and not candidate.gates[g]["advisory"]]
    worse = [
        run.gate_title(g)
        for g in shared
        if None not in (candidate.gates[g]["high"], incumbent.gates[g]["low"])
        and candidate.gates[g]["high"] < incumbent.gates[g]["low"]
    ]
    if worse:
        return Line(item, "fail", f"surely worse on {', '.join(worse)}")
    lower = [g for g in shared if rate(candidate.gates[g]) < rate(incumbent.gates[g])]
    told = f"lower, but within the intervals, on {', '.join(map(run.gate_title, lower))}" if lower else "none lower"
    return Line(item, "pass" if shared else "undecided", f"{count(len(shared))} gates compared: {told}")
