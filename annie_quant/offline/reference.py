"""The bf16 reference: its greedy answers, cached on disk, and its logits, kept in memory while they fit."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from annie_quant.checkpoint.model_hash import model_sha256
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.resume import JsonLines
from annie_quant.judge import Workload
from annie_quant.offline.decoding import Completion, generate_distributed
from annie_quant.offline.engine import Engine, Row
from annie_quant.offline.loading import load, numerics_of
from annie_quant.offline.process_group import SINGLE, ProcessGroup
from annie_quant.offline.prompts import Answered, Template, TurnRequest
from annie_quant.offline.verification import answer_workloads

MAX_LOGITS_BYTES = 1 << 30  # of the reference's logits in memory
ANSWERS_PER_WRITE = 512


def default_cache() -> Path:
    """Return the user's cache folder; a temporary one, without reuse, where that cannot be written.

    Nothing is ever written into a model's folder: it may be shared, read-only, or about to be published.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "annie_quant"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        writable = os.access(cache, os.W_OK)
    except (OSError, RuntimeError):
        writable = False
    return cache if writable else Path(tempfile.mkdtemp(prefix="annie-quant-cache-"))


class StoredAnswer(msgspec.Struct):
    """A line of the answer cache. key: request_key of the request."""

    key: str
    tokens: list[int]
    finished: bool


class AnswerCache:
    """Greedy answers in a JSON-lines file, written after every 512, so that a killed run resumes.

    The first process of a group reads and writes the file; `answers` is the same in all of them.
    """

    def __init__(self, path: Path, group: ProcessGroup = SINGLE) -> None:
        self.log: JsonLines | None = None
        answers: dict[str, Completion] = {}
        if group.is_first:
            self.log = JsonLines(path, sync=True)
            for _, line in self.log.lines():
                with contextlib.suppress(msgspec.DecodeError):
                    stored = msgspec.json.decode(line, type=StoredAnswer)
                    answers[stored.key] = Completion(stored.tokens, stored.finished)
        self.answers = group.gather(answers)

    def add(self, answers: dict[str, Completion]) -> None:
        self.answers |= answers
        if self.log is not None:
            stored = (StoredAnswer(key, c.tokens, c.finished) for key, c in answers.items())
            self.log.append(*map(msgspec.json.encode, stored))

    def close(self) -> None:
        if self.log is not None:
            self.log.close()


def request_key(request: TurnRequest, end_tokens: Sequence[int]) -> str:
    """Return a hash of what determines a greedy answer: prompt tokens, token limit and end tokens."""
    key = json.dumps([request.prompt, request.max_tokens, sorted(end_tokens)])
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class Reference:
    """The bf16 model. Its answers come from the cache; the model is loaded when something is missing there."""

    def __init__(
        self,
        folder: Path,
        template: Template,
        dtype: str,
        device: str,
        cache: Path | None = None,
        rows: int = 128,
        group: ProcessGroup = SINGLE,
    ) -> None:
        self.folder, self.template, self.dtype, self.device, self.rows = folder, template, dtype, device, rows
        self.group = group
        self.sha256 = model_sha256(folder)
        self.cache_folder = cache or default_cache()
        self.cache = AnswerCache(self.cache_path(), group)
        self._engine: Engine | None = None
        self._logits: dict[int, torch.Tensor] | None = None  # of self._rows, while all of them fit into memory
        self._rows: Sequence[Row] | None = None

    def cache_path(self, arithmetic: str = "") -> Path:
        """Return the file of the answers in an arithmetic; "": the usual one."""
        suffix = f"-{arithmetic}" if arithmetic else ""
        return self.cache_folder / f"answers-{self.sha256[:16]}-{self.dtype}{suffix}.jsonl"

    def engine(self) -> Engine:
        if self._engine is None:
            model = load(self.folder, cache="packed", dtype=getattr(torch, self.dtype), device=self.device)
            if numerics_of(model) != ["bf16"]:
                raise UsageError(f"{self.folder} is quantized; --reference takes the bf16 checkpoint")
            self._engine = Engine(model, rows=self.rows, group=self.group)
        return self._engine

    def answer(self, workloads: Sequence[Workload], progress: Progress = SILENT) -> list[Answered]:
        """Return every turn of every case with the reference's greedy answer, turn by turn."""
        return answer_workloads(self.template, workloads, lambda requests: self.complete(requests, progress))

    def complete(self, requests: Sequence[TurnRequest], progress: Progress) -> list[Completion]:
        """Return the requests' answers in order. Those that are not in the cache are generated and added to it."""
        keys = [request_key(r, self.template.end_tokens) for r in requests]
        missing = {k: r for k, r in zip(keys, requests, strict=True) if k not in self.cache.answers}
        work = sorted(missing.items(), key=lambda item: -item[1].max_tokens)
        n_finished = 0

        def on_finished(n: int) -> None:
            nonlocal n_finished
            n_finished += n
            progress.update(n_finished, len(work), "the reference answers")

        for at in range(0, len(work), ANSWERS_PER_WRITE):
            part = work[at : at + ANSWERS_PER_WRITE]
            completions = generate_distributed(
                self.engine(),
                [list(r.prompt) for _, r in part],
                [r.max_tokens for _, r in part],
                self.template.end_tokens,
                on_finished,
            )
            self.cache.add({key: c for (key, _), c in zip(part, completions, strict=True)})
        return [self.cache.answers[k] for k in keys]

    def scores(self, rows: Sequence[Row]) -> Iterator[tuple[int, torch.Tensor]]:
        """Engine.scores of the reference; logits of the last rows stay in memory if they fit into 1 GB, for several numerics."""
        if self._logits is not None and self._rows == rows:
            yield from self._logits.items()
            return
        self._logits, self._rows = None, rows
        stored: dict[int, torch.Tensor] = {}
        size = 0
        for i, logits in self.engine().scores(rows):
            size += logits.nbytes
            if size <= MAX_LOGITS_BYTES:
                stored[i] = logits.clone()
            else:
                stored.clear()
            yield i, logits
        if size <= MAX_LOGITS_BYTES:
            self._logits = stored
