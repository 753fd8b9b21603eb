"""Small mixtures of experts with random weights, made with NumPy only: plain with either names, and quantized."""

from __future__ import annotations

from pathlib import Path

import checkpoint_zoo as zoo
import ml_dtypes
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
            parts = (
                [("gate_proj", t[e, :WIDTH]), ("up_proj", t[e, WIDTH:])]
                if "gate_up" in kind
                else [(kind, t[e])]
            )
            out |= {f"{base}.{e}.{k}.weight": np.ascontiguousarray(v) for k, v in parts}
    return out


def merged(folder: Path) -> Path:
    """Write a plain checkpoint as transformers stores it."""
    return zoo.save(folder, weights(), zoo.CONFIG | CONFIG)


def per_expert(folder: Path) -> Path:
    """Write the same plain checkpoint with a name per expert."""
    return zoo.save(folder, single(weights()), zoo.CONFIG | CONFIG)


def nvfp4(folder: Path, source: Path) -> Path:
    """Quantize a plain checkpoint with a name per expert as ModelOpt does: routers and gates stay in 16 bits."""
    return zoo.nvfp4(
        folder, source, lambda n: not n.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
    )


def pack_merged(t: dict, c: dict) -> None:
    """Store one layer's experts as merged codes with merged scales, in the layout of ModelOpt's fused experts."""
    base = f"{LAYER}.mlp.experts"
    for e in range(EXPERTS):
        for k in ("gate_proj", "up_proj", "down_proj"):
            for end in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
                t.pop(f"{base}.{e}.{k}.{end}")
    for name, rows, columns in (
        ("gate_up_proj", 2 * WIDTH, zoo.CONFIG["hidden_size"]),
        ("down_proj", 256, WIDTH),
    ):
        t[f"{base}.{name}"] = np.ones((EXPERTS, rows, columns // 2), np.uint8)
        t[f"{base}.{name}_weight_scale"] = np.ones(
            (EXPERTS, rows, columns // 16), ml_dtypes.float8_e4m3fn
        )
        t[f"{base}.{name}_weight_scale_2"] = np.ones(EXPERTS, np.float32) / 1000


def plain_merged(t: dict, c: dict) -> None:
    """Store one layer's experts merged in 16 bits, as ModelOpt exports them when it does not see them."""
    pack_merged(t, c)
    for name in [
        n for n in t if ".mlp.experts." in n and n.endswith(("_weight_scale", "_weight_scale_2"))
    ]:
        t.pop(name)
    t |= {n: v for n, v in weights().items() if n.startswith(f"{LAYER}.mlp.experts")}


def plain_one(t: dict, c: dict) -> None:
    """Leave one linear of one expert in 16 bits and list it, as a tool that skips experts without tokens does."""
    module = f"{EXPERT}.down_proj"
    for end in ("weight_scale", "weight_scale_2", "input_scale"):
        t.pop(f"{module}.{end}")
    t[f"{module}.weight"] = single(weights())[f"{module}.weight"]
    c["quantization_config"]["ignore"].append(module)


def drop(*ends: str):
    """Return a change that removes the tensors of the first bad expert that end so."""
    return lambda t, c: [t.pop(n) for n in list(t) if n.startswith(EXPERT) and n.endswith(ends)]


def after(first, name: str, change):
    """Return `first` and then a change of one tensor; None removes it."""

    def both(t: dict, c: dict) -> None:
        first(t, c)
        value = change(t.pop(name))
        if value is not None:
            t[name] = value

    return both


def no_change(t: dict, c: dict) -> None:
    pass


GATE_UP = f"{LAYER}.mlp.experts.gate_up_proj"
ROUTER = f"{LAYER}.mlp.gate.weight"
MODULE = f"{LAYER}.mlp.experts"
# name → (change, code, tensor)
FAULTS = {
    "an expert is missing": (drop(".weight", "_scale", "_scale_2"), "expert_count", MODULE),
    "one expert more than the configuration": (
        lambda t, c: c.update(num_experts=EXPERTS - 1),
        "expert_count",
        MODULE,
    ),
    "a router for fewer experts": (
        after(no_change, ROUTER, lambda w: w[:-1]),
        "expert_count",
        ROUTER,
    ),
    "one expert in 16 bits": (plain_one, "experts_mixed", MODULE),
    "merged experts left unquantized": (plain_merged, "experts_unquantized", GATE_UP),
    "packed experts": (pack_merged, "tensor_unknown", GATE_UP),
    "an expert without block scales": (
        drop("up_proj.weight_scale"),
        "block_scale_missing",
        f"{EXPERT}.up_proj.weight",
    ),
    "gate and up of an expert differ in scale": (
        after(
            no_change, f"{EXPERT}.up_proj.weight_scale_2", lambda s: np.array(s * 1.5, np.float32)
        ),
        "fused_tensor_scale",
        f"{EXPERT}.gate_proj",
    ),
    "a dead expert": (
        after(
            no_change,
            f"{EXPERT}.down_proj.weight_scale_2",
            lambda s: np.array(s / 1000, np.float32),
        ),
        "expert_scale_range",
        f"{EXPERT}.down_proj",
    ),
    "an expert that saw no token": (
        after(no_change, f"{EXPERT}.down_proj.input_scale", lambda s: np.array(1e-9, np.float32)),
        "expert_scale_range",
        f"{EXPERT}.down_proj",
    ),
    "a quantized router": (
        lambda t, c: quantize_router(t, c),
        "router_quantized",
        f"{LAYER}.mlp.gate",
    ),
}


def quantize_router(t: dict, c: dict) -> None:
    from annie_quant import nvfp4 as codec

    packed = codec.pack(t[ROUTER].astype(np.float32))
    t[ROUTER] = np.asarray(packed.codes)
    t[f"{ROUTER}_scale"] = np.asarray(packed.block_scale)
    t[f"{ROUTER}_scale_2"] = np.array(packed.tensor_scale, np.float32)
    t[f"{ROUTER.removesuffix('.weight')}.input_scale"] = np.array(0.004, np.float32)
    c["quantization_config"]["ignore"].remove(ROUTER.removesuffix(".weight"))
