"""Llama 2 and 3: dense, plain norms, text only. Source: transformers' modeling_llama.py."""

from __future__ import annotations

from annie_quant.models.family import COMMON_UNQUANTIZED, DENSE_FUSED, DENSE_INPUTS, DENSE_KINDS, Family, Form

FAMILY = Family(
    name="Llama",
    text=Form("LlamaForCausalLM", "llama"),
    inputs=DENSE_INPUTS,
    fused=DENSE_FUSED,
    kinds=DENSE_KINDS,
    unquantized=COMMON_UNQUANTIZED,
)
