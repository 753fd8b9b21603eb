"""Conversations to calibrate with and others to judge on, and a row of their figures. For head_alone.py and rounders.py."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from annie_quant.core.untrusted import JsonObject
from annie_quant.quantize import calibration_samples as text
from annie_quant.quantize import kl_trial
from annie_quant.quantize.calibration_text import samples_of_rows
from annie_quant.quantize.plan import QuantizationPlan

HEADER = "| draw | | W4A4: KL, at decisions, flips there | W4A16 | s |\n|---|---|---|---|---|"


def drawn(
    model: Path, rows: Sequence[JsonObject], draw: int, samples: int, held: int
) -> tuple[list[text.CalibrationSample], list[text.CalibrationSample]]:
    """Return the answers of the first `samples` of the rows, in random order with seed `draw`, and those of the next `held`."""
    rows = list(rows)
    random.Random(draw).shuffle(rows)
    parts = rows[:samples], rows[samples:][:held]
    return samples_of_rows(model, parts[0]), samples_of_rows(model, parts[1])


def show(
    draw: int, name: str, trial: kl_trial.Trial, plan: QuantizationPlan, seconds: float
) -> None:
    cells = []
    for inputs in (True, False):
        kl, decisions, flips = trial.shares(plan, inputs).sum(0)
        cells.append(f"{1e3 * kl:.2f}, {1e3 * decisions:.2f}, {flips:.1%}")
    print(f"| {draw} | {name} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)
