"""Arrange calibration samples in batches in which each shared prefix is computed once, and long rows in pieces.

    text = arrange(samples)
    model = layerwise.DecoderLayers(folder, text.batches)
    table = text.weight_table(token_weights, model.device)

The samples form a tree of shared tokens. Rows of a batch continue rows of an earlier batch (TokenBatch.start), whose keys, values
and states are kept (continuation.py). A row with more tokens than one forward pass takes is a chain of batches of one row.

A position that several samples share counts once per sample, with the sample's weight: its code stands for the positions of each
kind that it replaces, and the weight table has one weight per code. Sums of weights and weighted moments are therefore those of all
samples.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from annie_quant.offline.caches import common_prefix
from annie_quant.quantize.backend import device_kind
from annie_quant.quantize.calibration_samples import (
    KINDS,
    PADDING,
    CalibrationSample,
    TokenBatch,
    TokenWeights,
    weight_table,
)


@dataclass(frozen=True)
class PassCost:
    """What a forward pass of one layer costs, in tokens.

    tokens: positions of one pass; on a CPU its activations stay in the caches.
    extra_pass: cost of one more pass.
    """

    tokens: int
    extra_pass: int

    @property
    def split(self) -> int:
        """Cost of one more pass over shared tokens, which also divides what follows them."""
        return 4 * self.extra_pass

    @property
    def min_saved(self) -> int:
        """Positions; where fewer are saved, each row that follows computes the shared tokens again."""
        return self.extra_pass // 2


PASS_COSTS = {"cpu": PassCost(4096, 64), "cuda": PassCost(32768, 2048)}


class DistinctPositions:
    """Counts the positions of rows that are added one by one; a prefix that several share counts once."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []  # in lexicographic order

    def new(self, row: tuple[int, ...]) -> int:
        """Return how many positions a row would add."""
        place = bisect.bisect(self.rows, row)
        neighbours = self.rows[max(0, place - 1) : place + 1]
        return len(row) - max((common_prefix(row, other) for other in neighbours), default=0)

    def add(self, row: tuple[int, ...]) -> None:
        bisect.insort(self.rows, row)


def distinct_positions(rows: Iterable[Sequence[object]]) -> int:
    """Return the number of positions that are computed where every shared prefix is computed once."""
    ordered: list[Any] = sorted(rows)
    shared = sum(common_prefix(a, b) for a, b in itertools.pairwise(ordered))
    return sum(map(len, ordered)) - shared


@dataclass(frozen=True)
class TokenSequence:
    """A token sequence, and the samples that are equal to it or to a prefix of it."""

    ids: tuple[int, ...]
    samples: list[CalibrationSample]

    def counts(self, start: int, end: int) -> np.ndarray:
        """Return the weight of the samples that have a position of each kind there, float64 [end - start, KINDS]."""
        counts = np.zeros((end - start, KINDS))
        for sample in self.samples:
            kinds = np.asarray(sample.kinds[start:end], np.int64)
            counts[np.arange(len(kinds)), kinds] += sample.weight
        return counts


def codes_of_kinds() -> dict[tuple[float, ...], int]:
    """Return the codes of positions of one sample of weight 1: their kinds."""
    return {tuple(counts): kind for kind, counts in enumerate(np.eye(KINDS, dtype=int).tolist())}


@dataclass
class SharedText:
    """Calibration text as batches.

    batches: in an order in which each comes after the one that it continues.
    codes: counts of the kinds of a position → code, which `kinds` of a batch hold.
    """

    batches: list[TokenBatch] = field(default_factory=list)
    codes: dict[tuple[float, ...], int] = field(default_factory=codes_of_kinds)

    def counts(self, device: str | torch.device) -> torch.Tensor:
        """Return how many positions of each kind a code stands for, weighted, float32 [codes, KINDS]."""
        return torch.tensor(list(self.codes), dtype=torch.float32, device=device)

    def weight_table(self, token_weights: TokenWeights, device: str | torch.device) -> torch.Tensor:
        """Return the weight of every code, float32 [codes]."""
        return self.counts(device) @ weight_table(token_weights, device)

    def encode(self, counts: np.ndarray) -> np.ndarray:
        """Return the codes [T] of counts [T, KINDS]."""
        different, indices = np.unique(counts, axis=0, return_inverse=True)
        codes = [self.codes.setdefault(tuple(row), len(self.codes)) for row in different.tolist()]
        return np.array(codes, np.int64)[indices.reshape(-1)]


def arrange(samples: Sequence[CalibrationSample], cost: PassCost | None = None) -> SharedText:
    """Return the samples as batches. cost: of a pass, by default that of this machine's device."""
    text = SharedText()
    roots = [(0, branch) for branch in branches(sequences_of(samples), 0)]
    add_branches(text, roots, None, cost or PASS_COSTS[device_kind()])
    return text


def sequences_of(samples: Sequence[CalibrationSample]) -> list[TokenSequence]:
    """Return the sequences that are not a prefix of another one, in lexicographic order."""
    sequences: list[TokenSequence] = []
    waiting: list[CalibrationSample] = []
    ordered = sorted(samples, key=lambda s: s.ids)
    for sample, following in zip(ordered, [*(s.ids for s in ordered[1:]), ()], strict=True):
        waiting.append(sample)
        # Samples between a prefix and the sequence that it begins begin with that prefix, too.
        if following[: len(sample.ids)] != sample.ids:
            sequences.append(TokenSequence(sample.ids, waiting))
            waiting = []
    return sequences


@dataclass(frozen=True)
class Branch:
    """The tokens from `begin` to `end`, which all of its sequences share.

    children: the branches that follow; none at the end of a sequence.
    """

    sequences: Sequence[TokenSequence]
    begin: int
    end: int
    children: Sequence[Branch] = ()

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def saved(self) -> int:
        """Number of positions that are saved by computing the tokens once."""
        return (len(self.children) - 1) * self.length

    def without(self) -> list[Branch]:
        """Return the children, each with this branch's tokens."""
        return [replace(child, begin=self.begin) for child in self.children]


Continued = tuple[int, Branch]  # the row of an earlier batch that the branch continues


def branches(sequences: Sequence[TokenSequence], begin: int) -> list[Branch]:
    """Return the tree of sequences in lexicographic order, none of which is a prefix of another one."""
    result = []
    for _, members in itertools.groupby(sequences, key=lambda s: s.ids[begin]):
        same = list(members)
        if len(same) == 1:
            result.append(Branch(same, begin, len(same[0].ids)))
            continue
        end = begin + common_prefix(same[0].ids[begin:], same[-1].ids[begin:])
        result.append(Branch(same, begin, end, branches(same, end)))
    return result


def add_branches(
    text: SharedText, continued: Sequence[Continued], start: int | None, cost: PassCost
) -> None:
    """Add branches as batches, and what follows them. start: the batch that they continue, if any."""
    last, shared = worth_sharing(continued, cost)
    for rows in divided(last, cost.tokens, cost.extra_pass):
        add_batches(text, rows, start, cost.tokens)
    for rows in divided(shared, cost.tokens, cost.split):
        batch = add_batches(text, rows, start, cost.tokens)
        follow = [(row, child) for row, (_, branch) in enumerate(rows) for child in branch.children]
        add_branches(text, follow, batch, cost)


def worth_sharing(
    continued: Sequence[Continued], cost: PassCost
) -> tuple[list[Continued], list[Continued]]:
    """Return the branches that end their sequences, and those whose tokens are computed once for what follows.

    Where sharing saves too little, the tokens belong to each of the branches that follow.
    """
    last = [(row, branch) for row, branch in continued if not branch.children]
    shared = [(row, branch) for row, branch in continued if branch.children]
    min_saved = cost.min_saved
    while shared:
        enough = all(branch.saved >= min_saved for _, branch in shared)
        if enough and sum(branch.saved for _, branch in shared) >= cost.extra_pass:
            break
        if enough:
            # Together they save too little. What follows the shorter ones may save more.
            min_saved = cost.extra_pass
        parts: list[Continued] = []
        for row, branch in shared:
            saves_enough = branch.saved >= min_saved
            parts += [(row, part) for part in ([branch] if saves_enough else branch.without())]
        last += [(row, branch) for row, branch in parts if not branch.children]
        shared = [(row, branch) for row, branch in parts if branch.children]
    return last, shared


def divided(rows: Sequence[Continued], tokens: int, cost: int) -> list[list[Continued]]:
    """Return the rows in parts, by `divide`."""
    ordered = sorted(rows, key=lambda r: (r[1].length, r[1].sequences[0].ids))
    return [ordered[part] for part in divide([b.length for _, b in ordered], tokens, cost)]


def divide(lengths: Sequence[int], tokens: int, cost: int) -> list[slice]:
    """Divide rows of increasing lengths into parts with the fewest positions in all, each padded to its longest row.

    Each part costs `cost` further positions, and has at most `tokens` positions or one row.
    """
    totals = [0]
    begins = [0]
    for end in range(1, len(lengths) + 1):
        width = lengths[end - 1]
        first = max(0, end - max(1, tokens // width))
        total, begin = min((totals[b] + (end - b) * width + cost, b) for b in range(first, end))
        totals.append(total)
        begins.append(begin)
    parts: list[slice] = []
    end = len(lengths)
    while end:
        parts.append(slice(begins[end], end))
        end = begins[end]
    return parts[::-1]


def add_batches(text: SharedText, rows: Sequence[Continued], start: int | None, tokens: int) -> int:
    """Add branches as one batch, or one long branch as a chain of them. Return the index of the last one."""
    longest = max(branch.length for _, branch in rows)
    if longest <= tokens:
        text.batches.append(batch_of(text, rows, start))
        return len(text.batches) - 1
    ((row, branch),) = rows  # `divide` gives a row of more than `tokens` a part of its own
    for begin in range(branch.begin, branch.end, tokens):
        piece = replace(branch, begin=begin, end=min(branch.end, begin + tokens))
        text.batches.append(batch_of(text, [(row, piece)], start))
        start = len(text.batches) - 1
        row = 0
    assert start is not None
    return start


def batch_of(text: SharedText, rows: Sequence[Continued], start: int | None) -> TokenBatch:
    """Return the tokens of branches as one batch, padded on the right to the longest."""
    shape = len(rows), max(b.length for _, b in rows)
    ids = np.zeros(shape, np.int64)
    kinds = np.full(shape, PADDING, np.int64)
    for i, (_, branch) in enumerate(rows):
        counts = sum(s.counts(branch.begin, branch.end) for s in branch.sequences)
        ids[i] = np.resize(branch.sequences[0].ids[branch.begin : branch.end], shape[1])
        kinds[i, : branch.length] = text.encode(np.asarray(counts))
    if start is None:
        return TokenBatch(ids, kinds)
    continued_rows = np.array([row for row, _ in rows])
    offsets = np.array([b.begin for _, b in rows])
    return TokenBatch(ids, kinds, start, continued_rows, offsets)
