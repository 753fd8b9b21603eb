"""Qwen3.5 MoE, and Qwen3.6 and 3.8 of the same architecture: Qwen3.5's layers with routed experts and a shared one.

Every layer has a router (mlp.gate), merged or single experts, a shared expert, and shared_expert_gate with one output,
which scales the shared expert. Router and gate stay unquantized. Later versions keep class and model type, so config.json
names this family for them, too.
Sources: transformers' modeling_qwen3_5_moe.py; llama.cpp's names from gguf's tensor_mapping.
No activation of an expert is in `inputs`, so no strategy folds scales into experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from annie_quant.models import qwen3_5
from annie_quant.models._dense import MLP_INPUT, MLP_OUTPUT, QWEN_EXPERTS, SHARED_EXPERT
from annie_quant.models.family import Form, LinearInput

GGUF_SHARED = {
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}

EXPERTS = replace(QWEN_EXPERTS, gguf={**QWEN_EXPERTS.gguf, **GGUF_SHARED})

FAMILY = replace(
    qwen3_5.FAMILY,
    name="Qwen3.5 MoE",
    text=Form("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    multimodal=Form("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    inputs=(
        *(i for i in qwen3_5.FAMILY.inputs if i not in (MLP_INPUT, MLP_OUTPUT)),
        # The router and the experts read this norm, too, and take no scale.
        LinearInput(SHARED_EXPERT, "post_attention_layernorm", "norm", searched=False),
        LinearInput(("mlp.shared_expert.down_proj",), "mlp.shared_expert.up_proj", "rows"),
    ),
    fused={k: v for k, v in qwen3_5.FAMILY.fused.items() if k != "gate_up_proj"} | {"gate_up_proj": SHARED_EXPERT},
    gguf=qwen3_5.GGUF.with_experts("qwen35moe", EXPERTS),
    published={},
    experts=EXPERTS,
)


def tensor_shapes(s: Any) -> dict[str, tuple[str, tuple[int | None, ...]]]:
    """Return the shapes that a mixture's fields determine, as qwen3_5.tensor_shapes does.

    s: the typed fields of config.json. One expert's linears have the names of the experts' module and the linear.
    """
    hidden, width, count = s.hidden_size, s.moe_intermediate_size, s.num_experts
    fields = "num_experts, moe_intermediate_size and hidden_size"
    shared = ("shared_expert_intermediate_size and hidden_size", (s.shared_expert_intermediate_size, hidden))
    return {
        "mlp.gate.weight": ("num_experts and hidden_size", (count, hidden)),
        "mlp.shared_expert_gate.weight": ("hidden_size", (1, hidden)),
        "mlp.experts.gate_proj": (fields, (width, hidden)),
        "mlp.experts.up_proj": (fields, (width, hidden)),
        "mlp.experts.down_proj": (fields, (hidden, width)),
        "mlp.shared_expert.gate_proj.weight": shared,
        "mlp.shared_expert.up_proj.weight": shared,
        "mlp.shared_expert.down_proj.weight": (shared[0], (hidden, s.shared_expert_intermediate_size)),
    }
