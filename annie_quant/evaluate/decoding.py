"""Greedy decoding of many prompts in one batch; finished rows leave it and waiting prompts join."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import DynamicCache

from annie_quant.evaluate import caches, decode_graph
from annie_quant.evaluate.decode_graph import FixedBuffers
from annie_quant.evaluate.engine import Engine

FINISHED = -1  # in RunningBatch.rows: a finished row that is still computed
REFILL = 0.5  # share of free rows at which waiting prompts join
LEAST_ROWS = 16  # of a process's share on a GPU, where a step of few rows takes as long as one of many
SHRINK = 0.75  # share of active rows below which finished rows are dropped


@dataclass
class Completion:
    """A greedy continuation: token ids without the end token. finished: False where the token limit ended it."""

    tokens: list[int]
    finished: bool


@dataclass
class RunningBatch:
    """Rows that are being decoded.

    rows: the prompt's index per row, or FINISHED. lengths: int64 [B], tokens per row. real: bool [B, columns], columns that
    hold a token of the row. tokens: int64 [B], chosen last and not computed yet. fixed: where steps are computed in buffers of
    fixed size.
    """

    rows: list[int]
    cache: DynamicCache
    lengths: torch.Tensor
    real: torch.Tensor
    tokens: torch.Tensor
    fixed: FixedBuffers | None = None

    @property
    def active(self) -> list[int]:
        """Positions of the rows that are not finished."""
        return [j for j, row in enumerate(self.rows) if row != FINISHED]

    def compact(self) -> None:
        """Drop finished rows, and the unused columns of the others."""
        self.fixed = None
        rows = torch.tensor(self.active, device=self.real.device)
        self.real, self.lengths, self.tokens = self.real[rows], self.lengths[rows], self.tokens[rows]
        self.rows = [self.rows[j] for j in rows.tolist()]
        width = int(self.lengths.max())
        columns = None
        if width < self.real.shape[1]:
            columns = (~self.real).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
            self.real = torch.arange(width, device=self.real.device) < self.lengths.unsqueeze(1)
        caches.select(self.cache, rows, columns)


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    end_tokens: Sequence[int],
    on_finished: Callable[[int], None] = lambda n: None,
    n_decoded: Sequence[int] | None = None,
) -> list[Completion]:
    """Return greedy continuations of at most limits[i] tokens, each up to and without an end token.

    Long prompts are started first, so that rows of similar length are computed together. on_finished(n): called when n more
    rows have ended. n_decoded[i]: last tokens of prompts[i] that a server has decoded, not read; None: no tokens.
    """
    read = [len(p) - n for p, n in zip(prompts, n_decoded or [0] * len(prompts), strict=True)]
    completions = [Completion([], False) for _ in prompts]
    waiting = sorted((i for i in range(len(prompts)) if limits[i] > 0), key=lambda i: -len(prompts[i]))
    running: RunningBatch | None = None
    while True:
        active = len(running.active) if running else 0
        if waiting and active <= engine.rows * (1 - REFILL):
            free = engine.rows - active
            joining = start(engine, prompts, waiting[:free], read)
            waiting = waiting[free:]
            running = join(engine, [running, *joining] if running and active else joining)
        elif not active:
            return completions
        assert running is not None
        n_finished = 0
        for j, token in enumerate(running.tokens.tolist()):
            if running.rows[j] == FINISHED:
                continue
            completion, limit = completions[running.rows[j]], limits[running.rows[j]]
            completion.finished = token in end_tokens
            if not completion.finished:
                completion.tokens.append(token)
            if completion.finished or len(completion.tokens) == limit:
                running.rows[j] = FINISHED
                n_finished += 1
        on_finished(n_finished)
        if running.active:
            advance(engine, running)


def generate_distributed(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    end_tokens: Sequence[int],
    on_finished: Callable[[int], None] = lambda n: None,
    n_decoded: Sequence[int] | None = None,
) -> list[Completion]:
    """generate by all processes of the engine's group: prompts are split into parts, one process per part.

    A part has prompts of similar limit and length.
    """
    order = sorted(range(len(prompts)), key=lambda i: (-limits[i], -len(prompts[i])))
    rows = rows_per_part(engine, len(prompts))
    parts = [order[at : at + rows] for at in range(0, len(order), rows)]
    completions: dict[int, Completion] = {}
    decoded = n_decoded or [0] * len(prompts)
    for number, part in enumerate(parts):
        if engine.group.owns(number):
            new = generate(
                engine,
                [prompts[i] for i in part],
                [limits[i] for i in part],
                end_tokens,
                on_finished,
                [decoded[i] for i in part],
            )
            completions.update(zip(part, new, strict=True))
    completions = engine.group.gather(completions)
    return [completions[i] for i in range(len(prompts))]


def rows_per_part(engine: Engine, n: int) -> int:
    """Return how many of n prompts a process decodes together.

    On a CPU it does not depend on the number of processes, so that every answer comes from the same tensors. A GPU's products
    depend on the rows next to each other anyway, so there each process gets its share.
    """
    if engine.device.type == "cpu":
        return engine.rows
    return min(engine.rows, max(LEAST_ROWS, math.ceil(n / engine.group.size)))


def start(
    engine: Engine, prompts: Sequence[Sequence[int]], rows: Sequence[int], read: Sequence[int]
) -> list[RunningBatch]:
    """Compute the prompts of these rows. The batches' tokens are the first of each row. read[i]: tokens that are not decoded."""
    batches = []
    for forward in engine.forwards([prompts[i] for i in rows], [read[i] - 1 for i in rows]):
        lengths = torch.tensor([len(prompts[rows[j]]) for j in forward.rows], device=engine.device)
        index = torch.arange(len(lengths), device=engine.device)
        tokens = engine.logits(forward.hidden[index, lengths - 1 - forward.shared]).argmax(-1)
        real = torch.arange(forward.shared + forward.hidden.shape[1], device=engine.device) < lengths.unsqueeze(1)
        batches.append(RunningBatch([rows[j] for j in forward.rows], forward.cache, lengths, real, tokens))
    return batches


def advance(engine: Engine, running: RunningBatch) -> None:
    """Compute one decode step."""
    if engine.fixed_buffers:
        decode_graph.advance(engine, running)
        return
    if len(running.active) < SHRINK * len(running.rows):
        running.compact()
    running.real = torch.nn.functional.pad(running.real, (0, 1), value=True)
    windows = "sliding_attention" in engine.layer_types
    hidden = engine.step(
        running.tokens[:, None],
        running.cache,
        running.real.shape[1],
        attention_mask=engine.decode_masks(running.real, running.lengths) if windows else running.real,
        position_ids=running.lengths[:, None],
    )
    running.lengths = running.lengths + 1
    running.tokens = engine.logits(hidden[:, -1]).argmax(-1)


def join(engine: Engine, parts: Sequence[RunningBatch]) -> RunningBatch:
    """Return one batch with the active rows of several."""
    for part in parts:
        part.compact()
    columns = max(p.real.shape[1] for p in parts)
    target = caches.new_cache(engine.model.config, engine.layer_types)
    cache = caches.concatenate([p.cache for p in parts], target, columns)
    real = torch.cat([torch.nn.functional.pad(p.real, (0, columns - p.real.shape[1])) for p in parts])
    rows = [row for p in parts for row in p.rows]
    return RunningBatch(rows, cache, torch.cat([p.lengths for p in parts]), real, torch.cat([p.tokens for p in parts]))
