"""Mean KL on held-out answers of strategies and their options, one JSON line per row: W4A4, W4A16, seconds.

    python tests/perf/ablate_best.py --seeds 0,1,2 "gptq" "best effort=fast" "best recipe=fixed prompt=0"
    python tests/perf/ablate_best.py --model DIR --samples 256 --answers 150 --output rows.jsonl ...

A row is a strategy and its settings. Each seed draws other calibration conversations; the held-out answers are those of the split
`gate` (seed 77), whose prompts and topics calibration does not have. Weights and inputs are rounded in transformers in float32;
gates are judged by `annie-quant eval`, not here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

import annie_quant
from annie_quant import quantize
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data import generate
from annie_quant.data.rows import read_conversations
from annie_quant.offline.loading import load
from annie_quant.quantize import calibration_samples, kl_trial

TINY = Path(annie_quant.__file__).parent / "assets/tiny-annie"


class HeldOut:
    """The source's distributions over held-out answers."""

    def __init__(self, model: Path, persona: str, answers: int, work: Path) -> None:
        file = work / "gate.jsonl"
        generate(persona, teacher="offline", n=400, output=file, seed=77, split="gate")
        samples = calibration_samples.samples_of_rows(model, read_conversations(file))
        chosen = list(kl_trial.spread(samples))[:answers]
        self.trial = kl_trial.Trial(
            ModelFolder(model),
            kl_trial.answers_to_score(chosen, calibration_samples.RESPONSE, 10**9),
        )

    def divergence(self, checkpoint: Path, numerics: str) -> float:
        """Return the mean KL of a quantized checkpoint, in nats per token."""
        trial = self.trial
        source, engine = trial.model, trial.engine
        model = load(
            checkpoint, numerics, cache="float32", dtype=torch.float32, device=str(engine.device)
        )
        trial.model, trial.engine = model, kl_trial.Engine(model)
        try:
            with torch.inference_mode():
                return trial.divergence()
        finally:
            trial.model, trial.engine = source, engine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+", metavar="'STRATEGY [NAME=VALUE ...]'")
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--persona", default="annie")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--samples", type=int, default=256, help="calibration conversations")
    parser.add_argument("--answers", type=int, default=150, help="held-out answers")
    parser.add_argument("--output", type=Path, help="append the rows to this file, too")
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="ablate-"))
    held_out = HeldOut(arguments.model, arguments.persona, arguments.answers, work)
    for seed in map(int, arguments.seeds.split(",")):
        calibration = work / f"calibration{seed}.jsonl"
        generate(arguments.persona, teacher="offline", n=500, output=calibration, seed=seed)
        for row in arguments.rows:
            strategy, *settings = row.split()
            start = time.monotonic()
            quantize.run(strategy, arguments.model, work / "out", calib_data=calibration, calib_samples=arguments.samples,
                         force=True, seed=seed, **dict(item.split("=", 1) for item in settings))  # fmt: skip
            seconds = round(time.monotonic() - start, 1)
            figures = {
                kind: round(held_out.divergence(work / "out", kind), 5)
                for kind in ("w4a4", "w4a16")
            }
            line = json.dumps(
                {
                    "model": arguments.model.name,
                    "seed": seed,
                    "row": row,
                    **figures,
                    "seconds": seconds,
                }
            )
            print(line, flush=True)
            if arguments.output:
                with arguments.output.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
