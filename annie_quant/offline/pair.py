"""What is evaluated: the settings of an evaluation, a checkpoint and its bf16 reference, and the comparison of their logits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from annie_quant import judge
from annie_quant.checkpoint import prompt_files
from annie_quant.core.errors import AnnieError, UsageError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.untrusted import JsonObject
from annie_quant.data.workloads import resolve
from annie_quant.documents import KLSummary
from annie_quant.documents.persona import Persona
from annie_quant.judge import Workload, tool_eval
from annie_quant.offline.answers import Choices, Reference, choices_of
from annie_quant.offline.engine import Engine, Row, batches
from annie_quant.offline.kl import Tally, compare_logits
from annie_quant.offline.loading import load
from annie_quant.offline.prompts import CLASSES, Answered, ScoredAnswer, Template

SHOWN = 3
StrPath = str | os.PathLike[str]
Workloads = StrPath | Iterable[StrPath | Workload] | None


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """The settings of an evaluation.

    checkpoint: folder of the model that is judged.
    reference: folder of the bf16 model that it was made from.
    workloads: prompts to choose from.
    n_per_gate: prompts per gate that are drawn from the workloads; None: all prompts.
    extends: whether more prompts are drawn where a gate that compares with bf16's own answers applies to few of them.
    numerics: names of profiles (profiles.py); those that the checkpoint lacks are skipped.
    ensemble: whether the further members of each numerics are computed (ensemble.py), for a verdict that does not hang on one
        arithmetic.
    plain: those of `numerics` whose further members are not computed all the same.
    conversations: a JSON-lines file, or rows, whose assistant tokens are scored in addition to the reference's answers.
    n_conversations: most conversations, taken evenly over the file.
    text: a plain text file for perplexity and KL over all of its tokens.
    faults: of the export, which forbid the verdict "keeps".
    layers_n: prompts per gate for the sensitivity of layers, under the first numerics; None: not measured.
    output: JSON file for the evaluation. The sensitivity goes to OUTPUT.layers.json, from which a killed run resumes.
    cache: folder for the reference's answers; None: annie_quant in XDG_CACHE_HOME.
    dtype: "float32" or "bfloat16" for everything that is not packed; None: float32 where memory allows.
    device: torch's name; None: a GPU where there is one.
    rows: answers per batch.
    """

    checkpoint: Path
    reference: Path
    workloads: Sequence[Workload] = ()
    n_per_gate: int | None = None
    extends: bool = False
    numerics: Sequence[str] = ("w4a4", "w4a16")
    ensemble: bool = True
    plain: Sequence[str] = ()
    conversations: StrPath | Sequence[JsonObject] | None = None
    n_conversations: int | None = None
    text: StrPath | None = None
    faults: Sequence[str] = ()
    layers_n: int | None = None
    output: Path | None = None
    cache: Path | None = None
    dtype: str | None = None
    device: str | None = None
    rows: int = 128

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
        return list(self.workloads) if n is None else judge.sample(self.workloads, n)


def distinct_workloads(workloads: Workloads, persona: StrPath | Persona | None = None) -> list[Workload]:
    """Return the workloads that resolve() returns, each prompt once."""
    return judge.distinct_prompts(resolve(persona, workloads))[0]


@dataclass(frozen=True)
class ComparedAnswer:
    """One scored answer: kl.FIELDS of each token, float64 [n, len(FIELDS)], and the checkpoint's choices."""

    fields: np.ndarray
    choices: Choices


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
        return [
            ScoredAnswer(r.workload.name, r.prompt, tuple(self.template.target(c)), r.workload.thinking)
            for r, c in answered
        ]

    def compare(self, scored: Sequence[ScoredAnswer], text: str | None = None) -> dict[int, ComparedAnswer]:
        """Score the answers with both models, and return the comparison of each by its index.

        text: reported as progress; None reports nothing.
        """
        rows = [Row(s.prompt, s.target) for s in scored]
        comparisons: dict[int, ComparedAnswer] = {}
        both = zip(self.engine.scores(rows), self.reference.scores(rows), strict=True)
        pairs = ((i, logits, expected) for (i, logits), (_, expected) in both)
        for indices, logits, expected in batches(pairs, self.engine.compared_tokens):
            targets = [rows[i].target for i in indices]
            target = torch.tensor([token for t in targets for token in t], device=logits.device)
            choices = choices_of(logits, targets, self.template.end_tokens)
            fields = compare_logits(expected, logits, target)
            parts = np.split(fields, np.cumsum([len(t) for t in targets])[:-1])
            comparisons |= zip(indices, map(ComparedAnswer, parts, choices), strict=True)
            if text is not None:
                self.progress.update(len(comparisons), len(rows), text)
        return comparisons

    def summarize(
        self, scored: Sequence[ScoredAnswer], comparisons: Mapping[int, ComparedAnswer], offset: int = 0
    ) -> KLSummary | None:
        """Return the KL figures of `scored`, whose comparisons have the indices from `offset` on; None without tokens."""
        tally = Tally(CLASSES)
        for i, answer in enumerate(scored, offset):
            classes = self.template.classes(answer.target, answer.thinking)
            decides = None if answer.plain else self.template.decisions(answer.target, answer.thinking)
            tally.add(answer.category, classes, comparisons[i].fields, decides)
        return tally.summary()


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def open_pair(job: EvaluationJob, progress: Progress = SILENT) -> Iterator[ModelPair]:
    """Load the models of a job."""
    start = time.monotonic()
    device = job.device or default_device()
    if job.dtype not in (None, "float32", "bfloat16"):
        raise UsageError(f"dtype {job.dtype!r}", "choose float32 or bfloat16")
    dtype = job.dtype or working_dtype([job.checkpoint, job.reference], device)
    torch.backends.cudnn.allow_tf32 = False  # float32 means float32, in convolutions too
    progress.update(0, None, "loading")
    template = Template(job.reference)
    dense_cache = "float32" if dtype == "float32" else "bf16"
    model = load(job.checkpoint, cache=dense_cache, dtype=getattr(torch, dtype), device=device)
    engine = Engine(model, rows=job.rows)
    reference = Reference(job, template, dtype, device)
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
    folder, source, template = pair.job.checkpoint, pair.job.reference, pair.template
    if folder.resolve() == source.resolve() or prompt_files.same_bytes(folder, source):
        return PromptCheck([], [])
    if not prompt_files.has_tokenizer(folder):
        return PromptCheck([], ["the checkpoint has no tokenizer; both models were evaluated with the reference's"])
    blocking = [difference.message for difference in prompt_files.differences(folder, source)]
    try:
        own = Template(folder)
    except AnnieError as error:
        return PromptCheck([*blocking, f"no server can use the checkpoint's tokenizer: {error.message}"], [])
    if set(own.end_tokens) != set(template.end_tokens):
        blocking.append(f"its answers end with tokens {own.end_tokens}, the reference's with {template.end_tokens}")
    if other := other_prompts(own, template, answered):
        names = ", ".join(other[:SHOWN]) + (", ..." if len(other) > SHOWN else "")
        blocking.append(
            f"the checkpoint's own tokenizer and chat template give other tokens for {len(other)} of {len(answered)} prompts "
            f"({names}); the answers that were compared are not those of a server"
        )
    notes = [] if blocking else ["the tokenizer's files differ from the reference's, and give the same tokens"]
    return PromptCheck(blocking, notes)


def other_prompts(own: Template, template: Template, answered: Sequence[Answered]) -> list[str]:
    """Return the names of the prompts, or answers, that are other tokens or another text with the checkpoint's own files."""
    other = []
    earlier: dict[tuple[str, str], list[Any]] = {}
    for request, completion in answered:
        messages = earlier.setdefault(request.conversation, [])
        try:
            same = own.request(request.workload, request.case, request.turn, messages).prompt == request.prompt
        except AnnieError:
            same = False
        texts = [t.tokenizer.decode(completion.tokens, skip_special_tokens=False) for t in (own, template)]
        if not same or texts[0] != texts[1]:
            other.append(request.name)
        messages.append(template.message(request, completion))
    return other


def working_dtype(folders: Sequence[Path], device: str) -> str:
    """Return "float32" where both models fit into half of the device's free memory that way, else "bfloat16".

    The same on a CPU and a GPU, so that a verdict does not depend on the device: numerics profiles round from float32
    (emulation.py).
    """
    free = psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    # In float32 both need 8 bytes per weight. On disk they have 2.5 (4 bits and bf16), so this is at most 3.2 times the size;
    # the rest is for activations and logits.
    size = sum(f.stat().st_size for folder in folders for f in folder.glob("*.safetensors"))
    return "float32" if 5 * size < free / 2 else "bfloat16"
