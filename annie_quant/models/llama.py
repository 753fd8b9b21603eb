"""Llama 2 and 3: dense, plain norms, text only. `attention_bias` and `mlp_bias` add biases to all linears.

Sources: transformers' modeling_llama.py; llama.cpp's conversion/llama.py for the order of rows.
"""

from __future__ import annotations

from annie_quant.models._dense import dense

FAMILY = dense(
    "Llama",
    "LlamaForCausalLM",
    "llama",
    interleaved={"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"},
)
