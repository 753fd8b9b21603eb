"""Training rows as token ids in length buckets, drawn in worker processes; the same for the same seed."""

from __future__ import annotations

import random
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rows import Row, row

# (longest row in tokens, rows per step for the base, rows per step for an overlay, interval in steps)
BUCKETS = ((192, 96, 16, 1), (416, 48, 12, 1), (1792, 6, 2, 6))
TOKENIZER = Path(__file__).resolve().parent / "vocabulary"
_tokenizer: Any = None


def tokenizer() -> Any:
    global _tokenizer
    if _tokenizer is None:
        from transformers import AutoTokenizer

        _tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, trust_remote_code=False)
    return _tokenizer


def encode(training_row: Row) -> tuple[list[int], int]:
    """Return a row's token ids and the index where its learned part begins: the model's answer with its end token."""
    t = tokenizer()
    options = {"tools": training_row.tools, "tokenize": False, "enable_thinking": training_row.thinking}
    whole = t.apply_chat_template(training_row.messages, **options).removesuffix("\n")
    head = t.apply_chat_template(training_row.messages[:-1], add_generation_prompt=True, **options)
    if not whole.startswith(head):
        raise ValueError(f"the prompt is not a prefix of the whole:\n{head}\n---\n{whole}")
    ids = t(head, add_special_tokens=False)["input_ids"]
    return ids + t(whole[len(head) :], add_special_tokens=False)["input_ids"], len(ids)


def _some(job: tuple[str, str, int]) -> list[tuple[list[int], int]]:
    style, seed, count = job
    rng = random.Random(seed)
    return [encode(row(rng, style)) for _ in range(count)]


def rows(style: str, count: int, seed: int, workers: int) -> list[list[tuple[list[int], int]]]:
    """Return `count` rows of a style, by bucket."""
    step = 500
    jobs = [(style, f"{seed}:{style}:{i}", min(step, count - i)) for i in range(0, count, step)]
    if workers > 1:
        with get_context("spawn").Pool(workers) as pool:
            parts = pool.map(_some, jobs)
    else:
        parts = [_some(job) for job in jobs]
    buckets: list[list[tuple[list[int], int]]] = [[] for _ in BUCKETS]
    for ids, start in (r for part in parts for r in part):
        index = next((i for i, b in enumerate(BUCKETS) if len(ids) <= b[0]), None)
        if index is not None:
            buckets[index].append((ids, start))
    return buckets


def batch(bucket: list[tuple[list[int], int]], n: int, rng: np.random.Generator, whole: float = 0.0) -> tuple[Any, Any]:
    """Return ids [n, T], right-padded, and the loss mask [n, T], 1 where the next token is learned.

    whole: weight of the prompt's tokens.
    """
    chosen = [bucket[i] for i in rng.integers(0, len(bucket), n)]
    length = max(len(ids) for ids, _ in chosen)
    length += -length % 64
    tokens, mask = np.zeros((n, length), np.int64), np.zeros((n, length), np.float32)
    for r, (ids, start) in enumerate(chosen):
        tokens[r, : len(ids)] = ids
        mask[r, : start - 1] = whole
        mask[r, start - 1 : len(ids) - 1] = 1
    return tokens, mask
