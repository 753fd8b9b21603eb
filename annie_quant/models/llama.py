"""Llama 2 and 3: dense, plain norms, text only. `attention_bias` and `mlp_bias` add biases to all linears.

Sources: transformers' modeling_llama.py; llama.cpp's conversion/llama.py for the order of rows.
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
    name="Llama",
    text=Form("LlamaForCausalLM", "llama"),
    inputs=DENSE_INPUTS,
    fused=DENSE_FUSED,
    kinds=DENSE_KINDS,
    unquantized=COMMON_UNQUANTIZED,
    gguf=GGUFNames(
        architecture="llama",
        top=GGUF_TOP,
        layer=GGUF_LAYER,
        mtp={},
        interleaved={"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"},
    ),
)
