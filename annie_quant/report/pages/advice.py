"""The recommendation, the drop-in checklist and the decision tree as text. judge.decision decides; nothing is decided here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from annie_quant.judge import decision
from annie_quant.report.format import SIGNS, count
from annie_quant.report.pages.comparison import container
from annie_quant.report.run import LoadedRun, Side
from annie_quant.schema import Outcome, Standing


@dataclass
class Step:
    """A question of the decision tree and its answer. verdict: "" where it was not asked."""

    text: str
    verdict: Outcome | Literal[""] = ""
    children: list[Step] = field(default_factory=list)

    @property
    def sign(self) -> str:
        return SIGNS.get(self.verdict, "·")


def outcome(run: LoadedRun) -> Standing:
    return decision.outcome(run.aggregates, run.verdict)


def badge(run: LoadedRun) -> str:
    """Return the decision in a few words: the recommendation's where a candidate was served, else the verdict's."""
    advice = recommendation(run) if run.sentence else None
    return (advice.badge if advice else "") or run.verdict.badge or outcome(run)


def checklist(run: LoadedRun) -> list[decision.ChecklistItem]:
    """Empty where no candidate was served."""
    candidate, incumbent = run.candidate, run.incumbent
    if candidate is None:
        return []
    with_thinking = {w.name for w in run.inputs if w.thinking}
    other = incumbent.name if incumbent else None
    return decision.checklist(run.aggregates, candidate.name, other, run.measured, with_thinking, run.answer_pairs)


def checklist_title(run: LoadedRun) -> str:
    labels = [run.label(s.model) for s in (run.candidate, run.incumbent) if s]
    return " instead of ".join(labels)


def recommendation(run: LoadedRun) -> decision.Recommendation | None:
    """None where no candidate was served."""
    candidate, incumbent = run.candidate, run.incumbent
    if candidate is None:
        return None
    other = incumbent.name if incumbent else None
    return decision.recommendation(run.aggregates, candidate.name, other, checklist(run), run.answer_pairs)


def operation_changes(run: LoadedRun) -> list[str]:
    """What changes for whoever runs the machine, and how to go back."""
    candidate, incumbent = run.candidate, run.incumbent
    if candidate is None:
        return []
    changes, runtime = [], candidate.data.runtime or "not on record"
    before = incumbent.data.runtime or "not on record" if incumbent else None
    if before == runtime:
        changes.append(f"the same server ({runtime}), another model file")
    elif before is not None:
        changes.append(f"another server: {before} → {runtime}, to install, start and monitor")
        if container(candidate):
            changes.append(
                "a container image and its NVIDIA runtime instead of one binary; its first start takes minutes"
            )
    name = {"vLLM": "vllm", "SGLang": "sglang"}.get(container(candidate), "llama.cpp")
    folder = run.model(candidate.model).checkpoint or "MODEL_DIR"
    changes.append(f"start script: annie-quant serve {folder} --runtime {name} --dry-run prints its command")
    if incumbent:
        label = run.label(incumbent.model)
        changes.append(f"way back: keep {label} and its start command; both fit only within the budget below")
    changes.append("resource registry: enter the candidate's highest memory from the table below")
    return changes


def decision_tree(run: LoadedRun) -> list[Step]:
    """The NVFP4 models with their questions, in a search's order, else in that of run.json."""
    order = {strategy: index for index, strategy in enumerate(run.tried)}
    models = [m.name for m in run.models if m.format == "NVFP4" or _four_bits(run, m.name)]
    chosen = run.candidate.model if run.candidate else run.verdict.candidate
    return [_model(run, m, m == chosen) for m in sorted(models, key=lambda m: order.get(m, len(order)))]


def _four_bits(run: LoadedRun, model: str) -> bool:
    return any(s.how in ("W4A4", "W4A16") for s in run.sides_of(model))


def _model(run: LoadedRun, model: str, chosen: bool) -> Step:
    sides = run.sides_of(model)
    audit = next((s.summary for s in run.document.stages if s.name == f"audit-{model}"), None)
    steps = (
        [Step(f"every tensor audited: {audit}", "pass" if audit == "sound" else "fail")] if audit is not None else []
    )
    steps += [_gates(run, side) for side in sides]
    steps += _members(run, model)
    if not any(s.kind == "served" for s in sides):
        steps.append(Step("serving: not tried"))
    verdict = decision.combined([s.verdict for s in steps if s.verdict] or ["undecided"])
    end = {
        "pass": "keeps every gate",
        "fail": "loses: try the next strategy",
        "undecided": "open: more answers needed",
    }
    text = end[verdict]
    if verdict == "fail" and decision.standing_of(run.aggregates, model) == "fragile":
        text = "fragile, keeps in one arithmetic what it loses in another: try the next strategy"
    return Step(f"{run.label(model)}: {text}" + (", the candidate" if chosen else ""), verdict, steps)


def _members(run: LoadedRun, model: str) -> list[Step]:
    """The further arithmetics of the ensemble as one step."""
    members = run.aggregates.members.get(model, {})
    if not members:
        return []
    gates = [g for g in decision.deciding_gates(run.aggregates, model) if "+" in g.where]
    verdict = decision.combined([g.outcome for g in gates] or ["undecided"])
    named = list(dict.fromkeys(f"{g.title} ({g.where})" for g in gates if g.outcome == verdict != "pass"))
    text = f"{len(members)} further arithmetics: {sum(g.outcome == 'pass' for g in gates)} of {len(gates)} gates kept"
    return [Step("; ".join([text, *([", ".join(named)] if named else [])]), verdict)]


def _gates(run: LoadedRun, side: Side) -> Step:
    """A side's gates as one step that names the failing ones, else the undecided ones."""
    gates = side.deciding
    verdict = decision.combined([r.verdict for r in gates.values()] or ["undecided"])
    named = [
        f"{run.gate_title(gate)} {count(r.passes)}/{count(r.n)}"
        for gate, r in gates.items()
        if r.verdict == verdict != "pass"
    ]
    verb = "kept" if any(side.word(gate) != gates[gate].verdict for gate in gates) else "pass"
    where = "smoke test and gates behind a server" if side.kind == "served" else f"gates under {side.title}"
    passing = sum(r.verdict == "pass" for r in gates.values())
    return Step(
        f"{where}: {passing} of {len(gates)} gates {verb}" + "; ".join(["", ", ".join(named)] if named else []), verdict
    )
