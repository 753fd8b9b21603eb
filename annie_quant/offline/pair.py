"""A checkpoint and its bf16 reference, each loaded once, and the comparison of their logits.

Whether a checkpoint's own tokenizer and chat template give what the reference's give, on which the evaluation is computed.

A server uses the checkpoint's own files. Where they give other prompts, the answers that were compared are not the server's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from annie_quant.checkpoint import prompt_files
from annie_quant.core.errors import AnnieError, UsageError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.documents import KLSummary
from annie_quant.judge.answers import assistant_message
from annie_quant.offline.engine import Engine, Row, batches
from annie_quant.offline.kl import Tally, compare_logits
from annie_quant.offline.loading import load
from annie_quant.offline.process_group import ProcessGroup, default_device, join_group
from annie_quant.offline.prompts import CLASSES, Answered, ScoredAnswer, Template
from annie_quant.offline.reference import Reference
from annie_quant.offline.verification import Choices, choices_of

SHOWN = 3


class PromptCheck(NamedTuple):
    """blocking: why the verdict cannot be "keeps". notes: what else a reader must know."""

    blocking: list[str]
    notes: list[str]


def check_prompts(folder: Path, source: Path, template: Template, answered: Sequence[Answered]) -> PromptCheck:
    """Compare what the files of `folder` give with what the reference's give, for these prompts and the reference's answers.

    template: the reference's, of the folder `source`.
    """
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
        answer = template.answer(request, completion)
        messages.append(assistant_message(answer.text, answer.tool_calls))
    return other


StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Comparison:
    """One scored answer: kl.FIELDS of each token, float64 [n, len(FIELDS)], and the checkpoint's choices."""

    fields: np.ndarray
    choices: Choices


class ModelPair:
    """A checkpoint and its reference, with what their comparison needs.

    cache: folder for the reference's answers; default: annie_quant in XDG_CACHE_HOME. dtype: "float32" or "bfloat16" for
    everything that is not packed. rows: answers per batch. group: the processes that share the work; default: torchrun's. Only the
    first one reports progress.
    start: time.monotonic() when loading began.
    """

    def __init__(
        self,
        model_dir: StrPath,
        reference_dir: StrPath,
        *,
        cache: StrPath | None = None,
        dtype: str | None = None,
        device: str | None = None,
        rows: int = 128,
        progress: Progress | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.start = time.monotonic()
        self.group = group = group or join_group()
        self.progress: Progress = progress if progress is not None and group.is_first else SILENT
        self.model_dir, self.reference_dir = Path(model_dir), Path(reference_dir)
        self.device = device or default_device(group)
        if dtype not in (None, "float32", "bfloat16"):
            raise UsageError(f"dtype {dtype!r}", "choose float32 or bfloat16")
        self.dtype = dtype or working_dtype([self.model_dir, self.reference_dir], self.device)
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32, in convolutions too
        self.progress.update(0, None, "loading")
        self.template = Template(reference_dir)
        dense_cache = "float32" if self.dtype == "float32" else "bf16"
        self.model = load(model_dir, cache=dense_cache, dtype=getattr(torch, self.dtype), device=self.device)
        self.engine = Engine(self.model, rows=rows, group=group)
        self.reference = Reference(
            self.reference_dir, self.template, self.dtype, self.device, Path(cache) if cache else None, rows, group
        )

    def __enter__(self) -> ModelPair:
        return self

    def __exit__(self, *exc: object) -> None:
        self.reference.cache.close()

    def scored(self, answered: Sequence[Answered]) -> list[ScoredAnswer]:
        """Return the reference's answers as scored answers."""
        return [
            ScoredAnswer(r.workload.name, r.prompt, tuple(self.template.target(c)), r.workload.thinking)
            for r, c in answered
        ]

    def compare(self, scored: Sequence[ScoredAnswer], text: str | None = None) -> dict[int, Comparison]:
        """Score the answers with both models, and return the comparison of each by its index.

        text: reported as progress; None reports nothing. Each process of a group computes its batches and gets all results.
        """
        rows = [Row(s.prompt, s.target) for s in scored]
        comparisons: dict[int, Comparison] = {}
        both = zip(self.engine.scores(rows), self.reference.scores(rows), strict=True)
        pairs = ((i, logits, expected) for (i, logits), (_, expected) in both)
        for indices, logits, expected in batches(pairs, self.engine.compared_tokens):
            targets = [rows[i].target for i in indices]
            target = torch.tensor([token for t in targets for token in t], device=logits.device)
            choices = choices_of(logits, targets, self.template.end_tokens)
            fields = compare_logits(expected, logits, target)
            parts = np.split(fields, np.cumsum([len(t) for t in targets])[:-1])
            comparisons |= zip(indices, map(Comparison, parts, choices), strict=True)
            if text is not None:
                self.progress.update(min(len(comparisons) * self.group.size, len(rows)), len(rows), text)
        return self.group.gather(comparisons)

    def summarize(
        self, scored: Sequence[ScoredAnswer], comparisons: Mapping[int, Comparison], offset: int = 0
    ) -> KLSummary | None:
        """Return the KL figures of `scored`, whose comparisons have the indices from `offset` on; None without tokens."""
        tally = Tally(CLASSES)
        for i, answer in enumerate(scored, offset):
            classes = self.template.classes(answer.target, answer.thinking)
            decides = None if answer.plain else self.template.decisions(answer.target, answer.thinking)
            tally.add(answer.category, classes, comparisons[i].fields, decides)
        return tally.summary()


def working_dtype(folders: Sequence[Path], device: str) -> str:
    """Return "float32" where both models fit into half of the device's free memory that way, else "bfloat16".

    The same on a CPU and a GPU, so that a verdict does not depend on the device: numerics profiles round from float32
    (offline/emulation.py).
    """
    free = psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    # In float32 both need 8 bytes per weight. On disk they have 2.5 (4 bits and bf16), so this is at most 3.2 times the size;
    # the rest is for activations and logits.
    size = sum(f.stat().st_size for folder in folders for f in folder.glob("*.safetensors"))
    return "float32" if 5 * size < free / 2 else "bfloat16"
