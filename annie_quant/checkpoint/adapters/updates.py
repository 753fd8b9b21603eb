"""The arithmetic of a merge: one tensor of the base, changed in float32 and rounded once.

A tensor is a matrix here: [experts, rows, columns] has the experts' rows one after the other, and a
vector has one column. Products, scale and sum are computed as peft's merge_and_unload computes them
on a float32 model, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from annie_quant.checkpoint import header
from annie_quant.checkpoint.shards import ROWS_ELEMENTS, ModelFolder
from annie_quant.core.errors import CheckpointError


@dataclass(frozen=True)
class LowRankUpdate:
    """A product that is added to some rows of a tensor: scale * left @ right.

    first_row: where it starts.
    left: [rows, rank].  right: [rank, columns]. Both are views of the adapter's file.
    scale: alpha over the rank, or over its root (rsLoRA).
    magnitude: DoRA's norm of each row after the update, or None.
    """

    first_row: int
    left: np.ndarray
    right: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None


@dataclass
class TensorUpdate:
    """What becomes of one tensor of the base.

    name: in the merged model.
    source: the tensor of the base that it starts from.
    dtype: safetensors' name of the type, of the base and of the result.
    shape: of the result.
    kind: kind of part, for the summary.
    replacement: the tensor of the adapter that it starts from instead, or None.
    low_rank: products that are added.
    rows: rows that are replaced, as (their numbers, their values).
    """

    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    replacement: np.ndarray | None = None
    low_rank: list[LowRankUpdate] = field(default_factory=list)
    rows: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def columns(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    def changes(self) -> bool:
        """Return whether anything of the adapter goes into it."""
        return self.replacement is not None or bool(self.low_rank) or bool(self.rows)


@dataclass
class ChangeSize:
    """Sums of squares over tensors: of the base's weights, and of what a merge adds to them."""

    base: float = 0.0
    change: float = 0.0

    def add(self, other: ChangeSize) -> None:
        self.base += other.base
        self.change += other.change

    @property
    def relative(self) -> float:
        """The norm of the change relative to that of the base."""
        return float(np.sqrt(self.change / self.base)) if self.base else 0.0


def merged_rows(update: TensorUpdate, base: ModelFolder, size: ChangeSize) -> Iterator[np.ndarray]:
    """Yield the merged tensor's rows in order, rounded once to its type, in pieces of some MB.

    size: takes the sums of squares.
    Raises CheckpointError where a value is not finite, or beyond the type.
    """
    columns = update.columns
    source = base.tensor(update.source).reshape(-1, columns)
    start_from = source
    if update.replacement is not None:
        start_from = update.replacement.reshape(-1, columns)
    has_same_rows = len(source) == len(start_from)
    step = max(1, ROWS_ELEMENTS // columns)
    for start in range(0, len(start_from), step):
        stop = min(start + step, len(start_from))
        block = start_from[start:stop].astype(np.float32)
        before = None
        if has_same_rows:
            is_base = start_from is source
            before = block.copy() if is_base else source[start:stop].astype(np.float32)
            size.base += _squares(before)
        with np.errstate(over="ignore", invalid="ignore"):  # _rounded refuses what overflows
            for product in update.low_rank:
                _add(product, block, start)
        for numbers, values in update.rows:
            inside = (numbers >= start) & (numbers < stop)
            block[numbers[inside] - start] = values[inside].astype(np.float32)
        rounded = _rounded(update, block)
        if before is not None:
            size.change += _squares(np.subtract(block, before, out=before))
        yield rounded
        row_bytes = columns * source.itemsize
        base.release(update.source, start * row_bytes, min(stop, len(source)) * row_bytes)


def _add(product: LowRankUpdate, block: np.ndarray, start: int) -> None:
    """Add a product to those of its rows that are in a block. start: the block's first row."""
    first = max(product.first_row, start)
    last = min(product.first_row + len(product.left), start + len(block))
    if first >= last:
        return
    own = slice(first - product.first_row, last - product.first_row)
    left = np.ascontiguousarray(product.left[own], np.float32)
    right = np.ascontiguousarray(product.right, np.float32)
    change = left @ right
    change *= np.float32(product.scale)
    rows = block[first - start : last - start]
    rows += change
    if product.magnitude is not None:
        norms = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1)).astype(np.float32)
        rows *= (product.magnitude[own].astype(np.float32) / norms)[:, None]


def _squares(block: np.ndarray) -> float:
    return float(np.vdot(block, block))


def _rounded(update: TensorUpdate, block: np.ndarray) -> np.ndarray:
    """Return the block in the tensor's type. Raises CheckpointError where that cannot hold it."""
    dtype = header.DTYPES[update.dtype]
    largest = max(block.max(initial=0), -block.min(initial=0))
    if not largest <= ml_dtypes.finfo(dtype).max:  # also where it is not a number
        raise CheckpointError(
            f"{update.name}: merged values are not finite, or too large for {update.dtype}",
            "check the adapter's alpha and rank, and that the base is the one it was trained on",
        )
    return block.astype(dtype)
