"""Attention for evaluation: grouped-query decode steps without copying keys and values for each query head.

transformers' sdpa repeats the keys and values of every key head before each masked call. In a decode step over many
rows that copy is most of the time. Here the query heads of one key head are the rows of one product instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "annie_quant_grouped"


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, T, D], key and value [B, Hkv, L, D], mask bool [B, 1, T, L], true where seen → ([B, T, H, D],
    None)."""
    batch, heads, steps, size = query.shape
    if steps > 1 or (attention_mask is not None and attention_mask.dtype != torch.bool):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
    of_key = (batch * key.shape[1], heads // key.shape[1], size)
    scores = torch.bmm((query * (scaling or size**-0.5)).reshape(of_key), key.flatten(0, 1).transpose(1, 2))
    scores = scores.view(batch, heads, -1).float()
    if attention_mask is not None:
        scores = scores.masked_fill_(~attention_mask[:, 0], -torch.inf)
    weights = scores.softmax(-1).to(value.dtype).view(of_key[0], of_key[1], -1)
    return torch.bmm(weights, value.flatten(0, 1)).view(batch, 1, heads, size), None


@contextlib.contextmanager
def grouped(config: Any) -> Iterator[None]:
    """While open, a model with this (text) config that uses sdpa decodes with grouped_attention."""
    before = config._attn_implementation
    if before != "sdpa":
        yield
        return
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = before
