"""Calibration text as tokens, each with the kind of token that it predicts: prompt, content, tool-call markup, thinking, end.

A position has the kind of the token predicted there, because its activations decide that token. Padding is on the right, where
no real token attends to it (the models are causal). It repeats the text, so that code which ignores the kinds sees natural
activations only.

Most answers follow the same system prompt and tools, so each shared prefix is computed once:

    text = arrange(samples)
    model = layerwise.DecoderLayers(folder, text.batches)
    table = text.weight_table(token_weights, model.device)

Rows of a batch continue rows of an earlier batch (TokenBatch.start), whose keys, values and states DecoderLayers keeps for them. A
position that several samples share counts once per sample: its code stands for the number of positions of each kind that it
replaces, and the weight table has one weight per code. Sums of weights and weighted moments are therefore those of all samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import UsageError
from annie_quant.core.untrusted import JsonObject
from annie_quant.data.rows import read_conversations
from annie_quant.offline.caches import common_prefix
from annie_quant.offline.prompts import Template, conversation_answers
from annie_quant.quantize.backend import device_kind
from annie_quant.quantize.strategy import Job, StrategyOptions

PROMPT, CONTENT, TOOL_MARKUP, THINKING, END_OF_TURN = range(5)
KINDS = 5
PADDING = -1
TokenWeights = Mapping[int, float]  # kind → how much a position's activations count
# What the model is to answer, and nothing else.
RESPONSE: TokenWeights = {
    PROMPT: 0.0,
    CONTENT: 1.0,
    TOOL_MARKUP: 1.0,
    THINKING: 1.0,
    END_OF_TURN: 1.0,
}
# A few tokens decide whether a checkpoint keeps its manners: the markup of a call, and the token that ends the turn.
MANNERS_RESPONSE: TokenWeights = {**RESPONSE, TOOL_MARKUP: 8.0, END_OF_TURN: 8.0}
MAX_TOKENS = 2048
BATCH_TOKENS = 16384
GROUP_COST = 64  # tokens: cost of one more forward pass of one layer on a CPU
SHARED_TOKENS = 4096  # of one forward pass: its activations stay in the caches of a CPU
SPLIT_COST = (
    4 * GROUP_COST
)  # tokens: cost of one more pass over shared tokens, which also divides what follows them
MIN_SAVED = (
    GROUP_COST // 2
)  # positions; where fewer are saved, each row that follows computes the shared tokens again


@dataclass(frozen=True)
class CalibrationSample:
    """One answer after its prompt.

    category: of its conversation.
    ids: the input tokens; the answer's last token is only predicted.
    kinds: of each position.
    answer: the answer's tokens.
    decides: whether each token of the answer decides about a call or the end (offline/prompts.py).
    row: index of its conversation.
    """

    category: str
    ids: tuple[int, ...]
    kinds: tuple[int, ...]
    answer: tuple[int, ...]
    decides: tuple[bool, ...] = ()
    row: int = 0

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.ids[: len(self.ids) - len(self.answer) + 1]


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens that are computed together.

    ids: int64 [B, T].
    kinds: int64 [B, T]; the kind of what follows a sample is PADDING.
    start: index of an earlier batch whose rows these continue (SharedText); None: they begin the text.
    rows: the row of that batch that each row continues, int64 [B]; None without start.
    offsets: number of tokens before each row, int64 [B]; None without start.
    """

    ids: np.ndarray
    kinds: np.ndarray
    start: int | None = None
    rows: np.ndarray | None = None
    offsets: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Number of real tokens of each row, int64 [B]."""
        return (self.kinds != PADDING).sum(1)


def read_samples(job: Job[StrategyOptions]) -> list[CalibrationSample]:
    """Return the assistant's answers in the job's conversations."""
    return samples_of_rows(job.model, read_conversations(job.conversations, job.calib_samples))


def samples_of_rows(model: Path, rows: Sequence[JsonObject]) -> list[CalibrationSample]:
    """Return the assistant's answers in conversations. Answers beyond MAX_TOKENS are left out."""
    template = Template(model)
    samples = []
    scored_rows = (
        (i, scored)
        for i, row in enumerate(rows)
        for scored in conversation_answers(template, [row])
    )
    for row, scored in scored_rows:
        ids = (*scored.prompt, *scored.target[:-1])
        if len(ids) > MAX_TOKENS:
            continue  # cutting would remove the answer, which is at the end
        answer_kinds = [k + 1 for k in template.classes(scored.target, scored.thinking)]
        kinds = (PROMPT,) * (len(scored.prompt) - 1) + tuple(answer_kinds)
        decides = tuple(template.decisions(scored.target, scored.thinking))
        samples.append(CalibrationSample(scored.category, ids, kinds, scored.target, decides, row))
    if not samples:
        ends = ", ".join(map(repr, template.tokenizer.convert_ids_to_tokens(template.end_tokens)))
        message = f"no assistant's answer in the calibration data has at most {MAX_TOKENS:,} tokens and ends with {ends}"
        raise UsageError(
            message,
            "annie-quant data; if answers end otherwise, eos_token_id in generation_config.json is wrong",
        )
    return samples


def make_batches(
    samples: Sequence[CalibrationSample], tokens: int = BATCH_TOKENS
) -> list[TokenBatch]:
    """Return batches of samples of similar length, at most `tokens` positions per batch."""
    batches: list[TokenBatch] = []
    waiting: list[CalibrationSample] = []
    for sample in sorted(samples, key=lambda s: len(s.ids)):
        if waiting and (len(waiting) + 1) * len(sample.ids) > tokens:
            batches.append(padded(waiting))
            waiting = []
        waiting.append(sample)
    return [*batches, padded(waiting)] if waiting else batches


def padded(samples: Sequence[CalibrationSample]) -> TokenBatch:
    """Return samples as one batch, padded on the right to the longest."""
    width = max(len(s.ids) for s in samples)
    ids, kinds = (
        np.zeros((len(samples), width), np.int64),
        np.full((len(samples), width), PADDING, np.int64),
    )
    for i, sample in enumerate(samples):
        ids[i] = np.resize(sample.ids, width)
        kinds[i, : len(sample.kinds)] = sample.kinds
    return TokenBatch(ids, kinds)


def weight_table(token_weights: TokenWeights, device: str | torch.device) -> torch.Tensor:
    """Return the weight of every kind of token, float32 [KINDS]."""
    return torch.tensor([token_weights.get(k, 0.0) for k in range(KINDS)], device=device)
