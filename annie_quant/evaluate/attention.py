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
from annie_quant.hf.profiles import BFLOAT16, CPU_KERNELS, Profile

NAME = "annie_quant_grouped"
QUERIES = 256  # whose scores are in memory at once


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


def amx_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Return outputs [B, T, H, D] as vLLM's attention on a CPU with AMX: e^(score - maximum) is rounded to bfloat16 before it is
    multiplied by the values, the sum that divides is not. Parameters as of grouped_attention.

    The products of tests/perf/trace_server.py for Qwen2.5-Coder-0.5B differ in 0.02 % of values, with exact weights in 17 %.
    """
    length, steps = key.shape[2], query.shape[2]
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    if mask is None:
        mask = torch.ones(steps, length, dtype=torch.bool, device=query.device).tril(length - steps)
    mask = mask.expand(len(query), 1, steps, length)
    outputs = []
    for i in range(0, steps, QUERIES):
        scores = query[:, :, i : i + QUERIES] @ key.transpose(2, 3) * scaling
        scores = scores.masked_fill_(~mask[:, :, i : i + QUERIES], -torch.inf)
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        outputs.append(weights.bfloat16().to(value.dtype) @ value / weights.sum(-1, keepdim=True))
    return torch.cat(outputs, 2).transpose(1, 2)


def rounded_attention(profile: Profile) -> Callable[..., tuple[torch.Tensor, None]]:
    """Return grouped_attention with the roundings of a numerics profile."""
    stream, stored = rounding(profile.stream), activations.cache_rounding(profile.kv)
    with_amx = profile.delta_rule == CPU_KERNELS and profile.stream == BFLOAT16 and torch.cpu._is_amx_tile_supported()

    def attention(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        query, (key, value) = stream(query), stored(module, key, value)
        if with_amx:
            output = amx_attention(query, key, value, args[0], options["scaling"])
        else:
            output, _ = grouped_attention(module, query, key, value, *args, **options)
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
    name = f"{NAME}_{profile.stream}_{profile.kv}_{profile.delta_rule}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(name, rounded_attention(profile) if profile.rounds else grouped_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = before
