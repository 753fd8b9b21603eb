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
        return np.array(
            [self.codes.setdefault(tuple(map(int, row)), len(self.codes)) for row in counts],
            np.int64,
        )


def can_share(folder: ModelFolder) -> bool:
    """Return whether DecoderLayers can continue a batch: on a CPU, in layers of full attention and DeltaNet.

    On a GPU, whose DeltaNet layers start from a state of zeros here, the forward passes are a small part of the time.
    """
    config = folder.text_config
    types = set(config.get("layer_types") or ["full_attention"])
    return device_kind() == "cpu" and types <= {"full_attention", "linear_attention"}


def arrange(
    samples: Sequence[CalibrationSample], tokens: int = SHARED_TOKENS, share: bool = True
) -> SharedText:
    """Return the samples as batches of at most `tokens` positions, or of one row.

    share: False gives batches of whole samples.
    """
    text = SharedText()
    text.encode(np.eye(KINDS, dtype=np.int64))  # a code below KINDS is a kind
    if not share:
        text.batches += make_batches(samples)
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
    whole, shared = (
        [(r, b) for r, b in continued if not b.children],
        [(r, b) for r, b in continued if b.children],
    )
    least = MIN_SAVED
    while shared and (
        any(b.saved < least for _, b in shared) or sum(b.saved for _, b in shared) < GROUP_COST
    ):
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
    return TokenBatch(
        ids, kinds, start, np.array([row for row, _ in rows]), np.array([b.begin for _, b in rows])
    )
