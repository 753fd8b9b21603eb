"""Caches of many rows at once: repeated from one row, joined, cut down to some rows, columns without gaps.

A cache layer is either transformers' LinearAttentionLayer (a state a row) or RoomyKeys (keys and values, a column a
token).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

STATES = (("conv_states", "is_conv_states_initialized"), ("recurrent_states", "is_recurrent_states_initialized"))


class RoomyKeys(DynamicLayer):
    """Keys and values [B, Hkv, columns, D] of one attention layer in buffers with room ahead: a decode step copies one
    column instead of all."""

    ROOM = 64
    buffers: list[torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        n = self.get_seq_length()
        end = n + key_states.shape[-2]
        if self.buffers is None or self.buffers[0].shape[-2] < end:
            room = self.ROOM if key_states.shape[-2] == 1 else 0
            shape = (*key_states.shape[:2], end + room, key_states.shape[-1])
            grown = [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2)]
            if n and self.keys is not None and self.values is not None:
                grown[0][:, :, :n], grown[1][:, :, :n] = self.keys, self.values
            self.buffers = grown
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, n:end] = states
        self.keys, self.values = (b[:, :, :end] for b in self.buffers)
        return self.keys, self.values

    def put(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.keys, self.values, self.buffers = keys, values, None


def empty(config: Any, kinds: Sequence[str]) -> DynamicCache:
    """A fresh cache for a model with these layer types."""
    cache = DynamicCache(config=config)
    cache.layers = [LinearAttentionLayer() if k == "linear_attention" else RoomyKeys() for k in kinds]
    return cache


def repeat(source: Any, into: Any, rows: int) -> Any:
    """`into`, filled with `rows` copies of the one row of `source`; keys and values are views until they grow."""
    for new, old in zip(into.layers, source.layers, strict=True):
        if isinstance(old, LinearAttentionLayer):
            put_states(new, [old], [getattr(old, name)[0].repeat_interleave(rows, 0) for name, _ in STATES])
        else:
            new.put(old.keys.expand(rows, -1, -1, -1), old.values.expand(rows, -1, -1, -1))
    return into


def join(sources: Sequence[Any], into: Any, columns: int) -> Any:
    """`into`, filled with the rows of all sources; keys and values are padded on the right to `columns`."""
    for n, new in enumerate(into.layers):
        old = [s.layers[n] for s in sources]
        if isinstance(new, LinearAttentionLayer):
            put_states(new, old, [torch.cat([getattr(o, name)[0] for o in old]) for name, _ in STATES])
        else:
            new.put(*(torch.cat([widen(getattr(o, x), columns) for o in old]) for x in ("keys", "values")))
    return into


def select(cache: Any, rows: torch.Tensor, columns: torch.Tensor | None = None) -> None:
    """Keep these rows, and of each (where columns int64 [rows, width] is given) these columns."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            for name, _ in STATES:
                getattr(layer, name)[0] = getattr(layer, name)[0][rows]
            continue
        keys, values = layer.keys[rows], layer.values[rows]
        if columns is not None:
            at = columns[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
            keys, values = keys.gather(2, at), values.gather(2, at)
        layer.put(keys, values)


def put_states(new: LinearAttentionLayer, old: Sequence[LinearAttentionLayer], states: Sequence[torch.Tensor]) -> None:
    for (name, flag), state in zip(STATES, states, strict=True):
        getattr(new, name)[0] = state
        getattr(new, flag)[0] = True
    new.conv_kernel_size[0], new.has_previous_state[0] = old[0].conv_kernel_size[0], True
    new.dtype, new.device = old[0].dtype, old[0].device


def widen(states: torch.Tensor, columns: int) -> torch.Tensor:
    return functional.pad(states, (0, 0, 0, columns - states.shape[-2]))
