"""Greedy answers: the bf16 reference's, cached on disk, and the checkpoint's with as little decoding as possible.

Greedy decoding is deterministic, so one forward over the reference's own greedy answer decides: where the quantized model's
most likely token agrees at every position, end of turn included, its greedy answer is that answer. Otherwise its answer is the
same up to the first difference and is decoded from there. In a conversation, the turns after a different answer have other
prompts and are decoded completely.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import torch

from annie_quant.checkpoint.chat_template import ConversationRefused
from annie_quant.checkpoint.prompt_files import model_files
from annie_quant.core.errors import UsageError
from annie_quant.core.files import sha256_text
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.resume import JsonLines
from annie_quant.documents import ChatMessage
from annie_quant.judge import Workload
from annie_quant.offline.decoding import Completion, generate
from annie_quant.offline.engine import Engine, Row
from annie_quant.offline.loading import load, numerics_of, share_equal_tensors
from annie_quant.offline.prompts import Answered, OfflineRequest, Template

if TYPE_CHECKING:
    from annie_quant.offline.pair import EvaluationJob

MAX_LOGITS_BYTES = 1 << 30  # of the reference's logits in memory; on a GPU a share of what is free
GPU_LOGITS_SHARE = 0.25
ANSWERS_PER_WRITE = 512
Question = TypeVar("Question")


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


def _stored_answer(line: bytes, where: str) -> StoredAnswer | None:
    """Return the answer of a line; None for a line that is not one, which counts as no answer."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(line, type=StoredAnswer)
    return None


class AnswerCache:
    """Greedy answers in a JSON-lines file, written after every 512, so that a killed run resumes."""

    def __init__(self, path: Path) -> None:
        self.log = JsonLines(path, sync=True)
        self.answers: dict[str, Completion] = {}
        for stored in filter(None, self.log.values(_stored_answer)):
            self.answers[stored.key] = Completion(stored.tokens, stored.finished)

    def add(self, answers: dict[str, Completion]) -> None:
        self.answers |= answers
        stored = (StoredAnswer(key, c.tokens, c.finished) for key, c in answers.items())
        self.log.append(*map(msgspec.json.encode, stored))

    def complete(
        self,
        work: Mapping[str, Question],
        answer: Callable[[Sequence[Question], Callable[[int], None]], list[Completion]],
        progress: Progress,
        text: str,
    ) -> None:
        """Add the answers to what is asked, in the order of `work`.

        work: key → question.
        answer: returns the answers to some of the questions. Its second argument is a function that takes the number of further
            answers that have ended.
        text: what is reported as progress.
        """
        n_finished = 0

        def on_finished(n: int) -> None:
            nonlocal n_finished
            n_finished += n
            progress.update(n_finished, len(work), text)

        keys = list(work)
        if keys:
            on_finished(0)
        for at in range(0, len(keys), ANSWERS_PER_WRITE):
            part = keys[at : at + ANSWERS_PER_WRITE]
            completions = answer([work[key] for key in part], on_finished)
            self.add(dict(zip(part, completions, strict=True)))

    def close(self) -> None:
        self.log.close()


def request_key(request: OfflineRequest, end_tokens: Sequence[int]) -> str:
    """Return a hash of what determines a greedy answer: prompt tokens, token limit and end tokens."""
    key = json.dumps([request.prompt, request.max_tokens, sorted(end_tokens)])
    return sha256_text(key)[:32]


class Reference:
    """The bf16 model. Its answers come from the cache; the model is loaded when something is missing there.

    rows: answers per batch.
    checkpoint: the model that it is compared with; tensors that are equal in both are in memory once.
    """

    def __init__(
        self,
        job: EvaluationJob,
        template: Template,
        dtype: str,
        device: str,
        rows: int,
        checkpoint: torch.nn.Module | None = None,
    ) -> None:
        self.job = job
        self.checkpoint = checkpoint
        self.template = template
        self.dtype = dtype
        self.device = device
        self.rows = rows
        self.files = model_files(job.reference)
        self.cache_folder = job.cache or default_cache()
        self.cache = AnswerCache(self.cache_path())
        self._engine: Engine | None = None
        self._logits: dict[int, torch.Tensor] | None = (
            None  # of self._rows, while all of them fit into memory
        )
        self._rows: Sequence[Row] | None = None

    def cache_path(self, arithmetic: str = "") -> Path:
        """Return the file of the answers in an arithmetic; "": the usual one."""
        suffix = f"-{arithmetic}" if arithmetic else ""
        return self.cache_folder / f"answers-{self.files.sha256[:16]}-{self.dtype}{suffix}.jsonl"

    def engine(self) -> Engine:
        if self._engine is None:
            model = load(self.job.reference, dtype=getattr(torch, self.dtype), device=self.device)
            if numerics_of(model) != ["bf16"]:
                raise UsageError(
                    f"{self.job.reference} is quantized; --reference takes the bf16 checkpoint"
                )
            if self.checkpoint is not None:
                share_equal_tensors(model, self.checkpoint)
            model.annie_quant_prefixes = {}  # its weights and its arithmetic never change
            self._engine = Engine(model, rows=self.rows)
        return self._engine

    def answer(self, workloads: Sequence[Workload], progress: Progress = SILENT) -> list[Answered]:
        """Return every turn of every case with the reference's greedy answer, turn by turn."""
        return answer_workloads(
            self.template, workloads, lambda requests: self.complete(requests, progress)
        )

    def complete(self, requests: Sequence[OfflineRequest], progress: Progress) -> list[Completion]:
        """Return the requests' answers in order. Those that are not in the cache are generated and added to it."""
        keys = [request_key(r, self.template.end_tokens) for r in requests]
        missing = {k: r for k, r in zip(keys, requests, strict=True) if k not in self.cache.answers}
        work = dict(sorted(missing.items(), key=lambda item: -item[1].max_tokens))

        def answer(
            part: Sequence[OfflineRequest], on_finished: Callable[[int], None]
        ) -> list[Completion]:
            return generate(
                self.engine(),
                [list(request.prompt) for request in part],
                [request.max_tokens for request in part],
                self.template.end_tokens,
                on_finished,
            )

        self.cache.complete(work, answer, progress, "the reference answers")
        return [self.cache.answers[k] for k in keys]

    def scores(self, rows: Sequence[Row]) -> Iterator[tuple[int, torch.Tensor]]:
        """Engine.scores of the reference; logits of the last rows stay in memory if they fit, for several numerics."""
        if self._logits is not None and self._rows == rows:
            yield from self._logits.items()
            return
        self._logits = None
        self._rows = rows
        stored: dict[int, torch.Tensor] = {}
        engine = self.engine()
        limit = MAX_LOGITS_BYTES
        if engine.device.type == "cuda":
            limit = int(GPU_LOGITS_SHARE * torch.cuda.mem_get_info(engine.device)[0])
        n_logits = engine.vocabulary * sum(len(row.target) for row in rows)
        fits = n_logits * torch.float32.itemsize <= limit
        for i, logits in engine.scores(rows):
            if fits:
                stored[i] = logits.clone()
            yield i, logits
        if fits:
            self._logits = stored


@dataclass(frozen=True)
class AnswerOutcome:
    """A model's answer to a request.

    same: whether it equals the reference's answer.
    agreed: number of tokens before the first difference.
    """

    request: OfflineRequest
    completion: Completion
    same: bool
    agreed: int


@dataclass(frozen=True)
class FirstDifference:
    """Where an answer first differs from the reference's.

    index: of the token.
    token: chosen there; None: not computed yet.
    """

    index: int
    token: int | None


@dataclass(frozen=True)
class TokenChoices:
    """What a model chooses at each token of a target.

    difference: where it first chooses another token than the target's; None: nowhere.
    best: int64 [n, 2], the two most likely tokens.
    margins: float32 [n], the difference of two logits: those of `best`, or of the `pairs` of choices_of.
    """

    difference: FirstDifference | None
    best: np.ndarray
    margins: np.ndarray


def answer_workloads(
    template: Template,
    workloads: Sequence[Workload],
    generate: Callable[[Sequence[OfflineRequest]], list[Completion]],
) -> list[Answered]:
    """Answer every turn of every case, turn by turn with all cases together, each with the model's own earlier answers.

    A conversation ends before a turn whose prompt the chat template refuses.
    """
    cases = [(w, c) for w in workloads for c in w.cases]
    messages: dict[tuple[str, str], list[ChatMessage]] = {(w.name, c.id): [] for w, c in cases}
    answered = []
    for turn in range(max((c.n_turns for _, c in cases), default=0)):
        requests = []
        for w, c in cases:
            earlier = messages[w.name, c.id]
            if turn >= c.n_turns or len(earlier) < turn:
                continue
            try:
                requests.append(template.request(w, c, turn, earlier))
            except ConversationRefused:
                if turn == 0:
                    raise
        for request, completion in zip(requests, generate(requests), strict=True):
            messages[request.conversation].append(template.message(request, completion))
            answered.append(Answered(request, completion))
    return answered


def first_difference(
    choices: torch.Tensor, target: Sequence[int], end_tokens: Sequence[int]
) -> FirstDifference | None:
    """Return where the most likely tokens, int64 [len(target)], first differ from `target`. All end tokens are equal."""
    for index, (chosen, expected) in enumerate(zip(choices.tolist(), target, strict=True)):
        if chosen != expected and not (chosen in end_tokens and expected in end_tokens):
            return FirstDifference(index, chosen)
    return None


def choices_of(
    logits: torch.Tensor,
    targets: Sequence[Sequence[int]],
    end_tokens: Sequence[int],
    pairs: Sequence[np.ndarray] | None = None,
) -> list[TokenChoices]:
    """Return the choices of several answers. Equal logits give the token of the lowest index.

    logits: [n, V], which all tokens of `targets` were chosen from, in their order. pairs: per target int64 [len(target), 2], tokens
    whose logits are subtracted; None: the two best.
    """
    first = logits.argmax(-1)  # the lowest index among equal logits; topk leaves their order open
    without = logits.scatter(-1, first.unsqueeze(-1), -torch.inf)
    best = torch.stack((first, without.argmax(-1)), -1)
    tokens = best if pairs is None else torch.from_numpy(np.concatenate(pairs)).to(logits.device)
    two = logits.gather(-1, tokens)
    ends = np.cumsum([len(target) for target in targets])[:-1]
    bests = np.split(best.cpu().numpy(), ends)
    margins = np.split((two[:, 0] - two[:, 1]).cpu().numpy(), ends)
    return [
        TokenChoices(first_difference(torch.from_numpy(b[:, 0]), target, end_tokens), b, m)
        for b, m, target in zip(bests, margins, targets, strict=True)
    ]


@dataclass(frozen=True)
class _Continuation:
    """An answer that is decoded. index: of the reference's. known: its first tokens."""

    index: int
    request: OfflineRequest
    known: list[int]


def answer_from_differences(
    engine: Engine,
    template: Template,
    reference: Sequence[Answered],
    differences: Mapping[int, FirstDifference | None],
    on_finished: Callable[[int], None] = lambda n: None,
) -> list[AnswerOutcome]:
    """Return the quantized model's own greedy answers, decoded from where they differ from the reference's.

    reference: in turn order. differences: by index, from first_difference; one that is missing is None.
    """
    outcomes: dict[int, AnswerOutcome] = {}
    messages: dict[tuple[str, str], list[ChatMessage]] = {}
    changed: set[tuple[str, str]] = set()  # conversations with a different earlier answer
    by_turn: dict[int, list[int]] = {}
    for i, (request, _) in enumerate(reference):
        by_turn.setdefault(request.turn, []).append(i)
    for turn in sorted(by_turn):
        work: list[_Continuation] = []
        for i in by_turn[turn]:
            request, completion = reference[i]
            difference = differences.get(i)
            if request.conversation in changed:
                earlier = messages[request.conversation]
                try:
                    own = template.request(request.workload, request.case, turn, earlier)
                except ConversationRefused:  # a server would refuse it: no answer
                    outcomes[i] = AnswerOutcome(request, Completion([], False), False, 0)
                else:
                    work.append(_Continuation(i, own, []))
            elif difference is None:
                agreed = len(completion.tokens) + completion.finished
                outcomes[i] = AnswerOutcome(request, completion, True, agreed)
            else:
                known = completion.tokens[: difference.index]
                if difference.token in template.end_tokens:
                    ended = Completion(known, True)
                    outcomes[i] = AnswerOutcome(request, ended, False, difference.index)
                    continue
                if difference.token is not None:
                    known = [*known, difference.token]
                work.append(_Continuation(i, request, known))
        completions = generate(
            engine,
            [[*w.request.prompt, *w.known] for w in work],
            [w.request.max_tokens - len(w.known) for w in work],
            template.end_tokens,
            on_finished,
            [len(w.known) for w in work],
        )
        for w, rest in zip(work, completions, strict=True):
            completion = Completion(w.known + rest.tokens, rest.finished)
            agreed = max(0, len(w.known) - 1)
            outcomes[w.index] = AnswerOutcome(w.request, completion, False, agreed)
        for i in by_turn[turn]:
            outcome = outcomes[i]
            conversation = outcome.request.conversation
            if outcome.completion != reference[i].completion:
                changed.add(conversation)
            if outcome.request.case.turns:
                message = template.message(outcome.request, outcome.completion)
                messages.setdefault(conversation, []).append(message)
    return [outcomes[i] for i in range(len(reference))]
