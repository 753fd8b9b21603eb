"""What the order of GPTQ's columns and the rounder do to a model: KL, KL at decisions and flips of answers that neither saw.

    python tests/perf/rounders.py DIR rows.jsonl --samples 64 --held 60 --draws 0,1,2

Draw d takes --samples of the conversations in random order with seed d, rounds every linear (W4A4) by each rounder, and scores the
answers of the next --held conversations. Rounders: stored, the C loop with the columns as they are stored; loop, in activation
order, as `gptq` on a CPU; torch, StreamRounder, as on a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from fresh_answers import HEADER, drawn, show

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import SILENT
from annie_quant.data.rows import read_conversations
from annie_quant.models.formats import NVFP4
from annie_quant.quantize import gptq, kl_trial, rounding
from annie_quant.quantize.formats import choose
from annie_quant.quantize.rounding import round_model
from annie_quant.quantize.strategy import TRIAL_TOKENS, Job, Method

ROUNDERS = {
    "stored": (
        gptq,
        "activation_order",
        lambda diagonal: torch.arange(len(diagonal), device=diagonal.device),
    ),
    "loop": (rounding, "device_kind", lambda: "cpu"),
    "torch": (rounding, "device_kind", lambda: "cuda"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--held", type=int, default=60)
    parser.add_argument("--draws", default="0,1,2")
    parser.add_argument("--rounders", default=",".join(ROUNDERS))
    arguments = parser.parse_args()
    folder, every = ModelFolder(arguments.model), read_conversations(arguments.rows)
    formats = dict.fromkeys(choose(folder, ()), NVFP4)
    print(HEADER)
    for draw in map(int, arguments.draws.split(",")):
        learned, held = drawn(arguments.model, every, draw, arguments.samples, arguments.held)
        plans = {}
        for name in arguments.rounders.split(","):
            with tempfile.TemporaryDirectory() as work, mock.patch.object(*ROUNDERS[name]):
                job = Job(
                    arguments.model,
                    Path(work) / "out",
                    scale="sweep",
                    seed=draw,
                    work=Path(work) / "work",
                )
                start = time.monotonic()
                plans[name] = (
                    round_model(job, formats, learned, Method(), SILENT),
                    time.monotonic() - start,
                )
        trial = kl_trial.Trial(
            folder, kl_trial.answers_to_score(held, TRIAL_TOKENS["cuda"], cut=False)
        )
        for name, (plan, seconds) in plans.items():
            show(draw, name, trial, plan, seconds)


if __name__ == "__main__":
    main()
