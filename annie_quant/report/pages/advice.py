"""The decision tree as it was walked, and the recommendation with its reasons.

A recommendation never rests on tokens a second alone: gates come first, then what a user or the machine gains, and what
changes in operation is named.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from annie_quant.judge import decision
from annie_quant.report import typed
from annie_quant.report.format import clean, count
from annie_quant.report.pages.comparison import Pair, container, model_of, pair
from annie_quant.report.run import Run, Side
from annie_quant.schema import Outcome


@dataclass
class Step:
    """A question of the decision tree and its answer; `verdict`: pass, fail, undecided, or "" where it was not asked."""

    text: str
    verdict: Outcome | Literal[""] = ""
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
    outcomes = [q.verdict for q in questions if q.verdict]
    verdict = decision.combined(outcomes or ["undecided"])
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
    verdict = decision.combined([r["verdict"] for r in rows.values()] or ["undecided"])
    named = by[verdict] if verdict != "pass" else []
    told = ", ".join(f"{run.gate_title(g)} {count(rows[g]['passes'])}/{count(rows[g]['n'])}" for g in named)
    counted = f"{len(by['pass'])} of {len(rows)} gates pass"
    where = "smoke test and gates behind a server" if side.kind == "served" else f"gates under {side.title}"
    return Step(f"{where}: {counted}" + (f"; {told}" if told else ""), verdict)


@dataclass(frozen=True)
class Advice:
    """The recommendation. operation: what changes for whoever runs the machine."""

    action: str
    sentence: str
    reasons: list[str]
    operation: list[str]


def recommendation(run: Run) -> Advice | None:
    """What to do, with its reasons. None where no candidate was served."""
    who = pair(run)
    if who is None:
        return None
    candidate, incumbent = _backends(who)
    _, items = checklist(run)
    advice = decision.recommendation(typed.aggregates(run), candidate, incumbent, items)
    return Advice(advice.action, clean(advice.sentence), [clean(r) for r in advice.reasons], operation_change(run, who))


def checklist(run: Run) -> tuple[str, list[decision.ChecklistItem]]:
    """(title, items); no items where the verdict names no candidate that was served."""
    who = pair(run)
    if who is None:
        return "", []
    candidate, incumbent = _backends(who)
    with_thinking = {w["name"] for w in run.inputs if w["thinking"]}
    records = typed.records(r for r in run.measured if r["backend"] == candidate)
    items = decision.checklist(typed.aggregates(run), candidate, incumbent, records, with_thinking)
    other = f" in place of {who.names[1]}" if incumbent else ""
    return f"{who.names[0]}{other}", [replace(item, evidence=clean(item.evidence)) for item in items]


def _backends(who: Pair) -> tuple[str, str | None]:
    candidate, incumbent = (s.key.split("/", 1)[1] if s else None for s in (who.candidate, who.incumbent))
    return str(candidate), incumbent


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
