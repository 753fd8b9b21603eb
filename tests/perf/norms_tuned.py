"""What tuning the norms after gptq does to answers that neither saw: KL, KL at decisions and flips, W4A4 and W4A16.

    python tests/perf/norms_tuned.py DIR rows.jsonl --samples 64 --draws 0,1,2 --steps 24

Draw d takes --samples of the conversations in random order with seed d, rounds every linear by `gptq` (W4A4), tunes the norms
(annie_quant/quantize/norm_tuning.py), and scores the answers of the next 60 conversations before and after.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import SILENT
from annie_quant.core.untrusted import JsonObject
from annie_quant.data.rows import read_conversations
from annie_quant.quantize import calibration_samples as text
from annie_quant.quantize import kl_trial, norm_tuning
from annie_quant.quantize.backend import device_kind
from annie_quant.quantize.formats import NVFP4, choose
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.rounding import Method, round_model
from annie_quant.quantize.strategy import Job

HELD = 60
HEADER = "| draw | | W4A4: KL, at decisions, flips there | W4A16 | s |\n|---|---|---|---|---|"


def drawn(
    model: Path, rows: Sequence[JsonObject], draw: int, samples: int, held: int
) -> tuple[list[text.CalibrationSample], list[text.CalibrationSample]]:
    """Return the answers of the first `samples` of the rows, in random order with seed `draw`, and those of the next `held`."""
    rows = list(rows)
    random.Random(draw).shuffle(rows)
    parts = rows[:samples], rows[samples:][:held]
    return text.samples_of_rows(model, parts[0]), text.samples_of_rows(model, parts[1])


def show(
    draw: int, name: str, trial: kl_trial.Trial, plan: QuantizationPlan, seconds: float
) -> None:
    cells = []
    for inputs in (True, False):
        kl, decisions, flips = trial.shares(plan, inputs).sum(0)
        cells.append(f"{1e3 * kl:.2f}, {1e3 * decisions:.2f}, {flips:.1%}")
    print(f"| {draw} | {name} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--draws", default="0,1,2")
    parser.add_argument("--steps", type=int, default=norm_tuning.STEPS[device_kind()])
    arguments = parser.parse_args()
    norm_tuning.STEPS[device_kind()] = arguments.steps
    folder, every = ModelFolder(arguments.model), read_conversations(arguments.rows)
    formats = dict.fromkeys(choose(folder, ()), NVFP4)
    print(HEADER)
    for draw in map(int, arguments.draws.split(",")):
        learned, held = drawn(arguments.model, every, draw, arguments.samples, HELD)
        with tempfile.TemporaryDirectory() as work:
            job = Job(
                arguments.model,
                Path(work) / "out",
                scale="sweep",
                seed=draw,
                work=Path(work) / "work",
            )
            start = time.monotonic()
            plan = round_model(job, formats, learned, Method(), SILENT)
            rounded = time.monotonic()
            weights = norm_tuning.tuned_norms(job, plan, learned, 0.1, SILENT, Path(work) / "norms")
            tuned = time.monotonic()
        trial = kl_trial.Trial(
            folder, kl_trial.answers_to_score(held, kl_trial.MOST_TOKENS, cut=False)
        )
        show(draw, "gptq", trial, plan, rounded - start)
        show(draw, "norms tuned", trial, replace(plan, weights=weights), tuned - rounded)


if __name__ == "__main__":
    main()
