"""Decode steps on buffers of fixed size, which a GPU replays as one CUDA graph.

A step of a small model launches more than a thousand kernels of a few microseconds each. Launching them one by one takes longer
than they run; a graph launches them together. It has fixed addresses and shapes, so a batch gets spare columns of keys and values,
the mask hides those that are not written, and rows that have ended are computed until the batch is cut again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from annie_quant.evaluate.caches import KeyValueBuffer

if TYPE_CHECKING:
    from annie_quant.evaluate.decoding import RunningBatch
    from annie_quant.evaluate.engine import Engine

SPARE_COLUMNS = 128  # steps after which a batch is cut, and its step captured, again


@dataclass
class FixedBuffers:
    """What a batch with fixed addresses needs besides its own tensors.

    column: int64 [1], the column that the next step writes. left: steps until all columns are written. graph: the captured step.
    """

    column: torch.Tensor
    left: int
    graph: Any = None


def fix_buffers(running: RunningBatch) -> FixedBuffers:
    """Add SPARE_COLUMNS columns to a batch."""
    columns = running.real.shape[1]
    column = torch.tensor([columns], device=running.real.device)
    running.real = functional.pad(running.real, (0, SPARE_COLUMNS))
    running.lengths, running.tokens = running.lengths.clone(), running.tokens.clone()
    for layer in running.cache.layers:
        if isinstance(layer, KeyValueBuffer):
            layer.fix(columns + SPARE_COLUMNS, column)
    return FixedBuffers(column, SPARE_COLUMNS)


@torch.inference_mode()
def advance(engine: Engine, running: RunningBatch) -> None:
    """Compute one decode step in place: the first one of a batch directly, the following ones by its graph."""
    fixed = running.fixed
    if fixed is None or not fixed.left:
        running.compact()
        fixed = running.fixed = fix_buffers(running)
        run_aside(engine, lambda: compute(engine, running, fixed.column))  # also prepares the libraries for the capture
    else:
        if fixed.graph is None and engine.captures:
            fixed.graph = capture(engine, lambda: compute(engine, running, fixed.column))
        if fixed.graph is None:
            compute(engine, running, fixed.column)
        else:
            fixed.graph.replay()
    fixed.left -= 1


def compute(engine: Engine, running: RunningBatch, column: torch.Tensor) -> None:
    """Compute one step, and write its results into the batch's own tensors."""
    running.real.index_fill_(1, column, True)
    visible: Any = running.real[:, None, None, :]
    if set(engine.layer_types) != {
        "full_attention"
    }:  # as transformers' masks by layer type, which it does not check again
        visible = engine.decode_masks(running.real, running.lengths)
    hidden = engine.step(
        running.tokens[:, None], running.cache, 0, attention_mask=visible, position_ids=running.lengths[:, None]
    )
    running.lengths.add_(1)
    column.add_(1)
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


def capture(engine: Engine, work: Callable[[], None]) -> Any:
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
