"""Llama, Qwen2, Qwen3 and Qwen3 MoE, Gemma 3: the decoder layer of most families, with experts in place of the MLP in a mixture.

They differ only in norms and in llama.cpp's names, which are those of gguf's tensor_mapping. Sources: transformers'
modeling_llama.py, modeling_qwen2.py, modeling_qwen3.py, modeling_qwen3_moe.py and modeling_gemma3.py; llama.cpp's
conversion/llama.py for Llama's order of rows, and src/models/gemma3.cpp for Gemma's constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from annie_quant.models.family import GGUF_MLP, Experts, Family, Form, GGUFNames, LinearInput

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj")
ATTENTION_INPUT = LinearInput(ATTENTION, "input_layernorm", "norm")
# Grouped value heads use the rows several times, so no scale is searched; the audit still checks whether one cancels.
ATTENTION_OUTPUT = LinearInput(("self_attn.o_proj",), "self_attn.v_proj", "rows", searched=False)
MLP_INPUT = LinearInput(MLP, "post_attention_layernorm", "norm")
MLP_OUTPUT = LinearInput(("mlp.down_proj",), "mlp.up_proj", "rows")  # it reads silu(gate) * up
DENSE_INPUTS = (ATTENTION_INPUT, MLP_INPUT, MLP_OUTPUT, ATTENTION_OUTPUT)
DENSE_FUSED = {"qkv_proj": ATTENTION, "gate_up_proj": MLP}
DENSE_KINDS = {"mlp": ("mlp.*",), "attention": ("self_attn.*_proj*",)}
GGUF_TOP = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
# With the norms of queries and keys, which Llama does not have.
GGUF_ATTENTION = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}
# The layer of Llama, Qwen2 and Qwen3; none of them has all of these tensors.
GGUF_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **GGUF_ATTENTION,
    **GGUF_MLP,
}
GGUF_LAYER |= {
    name.replace("_proj.weight", "_proj.bias"): stored.replace(".weight", ".bias")
    for name, stored in GGUF_LAYER.items()
    if name.endswith("_proj.weight")
}
# The mixture of experts of Qwen2 MoE and its successors. The shared expert is a dense MLP that every token passes.
SHARED_EXPERT = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
QWEN_EXPERTS = Experts(
    module="mlp.experts",
    merged={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    fused=("gate_proj", "up_proj"),
    router="mlp.gate",
    count="num_experts",
    width="moe_intermediate_size",
    active="num_experts_per_tok",
    gguf={
        "mlp.gate": "ffn_gate_inp",
        "mlp.experts.gate_proj": "ffn_gate_exps",
        "mlp.experts.up_proj": "ffn_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
    },
)
# ModelOpt's default exclusions that concern every family: head, embedding, routers, vision, multi-token prediction.
COMMON_UNQUANTIZED = (
    "*lm_head",
    "*embed_tokens*",
    "*mlp.gate",
    "*router*",
    "*shared_expert_gate",
    "mtp.*",
    "*visual*",
    "*vision*",
)


def dense_family(
    name: str,
    class_name: str,
    model_type: str,
    *,
    interleaved: Mapping[str, str] | None = None,
    tensor_scales: bool = True,
) -> Family:
    """Return a family with four linears of attention, a gated MLP and plain norms, whose model type is llama.cpp's architecture.

    name: for messages.
    class_name, model_type: as config.json names them.
    interleaved, tensor_scales: fields of GGUFNames.
    """
    names = GGUFNames(
        model_type, GGUF_TOP, GGUF_LAYER, {}, interleaved or {}, tensor_scales=tensor_scales
    )
    form = Form(class_name, model_type)
    return Family(
        name, form, DENSE_INPUTS, DENSE_FUSED, DENSE_KINDS, COMMON_UNQUANTIZED, gguf=names
    )


# Biases: Llama's `attention_bias` and `mlp_bias` add them to all linears; Qwen2 has them on queries, keys and values.
LLAMA = dense_family(
    "Llama",
    "LlamaForCausalLM",
    "llama",
    interleaved={
        "self_attn.q_proj": "num_attention_heads",
        "self_attn.k_proj": "num_key_value_heads",
    },
)
QWEN2 = dense_family("Qwen2", "Qwen2ForCausalLM", "qwen2", tensor_scales=False)
QWEN3 = dense_family("Qwen3", "Qwen3ForCausalLM", "qwen3")
QWEN3_GGUF = QWEN3.gguf
assert QWEN3_GGUF is not None
# Layers of `mlp_only_layers` have a dense MLP. No activation of an expert is in `inputs`: no strategy folds scales into experts.
QWEN3_MOE = replace(
    QWEN3,
    name="Qwen3 MoE",
    text=Form("Qwen3MoeForCausalLM", "qwen3_moe"),
    experts=QWEN_EXPERTS,
    gguf=QWEN3_GGUF.with_experts("qwen3moe", QWEN_EXPERTS),
)
# Norms compute (1 + w), four per layer; those after attention and MLP scale an output, not a linear's input, so nothing is folded
# into them. Layers with sliding windows have another rotary base. Embeddings are scaled by sqrt(hidden_size) when they are read
# (DecoderLayers does the same). The head is tied.
GEMMA3 = Family(
    name="Gemma 3",
    text=Form("Gemma3ForCausalLM", "gemma3_text"),
    inputs=(
        ATTENTION_INPUT,
        LinearInput(MLP, "pre_feedforward_layernorm", "norm"),
        MLP_OUTPUT,
        ATTENTION_OUTPUT,
    ),
    fused=DENSE_FUSED,
    kinds=DENSE_KINDS,
    unquantized=COMMON_UNQUANTIZED,
    norms_add_one=True,
    gguf=GGUFNames(
        architecture="gemma3",
        top=GGUF_TOP,
        layer={
            **GGUF_LAYER,
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
