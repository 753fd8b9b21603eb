"""Calibration text in which each shared prefix is computed once: most answers follow the same system prompt and tools.

    text = arrange(samples)
    model = layerwise.DecoderLayers(folder, text.batches)
    table = text.weight_table(token_weights, model.device)

Rows of a batch continue rows of an earlier batch (TokenBatch.start), whose keys, values and states DecoderLayers keeps for them. A
position that several samples share counts once per sample: its code stands for the number of positions of each kind that it
replaces, and the weight table has one weight per code. Sums of weights and weighted moments are therefore those of all samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.offline.engine import common_prefix
from annie_quant.quantize import calibration_samples
from annie_quant.quantize.backend import device_and_dtype
from annie_quant.quantize.calibration_samples import KINDS, PADDING, CalibrationSample, TokenBatch, TokenWeights

GROUP_COST = 64  # tokens: cost of one more forward pass of one layer on a CPU
TOKENS = 4096  # of one forward pass: its activations stay in the caches of a CPU
SPLIT_COST = 4 * GROUP_COST  # tokens: cost of one more pass over shared tokens, which also divides what follows them
MIN_SAVED = GROUP_COST // 2  # positions; where fewer are saved, each row that follows computes the shared tokens again


def weight_table(token_weights: TokenWeights, device: str | torch.device) -> torch.Tensor:
    """Return the weight of every kind of token, float32 [KINDS]."""
    return torch.tensor([token_weights.get(k, 0.0) for k in range(KINDS)], device=device)


@dataclass(frozen=True)
class TokenSequence:
    """A token sequence, and the samples that are equal to it or to a prefix of it."""

    ids: tuple[int, ...]
    samples: list[CalibrationSample]

    def counts(self, start: int, end: int) -> np.ndarray:
        """Return how many samples have a position of each kind there, int64 [end - start, KINDS]."""
        counts = np.zeros((end - start, KINDS), np.int64)
        for sample in self.samples:
            kinds = np.asarray(sample.kinds[start:end], np.int64)
            np.add.at(counts, (np.arange(len(kinds)), kinds), 1)
        return counts


@dataclass
class SharedText:
    """Calibration text as batches.

    batches: in an order in which each comes after the one that it continues.
    codes: counts of the kinds of a position → code, which `kinds` of a batch hold.
    """

    batches: list[TokenBatch] = field(default_factory=list)
    codes: dict[tuple[int, ...], int] = field(default_factory=dict)

    def weight_table(self, token_weights: TokenWeights, device: str | torch.device) -> torch.Tensor:
        """Return the weight of every code, float32 [codes]."""
        counts = torch.tensor(list(self.codes), dtype=torch.float32, device=device)
        return counts @ weight_table(token_weights, device)

    def encode(self, counts: np.ndarray) -> np.ndarray:
        """Return the codes [T] of counts [T, KINDS]."""
        return np.array([self.codes.setdefault(tuple(map(int, row)), len(self.codes)) for row in counts], np.int64)


def can_share(folder: ModelFolder) -> bool:
    """Return whether DecoderLayers can continue a batch: on a CPU, in layers of full attention and DeltaNet.

    On a GPU, whose DeltaNet layers start from a state of zeros here, the forward passes are a small part of the time.
    """
    config = folder.text_config
    types = set(config.get("layer_types") or ["full_attention"])
    return device_and_dtype(folder)[0] == "cpu" and types <= {"full_attention", "linear_attention"}


def arrange(samples: Sequence[CalibrationSample], tokens: int = TOKENS, share: bool = True) -> SharedText:
    """Return the samples as batches of at most `tokens` positions, or of one row.

    share: False gives batches of whole samples.
    """
    text = SharedText()
    text.encode(np.eye(KINDS, dtype=np.int64))  # a code below KINDS is a kind
    if not share:
        text.batches += calibration_samples.make_batches(samples)
        return text
    add(text, [(0, branch) for branch in branches(sequences_of(samples), 0)], None, tokens)
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
    def saved(self) -> int:
        """Number of positions that are saved by computing the tokens once."""
        return (len(self.children) - 1) * (self.end - self.begin)

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


def add(text: SharedText, continued: Sequence[Continued], start: int | None, tokens: int) -> None:
    """Add branches as batches, and what follows them. start: the batch that they continue, if any."""
    whole, shared = [(r, b) for r, b in continued if not b.children], [(r, b) for r, b in continued if b.children]
    least = MIN_SAVED
    while shared and (any(b.saved < least for _, b in shared) or sum(b.saved for _, b in shared) < GROUP_COST):
        if all(b.saved >= least for _, b in shared):
            least = GROUP_COST  # together they save too little: what follows the shorter ones may save more
        parts = [(r, c) for r, b in shared for c in (b.without() if b.saved < least else [b])]
        whole += [(r, b) for r, b in parts if not b.children]
        shared = [(r, b) for r, b in parts if b.children]
    for part in divided(whole, tokens, GROUP_COST):
        text.batches.append(batch_of(text, part, start))
    for part in divided(shared, tokens, SPLIT_COST):
        text.batches.append(batch_of(text, part, start))
        follow = [(row, child) for row, (_, branch) in enumerate(part) for child in branch.children]
        add(text, follow, len(text.batches) - 1, tokens)


def divided(rows: Sequence[Continued], tokens: int, cost: int) -> list[list[Continued]]:
    """Return the rows in parts, by `divide`."""
    ordered = sorted(rows, key=lambda r: (r[1].end - r[1].begin, r[1].sequences[0].ids))
    return [ordered[part] for part in divide([b.end - b.begin for _, b in ordered], tokens, cost)]


def divide(lengths: Sequence[int], tokens: int, cost: int) -> list[slice]:
    """Divide rows of increasing lengths into parts with the fewest positions in all, each padded to its longest row.

    Each part costs `cost` further positions, and has at most `tokens` positions or one row.
    """
    totals, begins = [0], [0]
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


def batch_of(text: SharedText, rows: Sequence[Continued], start: int | None) -> TokenBatch:
    """Return the tokens of branches as one batch, padded on the right to the longest."""
    shape = len(rows), max(b.end - b.begin for _, b in rows)
    ids, kinds = np.zeros(shape, np.int64), np.full(shape, PADDING, np.int64)
    for i, (_, branch) in enumerate(rows):
        first, last = branch.begin, branch.end
        counts = sum(s.counts(first, last) for s in branch.sequences)
        ids[i] = np.resize(branch.sequences[0].ids[first:last], shape[1])
        kinds[i, : last - first] = text.encode(np.asarray(counts))
    if start is None:
        return TokenBatch(ids, kinds)
    return TokenBatch(ids, kinds, start, np.array([row for row, _ in rows]), np.array([b.begin for _, b in rows]))
