"""Qwen3.5, dense and MoE: three DeltaNet layers per full-attention layer, norms that compute (1 + w), text and multimodal form.

In the mixture (Qwen3.5 MoE, and Qwen3.6 and 3.8, which keep its class and model type) every layer has a router (mlp.gate), merged
or single experts, a shared expert, and shared_expert_gate with one output, which scales the shared expert. Router and gate stay
unquantized. No activation of an expert is in `inputs`, so no strategy folds scales into experts.
Sources: transformers' modeling_qwen3_5.py and modeling_qwen3_5_moe.py; llama.cpp's conversion/qwen.py and src/models/qwen35.cpp;
gguf's tensor_mapping for the mixture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from annie_quant.models import dense
from annie_quant.models.family import (
    GGUF_MLP,
    DeltaNet,
    Family,
    Form,
    GGUFNames,
    LinearInput,
    ModelSize,
)

DELTANET = DeltaNet(
    mixed=("linear_attn.in_proj_qkv", "linear_attn.conv1d"),
    value_rows=("linear_attn.in_proj_z",),
    per_head=(
        "linear_attn.in_proj_a",
        "linear_attn.in_proj_b",
        "linear_attn.A_log",
        "linear_attn.dt_bias",
    ),
    output="linear_attn.out_proj",
    log_decay="linear_attn.A_log",
    convolution="linear_attn.conv1d",
)

GGUF = GGUFNames(
    architecture="qwen35",
    top=dense.GGUF_TOP,
    layer={
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        **dense.GGUF_ATTENTION,
        "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
        "linear_attn.in_proj_z.weight": "attn_gate.weight",
        "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
        "linear_attn.in_proj_b.weight": "ssm_beta.weight",
        "linear_attn.conv1d.weight": "ssm_conv1d.weight",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.norm.weight": "ssm_norm.weight",
        "linear_attn.out_proj.weight": "ssm_out.weight",
        **GGUF_MLP,
    },
    mtp={
        "fc.weight": "nextn.eh_proj.weight",
        "pre_fc_norm_embedding.weight": "nextn.enorm.weight",
        "pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
        "norm.weight": "nextn.shared_head_norm.weight",
    },
)


def _published(
    label: str,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    key_heads: int,
    value_heads: int,
    vocabulary: int,
) -> ModelSize:
    """Weights per part of a published shape with untied embeddings; DeltaNet's heads have 128 elements."""
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads + heads)  # q is doubled for its gate
    deltanet = hidden * 128 * (2 * key_heads + 3 * value_heads)  # q and k, then v, z and the output
    rest = hidden * 2 * value_heads + 4 * 128 * (2 * key_heads + value_heads)
    full = layers // 4
    counts = {
        "mlp": 3 * hidden * intermediate * layers,
        "attention": attention * full,
        "deltanet": deltanet * (layers - full),
        "rest": rest * (layers - full) + hidden * (2 * layers + 1),
        "head": hidden * vocabulary,
        "embedding": hidden * vocabulary,
    }
    return ModelSize(label, counts, layers, hidden, intermediate)


FAMILY = Family(
    name="Qwen3.5",
    text=Form("Qwen3_5ForCausalLM", "qwen3_5_text"),
    multimodal=Form("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    inputs=(
        dense.ATTENTION_INPUT,
        LinearInput(
            (
                "linear_attn.in_proj_qkv",
                "linear_attn.in_proj_z",
                "linear_attn.in_proj_b",
                "linear_attn.in_proj_a",
            ),
            "input_layernorm",
            "norm",
        ),
        LinearInput((DELTANET.output,), "linear_attn.norm", "norm", per_head=True),
        dense.MLP_INPUT,
        dense.MLP_OUTPUT,
        dense.ATTENTION_OUTPUT,  # its input passes a gate, too
    ),
    fused={
        **dense.DENSE_FUSED,
        "in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    },
    kinds={
        **dense.DENSE_KINDS,
        "deltanet": ("linear_attn.in_proj_qkv*", "linear_attn.in_proj_z*", "linear_attn.out_proj*"),
    },
    unquantized=(
        *dense.COMMON_UNQUANTIZED,
        "*linear_attn.conv1d",
        "*linear_attn.in_proj_a",
        "*linear_attn.in_proj_b",
    ),
    norms_add_one=True,
    plain_norms=("linear_attn.norm",),
    position_axes=3,
    mtp_shapes={
        "fc.weight": (1, 2),  # embedding and hidden state, one after the other
        "norm.weight": (1,),
        "pre_fc_norm_embedding.weight": (1,),
        "pre_fc_norm_hidden.weight": (1,),
    },
    deltanet=DELTANET,
    gguf=GGUF,
    renamed_classes={
        "tokenizer_class": ("Qwen2Tokenizer", "TokenizersBackend"),
        "processor_class": ("Qwen2VLProcessor", "Qwen3VLProcessor"),
        "image_processor_type": ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"),
        "video_processor_type": ("Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"),
    },
    preprocessor_stub={
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
    published={
        "9b": _published("Qwen3.5-9B", 4096, 12288, 32, 16, 4, 256, 16, 32, 248320),
        "27b": _published("Qwen3.5-27B", 5120, 17408, 64, 24, 4, 256, 16, 48, 248320),
    },
)


GGUF_SHARED = {
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}

EXPERTS = replace(dense.QWEN_EXPERTS, gguf={**dense.QWEN_EXPERTS.gguf, **GGUF_SHARED})

MOE = replace(
    FAMILY,
    name="Qwen3.5 MoE",
    text=Form("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    multimodal=Form("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    inputs=(
        *(i for i in FAMILY.inputs if i not in (dense.MLP_INPUT, dense.MLP_OUTPUT)),
        # The router and the experts read this norm, too, and take no scale.
        LinearInput(dense.SHARED_EXPERT, "post_attention_layernorm", "norm", searched=False),
        LinearInput(("mlp.shared_expert.down_proj",), "mlp.shared_expert.up_proj", "rows"),
    ),
    fused={k: v for k, v in FAMILY.fused.items() if k != "gate_up_proj"}
    | {"gate_up_proj": dense.SHARED_EXPERT},
    gguf=GGUF.with_experts("qwen35moe", EXPERTS),
    published={},
    experts=EXPERTS,
)


def tensor_shapes(s: Any) -> dict[str, tuple[str, tuple[int | None, ...]]]:
    """Return the shapes that a config.json's fields determine: name without layer → (fields, shape). None: any size.

    s: the typed fields of config.json, as in annie_quant.checkpoint.gguf.layout.GgufSettings. Those of a mixture are None for a
        dense model. One expert's linears have the names of the experts' module and the linear.
    """
    hidden = s.hidden_size
    heads = s.num_attention_heads
    kv = s.num_key_value_heads
    width = s.attention_head_dim
    values = s.linear_num_value_heads * s.linear_value_head_dim
    mixed = 2 * s.linear_num_key_heads * s.linear_key_head_dim + values
    mlp = s.intermediate_size
    shared = s.shared_expert_intermediate_size
    attention = "heads, head_dim and hidden_size"
    deltanet = "the linear_* fields and hidden_size"
    rows: list[tuple[str, tuple[int | None, ...], list[str]]] = [
        (
            "vocab_size and hidden_size",
            (s.vocab_size, hidden),
            ["embed_tokens.weight", "lm_head.weight"],
        ),
        (
            "hidden_size",
            (hidden,),
            ["norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"],
        ),
        (
            "intermediate_size and hidden_size",
            (mlp, hidden),
            ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        ),
        ("intermediate_size and hidden_size", (hidden, mlp), ["mlp.down_proj.weight"]),
        (attention, (None, hidden), ["self_attn.q_proj.weight"]),  # with or without its gate
        (attention, (kv * width, hidden), ["self_attn.k_proj.weight", "self_attn.v_proj.weight"]),
        (attention, (hidden, heads * width), ["self_attn.o_proj.weight"]),
        ("head_dim", (width,), ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]),
        (deltanet, (mixed, hidden), ["linear_attn.in_proj_qkv.weight"]),
        (deltanet, (values, hidden), ["linear_attn.in_proj_z.weight"]),
        (
            deltanet,
            (s.linear_num_value_heads, hidden),
            ["linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"],
        ),
        (deltanet, (hidden, values), ["linear_attn.out_proj.weight"]),
        (deltanet, (mixed, None, s.linear_conv_kernel_dim), ["linear_attn.conv1d.weight"]),
        ("linear_value_head_dim", (s.linear_value_head_dim,), ["linear_attn.norm.weight"]),
        (
            "linear_num_value_heads",
            (s.linear_num_value_heads,),
            ["linear_attn.A_log", "linear_attn.dt_bias"],
        ),
    ]
    if s.num_experts is not None:
        fields = "num_experts, moe_intermediate_size and hidden_size"
        expert = s.moe_intermediate_size
        of_shared = "shared_expert_intermediate_size and hidden_size"
        rows += [
            ("num_experts and hidden_size", (s.num_experts, hidden), ["mlp.gate.weight"]),
            ("hidden_size", (1, hidden), ["mlp.shared_expert_gate.weight"]),
            (fields, (expert, hidden), ["mlp.experts.gate_proj", "mlp.experts.up_proj"]),
            (fields, (hidden, expert), ["mlp.experts.down_proj"]),
            (
                of_shared,
                (shared, hidden),
                ["mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"],
            ),
            (of_shared, (hidden, shared), ["mlp.shared_expert.down_proj.weight"]),
        ]
    return {name: (fields, shape) for fields, shape, names in rows for name in names}
