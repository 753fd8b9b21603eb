"""Greedy decoding of many prompts in batches, which finished rows leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from annie_quant.offline import caches
from annie_quant.offline.caches import KeyValueBuffer
from annie_quant.offline.engine import Engine

SPARE_COLUMNS = 128  # steps after which a batch is cut, and its step captured, again
# Finished rows times steps. A captured step of few rows takes nearly as long as one of many: cutting them out pays for another
# capture only above this.
RECUT_ROW_STEPS = 4096


@torch.inference_mode()
def advance_fixed(engine: Engine, running: RunningBatch) -> None:
    """Compute one decode step in place: the first one of a batch directly, the following ones by its graph.

    A step of a small model launches more than a thousand kernels of a few microseconds each. Launching them one by one takes longer
    than they run; a graph launches them together. It has fixed shapes, so the batch gets spare columns of keys and values, the mask
    hides those that are not written, and rows that have ended are computed until the batch is cut again.
    """
    work = partial(compute_step, engine, running)
    if not running.left:
        running.compact()
        running.add_columns()
        run_aside(engine, work)  # also prepares the libraries for the capture
    else:
        if running.graph is None and engine.captures:
            running.graph = capture(engine, work)
        if running.graph is None:
            work()
        else:
            running.graph.replay()
    running.left -= 1


def compute_step(engine: Engine, running: RunningBatch) -> None:
    """Compute one step, and write its results into the batch's own tensors."""
    assert running.column is not None
    running.real.index_fill_(1, running.column, True)
    visible: Any = running.real[:, None, None, :]
    if set(engine.layer_types) != {"full_attention"}:
        # as transformers' masks by layer type, which it does not check again
        visible = engine.decode_masks(running.real, running.lengths)
    hidden = engine.step(
        running.tokens[:, None],
        running.cache,
        0,
        attention_mask=visible,
        position_ids=running.lengths[:, None],
    )
    running.lengths.add_(1)
    running.column.add_(1)
    running.tokens.copy_(engine.logits(hidden[:, -1]).argmax(-1))


def run_aside(engine: Engine, work: Callable[[], None]) -> None:
    """Run `work` on the stream of captures, after all work before it and before all work after it."""
    if engine.capture_stream is None:
        work()
        return
    current = torch.cuda.current_stream(engine.device)
    engine.capture_stream.wait_stream(current)
    with torch.cuda.stream(engine.capture_stream):
        work()
    current.wait_stream(engine.capture_stream)


def capture(engine: Engine, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """Return the graph of `work`; None, and no further attempts, where something in it cannot be captured.

    torch.cuda.graph would also collect garbage before each capture, which takes longer than the capture.
    """
    graph = torch.cuda.CUDAGraph()

    def record() -> None:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()

    try:
        run_aside(engine, record)
    except RuntimeError:  # such as experts that copy the tokens' counts to the host
        engine.captures = False
        return None
    return graph


FINISHED_ROW = -1  # in RunningBatch.rows: a finished row that is still computed
SHRINK = 0.75  # share of active rows below which finished rows are dropped


@dataclass
class Completion:
    """A greedy continuation: token ids without the end token. finished: False where the token limit ended it."""

    tokens: list[int]
    finished: bool


@dataclass
class RunningBatch:
    """Rows that are being decoded.

    rows: the prompt's index per row, or FINISHED_ROW. lengths: int64 [B], tokens per row. real: bool [B, columns], columns that
    hold a token of the row. tokens: int64 [B], chosen last and not computed yet.

    Where steps are computed in buffers of fixed size, column: int64 [1], the column that the next step writes; left: steps until
    all columns are written; graph: the captured step.
    """

    rows: list[int]
    cache: DynamicCache
    lengths: torch.Tensor
    real: torch.Tensor
    tokens: torch.Tensor
    column: torch.Tensor | None = None
    left: int = 0
    graph: torch.cuda.CUDAGraph | None = None

    @property
    def active(self) -> list[int]:
        """Positions of the rows that are not finished."""
        return [j for j, row in enumerate(self.rows) if row != FINISHED_ROW]

    def compact(self) -> None:
        """Drop finished rows, and the unused columns of the others."""
        self.left = 0
        self.graph = None
        rows = torch.tensor(self.active, device=self.real.device)
        self.real, self.lengths, self.tokens = (
            self.real[rows],
            self.lengths[rows],
            self.tokens[rows],
        )
        self.rows = [self.rows[j] for j in rows.tolist()]
        width = int(self.lengths.max())
        columns = None
        if width < self.real.shape[1]:
            columns = (~self.real).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
            self.real = torch.arange(width, device=self.real.device) < self.lengths.unsqueeze(1)
        caches.take_rows(self.cache, self.cache, rows, columns)

    def add_columns(self) -> None:
        """Add SPARE_COLUMNS columns, and let all tensors stay where they are until these are written."""
        columns = self.real.shape[1]
        self.column = torch.tensor([columns], device=self.real.device)
        self.left = SPARE_COLUMNS
        self.real = functional.pad(self.real, (0, SPARE_COLUMNS))
        self.lengths, self.tokens = self.lengths.clone(), self.tokens.clone()
        for layer in self.cache.layers:
            if isinstance(layer, KeyValueBuffer):
                layer.fix(columns + SPARE_COLUMNS, self.column)


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    end_tokens: Sequence[int],
    on_finished: Callable[[int], None] = lambda n: None,
    n_decoded: Sequence[int] | None = None,
) -> list[Completion]:
    """Return greedy continuations of at most limits[i] tokens, each up to and without an end token.

    A batch has prompts of similar limit and length. on_finished(n): called when n more rows have ended. n_decoded[i]: last tokens
    of prompts[i] that a server has decoded, not read; None: no tokens.
    """
    read = [len(p) - n for p, n in zip(prompts, n_decoded or [0] * len(prompts), strict=True)]
    completions = [Completion([], False) for _ in prompts]
    for part in decoded_together(engine, prompts, limits):
        running = join(
            engine,
            compute_prompts(engine, prompts, sorted(part, key=lambda i: -len(prompts[i])), read),
        )
        while running.active:
            n_finished = 0
            for j, token in enumerate(running.tokens.tolist()):
                if running.rows[j] == FINISHED_ROW:
                    continue
                completion = completions[running.rows[j]]
                limit = limits[running.rows[j]]
                completion.finished = token in end_tokens
                if not completion.finished:
                    completion.tokens.append(token)
                if completion.finished or len(completion.tokens) == limit:
                    running.rows[j] = FINISHED_ROW
                    n_finished += 1
            on_finished(n_finished)
            active = running.active
            if active:
                rows = [running.rows[j] for j in active]
                left = max(limits[i] - len(completions[i].tokens) for i in rows)
                advance(engine, running, left)
    return completions


def decoded_together(
    engine: Engine, prompts: Sequence[Sequence[int]], limits: Sequence[int]
) -> Iterator[list[int]]:
    """Yield the rows of each batch: similar limits and lengths, with room for the keys and values of all their tokens."""
    order = sorted(range(len(prompts)), key=lambda i: (-limits[i], -len(prompts[i])))
    batch: list[int] = []
    columns = 0
    for i in order:
        if limits[i] <= 0:
            continue
        columns_with_row = max(columns, len(prompts[i]) + limits[i])
        n_columns = (len(batch) + 1) * columns_with_row
        is_full = engine.device.type == "cpu" and n_columns > engine.cache_columns
        if batch and (is_full or len(batch) == engine.rows):
            yield batch
            batch = []
            columns_with_row = len(prompts[i]) + limits[i]
        batch.append(i)
        columns = columns_with_row
    if batch:
        yield batch


def _decoded_batches(
    engine: Engine, prompts: Sequence[Sequence[int]], limits: Sequence[int]
) -> Iterator[list[int]]:
    """Yield the indices of the prompts that are decoded together. Those with a limit of 0 are left out."""
    asked = (i for i in range(len(prompts)) if limits[i] > 0)
    order = sorted(asked, key=lambda i: (-limits[i], -len(prompts[i])))
    at = 0
    while at < len(order):
        count = engine.decoded_rows(len(prompts[order[at]]) + limits[order[at]])
        yield order[at : at + count]
        at += count


def compute_prompts(
    engine: Engine, prompts: Sequence[Sequence[int]], rows: Sequence[int], read: Sequence[int]
) -> list[RunningBatch]:
    """Compute the prompts of these rows. The batches' tokens are the first of each row. read[i]: tokens that are not decoded."""
    batches = []
    inputs = [prompts[i] for i in rows]
    last = [len(prompts[i]) - 1 for i in rows]
    for forward in engine.forwards(inputs, [read[i] - 1 for i in rows], read=last):
        lengths = torch.tensor([len(prompts[rows[j]]) for j in forward.rows], device=engine.device)
        index = torch.arange(len(lengths), device=engine.device)
        tokens = engine.logits(forward.hidden[index, lengths - 1 - forward.shared]).argmax(-1)
        real = torch.arange(
            forward.shared + forward.hidden.shape[1], device=engine.device
        ) < lengths.unsqueeze(1)
        batches.append(
            RunningBatch([rows[j] for j in forward.rows], forward.cache, lengths, real, tokens)
        )
    return batches


def advance(engine: Engine, running: RunningBatch, steps: int) -> None:
    """Compute one decode step. steps: most that follow, this one included."""
    if engine.fixed_buffers:
        n_finished = len(running.rows) - len(running.active)
        if n_finished * steps > RECUT_ROW_STEPS:
            running.left = 0
        advance_fixed(engine, running)
        return
    if len(running.active) < SHRINK * len(running.rows):
        running.compact()
    running.real = functional.pad(running.real, (0, 1), value=True)
    windows = "sliding_attention" in engine.layer_types
    hidden = engine.step(
        running.tokens[:, None],
        running.cache,
        running.real.shape[1],
        attention_mask=engine.decode_masks(running.real, running.lengths)
        if windows
        else running.real,
        position_ids=running.lengths[:, None],
    )
    running.lengths = running.lengths + 1
    running.tokens = engine.logits(hidden[:, -1]).argmax(-1)


def join(engine: Engine, parts: Sequence[RunningBatch]) -> RunningBatch:
    """Return one batch with the active rows of several, whose caches are emptied."""
    for part in parts:
        part.compact()
    if len(parts) == 1:
        return parts[0]
    columns = max(p.real.shape[1] for p in parts)
    cache = engine.new_cache()
    caches.concatenate([p.cache for p in parts], cache, columns)
    real = torch.cat([functional.pad(p.real, (0, columns - p.real.shape[1])) for p in parts])
    rows = [row for p in parts for row in p.rows]
    return RunningBatch(
        rows,
        cache,
        torch.cat([p.lengths for p in parts]),
        real,
        torch.cat([p.tokens for p in parts]),
    )
