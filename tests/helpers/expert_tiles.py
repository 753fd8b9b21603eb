"""Pairs of tokens and experts sorted into tiles, and the operator of the experts' products with a result of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Alignment(NamedTuple):
    """Pairs sorted by expert and padded to whole tiles, int32 on the GPU.

    sorted_pairs  [tiles * tile_tokens]: numbers of pairs; the number of pairs where a tile is not full
    tile_experts  [tiles]: the expert of each tile; any number from where `padded` ends
    padded        [1]: the entries of sorted_pairs that are used
    """

    sorted_pairs: Tensor
    tile_experts: Tensor
    padded: Tensor


def align(top_k_index: Tensor, experts: int, tile_tokens: int) -> Alignment:
    """Sort the pairs of a router's choice [tokens, top_k] by expert. Does not wait for the GPU."""
    chosen = top_k_index.reshape(-1).long()
    pairs = chosen.numel()
    counts = chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    tiles = (counts + tile_tokens - 1) // tile_tokens
    ends = tiles.cumsum(0)
    order = chosen.argsort(stable=True)
    of_pair = chosen[order]
    first = counts.cumsum(0) - counts
    place = (
        (ends - tiles)[of_pair] * tile_tokens
        + torch.arange(pairs, device=chosen.device)
        - first[of_pair]
    )
    most = min(pairs, experts) + pairs // tile_tokens
    sorted_pairs = torch.full((most * tile_tokens,), pairs, dtype=torch.int32, device=chosen.device)
    sorted_pairs[place] = order.int()
    tile_experts = torch.searchsorted(ends, torch.arange(most, device=chosen.device), right=True)
    return Alignment(sorted_pairs, tile_experts.int(), (ends[-1:] * tile_tokens).int())


def products(
    x: Tensor, packed: Tensor, scales: Tensor, n: int, aligned: Alignment, top_k: int, tile: int
) -> Tensor:
    """Return [rows of x * top_k, n] in x's dtype; rows that no tile has are zeros."""
    out = x.new_zeros((x.shape[0] * top_k, n))
    torch.ops.annie_quant.nvfp4_experts_out(out, x, packed, scales, *aligned, top_k, tile)
    return out
