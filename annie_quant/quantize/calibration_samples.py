"""Calibration text as tokens, each with the kind of token that it predicts: prompt, content, tool-call markup, thinking, end.

A position has the kind of the token predicted there, because its activations decide that token. Padding is on the right, where
no real token attends to it (the models are causal). It repeats the text, so that code which ignores the kinds sees natural
activations only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

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


@dataclass(frozen=True)
class CalibrationSample:
    """One answer after its prompt.

    category: of its conversation.
    ids: the input tokens; the answer's last token is only predicted.
    kinds: of each position.
    answer: the answer's tokens.
    decides: whether each token of the answer decides about a call or the end (offline/prompts.py).
    row: index of its conversation.
    behaviour: what the answer does (data/behaviours.py); "" for a whole conversation.
    weight: how much its positions count in weighted moments, relative to those of other samples.
    """

    category: str
    ids: tuple[int, ...]
    kinds: tuple[int, ...]
    answer: tuple[int, ...]
    decides: tuple[bool, ...] = ()
    row: int = 0
    behaviour: str = ""
    weight: float = 1.0

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


def weight_table(token_weights: TokenWeights, device: str | torch.device) -> torch.Tensor:
    """Return the weight of every kind of token, float32 [KINDS]."""
    return torch.tensor([token_weights.get(k, 0.0) for k in range(KINDS)], device=device)
