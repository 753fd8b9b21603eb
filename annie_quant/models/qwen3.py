"""Qwen3, dense: attention with normed queries and keys, plain norms, text only. Source: transformers' modeling_qwen3.py;
llama.cpp's names from gguf's tensor_mapping.
"""

from __future__ import annotations

from annie_quant.models.family import (
    COMMON_UNQUANTIZED,
    DENSE_FUSED,
    DENSE_INPUTS,
    DENSE_KINDS,
    GGUF_LAYER,
    GGUF_TOP,
    Family,
    Form,
    GGUFNames,
)

GGUF = GGUFNames(architecture="qwen3", top=GGUF_TOP, layer=GGUF_LAYER, mtp={})

FAMILY = Family(
    name="Qwen3",
    text=Form("Qwen3ForCausalLM", "qwen3"),
    inputs=DENSE_INPUTS,
    fused=DENSE_FUSED,
    kinds=DENSE_KINDS,
    unquantized=COMMON_UNQUANTIZED,
    gguf=GGUF,
)
