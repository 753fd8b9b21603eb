"""Operations on caches of many rows: repeat one row, take rows and columns, concatenate, and what rows of tokens share.

A cache layer is a LinearAttentionLayer of transformers (one state per row) or KeyValueBuffer (keys and values, one column per
token).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

# (keys, values) → both as a cache holds them, in their own dtype.
StoredForm = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Layered(Protocol):
    """A cache, or a view of some of its layers."""

    layers: list[Any]


class KeyValueBuffer(DynamicLayer):
    """Keys and values [B, Hkv, columns, D] of one attention layer in buffers with spare columns.

    A decode step writes one column in place; it does not copy the others.
    stored: rounds new keys and values to what the cache holds; None: not.
    column: int64 [1], after fix(): the column that is written, in buffers that are read whole.
    """

    SPARE_COLUMNS = 64
    stored: StoredForm | None = None
    buffers: list[torch.Tensor] | None = None
    column: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.stored is not None:
            key_states, value_states = self.stored(key_states, value_states)
        if self.column is not None and self.keys is not None and self.values is not None:
            self.keys.index_copy_(2, self.column, key_states)
            self.values.index_copy_(2, self.column, value_states)
            return self.keys, self.values
        n = self.get_seq_length()
        end = n + key_states.shape[-2]
        if self.buffers is None or self.buffers[0].shape[-2] < end:
            spare = self.SPARE_COLUMNS if key_states.shape[-2] == 1 else 0
            shape = (*key_states.shape[:2], end + spare, key_states.shape[-1])
            larger = [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2)]
            if n and self.keys is not None and self.values is not None:
                larger[0][:, :, :n] = self.keys
                larger[1][:, :, :n] = self.values
            self.buffers = larger
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, n:end] = states
        self.keys, self.values = (b[:, :, :end] for b in self.buffers)
        return self.keys, self.values

    def set(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.keys = keys
        self.values = values
        self.buffers = None
        self.column = None

    def fix(self, columns: int, column: torch.Tensor) -> None:
        """Pad to `columns` with zeros; each update then writes column `column` and returns all columns."""
        assert self.keys is not None and self.values is not None  # a prompt was computed
        self.set(pad_columns(self.keys, columns), pad_columns(self.values, columns))
        self.column = column


def new_cache(
    config: PretrainedConfig,
    layer_types: Sequence[str],
    stored: Mapping[int, StoredForm] | None = None,
) -> DynamicCache:
    """Return an empty cache for a model with these layer types. stored: KeyValueBuffer.stored by layer."""
    cache = DynamicCache(config=config)
    cache.layers = []
    for index, layer_type in enumerate(layer_types):
        if layer_type == "linear_attention":
            cache.layers.append(LinearAttentionLayer())
            continue
        layer = KeyValueBuffer()
        layer.stored = (stored or {}).get(index)
        cache.layers.append(layer)
    return cache


def repeat_row(source: Layered, target: Layered, rows: int) -> None:
    """Fill `target` with `rows` copies of the one row of `source`. Keys and values are views until they grow."""
    for new, old in zip(target.layers, source.layers, strict=True):
        if isinstance(old, LinearAttentionLayer):
            set_states(new, old, [s.repeat_interleave(rows, 0) for s in states_of(old)])
        else:
            new.set(old.keys.expand(rows, -1, -1, -1), old.values.expand(rows, -1, -1, -1))


def concatenate(sources: Sequence[Layered], target: Layered, columns: int) -> None:
    """Fill `target` with the rows of all sources. Keys and values are padded on the right to `columns`.

    Keys and values of the sources are released layer by layer: they are most of the memory of a batch.
    """
    for n, new in enumerate(target.layers):
        old = [s.layers[n] for s in sources]
        if isinstance(new, LinearAttentionLayer):
            by_source = zip(*(states_of(layer) for layer in old), strict=True)
            set_states(new, old[0], [torch.cat(states) for states in by_source])
        else:
            keys = [pad_columns(layer.keys, columns) for layer in old]
            values = [pad_columns(layer.values, columns) for layer in old]
            for layer in old:
                layer.keys = layer.values = layer.buffers = None
            new.set(torch.cat(keys), torch.cat(values))
            del keys, values


def take_rows(
    source: Layered, target: Layered, rows: torch.Tensor, columns: torch.Tensor | None = None
) -> None:
    """Fill `target`, which may be `source`, with some rows of `source`, int64 [n]. A row may be taken several times.

    columns: int64 [n, width]: the columns of each row that are taken; None: all.
    """
    for new, old in zip(target.layers, source.layers, strict=True):
        if isinstance(old, LinearAttentionLayer):
            set_states(new, old, [s[rows] for s in states_of(old)])
            continue
        keys = old.keys[rows]
        values = old.values[rows]
        if columns is not None:
            index = columns[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
            keys, values = keys.gather(2, index), values.gather(2, index)
        new.set(keys, values)


def states_of(layer: LinearAttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states of the convolution and of the recurrence, one row each per row of the batch."""
    convolution = layer.conv_states[0]
    recurrence = layer.recurrent_states[0]
    assert convolution is not None and recurrence is not None  # a step was computed
    return convolution, recurrence


def set_states(
    new: LinearAttentionLayer, old: LinearAttentionLayer, states: Sequence[torch.Tensor]
) -> None:
    """Give a layer these states, and the settings of `old`."""
    new.conv_states[0], new.recurrent_states[0] = states
    new.is_conv_states_initialized[0] = True
    new.is_recurrent_states_initialized[0] = True
    new.conv_kernel_size[0] = old.conv_kernel_size[0]
    new.has_previous_state[0] = True
    new.dtype = old.dtype
    new.device = old.device


def pad_columns(states: torch.Tensor, columns: int) -> torch.Tensor:
    return functional.pad(states, (0, 0, 0, columns - states.shape[-2]))


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the common prefix."""
    low = 0
    high = min(len(a), len(b))
    # Slices are compared by their own type, in far less time than one item after the other.
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
