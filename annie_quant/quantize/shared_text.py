"""Calibration text in which each shared prefix is computed once: most answers follow the same system prompt and tools.

    text = arrange(samples)
    model = layerwise.DecoderLayers(folder, text.batches)
    table = text.weight_table(token_weights, model.device)

A batch continues the one row of an earlier batch (Batch.start), whose keys, values and states DecoderLayers keeps for it. A
position that several samples pass counts once per sample: its code stands for how many positions of each kind it replaces, and
the weight table has one weight per code. So sums of weights and weighted moments are those of all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.evaluate.prefix import group_by_prefix
from annie_quant.quantize import calibration_samples, input_stats, layerwise
from annie_quant.quantize.calibration_samples import KINDS, PADDING, Batch, Sample, TokenWeights

GROUP_COST = 128  # tokens: cost of one more forward pass of one layer on a CPU
TOKENS = 4096  # of one forward pass: its activations stay in the caches of a CPU
MIN_ROWS = 2  # a prefix of one sequence saves nothing


@dataclass(frozen=True)
class TokenSequence:
    """A token sequence, and the samples that are it or that it begins with."""

    ids: tuple[int, ...]
    samples: list[Sample]

    def counts(self, start: int, end: int) -> np.ndarray:
        """Return how many samples have a position of each kind there, int64 [end - start, KINDS]."""
        counts = np.zeros((end - start, KINDS), np.int64)
        for sample in self.samples:
            kinds = np.asarray(sample.kinds[start:end], np.int64)
            np.add.at(counts, (np.arange(len(kinds)), kinds), 1)
        return counts


@dataclass
class SharedText:
    """batches: a batch comes after the one that it continues.  codes: counts of the kinds → code, which `kinds` of a batch hold."""

    batches: list[Batch] = field(default_factory=list)
    codes: dict[tuple[int, ...], int] = field(default_factory=dict)

    def weight_table(self, token_weights: TokenWeights, device: str | torch.device) -> torch.Tensor:
        """Return the weight of every code, float32 [codes]."""
        counts = torch.tensor(list(self.codes), dtype=torch.float32, device=device)
        return counts @ input_stats.weight_table(token_weights, device)

    def encode(self, counts: np.ndarray) -> np.ndarray:
        """Return the codes [T] of counts [T, KINDS]."""
        return np.array([self.codes.setdefault(tuple(map(int, row)), len(self.codes)) for row in counts], np.int64)


def can_share(folder: ModelFolder) -> bool:
    """Return whether DecoderLayers can continue a batch: on a CPU, in layers of full attention and DeltaNet.

    On a GPU, whose DeltaNet layers start from a state of zeros here, the forward passes are a small part of the time.
    """
    config = folder.text_config
    types = set(config.get("layer_types") or ["full_attention"])
    return layerwise.device_and_dtype(folder)[0] == "cpu" and types <= {"full_attention", "linear_attention"}


def arrange(samples: Sequence[Sample], tokens: int = TOKENS, share: bool = True) -> SharedText:
    """Return the samples as batches of at most `tokens` positions, or of one row.

    share: False gives batches of whole samples.
    """
    text = SharedText()
    text.encode(np.eye(KINDS, dtype=np.int64))  # a code below KINDS is a kind
    if not share:
        text.batches += calibration_samples.make_batches(samples)
        return text
    add(text, sequences_of(samples), 0, None, tokens)
    return text


def sequences_of(samples: Sequence[Sample]) -> list[TokenSequence]:
    """Return the sequences that no other one begins with, in lexicographic order."""
    sequences: list[TokenSequence] = []
    waiting: list[Sample] = []
    ordered = sorted(samples, key=lambda s: s.ids)
    for sample, following in zip(ordered, [*(s.ids for s in ordered[1:]), ()], strict=True):
        waiting.append(sample)
        # Samples between a prefix and the sequence that it begins begin with that prefix, too.
        if following[: len(sample.ids)] != sample.ids:
            sequences.append(TokenSequence(sample.ids, waiting))
            waiting = []
    return sequences


def add(text: SharedText, sequences: Sequence[TokenSequence], offset: int, start: int | None, tokens: int) -> None:
    """Add the tokens of sequences from `offset` on, which continue batch `start`."""
    tails: list[TokenSequence] = []
    rest = [s.ids[offset:] for s in sequences]
    for group in group_by_prefix(rest, [len(r) - 1 for r in rest], GROUP_COST):
        members = [sequences[i] for i in group.rows]
        if not group.shared or len(members) < MIN_ROWS:
            tails += members
            continue
        end = offset + group.shared
        counts = sum(s.counts(offset, end) for s in members)
        ids = np.asarray(members[0].ids[offset:end], np.int64)[None]
        text.batches.append(Batch(ids, text.encode(np.asarray(counts))[None], start, offset))
        add(text, members, end, len(text.batches) - 1, tokens)
    tails.sort(key=lambda s: len(s.ids))
    for part in divide([len(s.ids) - offset for s in tails], tokens):
        text.batches.append(batch_of(text, tails[part], offset, start))


def divide(lengths: Sequence[int], tokens: int) -> list[slice]:
    """Return parts of rows of these lengths, which rise, that take the fewest positions when each is padded to its longest row.

    A part costs GROUP_COST positions more, and has at most `tokens` or one row.
    """
    costs, begins = [0], [0]
    for end in range(1, len(lengths) + 1):
        width = lengths[end - 1]
        most = max(1, tokens // width)
        cost, begin = min(
            (costs[begin] + (end - begin) * width + GROUP_COST, begin) for begin in range(max(0, end - most), end)
        )
        costs.append(cost)
        begins.append(begin)
    parts: list[slice] = []
    end = len(lengths)
    while end:
        parts.append(slice(begins[end], end))
        end = begins[end]
    return parts[::-1]


def batch_of(text: SharedText, sequences: Sequence[TokenSequence], offset: int, start: int | None) -> Batch:
    """Return the tokens of sequences from `offset` on as one batch, padded on the right to the longest."""
    width = max(len(s.ids) for s in sequences) - offset
    ids, kinds = np.zeros((len(sequences), width), np.int64), np.full((len(sequences), width), PADDING, np.int64)
    for i, sequence in enumerate(sequences):
        ids[i] = np.resize(sequence.ids[offset:], width)
        kinds[i, : len(sequence.ids) - offset] = text.encode(sequence.counts(offset, len(sequence.ids)))
    return Batch(ids, kinds, start, offset)
