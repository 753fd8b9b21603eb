"""An evaluation in its own process, so that several checkpoints are judged at once and other stages run meanwhile.

    python -m annie_quant.cli.pipeline.evaluation_process JOB       JOB: ProcessJob as JSON

Below the supervisor of ops/server.py: it ends however annie-quant ends. Its log has one line per state.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from annie_quant import documents, judge
from annie_quant.checkpoint.inspection import export_notes
from annie_quant.cli.pipeline.stages import StageResult, Stages, offline_prompts, silence_transformers
from annie_quant.core import host
from annie_quant.core.errors import AnnieError
from annie_quant.core.progress import Progress
from annie_quant.data.workloads import resolve
from annie_quant.judge import Workload
from annie_quant.judge.decision import FAILING
from annie_quant.ops import llama_cpp, server

AT_ONCE = 2  # processes that share the processors
POLL_S = 0.1
LINE_S = 0.5  # at most one line of progress per so many seconds


class _Stage(NamedTuple):
    name: str
    inputs: Mapping[str, object]
    outputs: list[str]
    job: ProcessJob


class ProcessJob(msgspec.Struct, kw_only=True):
    """What one process computes.

    reference: folder of the bf16 model.
    cache: folder for its answers.
    n_per_gate, persona, workloads: the prompts (as for data/workloads.py).
    checkpoint: None for the reference's answers alone, in both arithmetics, which later jobs find in `cache`.
    numerics: as for EvaluationJob.
    until_loss: end with the first arithmetic where that loses: the others could not make it keep.
    output: file for the evaluation.
    """

    reference: str
    cache: str
    n_per_gate: int
    persona: str | None = None
    workloads: str | None = None
    checkpoint: str | None = None
    numerics: tuple[str, ...] = ("w4a4", "w4a16")
    until_loss: bool = False
    output: str | None = None

    def prompts(self) -> list[Workload]:
        return offline_prompts(self.n_per_gate, resolve(self.persona, self.workloads))


class EvaluationProcesses:
    """Stages that run at the same time, one process each. A context manager, which ends what still runs."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.threads = max(1, host.cores() // AT_ONCE)
        self._started: list[tuple[_Stage, server.Server | None]] = []

    def start(self, name: str, inputs: Mapping[str, object], outputs: list[str], job: ProcessJob) -> None:
        """Start the process of a stage and return at once; does nothing for a stage that has finished before."""
        process = None
        if not self.stages.is_finished(name, inputs):
            command = [sys.executable, "-m", __name__, msgspec.json.encode(job).decode()]
            environment = llama_cpp.environment() | {"OMP_NUM_THREADS": str(self.threads)}
            process = server.spawn(command, self.stages.dir / f"logs/{name}.log", name, environment)
        self._started.append((_Stage(name, inputs, outputs, job), process))

    def finish(self) -> None:
        """Wait for the stages that were started, in order. Raises ServerError with the cause of a failure."""
        while self._started:
            stage, process = self._started[0]
            self.stages.stage(stage.name, stage.inputs, stage.outputs, partial(ended, stage.job, process), StageResult)
            del self._started[0]

    def __enter__(self) -> EvaluationProcesses:
        return self

    def __exit__(self, *exc: object) -> None:
        for _, process in self._started:
            if process is not None:
                process.stop()


def ended(job: ProcessJob, process: server.Server | None, progress: Progress) -> StageResult:
    """Wait until the process of a job ends, and report its states. Raises ServerError with the cause where it failed."""
    assert process is not None
    state = ""
    while process.alive:
        lines = server.read(process.log).splitlines()
        if lines and lines[-1] != state:
            state = lines[-1]
            progress.message(state)
        time.sleep(POLL_S)
    process.wait()
    verdict = documents.Evaluation.load(Path(job.output)).verdict if job.output else None
    return StageResult(verdict.sentence if verdict else "")


def evaluate(job: ProcessJob, progress: Progress) -> None:
    """Compute a job in this process."""
    prompts = job.prompts()  # before torch is imported, so that an unknown workload is named at once
    from annie_quant.offline import ensemble
    from annie_quant.offline.evaluation import run
    from annie_quant.offline.pair import EvaluationJob, open_pair

    silence_transformers()
    settings = EvaluationJob(
        checkpoint=Path(job.checkpoint or job.reference),
        reference=Path(job.reference),
        workloads=prompts,
        numerics=job.numerics,
        faults=export_notes(job.checkpoint, job.reference) if job.checkpoint else [],
        output=Path(job.output) if job.output else None,
        cache=Path(job.cache),
    )
    if job.checkpoint is None:
        with open_pair(settings, progress) as pair:
            answered = pair.reference.answer(judge.distinct_prompts(prompts)[0], progress)
            ensemble.second_answers(pair, answered)
        return
    if job.until_loss:
        verdict = run(replace(settings, ensemble=False), progress).verdict
        if verdict is not None and verdict.verdict in FAILING:
            return
    run(settings, progress)


class _Log:
    """Progress as lines of the log, at most one per LINE_S."""

    def __init__(self) -> None:
        self._printed = -LINE_S

    def update(self, done: float, total: float | None = None, text: str = "") -> None:
        if time.monotonic() - self._printed >= LINE_S:
            self.message(", ".join(filter(None, (f"{done:g} of {total:g}" if total else "", text))))

    def message(self, text: str) -> None:
        self._printed = time.monotonic()
        print(text, flush=True)


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=ProcessJob)
    try:
        evaluate(job, _Log())
    except AnnieError as error:
        sys.exit(f"error: {error.message}" + (f" → {error.hint}" if error.hint else ""))


if __name__ == "__main__":
    main()
