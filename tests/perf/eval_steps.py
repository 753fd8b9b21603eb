"""Where the time of `annie-quant eval` goes, by part, on a CPU or a GPU. One command prints the table:

    python tests/perf/eval_steps.py CHECKPOINT REFERENCE                 (--n 200 --numerics w4a4,w4a16 are the defaults)
    python tests/perf/eval_steps.py CHECKPOINT REFERENCE --synchronize   (on a GPU: passes have their own seconds; slower)
    python tests/perf/eval_steps.py CHECKPOINT REFERENCE --functions 40  (also the functions with most processor time)

One row per stage: seconds of the wall and of the processor, then what is in them: forward passes over prompts (passes, tokens,
seconds) and decode steps (steps, rows of all steps, seconds), rendering and tokenizing, comparing logits, parsing and gates.
Without --synchronize a GPU's passes end when they are launched, and their time is in what waits for them: the wall of the stage
is right, the columns are not. Steps that a CUDA graph replays are counted with the time of their launch. bf16's answers are not
read from a cache unless --cache names a folder. Process CPU time is comparable on a machine with other load.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import pstats
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WALL = time.monotonic()
PROCESSOR = time.process_time()

import torch  # noqa: E402

from annie_quant import judge  # noqa: E402
from annie_quant.offline import decoding, engine, evaluation, pair, prompts  # noqa: E402

PARTS = ("prompts", "decode", "template", "logits", "gates")


@dataclass
class Stage:
    """The time of one stage, and by part: calls, tokens and seconds."""

    wall: float = 0.0
    processor: float = 0.0
    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, part: str, tokens: int, seconds: float) -> None:
        row = self.parts.setdefault(part, [0, 0, 0.0])
        row[0] += 1
        row[1] += tokens
        row[2] += seconds


class Stages:
    """A progress that begins a stage with each new text, and adds the time of parts to the current one."""

    def __init__(self) -> None:
        self.stages = {"importing": Stage(time.monotonic() - WALL, time.process_time() - PROCESSOR)}
        self.current = "auditing"
        self.wall = time.monotonic()
        self.processor = time.process_time()
        self.inner = 0.0  # seconds of parts inside the running part

    def update(self, done: float, total: float | None = None, text: str = "") -> None:
        name = re.sub(r" \(\d+\)|: checking answers", "", text)
        if name != self.current:
            self.end(name)

    def message(self, text: str) -> None:
        print(text)

    def end(self, following: str) -> None:
        """End the current stage. Its time since its last begin is added to it."""
        stage = self.stages.setdefault(self.current, Stage())
        stage.wall += time.monotonic() - self.wall
        stage.processor += time.process_time() - self.processor
        self.current = following
        self.wall = time.monotonic()
        self.processor = time.process_time()

    @contextmanager
    def part(self, name: str, tokens: int = 0) -> Iterator[None]:
        """Add the time of the block, without that of parts inside it."""
        outer = self.inner
        self.inner = 0.0
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            stage = self.stages.setdefault(self.current, Stage())
            stage.add(name, tokens, seconds - self.inner)
            self.inner = outer + seconds

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Replace a function by one whose time is added to a part."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            with self.part(part):
                return function(*args, **options)

        setattr(owner, name, timed)


def wrap_all(stages: Stages, synchronize: bool) -> None:
    """Let the functions that take time report to `stages`."""
    for name in ("render", "ids", "classes", "decisions"):
        stages.wrap(prompts.Template, name, "template")
    stages.wrap(pair, "compare_logits", "logits")
    stages.wrap(pair, "choices_of", "logits")
    stages.wrap(evaluation.ensemble, "choices_of", "logits")
    stages.wrap(prompts.Template, "answer", "gates")
    stages.wrap(judge, "checks", "gates")
    step = engine.Engine.step

    def counted(self: engine.Engine, ids: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        decodes = "position_ids" in options
        with stages.part("decode" if decodes else "prompts", ids.numel()):
            hidden = step(self, ids, *more, **options)
            if synchronize and ids.is_cuda and not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize()
        return hidden

    engine.Engine.step = counted
    if torch.cuda.is_available():
        wrap_replays(stages, synchronize)


def wrap_replays(stages: Stages, synchronize: bool) -> None:
    """Count the steps that a CUDA graph replays."""
    advance: Callable[..., None] = decoding.advance_fixed

    def replayed(model: engine.Engine, running: decoding.RunningBatch) -> None:
        if running.graph is None:
            advance(model, running)  # computed by Engine.step, which counts it
            return
        with stages.part("decode", len(running.rows)):
            advance(model, running)
            if synchronize:
                torch.cuda.synchronize()

    decoding.advance_fixed = replayed


def table(stages: Stages) -> Iterator[str]:
    """Yield the lines of the table, and the sums of its columns."""
    yield (
        f"{'stage':46} {'wall':>7} {'cpu':>7} | {'prompts':>7} {'tokens':>8} {'s':>6} | {'steps':>6} {'rows':>7} {'s':>6} |"
        f" {'template':>8} {'logits':>6} {'gates':>6}"
    )
    whole = Stage()
    for name, stage in stages.stages.items():
        if stage.wall < 0.005:
            continue
        yield line(name, stage)
        whole.wall += stage.wall
        whole.processor += stage.processor
        for part, row in stage.parts.items():
            total = whole.parts.setdefault(part, [0, 0, 0.0])
            whole.parts[part] = [a + b for a, b in zip(total, row, strict=True)]
    yield line("all", whole)


def line(name: str, stage: Stage) -> str:
    cells = {part: stage.parts.get(part, [0, 0, 0.0]) for part in PARTS}
    passes, tokens, seconds = cells["prompts"]
    steps, rows, spent = cells["decode"]
    others = " ".join(
        f"{cells[part][2]:{width}.2f}"
        for part, width in (("template", 8), ("logits", 6), ("gates", 6))
    )
    return (
        f"{name[:46]:46} {stage.wall:7.2f} {stage.processor:7.2f} | {passes:7.0f} {tokens:8.0f} {seconds:6.2f} |"
        f" {steps:6.0f} {rows:7.0f} {spent:6.2f} | {others}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--numerics", default="w4a4,w4a16")
    parser.add_argument("--workloads", help="names, by commas; default: the persona annie's")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--synchronize", action="store_true")
    parser.add_argument("--functions", type=int, default=0, help="also list so many functions")
    arguments = parser.parse_args()
    names = arguments.workloads.split(",") if arguments.workloads else None
    stages = Stages()
    wrap_all(stages, arguments.synchronize)
    profile = cProfile.Profile(time.process_time) if arguments.functions else None
    with tempfile.TemporaryDirectory() as folder:
        job = pair.EvaluationJob(
            checkpoint=arguments.checkpoint,
            reference=arguments.reference,
            workloads=judge.load_workloads(names),
            n_per_gate=arguments.n,
            extends=True,
            numerics=arguments.numerics.split(","),
            cache=arguments.cache or Path(folder),
        )
        stages.end("auditing")
        job = job.audited()
        if profile:
            profile.enable()
        result = evaluation.run(job, stages)
        if profile:
            profile.disable()
        stages.end("")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{device}, torch {torch.__version__}: {result.n_answers} prompts, {arguments.numerics}, "
        f"{result.dtype}; {result.verdict.verdict if result.verdict else 'no verdict'}"
    )
    print("\n".join(table(stages)))
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(arguments.functions)


if __name__ == "__main__":
    main()
