"""What is evaluated: the settings of an evaluation, and a checkpoint and its bf16 reference, loaded to be compared."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from annie_quant import judge
from annie_quant.checkpoint import prompt_files
from annie_quant.checkpoint.inspection import export_notes
from annie_quant.core.errors import AnnieError, UsageError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import KLSummary
from annie_quant.judge import Workload, tool_eval
from annie_quant.offline.answers import Reference, TokenChoices, choices_of
from annie_quant.offline.divergence import TokenLabels, compare_logits, kl_summary
from annie_quant.offline.engine import Engine, Row, batches
from annie_quant.offline.loading import load
from annie_quant.offline.prompts import Answered, ScoredAnswer, Template

_MAX_NAMES = 3  # of prompts in one message
StrPath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """The settings of an evaluation.

    checkpoint: folder of the model that is judged.
    reference: folder of the bf16 model that it was made from.
    workloads: prompts to choose from; one that is repeated counts once.
    n_per_gate: prompts per gate that are drawn from the workloads; None: all prompts.
    extends: whether more prompts are drawn where a gate that compares with bf16's own answers applies to few of them.
    numerics: names of profiles (profiles.py); those that the checkpoint lacks are skipped.
    ensemble: whether the further members of each numerics are computed (ensemble.py), for a verdict that does not hang on one
        arithmetic.
    quick: compute one numerics, the first that the checkpoint has, and no further members.
    conversations: rows whose assistant tokens are scored in addition to the reference's answers.
    faults: of the export, which forbid the verdict "keeps".
    output: JSON file for the evaluation.
    cache: folder for the reference's answers; None: annie_quant in XDG_CACHE_HOME.
    dtype: "float32" or "bfloat16" for everything that is not packed; None: float32 where memory allows.
    device: torch's name; None: a GPU where there is one.
    rows: answers per batch; None: Engine's default.
    """

    checkpoint: Path
    reference: Path
    workloads: Sequence[Workload] = ()
    n_per_gate: int | None = None
    extends: bool = False
    numerics: Sequence[str] = ("w4a4", "w4a16")
    ensemble: bool = True
    quick: bool = False
    conversations: Sequence[JsonObject] = ()
    faults: Sequence[str] = ()
    output: Path | None = None
    cache: Path | None = None
    dtype: str | None = None
    device: str | None = None
    rows: int | None = None

    @property
    def has_ensemble(self) -> bool:
        return self.ensemble and not self.quick

    def audited(self) -> EvaluationJob:
        """Return the job with the faults of the checkpoint's export."""
        return replace(self, faults=export_notes(self.checkpoint, self.reference))

    def prompts(self, n: int | None) -> list[Workload]:
        """Return the workloads with n prompts per gate, or all. Raises UsageError for a temperature above 0."""
        for workload in self.workloads:
            if workload.name == tool_eval.NAME:
                raise UsageError(
                    f"{workload.name} plays its scenarios against a server",
                    "annie-quant bench --workloads tool-eval-bench ...",
                )
            if workload.temperature != 0:
                raise UsageError(
                    f"workload {workload.name} has temperature {workload.temperature}; "
                    "only greedy answers (temperature 0) can be verified offline"
                )
        distinct = judge.distinct_prompts(self.workloads)[0]
        return distinct if n is None else judge.sample(distinct, n)


@dataclass(frozen=True)
class LogitComparison:
    """Scored answers under both models, in order.

    fields: divergence.FIELDS of each answer's tokens, float64 [n, len(FIELDS)].
    choices: the checkpoint's.
    """

    fields: list[np.ndarray]
    choices: list[TokenChoices]

    def summary(self, labels: TokenLabels) -> KLSummary:
        """Return the KL figures of all tokens, of which there is at least one."""
        return kl_summary(np.concatenate(self.fields), labels)

    def split(self, n: int) -> tuple[LogitComparison, LogitComparison]:
        """Return the first n answers, and the others."""
        first = LogitComparison(self.fields[:n], self.choices[:n])
        return first, LogitComparison(self.fields[n:], self.choices[n:])


@dataclass(frozen=True)
class ModelPair:
    """A checkpoint and its reference, loaded, with what their comparison needs. open_pair() makes one.

    job: settings.
    progress: what long steps report to.
    device, dtype: where and in what everything that is not packed is computed.
    template: the reference's tokenizer and chat template, with which both are evaluated.
    model, engine: the checkpoint and its batching.
    reference: the bf16 model, loaded when its answers are not cached.
    start: time.monotonic() when loading began.
    """

    job: EvaluationJob
    progress: Progress
    device: str
    dtype: str
    template: Template
    model: Any
    engine: Engine
    reference: Reference
    start: float

    def scored(self, answered: Sequence[Answered]) -> list[ScoredAnswer]:
        """Return the reference's answers as scored answers."""
        answers = []
        for request, completion in answered:
            target = tuple(self.template.target(completion))
            workload = request.workload
            answers.append(ScoredAnswer(workload.name, request.prompt, target, workload.thinking))
        return answers

    def compare(self, scored: Sequence[ScoredAnswer], text: str | None = None) -> LogitComparison:
        """Score the answers with both models. text: reported as progress; None reports nothing."""
        rows = [Row(s.prompt, s.target) for s in scored]
        fields: dict[int, np.ndarray] = {}
        choices: dict[int, TokenChoices] = {}
        if text is not None:
            self.progress.update(0, len(rows), text)
        both = zip(self.engine.scores(rows), self.reference.scores(rows), strict=True)
        pairs = ((i, logits, expected) for (i, logits), (_, expected) in both)
        for indices, logits, expected in batches(pairs, self.engine.compared_tokens):
            targets = [rows[i].target for i in indices]
            target = torch.tensor([token for t in targets for token in t], device=logits.device)
            ends = np.cumsum([len(t) for t in targets])[:-1]
            compared = np.split(compare_logits(expected, logits, target), ends)
            fields.update(zip(indices, compared, strict=True))
            chosen = choices_of(logits, targets, self.template.end_tokens)
            choices.update(zip(indices, chosen, strict=True))
            if text is not None:
                self.progress.update(len(fields), len(rows), text)
        order = range(len(rows))
        return LogitComparison([fields[i] for i in order], [choices[i] for i in order])


@contextmanager
def open_pair(job: EvaluationJob, progress: Progress = SILENT) -> Iterator[ModelPair]:
    """Load the models of a job."""
    start = time.monotonic()
    device = job.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if job.dtype not in (None, "float32", "bfloat16"):
        raise UsageError(f"dtype {job.dtype!r}", "choose float32 or bfloat16")
    dtype = job.dtype or working_dtype([job.checkpoint, job.reference], device)
    torch.backends.cudnn.allow_tf32 = False  # float32 means float32, in convolutions too
    progress.update(0, None, "loading")
    template = Template(job.reference)
    dense_cache = "float32" if dtype == "float32" else "bf16"
    model = load(job.checkpoint, cache=dense_cache, dtype=getattr(torch, dtype), device=device)
    engine = Engine(model, rows=job.rows)
    reference = Reference(job, template, dtype, device, engine.rows, model)
    try:
        yield ModelPair(job, progress, device, dtype, template, model, engine, reference, start)
    finally:
        reference.cache.close()


class PromptCheck(NamedTuple):
    """blocking: why the verdict cannot be "keeps". notes: what else a reader must know."""

    blocking: list[str]
    notes: list[str]


def check_prompts(pair: ModelPair, answered: Sequence[Answered]) -> PromptCheck:
    """Compare the prompts and texts that the checkpoint's own tokenizer and chat template give with the reference's.

    A server uses the checkpoint's own files. Where they give other prompts, the answers that were compared are not the server's.
    """
    folder = pair.job.checkpoint
    source = pair.job.reference
    template = pair.template
    if folder.resolve() == source.resolve() or prompt_files.same_bytes(folder, source):
        return PromptCheck([], [])
    if not prompt_files.has_tokenizer(folder):
        return PromptCheck(
            [], ["the checkpoint has no tokenizer; both models were evaluated with the reference's"]
        )
    blocking = [difference.message for difference in prompt_files.differences(folder, source)]
    try:
        own = Template(folder)
    except AnnieError as error:
        return PromptCheck(
            [*blocking, f"no server can use the checkpoint's tokenizer: {error.message}"], []
        )
    if set(own.end_tokens) != set(template.end_tokens):
        blocking.append(
            f"its answers end with tokens {own.end_tokens}, the reference's with {template.end_tokens}"
        )
    other = _other_prompts(own, template, answered)
    if other:
        names = ", ".join(other[:_MAX_NAMES])
        if len(other) > _MAX_NAMES:
            names += ", ..."
        blocking.append(
            f"the checkpoint's own tokenizer and chat template give other tokens for {len(other)} of {len(answered)} prompts "
            f"({names}); the answers that were compared are not those of a server"
        )
    if blocking:
        return PromptCheck(blocking, [])
    note = "the tokenizer's files differ from the reference's, and give the same tokens"
    return PromptCheck([], [note])


def _other_prompts(own: Template, template: Template, answered: Sequence[Answered]) -> list[str]:
    """Return the names of the prompts, or answers, that are other tokens or another text with the checkpoint's own files."""
    other = []
    earlier: dict[tuple[str, str], list[Any]] = {}
    for request, completion in answered:
        messages = earlier.setdefault(request.conversation, [])
        try:
            rendered = own.request(request.workload, request.case, request.turn, messages)
            same = rendered.prompt == request.prompt
        except AnnieError:
            same = False
        if not same or own.text(completion) != template.text(completion):
            other.append(request.name)
        if request.case.turns:  # a later turn's prompt has this answer
            messages.append(template.message(request, completion))
    return other


def working_dtype(folders: Sequence[Path], device: str) -> str:
    """Return "float32" where both models fit into half of the device's free memory that way, else "bfloat16".

    The same on a CPU and a GPU, so that a verdict does not depend on the device: numerics profiles round from float32
    (emulation.py).
    """
    free = psutil.virtual_memory().available
    if device != "cpu":
        free = torch.cuda.mem_get_info(device)[0]
    # In float32 both need 8 bytes per weight. On disk they have 2.5 (4 bits and bf16), so this is at most 3.2 times the size;
    # the rest is for activations and logits.
    shards = [shard for folder in folders for shard in folder.glob("*.safetensors")]
    size = sum(shard.stat().st_size for shard in shards)
    return "float32" if 5 * size < free / 2 else "bfloat16"
