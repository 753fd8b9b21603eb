"""The stages that the demo and the search share: quantize, audit and evaluate one strategy.

A stage that finished with the same inputs is not done again, so a killed run resumes.

    python -m annie_quant.cli.pipeline.stages JOB       JOB: ProcessJob as JSON

evaluates in a process of its own, so that several checkpoints are judged at once and other stages run meanwhile. It is below the
supervisor of ops/server.py: it ends however annie-quant ends. Its log has one line per state.
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from annie_quant import __version__, checkpoint, documents, judge, quantize
from annie_quant.checkpoint import decode_speed
from annie_quant.checkpoint.shards import ModelFolder, model_sha256
from annie_quant.cli.pipeline.run_directory import RunDirectory
from annie_quant.core import host
from annie_quant.core.errors import AnnieError, UsageError
from annie_quant.core.files import sha256_text, write_text
from annie_quant.core.progress import Console, Progress
from annie_quant.core.untrusted import JsonObject
from annie_quant.data.rows import read_conversations, read_rows
from annie_quant.data.workloads import resolve
from annie_quant.judge import Workload
from annie_quant.judge.decision import FAILING
from annie_quant.judge.sampling import compares_with_reference, prompts_per_gate
from annie_quant.ops import llama_cpp, server
from annie_quant.quantize.strategies import find
from annie_quant.quantize.strategy import AnswerSource

MIN_DECIDING_N = 10  # with fewer prompts per gate, no gate decides: a trial run


class StageResult(msgspec.Struct):
    """The result of a stage.

    summary: one line for people.
    """

    summary: str


class PromptsResult(StageResult):
    """per_gate: prompts per gate that are used."""

    per_gate: int


class AuditResult(StageResult):
    """audit: Audit.to_dict() without its tensors."""

    audit: JsonObject

    @property
    def ok(self) -> bool:
        return self.audit["ok"]

    @property
    def loads(self) -> list[str]:
        """Which servers load the checkpoint, one line per server."""
        return self.audit["summary"].get("loads", [])


Result = TypeVar("Result", bound=StageResult)


class Stages:
    """The stages of one model in one run directory.

    calib_tokens: tokens of a conversation at most; None: the model's context.
    answers: what strategies that read answers are calibrated on (quantize.run).
    best_options: of `best`, in addition to the defaults.
    work: folder of the measurements that several budgets of a strategy share; None: they share none.
    rows: the stages so far, in order.
    """

    def __init__(
        self,
        directory: RunDirectory,
        model: Path,
        conversations: Path,
        samples: int,
        console: Console,
        work: Path | None = None,
        calib_tokens: int | None = None,
        answers: AnswerSource = "own",
        best_options: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self.dir = directory
        self.console = console
        self.model = model
        self.conversations = conversations
        self.samples = samples
        self.base = {
            "version": __version__,
            "model": model_sha256(model)[:16],
        }  # inputs of every stage
        self.rows: list[documents.Stage] = []
        self.calib_tokens = calib_tokens
        self.answers: AnswerSource = answers
        self.best_options = best_options
        self.work = work

    def stage(
        self,
        name: str,
        inputs: Mapping[str, object],
        outputs: list[str],
        work: Callable[[Progress], Result],
        kind: type[Result],
    ) -> Result:
        """Return the result of `work(progress)`, of type `kind`; it is not repeated if the stage has finished before."""

        def with_progress() -> Result:
            with self.console.task(name) as progress:
                return work(progress)

        stamp, before = self.dir.stage(name, self.base | dict(inputs), outputs, with_progress)
        if before:
            self.console.note(f"✓ {name}, done before ({stamp.seconds:.1f} s)")
        result = msgspec.convert(stamp.result, kind)
        self.rows.append(documents.Stage(name=name, seconds=stamp.seconds, summary=result.summary))
        return result

    def is_finished(self, name: str, inputs: Mapping[str, object]) -> bool:
        """Return whether stage() would not repeat this stage."""
        return self.dir.finished(name, self.base | dict(inputs)) is not None

    @cached_property
    def text_key(self) -> str:
        """A hash of the conversations' messages and tools; their provenance does not matter."""
        content = [[row["messages"], row.get("tools")] for row in read_rows(self.conversations)]
        return sha256_text(json.dumps(content))[:16]

    def checkpoint(self, strategy: str, draw: int = 0) -> Path:
        return self.dir / f"models/{drawn(strategy, draw)}"

    def rows_of_draw(self, draw: int) -> Path:
        """Return the calibration rows of a draw: 0 is the file itself, others are seeded random samples without replacement."""
        if draw == 0:
            return self.conversations
        path = self.dir / f"calibration-draw{draw}.jsonl"
        rows = read_rows(self.conversations)
        if len(rows) < 2 * self.samples:
            self.console.note(
                f"{len(rows)} calibration rows for draws of {self.samples}: the draws overlap, so their spread is too small"
            )
        chosen = sorted(random.Random(draw).sample(range(len(rows)), min(self.samples, len(rows))))
        write_text(path, "".join(json.dumps(rows[i], ensure_ascii=False) + "\n" for i in chosen))
        return path

    def quantize(
        self, strategy: str, draw: int = 0, chosen: Mapping[str, Any] | None = None
    ) -> StageResult:
        """Quantize. strategy: with a budget or without one. chosen: the strategy's options that are not its defaults."""
        named = NamedStrategy.of(strategy)
        plain = named.name
        budget = named.budget_bytes
        options: dict[str, Any] = {"answers": self.answers} | dict(chosen or {})
        options |= named.options
        if plain == "best":
            options |= self.best_options
        if budget is not None:
            device = decode_speed.DEVICES["gb10"]
            read = decode_speed.token_bytes(ModelFolder(self.model), budget)
            options |= {"min_tps": decode_speed.tok_s(read, device), "device": "gb10"}

        def work(progress: Progress) -> StageResult:
            job = quantize.run(
                plain,
                self.model,
                self.checkpoint(strategy, draw),
                calib_data=self.rows_of_draw(draw),
                calib_samples=self.samples,
                calib_tokens=self.calib_tokens,
                allow_prompt_mismatch=True,  # the demo and the search have checked the prompt
                force=True,
                report=progress,
                work=self.work and self.work / f"{plain}-{draw}",
                **options,
            )
            sizes = f"{job.size_bytes / 1e6:,.1f} of {job.source_bytes / 1e6:,.1f} MB"
            return StageResult(sizes)

        name = drawn(strategy, draw)
        inputs = self.data_inputs() | options
        outputs = [f"models/{name}/config.json"]
        return self.stage(f"quantize-{name}", inputs, outputs, work, StageResult)

    def audit(self, strategy: str, draw: int = 0) -> AuditResult:
        def work(progress: Progress) -> AuditResult:
            audit = checkpoint.audit(self.checkpoint(strategy, draw), source=self.model)
            outcome = (
                "sound"
                if audit.ok
                else f"{len(audit.findings)} findings: {audit.findings[0].message}"
            )
            return AuditResult(
                outcome, {k: v for k, v in audit.to_dict().items() if k != "tensors"}
            )

        name = drawn(strategy, draw)
        return self.stage(
            f"audit-{name}", self.data_inputs(), [f"models/{name}/config.json"], work, AuditResult
        )

    def prompts(self, n: int, everything: Sequence[Workload]) -> list[Workload]:
        """Return n prompts per gate, and more where a gate that compares with bf16's own answers applies to few of them."""
        chosen = offline_prompts(n, everything)
        if not compares_with_reference(chosen):
            return chosen
        from annie_quant.offline.evaluation import reference_gates
        from annie_quant.offline.pair import EvaluationJob, open_pair

        def work(progress: Progress) -> PromptsResult:
            job = EvaluationJob(
                checkpoint=self.model, reference=self.model, cache=self.dir / "eval"
            )
            with open_pair(job, progress) as pair:
                per_gate = prompts_per_gate(n, reference_gates(pair, chosen))
            return PromptsResult(f"{per_gate} per gate", per_gate)

        inputs = {**self.data_inputs(), "n": n, "asked": prompts_key(chosen)}
        per_gate = self.stage("bf16-answers", inputs, [], work, PromptsResult).per_gate
        return chosen if per_gate == n else offline_prompts(per_gate, everything)

    def evaluate(
        self,
        name: str,
        folder: Path,
        workloads: Sequence[Workload],
        numerics: Sequence[str] = ("w4a4", "w4a16"),
        n_conversations: int = 0,
        ensemble: bool = False,
    ) -> documents.Evaluation:
        """Evaluate a checkpoint into eval/<name>.json.

        n_conversations: calibration rows whose assistant tokens are scored too.
        ensemble: also compute the further members of each numerics, for a verdict that does not depend on one arithmetic; it
        costs about half as much again.
        """
        from annie_quant.offline.evaluation import run
        from annie_quant.offline.pair import EvaluationJob

        name = file_name(name)
        output = f"eval/{name}.json"

        def work(progress: Progress) -> StageResult:
            settings = EvaluationJob(
                checkpoint=folder,
                reference=self.model,
                workloads=workloads,
                numerics=numerics,
                ensemble=ensemble,
                conversations=read_conversations(self.conversations, n_conversations)
                if n_conversations
                else (),
                output=self.dir / output,
                cache=self.dir / "eval",
            )
            result = run(settings, progress)
            return StageResult(result.verdict.sentence if result.verdict else "")

        asked = {"asked": prompts_key(workloads), "numerics": list(numerics), "ensemble": ensemble}
        self.stage(f"eval-{name}", self.data_inputs() | asked, [output], work, StageResult)
        evaluation = documents.Evaluation.load(self.dir / output)
        # One of version 0.1.0 has no verdict.
        return evaluation if evaluation.verdict else judge.judge_evaluation(evaluation)

    def data_inputs(self) -> dict[str, object]:
        inputs: dict[str, object] = {"rows": self.samples, "text": self.text_key}
        inputs |= {} if self.calib_tokens is None else {"tokens": self.calib_tokens}
        return inputs | {"answers": self.answers}


@dataclass(frozen=True)
class NamedStrategy:
    """A strategy as a search names it: best@1.5, or modelopt:NVFP4_AWQ_LITE_CFG.

    budget_bytes: of weights per token; None without one.
    options: the recipe of another library.
    """

    name: str
    budget_bytes: float | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> NamedStrategy:
        """Return the strategy of a name. Raises UsageError for a budget or a recipe that it cannot have."""
        name, colon, recipe = text.partition(":")
        if not colon:
            return cls(*with_budget(text))
        option = find(name).recipe_option
        if not option or not recipe:
            raise UsageError(
                f"{text}: only another library has recipes",
                "for example modelopt:NVFP4_AWQ_LITE_CFG, llmcompressor:gptq or autoround:light",
            )
        return cls(name, options={option: recipe})


def with_budget(name: str) -> tuple[str, float | None]:
    """Return the strategy of a name such as "best@1.5", and its budget: bytes of weights per token, None without one.

    Raises UsageError for a budget that the strategy cannot have.
    """
    strategy, at, gigabytes = name.partition("@")
    if not at:
        return strategy, None
    try:
        budget = float(gigabytes) * 1e9
    except ValueError:
        budget = 0.0
    if strategy != "best" or not 0 < budget < math.inf:
        raise UsageError(
            f"{name}: only `best` has a budget, in GB of weights per token", "for example best@1.5"
        )
    return strategy, budget


def file_name(name: str) -> str:
    """Return the name of a search's strategy as the name of a file or folder."""
    return re.sub("[:/]", "-", name)


def drawn(strategy: str, draw: int) -> str:
    """Return the name of a strategy's calibration draw in a run directory."""
    name = file_name(strategy)
    return f"{name}-draw{draw}" if draw else name


def offline_prompts(n: int, everything: Sequence[Workload]) -> list[Workload]:
    """Return the workloads of an offline evaluation: n prompts per gate, and every tool prompt.

    All tool prompts, because n = 25 leaves a rate of 45 % undecided against the required 60 % (R23) and n = 240 does not, and
    an answer that agrees with the reference's costs almost nothing.
    """
    chosen = {w.name: w for w in judge.sample(everything, n)}
    if n >= MIN_DECIDING_N:
        chosen |= {w.name: w for w in everything if "tool_call" in w.gates}
    return list(chosen.values())


def prompts_key(workloads: Sequence[Workload]) -> dict[str, list[str]]:
    """Return what identifies the prompts of an evaluation: by workload, the hashes of its file and of its prompts."""
    return {w.name: [w.sha256, judge.prompts_sha256(w)] for w in workloads}


# ---- evaluations in processes of their own

AT_ONCE = 2  # processes that share the processors
_POLL_S = 0.1
LINE_S = 0.5  # at most one line of progress per so many seconds


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
        self._started: list[tuple[server.Server | None, Callable[[], StageResult]]] = []

    def start(
        self, name: str, inputs: Mapping[str, object], outputs: list[str], job: ProcessJob
    ) -> None:
        """Start the process of a stage and return at once; does nothing for a stage that has finished before."""
        process = None
        if not self.stages.is_finished(name, inputs):
            command = [sys.executable, "-m", __name__, msgspec.json.encode(job).decode()]
            environment = llama_cpp.environment() | {"OMP_NUM_THREADS": str(self.threads)}
            process = server.spawn(command, self.stages.dir / f"logs/{name}.log", name, environment)
        work = partial(ended, job, process)
        self._started.append(
            (process, partial(self.stages.stage, name, inputs, outputs, work, StageResult))
        )

    def finish(self) -> None:
        """Wait for the stages that were started, in order. Raises ServerError with the cause of a failure."""
        while self._started:
            self._started[0][1]()
            del self._started[0]

    def __enter__(self) -> EvaluationProcesses:
        return self

    def __exit__(self, *exc: object) -> None:
        for process, _ in self._started:
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
        time.sleep(_POLL_S)
    process.wait()
    verdict = documents.Evaluation.load(Path(job.output)).verdict if job.output else None
    return StageResult(verdict.sentence if verdict else "")


def evaluate(job: ProcessJob, progress: Progress) -> None:
    """Compute a job in this process."""
    prompts = (
        job.prompts()
    )  # before torch is imported, so that an unknown workload is named at once
    from annie_quant.offline import ensemble
    from annie_quant.offline.evaluation import run
    from annie_quant.offline.pair import EvaluationJob, open_pair

    settings = EvaluationJob(
        checkpoint=Path(job.checkpoint or job.reference),
        reference=Path(job.reference),
        workloads=prompts,
        numerics=job.numerics,
        output=Path(job.output) if job.output else None,
        cache=Path(job.cache),
    )
    if job.checkpoint is None:
        with open_pair(settings, progress) as pair:
            answered = pair.reference.answer(judge.distinct_prompts(prompts)[0], progress)
            ensemble.second_answers(pair, answered)
        return
    settings = settings.audited()
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
