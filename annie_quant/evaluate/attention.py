"""Grouped-query attention in decode steps without a copy of keys and values per query head.

transformers' sdpa repeats the keys and values of each key head before every masked call; in a decode step of many rows that
copy takes most of the time. Here the query heads of one key head are the rows of one matrix product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from annie_quant.hf import activations
from annie_quant.hf.emulation import rounding
from annie_quant.hf.profiles import Profile

NAME = "annie_quant_grouped"


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return (outputs [B, T, H, D], None), as transformers' attention functions do.

    query: [B, H, T, D]. key, value: [B, Hkv, L, D]. attention_mask: bool [B, 1, T, L], True for visible columns.
    """
    batch, heads, steps, head_dim = query.shape
    if steps > 1 or (attention_mask is not None and attention_mask.dtype != torch.bool):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    per_key_head = (batch * key.shape[1], heads // key.shape[1], head_dim)
    scores = torch.bmm((query * (scaling or head_dim**-0.5)).reshape(per_key_head), key.flatten(0, 1).transpose(1, 2))
    scores = scores.view(batch, heads, -1).float()
    if attention_mask is not None:
        scores = scores.masked_fill_(~attention_mask[:, 0], -torch.inf)
    weights = scores.softmax(-1).to(value.dtype).view(per_key_head[0], per_key_head[1], -1)
    return torch.bmm(weights, value.flatten(0, 1)).view(batch, 1, heads, head_dim), None


def rounded_attention(profile: Profile) -> Callable[..., tuple[torch.Tensor, None]]:
    """Return grouped_attention with the roundings of a numerics profile."""
    stream, stored = rounding(profile.stream), activations.cache_rounding(profile.kv)

    def attention(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        output, _ = grouped_attention(module, stream(query), *stored(module, key, value), *args, **options)
        return stream(output), None

    return attention


@contextlib.contextmanager
def use_grouped_attention(config: Any, profile: Profile) -> Iterator[None]:
    """Let a model with this text config use grouped_attention instead of sdpa. Other implementations are unchanged.

    profile: where queries, keys, values and outputs are rounded.
    """
    before = config._attn_implementation
    if before != "sdpa":
        yield
        return
    name = f"{NAME}_{profile.stream}_{profile.kv}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(name, rounded_attention(profile) if profile.rounds else grouped_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = before
