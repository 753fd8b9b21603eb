"""Candidate and incumbent by the dimensions of the original plan (R48).

With the memory budget (R50) and the drop-in checklist.

What was not measured is shown as unknown; computed figures are named as such. judge.decision
decides; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from annie_quant.checkpoint.size import AttentionShape, caches_of
from annie_quant.core.templates import render_text
from annie_quant.documents import Identity, PairedGate, Standing, salvage_or_default
from annie_quant.judge import decision
from annie_quant.report.checklist import BUDGET_BYTES, ChecklistItem, checklist, pair_answers
from annie_quant.report.format import DASH, count, significant, size
from annie_quant.report.run import LoadedRun, ServedModel
from annie_quant.report.tables import Cell, Table, metric_cell, speed_cell

if TYPE_CHECKING:
    from annie_quant.ops.serving import RecipeRuntime

CONTEXT = 32_768  # tokens, as the original plan configures
ANSWERS = {"pass": "✓ yes", "fail": "✗ no", "undecided": "? open"}


class _ServedConfig(AttentionShape):
    text_config: AttentionShape | None = None


def dimensions(run: LoadedRun) -> Table | None:
    """One row per dimension: incumbent, then candidate. None where no candidate was served."""
    if run.candidate is None:
        return None
    sides = _sides(run)
    table = Table("What is served now and what would take its place", "dimension", list(sides))
    rows: tuple[tuple[str, Callable[[LoadedRun, ServedModel], Cell]], ...] = (
        ("runtime", lambda r, s: Cell(s.data.runtime or DASH, _identity(r, s).version or "")),
        ("fine-tuning", _weights),
        ("quantization", _format),
        (
            "model on disk",
            lambda r, s: Cell(size(r.model(s.model).size_bytes), key=f"size|{s.model}"),
        ),
        ("memory, idle", lambda r, s: _memory(s, "idle")),
        ("memory, 5 requests", lambda r, s: _memory(s, "five")),
        (f"cache at {count(CONTEXT)} tokens", _cache),
        ("decode p50, tok/s", lambda r, s: _speed(s, "decode", "decode_tok_s")),
        ("TTFT p50, ms", lambda r, s: _speed(s, "ttft", "ttft_content_ms")),
        ("TTFT, greeting, ms", _greeting),
        ("deployment", _deployment),
        ("context limit", _context),
        ("acceleration", _acceleration),
    )
    for title, write in rows:
        cells = [write(run, s) for s in sides.values()]
        for cell in cells:
            cell.css = f"word {cell.css}" if cell.css in ("pass", "fail", "undecided") else "word"
        table.rows.append((title, cells))
    return table


def _sides(run: LoadedRun) -> dict[str, ServedModel]:
    """Return the incumbent and the candidate by their headers."""
    sides = ((run.incumbent, "current"), (run.candidate, "candidate"))
    return {f"{run.label(side.model)} ({word})": side for side, word in sides if side}


def _identity(run: LoadedRun, side: ServedModel) -> Identity:
    return run.backends.get(side.name) or Identity(name=side.name)


def _weights(run: LoadedRun, side: ServedModel) -> Cell:
    """Whether both backends serve the same fine-tuned weights, where the benchmark knows their source."""
    both = [s for s in (run.candidate, run.incumbent) if s]
    sources = {str(_identity(run, s).meta.get("source") or "") for s in both}
    if sources == {""}:
        return Cell("not on record")
    return Cell(
        "the same weights on both sides"
        if len(sources) == 1
        else "differs, or not on record of both"
    )


def _format(run: LoadedRun, side: ServedModel) -> Cell:
    model = run.model(side.model)
    bits = f"{significant(model.bits_per_weight)} bits per weight" if model.bits_per_weight else ""
    return Cell(model.format or run.label(side.model), bits)


def _memory(side: ServedModel, level: str) -> Cell:
    value = getattr(side.data.memory_bytes, level, None)
    return Cell(size(value), key=f"memory|{side.key}|{level}" if value is not None else "")


def _speed(side: ServedModel, gate: str, metric: str) -> Cell:
    row = side.data.speed_gates.get(gate)
    return _with_n(speed_cell(side, gate, metric), row.n if row else None)


def _greeting(run: LoadedRun, side: ServedModel) -> Cell:
    greeting = side.data.workloads.get("greeting")
    return _with_n(
        metric_cell(side, "greeting", "ttft_content_ms"), greeting.n if greeting else None
    )


def _with_n(cell: Cell, n: int | None) -> Cell:
    if n and cell.key:
        cell.sub = ", ".join(filter(None, [cell.sub, f"n = {count(n)}"]))
    return cell


def _cache(run: LoadedRun, side: ServedModel) -> Cell:
    """Size of the caches, computed from config.json."""
    config = _config(run, side)
    caches = caches_of(config)
    tokens = min(CONTEXT, config.max_position_embeddings or CONTEXT)
    if not caches.position:
        return Cell("unknown (no config.json of this model is at hand)")
    size_bytes = caches.stored(tokens)
    model = run.model(side.model).size_bytes
    limit = f" at {count(tokens)} tokens, its limit" if tokens < CONTEXT else ""
    total = f"with the model {size(size_bytes + model)}" if model else ""
    return Cell(
        f"{size(size_bytes)}{limit}", f"{total}, computed for 16-bit caches", f"cache|{side.model}"
    )


def _config(run: LoadedRun, side: ServedModel) -> AttentionShape:
    """Return config.json of the model, or of another model of the run: all are forms of one model. Empty where there is none."""
    folders = (run.folder_of(name) for name in (side.model, *(m.name for m in run.models)))
    folder = next(filter(None, folders), None)
    config = (
        salvage_or_default(_ServedConfig, folder / "config.json") if folder else _ServedConfig()
    )
    return config.text_config or config


def container(side: ServedModel) -> RecipeRuntime | None:
    """Return the runtime that serves the side from its container image, or None."""
    from annie_quant.ops.serving import RECIPE_RUNTIMES

    return next(
        (known for known in RECIPE_RUNTIMES if known.name in (side.data.runtime or "").lower()),
        None,
    )


def _deployment(run: LoadedRun, side: ServedModel) -> Cell:
    runtime = container(side)
    if runtime:
        return Cell(f"{runtime.title} from its container image")
    return Cell(
        "one binary and one GGUF file"
        if "llama" in (side.data.runtime or "").lower()
        else "not on record"
    )


def _context(run: LoadedRun, side: ServedModel) -> Cell:
    limit = _config(run, side).max_position_embeddings
    served = _identity(run, side).max_model_len
    text = f"{count(limit)} tokens" if limit else DASH
    return Cell(text, f"{count(served)} served here" if served else "")


def _acceleration(run: LoadedRun, side: ServedModel) -> Cell:
    fp4 = run.model(side.model).format == "NVFP4" and container(side)
    here = f"here: {', '.join(gpus)}" if (gpus := run.gpu_names) else "here: no GPU"
    return Cell("FP4 tensor cores on Blackwell" if fp4 else "any GPU or CPU", here)


def memory_budget(run: LoadedRun) -> Table | None:
    """Memory of both sides compared with the machine's budget. None where no candidate was served."""
    if run.candidate is None:
        return None
    rows = [
        (title, decision.peak_bytes(s.data), f"memory|{s.key}|peak")
        for title, s in _sides(run).items()
    ]
    if len(rows) == 2:
        peaks = [peak for _, peak, _ in rows if peak]
        rows.append(("both, while switching", sum(peaks) if len(peaks) == 2 else None, ""))
    table = Table(
        f"Memory budget: {size(BUDGET_BYTES)} at the peak for everything that runs on the machine",
        "model",
        ["highest seen", "left for the rest", "within budget"],
    )
    for title, peak, key in rows:
        cells = [Cell("not measured"), Cell(DASH)]
        verdict = "undecided"
        if peak is not None:
            verdict = "pass" if peak < BUDGET_BYTES else "fail"
            left = size(BUDGET_BYTES - peak) if verdict == "pass" else "none"
            cells = [Cell(size(peak), key=key), Cell(left)]
        cells.append(Cell(ANSWERS[verdict], css=f"word {verdict}"))
        table.rows.append((title, cells))
    return table


def outcome_of(run: LoadedRun) -> Standing:
    """Return the run's outcome; a run of version 0.1.0 has no more than `passed`."""
    verdict = run.verdict
    if not verdict.sentence:
        return "undecided"
    if verdict.outcome is not None:
        return verdict.outcome
    if not verdict.passed:
        return "loses"
    return decision.standing_of(run.aggregates, verdict.candidate or "")


def checklist_items(run: LoadedRun) -> list[ChecklistItem]:
    """Return the drop-in checklist; [] where no candidate was served."""
    if run.candidate is None:
        return []
    return checklist(
        run.aggregates,
        run.candidate.name,
        run.incumbent.name if run.incumbent else None,
        run.measured,
        with_thinking={w.name for w in run.inputs if w.thinking},
        answers=_answers(run),
    )


def _answers(run: LoadedRun) -> dict[str, PairedGate] | None:
    """Return the candidate's gates against the incumbent's answers; None where not both are on record."""
    if run.candidate is None or run.incumbent is None:
        return None
    names = (run.candidate.name, run.incumbent.name)
    if not set(names) <= {r.backend for r in run.measured}:
        return None
    return pair_answers(run.measured, *names, run.sampled)


def checklist_title(run: LoadedRun) -> str:
    labels = [run.label(s.model) for s in (run.candidate, run.incumbent) if s]
    return " instead of ".join(labels)


def checklist_table(run: LoadedRun, items: list[ChecklistItem]) -> Table:
    table = Table(
        f"{checklist_title(run)}, from this run alone", "the candidate", ["outcome", "evidence"]
    )
    for row in items:
        cells = [
            Cell(ANSWERS[row.verdict], css=f"word {row.verdict}"),
            Cell(row.evidence, css="word"),
        ]
        table.rows.append((row.item, cells))
    return table


def operation_changes(run: LoadedRun) -> list[str]:
    """Return what changes for the operator, and how to go back."""
    candidate = run.candidate
    incumbent = run.incumbent
    if candidate is None:
        return []
    unknown = "not on record"
    image = container(candidate)
    values = {
        "runtime": candidate.data.runtime or unknown,
        "before": (incumbent.data.runtime or unknown) if incumbent else "",
        "container": image,
        "folder": run.model(candidate.model).checkpoint or "MODEL_DIR",
        "server": image.name if image else "llama.cpp",
        "incumbent": run.label(incumbent.model) if incumbent else "",
    }
    return render_text("operation.txt", **values).splitlines()
