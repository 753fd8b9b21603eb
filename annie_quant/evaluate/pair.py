"""A checkpoint and its bf16 reference, each loaded once, and the comparison of their logits."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from annie_quant.errors import UsageError
from annie_quant.evaluate.engine import Engine, Row, batches
from annie_quant.evaluate.kl import Tally, compare_logits
from annie_quant.evaluate.process_group import ProcessGroup, default_device, join_group
from annie_quant.evaluate.prompts import CLASSES, Answered, ScoredAnswer, Template
from annie_quant.evaluate.reference import Reference
from annie_quant.evaluate.verification import Choices, choices_of
from annie_quant.hf.loading import load
from annie_quant.progress import SILENT, Progress
from annie_quant.schema import KLSummary

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
    (hf/emulation.py).
    """
    free = psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    # In float32 both need 8 bytes per weight. On disk they have 2.5 (4 bits and bf16), so this is at most 3.2 times the size;
    # the rest is for activations and logits.
    size = sum(f.stat().st_size for folder in folders for f in folder.glob("*.safetensors"))
    return "float32" if 5 * size < free / 2 else "bfloat16"
