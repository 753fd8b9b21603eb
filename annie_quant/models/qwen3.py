"""Qwen3, dense: attention with normed queries and keys, plain norms, text only. Source: transformers' modeling_qwen3.py;
llama.cpp's names from gguf's tensor_mapping.
"""

from __future__ import annotations

from annie_quant.models.family import (
    COMMON_UNQUANTIZED,
    DENSE_FUSED,
    DENSE_INPUTS,
    DENSE_KINDS,
    Family,
    Form,
    GGUFNames,
)

GGUF = GGUFNames(
    architecture="qwen3",
    top={
        "embed_tokens.weight": "token_embd.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    },
    layer={
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "self_attn.q_proj.weight": "attn_q.weight",
        "self_attn.k_proj.weight": "attn_k.weight",
        "self_attn.v_proj.weight": "attn_v.weight",
        "self_attn.o_proj.weight": "attn_output.weight",
        "self_attn.q_norm.weight": "attn_q_norm.weight",
        "self_attn.k_norm.weight": "attn_k_norm.weight",
        "mlp.gate_proj.weight": "ffn_gate.weight",
        "mlp.up_proj.weight": "ffn_up.weight",
        "mlp.down_proj.weight": "ffn_down.weight",
    },
    mtp={},
)

FAMILY = Family(
    name="Qwen3",
    text=Form("Qwen3ForCausalLM", "qwen3"),
    inputs=DENSE_INPUTS,
    fused=DENSE_FUSED,
    kinds=DENSE_KINDS,
    unquantized=COMMON_UNQUANTIZED,
    gguf=GGUF,
)
