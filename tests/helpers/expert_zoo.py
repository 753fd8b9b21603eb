"""Small mixtures of experts with random weights, made with NumPy only: plain with either names, and quantized."""

from __future__ import annotations

from pathlib import Path

import checkpoint_zoo as zoo
import numpy as np

EXPERTS, WIDTH = 4, 64
CONFIG = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": WIDTH,
}
LAYER = "model.layers.1"
EXPERT = f"{LAYER}.mlp.experts.2"


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Return a dense model's weights with its MLPs replaced by merged experts, a router and a shared expert."""
    rng = np.random.default_rng(seed)
    dense = zoo.weights(zoo.CONFIG, seed)
    out = {n: t for n, t in dense.items() if ".mlp." not in n}
    h = zoo.CONFIG["hidden_size"]
    shapes = {
        "gate.weight": (EXPERTS, h),
        "experts.gate_up_proj": (EXPERTS, 2 * WIDTH, h),
        "experts.down_proj": (EXPERTS, h, WIDTH),
        "shared_expert.gate_proj.weight": (WIDTH, h),
        "shared_expert.up_proj.weight": (WIDTH, h),
        "shared_expert.down_proj.weight": (h, WIDTH),
        "shared_expert_gate.weight": (1, h),
    }
    for i in range(zoo.CONFIG["num_hidden_layers"]):
        for name, shape in shapes.items():
            value = rng.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])
            out[f"model.layers.{i}.mlp.{name}"] = value.astype(zoo.BF16)
    return out


def single(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the weights with a name per expert, cut by NumPy."""
    out = {}
    for name, t in tensors.items():
        base, _, kind = name.rpartition(".")
        if not base.endswith(".experts"):
            out[name] = t
            continue
        for e in range(EXPERTS):
            parts = [("gate_proj", t[e, :WIDTH]), ("up_proj", t[e, WIDTH:])] if "gate_up" in kind else [(kind, t[e])]
            out |= {f"{base}.{e}.{k}.weight": np.ascontiguousarray(v) for k, v in parts}
    return out


def merged(folder: Path) -> Path:
    """Write a plain checkpoint as transformers stores it."""
    return zoo.save(folder, weights(), zoo.CONFIG | CONFIG)


def per_expert(folder: Path) -> Path:
    """Write the same plain checkpoint with a name per expert."""
    return zoo.save(folder, single(weights()), zoo.CONFIG | CONFIG)
