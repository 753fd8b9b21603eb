"""The divergence of a 4-bit head alone: nearest rounding, and GPTQ over the answers' tokens as `best` rounds it; all else as it is.

    python tests/perf/head_alone.py DIR rows.jsonl --samples 96 --draws 0,1,2

Draw d takes --samples of the conversations in random order with seed d for the head's Hessian, and scores the answers of the next
--held.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from fresh_answers import drawn, show

from annie_quant import nvfp4
from annie_quant.checkpoint.linears import HEAD, weight_name
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import SILENT
from annie_quant.data.rows import read_conversations
from annie_quant.models.formats import GROUP, W4A16
from annie_quant.offline.engine import Row
from annie_quant.quantize import kl_trial
from annie_quant.quantize.plan import PlannedLinear, QuantizationPlan
from annie_quant.quantize.rounding import round_head
from annie_quant.quantize.strategy import TRIAL_TOKENS, Method


def nearest(folder: ModelFolder) -> nvfp4.Tensor:
    """Return the head, each block's scale from its largest value."""
    weight = np.concatenate(
        [np.asarray(piece, np.float32) for piece in folder.rows(weight_name(folder, HEAD))]
    )
    return nvfp4.pack(
        weight, tensor_scale=float(nvfp4.tensor_scale(float(abs(weight).max()))), group=GROUP
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--held", type=int, default=60)
    parser.add_argument("--draws", default="0,1,2")
    a = parser.parse_args()
    folder, rows = ModelFolder(a.model), read_conversations(a.rows)
    print("| draw | | KL, at decisions, flips there | the same | s |\n|---|---|---|---|---|")
    for draw in map(int, a.draws.split(",")):
        learned, held = drawn(a.model, rows, draw, a.samples, a.held)
        trial = kl_trial.Trial(
            folder, kl_trial.answers_to_score(held, TRIAL_TOKENS["cuda"], cut=False)
        )
        show(
            draw,
            "nearest",
            trial,
            QuantizationPlan({HEAD: PlannedLinear(W4A16, packed=nearest(folder))}),
            0,
        )
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as work:
            answers = [Row(s.prompt, s.answer) for s in learned]
            packed = round_head(
                trial, answers, Method().damping, "sweep", Path(work) / "head", SILENT
            )
        show(
            draw,
            "best",
            trial,
            QuantizationPlan({HEAD: PlannedLinear(W4A16, packed=packed)}),
            time.monotonic() - start,
        )


if __name__ == "__main__":
    main()
