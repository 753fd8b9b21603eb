"""Calibration samples of random tokens, in the shape of conversations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from annie_quant.quantize.calibration_samples import (
    CONTENT,
    PADDING,
    PROMPT,
    CalibrationSample,
    TokenBatch,
)


def padded(samples: Sequence[CalibrationSample]) -> TokenBatch:
    """Return samples as one batch, padded on the right to the longest."""
    width = max(len(s.ids) for s in samples)
    ids = np.zeros((len(samples), width), np.int64)
    kinds = np.full((len(samples), width), PADDING, np.int64)
    for i, sample in enumerate(samples):
        ids[i] = np.resize(sample.ids, width)
        kinds[i, : len(sample.kinds)] = sample.kinds
    return TokenBatch(ids, kinds)


def conversations(seed: int = 0) -> list[CalibrationSample]:
    """Return samples of conversations of one to three turns under two system prompts, one sample per conversation and turn.

    A sample ends with an answer in its own form: later turns have it without its first token, as chat templates drop thoughts.
    """
    rng = np.random.default_rng(seed)

    def tokens(least: int, most: int) -> list[int]:
        return rng.integers(10, 1500, rng.integers(least, most)).tolist()

    samples = []
    systems = [tokens(40, 60), tokens(90, 100)]
    for conversation in range(10):
        text = list(systems[conversation % 2])
        for _ in range(1 + conversation % 3):
            text += tokens(20, 50)
            answer = tokens(5, 30)
            kinds = [PROMPT] * len(text) + [CONTENT] * (len(answer) + 1)
            samples.append(CalibrationSample("chat", (*text, 7, *answer), tuple(kinds), ()))
            text += answer
    return samples


def make_batches(samples: Sequence[CalibrationSample], tokens: int = 16384) -> list[TokenBatch]:
    """Return batches of whole rows of similar length, which share nothing: at most `tokens` positions per batch."""
    batches: list[TokenBatch] = []
    waiting: list[CalibrationSample] = []
    for sample in sorted(samples, key=lambda s: len(s.ids)):
        if waiting and (len(waiting) + 1) * len(sample.ids) > tokens:
            batches.append(padded(waiting))
            waiting = []
        waiting.append(sample)
    return [*batches, padded(waiting)] if waiting else batches
