"""Predict the time of a token in llama.cpp on a processor, where products are bound by arithmetic as often as by memory.

    seconds = layers * layer + sum of products (weights and rows, per ggml type) + attention

    attention = layers with it * (start + tokens * (query heads * head + keys + share * deep))
    share = from 0 to 1 at DEEP tokens; with an odd number of key heads it starts at half of DEEP

The costs are those that `doctor --measure` fits on files of random weights (ops/llama_cpp_rates.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from annie_quant import models
from annie_quant.checkpoint import dialects
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import AttentionShape, is_tied
from annie_quant.documents import LlamaCppRates

STARTS_AT = 256  # earlier tokens from which attention is split over threads
DEEP = 16384  # earlier tokens up to which each costs more: keys stop fitting in a core's cache between query heads


class Product(NamedTuple):
    """A weight [rows, columns] that every token reads. type: ggml's name; share: of its rows that a token passes."""

    type: str
    rows: int
    columns: int
    share: float = 1.0


@dataclass(frozen=True)
class Work:
    """What one token computes: its products, and the attention of its layers."""

    products: Sequence[Product]
    shape: AttentionShape


def work_of(folder: ModelFolder, shape: AttentionShape) -> Work:
    """Return the work of a model folder in the GGUF file that `convert` writes of it."""
    family, linears = folder.family, dialects.linears(folder)
    of_weight = {linear.weight: linear for linear in linears.values()}
    scales = {name for linear in linears.values() for name in linear.tensors()} - of_weight.keys()
    fp4 = "NVFP4" if family.gguf is None or family.gguf.computes_nvfp4(folder) else "BF16"
    types = {"nvfp4": fp4, "fp8": "Q8_0"}
    experts, products = family.experts, []
    for name in folder:
        unread = family.is_auxiliary(name) or (
            name.endswith("embed_tokens.weight") and not is_tied(folder)
        )
        size = folder.info(name).shape
        if unread or name in scales or len(size) < 2:
            continue
        linear = of_weight.get(name)
        rows, columns = linear.shape(folder) if linear else (math.prod(size[:-1]), size[-1])
        routed = experts is not None and models.in_layer(name).startswith(f"{experts.module}.")
        share = experts.active_share(folder.text_config) if experts and routed else 1.0
        products.append(Product(types[linear.format] if linear else "BF16", rows, columns, share))
    return Work(products, shape)


def seconds(work: Work, rates: LlamaCppRates, depth: int = 0) -> float:
    """Return the seconds of a token after `depth` earlier tokens. A type that was not measured costs what bfloat16 does."""
    total = len(work.shape.types) * rates.layer_s
    for product in work.products:
        rate = rates.products.get(product.type) or rates.products["BF16"]
        total += product.share * product.rows * (rate.row_s + product.columns * rate.weight_s)
    return total + attention_seconds(work.shape, rates, depth)


def attention_seconds(shape: AttentionShape, rates: LlamaCppRates, depth: int) -> float:
    """Return the seconds of all layers' attention; a sliding window limits the tokens of its layers.

    A size that was not measured costs what the nearest one does, in proportion.
    """
    heads = shape.num_attention_heads
    kv_heads, dim = (
        shape.num_key_value_heads or heads,
        shape.head_dim or shape.hidden_size // max(1, heads),
    )
    if not heads or not rates.attention:
        return 0.0

    def distance(sizes: tuple[int, int]) -> tuple[float, float]:
        return abs(math.log(sizes[0] / dim)), abs(math.log(sizes[1] / kv_heads))

    near = min(rates.attention, key=lambda rate: distance((rate.head_dim, rate.kv_heads)))
    # The keys of one of 2, 4 or 8 heads are a power of two apart and fill a part of the cache's sets, those of one of 3 fill all.
    shallow = DEEP // 2 if kv_heads % 2 else 0
    token_s = (heads * near.head_s + kv_heads / near.kv_heads * near.keys_s) * dim / near.head_dim
    total = 0.0
    for kind, limit in (
        ("full_attention", depth),
        ("sliding_attention", min(depth, shape.sliding_window or depth)),
    ):
        each = token_s + rates.deep_s * min(1.0, max(0, limit - shallow) / (DEEP - shallow))
        total += shape.types.count(kind) * (
            limit * each + rates.depth_s * min(1.0, limit / STARTS_AT)
        )
    return total
