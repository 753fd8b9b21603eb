"""Calibration text as tokens that know what they are: prompt, content, tool-call markup, thinking, end of turn.

The mark of a position is the class of the token that is predicted there, for a position's activations decide that
token and not the one that stands there. Padding goes to the right, where no real token sees it (Qwen3.5 is causal), and
repeats the text, so that even who does not know of it sees no activations but natural ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from annie_quant.data.rows import read_conversations
from annie_quant.errors import UsageError
from annie_quant.quantize.job import Job

PROMPT, CONTENT, TOOL_MARKUP, THINKING, END_OF_TURN = range(5)
PADDING = -1
# How much a position's activations count, by its mark. RESPONSE: what the model is to say, and nothing else.
RESPONSE: Mapping[int, float] = {PROMPT: 0.0, CONTENT: 1.0, TOOL_MARKUP: 1.0, THINKING: 1.0, END_OF_TURN: 1.0}
MAX_TOKENS = 2048
BATCH_TOKENS = 16384


@dataclass(frozen=True)
class Text:
    """One answer behind its prompt: the tokens that are fed (its last token is only predicted) and a mark for each."""

    category: str
    ids: tuple[int, ...]
    marks: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.ids[: len(self.ids) - len(self.answer) + 1]


@dataclass(frozen=True)
class Batch:
    """ids and marks int64 [B, T]; marks are PADDING right of each text."""

    ids: np.ndarray
    marks: np.ndarray


def read(job: Job, limit: int | None = None) -> list[Text]:
    """The assistant's answers in the job's conversations, as texts; at most `limit`, taken evenly over them."""
    if job.calib_data is None:
        raise UsageError(
            "this strategy reads conversations",
            "annie-quant data --persona annie --output calibration.jsonl, then --calib-data calibration.jsonl",
        )
    return of_rows(job.model, read_conversations(job.calib_data, job.calib_samples), limit)


def of_rows(model: Any, rows: Sequence[dict[str, Any]], limit: int | None = None) -> list[Text]:
    from annie_quant.evaluate.prompts import Template, conversation_answers

    template = Template(model)
    texts = []
    for scored in conversation_answers(template, rows):
        ids = (*scored.prompt, *scored.target[:-1])
        if len(ids) > MAX_TOKENS:
            continue  # cutting it would cut the answer, which stands last
        kinds = [k + 1 for k in template.classes(scored.target, scored.thinking)]
        marks = (PROMPT,) * (len(scored.prompt) - 1) + tuple(kinds)
        texts.append(Text(scored.category, ids, marks, scored.target))
    if not texts:
        raise UsageError("no assistant's answer in the calibration data fits into 2,048 tokens", "annie-quant data")
    if limit is None or limit >= len(texts):
        return texts
    return [texts[i * len(texts) // limit] for i in range(limit)]


def batches(texts: Sequence[Text], tokens: int = BATCH_TOKENS) -> list[Batch]:
    """Texts of about one length together, at most `tokens` places a batch."""
    ordered = sorted(texts, key=lambda t: len(t.ids))
    found: list[Batch] = []
    waiting: list[Text] = []
    for text in ordered:
        if waiting and (len(waiting) + 1) * len(text.ids) > tokens:
            found.append(padded(waiting))
            waiting = []
        waiting.append(text)
    return [*found, padded(waiting)] if waiting else found


def padded(texts: Sequence[Text]) -> Batch:
    width = max(len(t.ids) for t in texts)
    ids, marks = np.zeros((len(texts), width), np.int64), np.full((len(texts), width), PADDING, np.int64)
    for i, text in enumerate(texts):
        ids[i] = np.resize(text.ids, width)
        marks[i, : len(text.marks)] = text.marks
    return Batch(ids, marks)
