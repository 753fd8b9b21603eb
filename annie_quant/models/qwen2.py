"""Qwen2 and Qwen2.5, dense: biases on queries, keys and values, plain norms, text only; small ones tie the head.

Sources: transformers' modeling_qwen2.py; llama.cpp's names from gguf's tensor_mapping.
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

FAMILY = Family(
    name="Qwen2",
    text=Form("Qwen2ForCausalLM", "qwen2"),
    inputs=DENSE_INPUTS,
    fused=DENSE_FUSED,
    kinds=DENSE_KINDS,
    unquantized=COMMON_UNQUANTIZED,
    gguf=GGUFNames(architecture="qwen2", top=GGUF_TOP, layer=GGUF_LAYER, mtp={}),
)
