"""The decision tree as it was walked, and the recommendation with its reasons.

A recommendation never rests on tokens a second alone: gates come first, then what a user or the machine gains, and what
changes in operation is named.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from annie_quant.judge.metrics import METRICS
from annie_quant.report.format import clean, count, significant, size
from annie_quant.report.pages.checklist import NO_LATER, Line, checklist
from annie_quant.report.pages.comparison import Pair, container, model_of, pair, peak
from annie_quant.report.pages.tables import signed
from annie_quant.report.run import Run, Side


@dataclass
class Step:
    """A question of the decision tree and its answer; `verdict`: pass, fail, undecided, or "" where it was not asked."""

    text: str
    verdict: str = ""
    children: list[Step] = field(default_factory=list)


def decision_tree(run: Run) -> list[Step]:
    """The founding tree A → B → C as it was walked: each NVFP4 strategy, its questions, where it ended.

    The order is the search's where there was one, else that of the run's models.
    """
    who = run.doc["verdict"].get("candidate")
    chosen = next((s.model for s in run.sides if who in (s.model, s.key.split("/", 1)[1])), who)
    names = [m["name"] for m in run.models if _is_nvfp4(run, m)]
    order = sorted(names, key=lambda n: run.walked.index(n) if n in run.walked else len(run.walked))
    return [_strategy(run, model, model == chosen) for model in order]


def _is_nvfp4(run: Run, model: dict[str, Any]) -> bool:
    offline = any(
        s.kind == "offline" and s.key.split("/")[-1] in ("w4a4", "w4a16") for s in run.sides if s.model == model["name"]
    )
    return "NVFP4" in str(model.get("format") or "") or offline


def _strategy(run: Run, model: str, chosen: bool) -> Step:
    questions: list[Step] = []
    stages = {s["name"]: s["summary"] for s in run.doc["stages"]}
    if (said := stages.get(f"audit-{model}")) is not None:
        questions.append(Step(f"every tensor audited: {clean(said)}", "pass" if said == "sound" else "fail"))
    for side in (s for s in run.sides if s.model == model):
        questions.append(_gates(run, side))
    if not any(s.kind == "served" for s in run.sides if s.model == model):
        questions.append(Step("serving: not tried"))
    verdicts = {q.verdict for q in questions if q.verdict}
    verdict = "fail" if "fail" in verdicts else "undecided" if "undecided" in verdicts or not verdicts else "pass"
    end = {
        "pass": "passes every gate",
        "fail": "fails: try the next strategy",
        "undecided": "open: more answers needed",
    }
    title = f"{run.label(model)}: {end[verdict]}" + (", the candidate" if chosen else "")
    return Step(title, verdict, questions)


def _gates(run: Run, side: Side) -> Step:
    """A side's gates as one step: failing ones named, then undecided ones."""
    rows = {g: r for g, r in side.gates.items() if not r["advisory"]}
    by = {v: [g for g, r in rows.items() if r["verdict"] == v] for v in ("fail", "undecided", "pass")}
    verdict = "fail" if by["fail"] else "undecided" if by["undecided"] or not rows else "pass"
    named = by[verdict] if verdict != "pass" else []
    told = ", ".join(f"{run.gate_title(g)} {count(rows[g]['passes'])}/{count(rows[g]['n'])}" for g in named)
    counted = f"{len(by['pass'])} of {len(rows)} gates pass"
    where = "smoke test and gates behind a server" if side.kind == "served" else f"gates under {side.title}"
    return Step(f"{where}: {counted}" + (f"; {told}" if told else ""), verdict)


@dataclass(frozen=True)
class Advice:
    """`word`: switch, stay or wait. `operation`: what changes for whoever runs the machine."""

    word: str
    sentence: str
    reasons: list[str]
    operation: list[str]


def recommendation(run: Run) -> Advice | None:
    """What to do, with its reasons. None where no candidate was served."""
    who = pair(run)
    if who is None:
        return None
    own = who.names[0]
    rows = {g: r for g, r in who.candidate.gates.items() if not r["advisory"]}
    rows |= {g: r for s in run.of("offline") if s.model == who.candidate.model for g, r in _named(run, s)}
    failed = [
        f"{_title(run, g)} {count(r['passes'])} of {count(r['n'])}" for g, r in rows.items() if r["verdict"] == "fail"
    ]
    open_ = [_title(run, g) for g, r in rows.items() if r["verdict"] == "undecided"]
    _, lines = checklist(run)
    operation = operation_change(run, who)
    if failed:
        return Advice("stay", f"Do not switch to {own}: it fails {'; '.join(failed[:4])}.", _evidence(lines), operation)
    if who.incumbent is None:
        return Advice("wait", f"{own} fails nothing, but nothing was measured beside it.", _evidence(lines), operation)
    other = who.names[1]
    gains, losses, faster = weighed(run, who)
    reasons = [*(f"gain: {g}" for g in gains), *(f"loss: {x}" for x in losses), *faster, *_evidence(lines)]
    if open_:
        sentence = f"Wait: {own} fails nothing, but {', '.join(open_[:4])} cannot be decided with so few answers."
        return Advice("wait", sentence, reasons, operation)
    if any(line.verdict == "fail" for line in lines):
        lost = ", ".join(line.item for line in lines if line.verdict == "fail")
        return Advice("stay", f"Stay with {other}: {own} passes its gates, but not on: {lost}.", reasons, operation)
    if gains and not losses:
        return Advice("switch", f"Switch to {own}: it passes every gate and gains without a loss.", reasons, operation)
    if gains:
        sentence = f"Switch to {own} only if its gains outweigh its losses; it passes every gate."
        return Advice("wait", sentence, reasons, operation)
    why = "more tokens a second alone are no reason" if faster else "it brings nothing that was measured here"
    return Advice("stay", f"Stay with {other}: {own} passes every gate, but {why}.", reasons, operation)


def _named(run: Run, side: Side) -> list[tuple[str, dict[str, Any]]]:
    return [(f"{g}|{side.title}", r) for g, r in side.gates.items() if not r["advisory"]]


def _title(run: Run, key: str) -> str:
    gate, _, where = key.partition("|")
    return run.gate_title(gate) + (f" ({where})" if where else "")


def _evidence(lines: list[Line]) -> list[str]:
    return [f"{line.item}: {line.evidence}" for line in lines if line.verdict != "pass"]


def weighed(run: Run, who: Pair) -> tuple[list[str], list[str], list[str]]:
    """(gains, losses, speed): significant paired differences, gates surely better or worse, memory. Decode speed is apart."""
    gains: list[str] = []
    losses: list[str] = []
    speed: list[str] = []
    ours, theirs = (s.key.split("/", 1)[1] for s in (who.candidate, who.incumbent) if s)
    for row in run.aggregates["comparisons"]:
        known = (
            {"median_difference", "median_a", "median_b"} <= row.keys()
            and row["workload"] == "all"
            and row["significant"]
        )
        if not known or {row["a"], row["b"]} != {ours, theirs}:
            continue
        turned = row["b"] != ours
        change = -row["median_difference"] if turned else row["median_difference"]
        before = row["median_b"] if turned else row["median_a"]
        metric = METRICS.get(row["metric"])
        if metric is None:
            continue
        told = f"{signed(change)} of {significant(before)} {metric.unit}, {count(row.get('n_prompts'))} prompts"
        if metric.user_latency and abs(change) > NO_LATER * abs(before):
            (gains if change < 0 else losses).append(f"{metric.title} {told}")
        elif row["metric"] == "decode_tok_s":
            speed.append(f"decode {told} (no reason by itself)")
    incumbent = who.incumbent
    for gate, row in who.candidate.gates.items():
        other = incumbent.gates.get(gate) if incumbent else None
        if other is None or row["advisory"] or None in (row["low"], row["high"], other["low"], other["high"]):
            continue
        shown = [f"{count(r['passes'])}/{count(r['n'])}" for r in (row, other)]
        told = f"{run.gate_title(gate)} {shown[0]} against {shown[1]}"
        if row["low"] > other["high"]:
            gains.append(told)
        elif row["high"] < other["low"]:
            losses.append(told)
    a, b = peak(who.candidate), peak(incumbent) if incumbent else None
    if a and b and abs(a - b) > NO_LATER * b:
        (gains if a < b else losses).append(f"memory {size(a)} against {size(b)}")
    return gains, losses, speed


def operation_change(run: Run, who: Pair) -> list[str]:
    """What whoever runs the machine has to do otherwise, and how to go back."""
    runtimes = [str(s.data.get("runtime") or "not on record") for s in (who.incumbent, who.candidate) if s]
    found = []
    if len(set(runtimes)) == 2:
        found.append(f"another server: {clean(runtimes[0])} → {clean(runtimes[1])}, to install, start and watch")
        if container(who.candidate):
            found.append(
                "a container image and its NVIDIA runtime in place of one binary; its first start takes minutes"
            )
    elif len(runtimes) == 2:
        found.append(f"the same server ({clean(runtimes[0])}), another model file")
    model = clean(model_of(run, who.candidate).get("checkpoint") or "MODEL_DIR")
    runtime = "vllm" if container(who.candidate) == "vLLM" else "sglang" if container(who.candidate) else "llama.cpp"
    found.append(f"start script: annie-quant serve {model} --runtime {runtime} --dry-run prints its command")
    if who.incumbent:
        found.append(f"way back: keep {who.names[1]} and its start command; both fit only if the budget below says so")
    found.append("resource registry: enter the candidate's highest memory from the table below")
    return found
