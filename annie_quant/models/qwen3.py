"""Qwen3, dense: attention with normed queries and keys, plain norms, text only. Source: transformers' modeling_qwen3.py."""

from __future__ import annotations

from annie_quant.models.family import COMMON_UNQUANTIZED, DENSE_FUSED, DENSE_INPUTS, DENSE_KINDS, Family, Form

FAMILY = Family(
    name="Qwen3",
    text=Form("Qwen3ForCausalLM", "qwen3"),
    inputs=DENSE_INPUTS,
    fused=DENSE_FUSED,
    kinds=DENSE_KINDS,
    unquantized=COMMON_UNQUANTIZED,
)
