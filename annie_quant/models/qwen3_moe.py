"""Qwen3 MoE: Qwen3's attention, routed experts without a shared one, plain norms, text only.

Layers of `mlp_only_layers` have a dense MLP. Published checkpoints store every expert's linears on their own; transformers
merges them when it loads one. Sources: transformers' modeling_qwen3_moe.py; llama.cpp's names from gguf's tensor_mapping.
No activation of an expert is in `inputs`, so no strategy folds scales into experts.
"""

from __future__ import annotations

from dataclasses import replace

from annie_quant.models import qwen3
from annie_quant.models._dense import QWEN_EXPERTS
from annie_quant.models.family import Form

GGUF = qwen3.FAMILY.gguf
assert GGUF is not None

FAMILY = replace(
    qwen3.FAMILY,
    name="Qwen3 MoE",
    text=Form("Qwen3MoeForCausalLM", "qwen3_moe"),
    experts=QWEN_EXPERTS,
    gguf=GGUF.with_experts("qwen3moe", QWEN_EXPERTS),
)
