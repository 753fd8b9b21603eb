"""Predicted drafts of an MTP head in pages: per model and kind of prompt, before any server ran."""

from __future__ import annotations

from annie_quant.documents.drafts import PromptEstimate
from annie_quant.report import format
from annie_quant.report.run import LoadedRun
from annie_quant.report.tables import Cell, Table

SHOWN = 3  # drafts per step


def drafts_table(run: LoadedRun) -> Table:
    """Return one row per model and kind of prompt; none without a head. Intervals are 95 %, over prompts."""
    caption = (
        f"Predicted drafts, {SHOWN} per step: tokens per step, and share of steps whose first drafts are all accepted, "
        "with 95 % intervals over prompts"
    )
    table = Table(caption, "model", sortable=True)
    for side in run.offline:
        for kind, prediction in side.data.drafts.items():
            steps = prediction.of(SHOWN)
            cells = {
                "numerics": Cell(side.how, css="word"),
                "prompts": Cell(f"{kind}, {format.count(prediction.prompts)}", css="word"),
                "tokens per step": _cell(steps.tokens_per_step, 1),
            }
            for number, share in enumerate(steps.accepted, 1):
                cells[f"draft {number}, %"] = _cell(share, 100)
            table.add(run.label(side.model), cells)
    return table


def _cell(estimate: PromptEstimate, factor: int) -> Cell:
    """Return an estimate times a factor, with its interval below."""
    value = factor * estimate.value
    digits = 0 if factor == 100 else 2
    interval = f"{factor * estimate.low:.{digits}f} to {factor * estimate.high:.{digits}f}"
    return Cell(f"{value:.{digits}f}", sub=interval, sort=value)
