"""Greedy decoding of many prompts in one batch that rows leave when they end and others join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import DynamicCache

from annie_quant.evaluate import caches
from annie_quant.evaluate.engine import Engine

IDLE = -1  # in Running.rows: a row that has ended and still takes part
REFILL = 0.5  # share of idle places at which waiting prompts join
SHRINK = 0.75  # share of going rows below which the others are dropped


@dataclass
class Decoded:
    """Greedy continuation: token ids without the end mark; finished is False when the limit cut it."""

    tokens: list[int]
    finished: bool


@dataclass
class Running:
    """Rows in the middle of decoding.

    rows: which prompt each is, or IDLE. lengths int64 [B]: tokens held. real bool [B, columns]: columns that are a
    token of the row. tokens int64 [B]: chosen last, not yet run.
    """

    rows: list[int]
    cache: DynamicCache
    lengths: torch.Tensor
    real: torch.Tensor
    tokens: torch.Tensor

    @property
    def going(self) -> list[int]:
        return [j for j, row in enumerate(self.rows) if row != IDLE]

    def compact(self) -> None:
        """Drop idle rows, and gaps between the columns of the others."""
        stay = torch.tensor(self.going, device=self.real.device)
        self.real, self.lengths, self.tokens = self.real[stay], self.lengths[stay], self.tokens[stay]
        self.rows = [self.rows[j] for j in stay.tolist()]
        width = int(self.lengths.max())
        columns = None
        if width < self.real.shape[1]:
            columns = (~self.real).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
            self.real = torch.arange(width, device=self.real.device) < self.lengths.unsqueeze(1)
        caches.select(self.cache, stay, columns)


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    ends: Sequence[int],
    tick: Callable[[int], None] = lambda n: None,
) -> list[Decoded]:
    """Greedy continuations of at most limits[i] tokens, each up to and without an end token of `ends`.

    Long prompts go first, so that rows of like length run together. tick(n) is told that n more rows have ended.
    """
    done = [Decoded([], False) for _ in prompts]
    waiting = sorted((i for i in range(len(prompts)) if limits[i] > 0), key=lambda i: -len(prompts[i]))
    running: Running | None = None
    while True:
        going = len(running.going) if running else 0
        if waiting and going <= engine.rows * (1 - REFILL):
            room = engine.rows - going
            joining = start(engine, prompts, waiting[:room])
            waiting = waiting[room:]
            running = join(engine, [running, *joining] if running and going else joining)
        elif not going:
            return done
        assert running is not None
        ended = 0
        for j, token in enumerate(running.tokens.tolist()):
            if running.rows[j] == IDLE:
                continue
            answer, limit = done[running.rows[j]], limits[running.rows[j]]
            answer.finished = token in ends
            if not answer.finished:
                answer.tokens.append(token)
            if answer.finished or len(answer.tokens) == limit:
                running.rows[j] = IDLE
                ended += 1
        tick(ended)
        if running.going:
            advance(engine, running)


def generate_together(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    ends: Sequence[int],
    tick: Callable[[int], None] = lambda n: None,
) -> list[Decoded]:
    """generate by all processes of the engine's team: prompts in parts of engine.rows, each part by one of them.

    Prompts of like limit and length come into one part. The parts are the same however many processes there are.
    """
    order = sorted(range(len(prompts)), key=lambda i: (-limits[i], -len(prompts[i])))
    parts = [order[at : at + engine.rows] for at in range(0, len(order), engine.rows)]
    found: dict[int, Decoded] = {}
    for number, part in enumerate(parts):
        if engine.team.mine(number):
            made = generate(engine, [prompts[i] for i in part], [limits[i] for i in part], ends, tick)
            found.update(zip(part, made, strict=True))
    found = engine.team.gather(found)
    return [found[i] for i in range(len(prompts))]


def start(engine: Engine, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> list[Running]:
    """Run the prompts of these rows; the tokens are each row's first."""
    parts = []
    for run in engine.forwards([prompts[i] for i in rows], [len(prompts[i]) - 1 for i in rows]):
        lengths = torch.tensor([len(prompts[rows[j]]) for j in run.rows], device=engine.device)
        at = torch.arange(len(lengths), device=engine.device)
        tokens = engine.logits(run.hidden[at, lengths - 1 - run.shared]).argmax(-1)
        real = torch.arange(run.shared + run.hidden.shape[1], device=engine.device) < lengths.unsqueeze(1)
        parts.append(Running([rows[j] for j in run.rows], run.cache, lengths, real, tokens))
    return parts


def advance(engine: Engine, running: Running) -> None:
    """One decode step."""
    if len(running.going) < SHRINK * len(running.rows):
        running.compact()
    running.real = torch.nn.functional.pad(running.real, (0, 1), value=True)
    hidden = engine.step(
        running.tokens[:, None],
        running.cache,
        running.real.shape[1],
        attention_mask=running.real,
        position_ids=running.lengths[:, None],
    )
    running.lengths = running.lengths + 1
    running.tokens = engine.logits(hidden[:, -1]).argmax(-1)


def join(engine: Engine, parts: Sequence[Running]) -> Running:
    """One batch out of several."""
    for part in parts:
        part.compact()
    columns = max(p.real.shape[1] for p in parts)
    cache = caches.join([p.cache for p in parts], caches.empty(engine.model.config, engine.kinds), columns)
    real = torch.cat([torch.nn.functional.pad(p.real, (0, columns - p.real.shape[1])) for p in parts])
    rows = [row for p in parts for row in p.rows]
    return Running(rows, cache, torch.cat([p.lengths for p in parts]), real, torch.cat([p.tokens for p in parts]))
