"""Gemma 3, text: norms that compute (1 + w), four per layer; sliding-window layers with a rotary base of their own; tied head.

The embeddings are scaled by sqrt(hidden_size) when they are read (transformers' modeling_gemma3.py; DecoderLayers does the same).
The norms after attention and MLP scale an output, not a linear's input, so nothing is folded into them.
Sources: transformers' modeling_gemma3.py; llama.cpp's names from gguf's tensor_mapping, its constants from src/models/gemma3.cpp.
"""

from __future__ import annotations

from annie_quant.models import _dense
from annie_quant.models.family import Family, Form, GGUFNames, LinearInput

FAMILY = Family(
    name="Gemma 3",
    text=Form("Gemma3ForCausalLM", "gemma3_text"),
    inputs=(
        _dense.ATTENTION_INPUT,
        LinearInput(_dense.MLP, "pre_feedforward_layernorm", "norm"),
        _dense.MLP_OUTPUT,
        _dense.ATTENTION_OUTPUT,
    ),
    fused=_dense.DENSE_FUSED,
    kinds=_dense.DENSE_KINDS,
    unquantized=_dense.COMMON_UNQUANTIZED,
    norms_add_one=True,
    gguf=GGUFNames(
        architecture="gemma3",
        top=_dense.GGUF_TOP,
        layer={
            **_dense.GGUF_LAYER,
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "pre_feedforward_layernorm.weight": "ffn_norm.weight",
            "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
        },
        mtp={},
        window_pattern=6,
        window_rope_theta=10_000.0,
        tensor_scales=False,
    ),
)
