"""Where the time of `annie-quant eval` goes: the forward passes of each stage, in one process.

    python tests/perf/eval_steps.py CHECKPOINT REFERENCE [--n 100] [--numerics w4a4,w4a16] [--synchronize]

Prints the processor seconds of imports and of each stage, and the number, tokens and seconds of the forward passes of prompts and
of decode steps; a stage begins with its first message, so its first passes are counted in the stage before. On a GPU a replayed
step (offline/decoding.py) is not counted; --synchronize waits for each pass, so that its seconds are its own.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

START = time.process_time()

import torch  # noqa: E402

from annie_quant import judge  # noqa: E402
from annie_quant.offline import engine, evaluation  # noqa: E402
from annie_quant.offline.pair import EvaluationJob  # noqa: E402

IMPORTED = time.process_time()


class Stages:
    """A progress that notes when the text of each stage comes, and the forward passes in it."""

    def __init__(self) -> None:
        self.name, self.since = "loading and reference answers", time.process_time()
        self.seconds: dict[str, float] = {}
        self.passes: dict[tuple[str, str], list[float]] = {}

    def update(self, done: int, total: int | None, text: str) -> None:
        self.end(re.sub(r" \(\d+\)", "", text))

    def message(self, text: str) -> None:
        print(text)

    def end(self, following: str) -> None:
        now = time.process_time()
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + now - self.since
        self.name, self.since = following, now

    def add(self, kind: str, tokens: int, seconds: float) -> None:
        row = self.passes.setdefault((self.name, kind), [0, 0, 0.0])
        row[0] += 1
        row[1] += tokens
        row[2] += seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--numerics", default="w4a4,w4a16")
    parser.add_argument("--synchronize", action="store_true")
    arguments = parser.parse_args()
    stages, step = Stages(), engine.Engine.step

    def counted(
        self: engine.Engine, ids: torch.Tensor, *more: object, **options: object
    ) -> torch.Tensor:
        start = time.process_time()
        hidden = step(self, ids, *more, **options)
        if arguments.synchronize and ids.is_cuda:
            torch.cuda.synchronize()
        stages.add(
            "decode" if "position_ids" in options else "prompts",
            ids.numel(),
            time.process_time() - start,
        )
        return hidden

    engine.Engine.step = counted
    settings = EvaluationJob(
        checkpoint=arguments.checkpoint,
        reference=arguments.reference,
        workloads=judge.load_workloads(),
        n_per_gate=arguments.n,
        extends=True,
        numerics=arguments.numerics.split(","),
    )
    result = evaluation.run(settings, stages)
    stages.end("")
    print(
        f"imports {IMPORTED - START:.2f} s; evaluation {sum(stages.seconds.values()):.2f} s; {result.verdict.verdict}"
    )
    for stage, seconds in stages.seconds.items():
        print(f"{seconds:8.2f} s  {stage}")
        for (name, kind), (passes, tokens, spent) in stages.passes.items():
            if name == stage:
                print(
                    f"           {passes:5.0f} passes, {tokens:7.0f} tokens, {spent:7.2f} s  {kind}"
                )


if __name__ == "__main__":
    main()
