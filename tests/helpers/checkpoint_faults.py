"""Faulty checkpoints: each is a change of a sound one, with the audit's code and the tensor that it names."""

from __future__ import annotations

from pathlib import Path

import checkpoint_zoo as zoo
import ml_dtypes
import numpy as np

from annie_quant.models.formats import FP8, NVFP4

GATE, UP, DOWN = (f"model.layers.1.mlp.{k}_proj" for k in ("gate", "up", "down"))
Q, V = "model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.v_proj"


def quant(config: dict) -> dict:
    return config["quantization_config"]


def scale(t: dict, name: str, value: float) -> None:
    t[name] = np.array(value, np.float32)


def byte(t: dict, name: str, value: int, index=(0, 0)) -> None:
    t[name].view(np.uint8)[index] = value


FAULTS = {
    "NaN block scale": (
        lambda t, c: byte(t, f"{GATE}.weight_scale", 0x7F),
        "block_scale_nan",
        f"{GATE}.weight_scale",
    ),
    "negative NaN block scale": (
        lambda t, c: byte(t, f"{GATE}.weight_scale", 0xFF),
        "block_scale_nan",
        f"{GATE}.weight_scale",
    ),
    "negative block scale": (
        lambda t, c: byte(t, f"{GATE}.weight_scale", 0xB8),
        "block_scale_negative",
        f"{GATE}.weight_scale",
    ),
    "zero block scale": (
        lambda t, c: byte(t, f"{GATE}.weight_scale", 0),
        "block_scale_zero",
        f"{GATE}.weight_scale",
    ),
    "NaN tensor scale": (
        lambda t, c: scale(t, f"{DOWN}.weight_scale_2", np.nan),
        "tensor_scale_bad",
        f"{DOWN}.weight_scale_2",
    ),
    "zero tensor scale": (
        lambda t, c: scale(t, f"{DOWN}.weight_scale_2", 0),
        "tensor_scale_bad",
        f"{DOWN}.weight_scale_2",
    ),
    "infinite tensor scale": (
        lambda t, c: scale(t, f"{DOWN}.weight_scale_2", np.inf),
        "tensor_scale_bad",
        f"{DOWN}.weight_scale_2",
    ),
    "divisor for multiplier": (
        lambda t, c: scale(t, f"{DOWN}.weight_scale_2", 1 / t[f"{DOWN}.weight_scale_2"]),
        "tensor_scale_inverted",
        f"{DOWN}.weight_scale_2",
    ),
    "no tensor scale": (lambda t, c: t.pop(f"{DOWN}.weight_scale_2"), "tensor_scale_missing", DOWN),
    "no input scale": (lambda t, c: t.pop(f"{DOWN}.input_scale"), "input_scale_missing", DOWN),
    "zero input scale": (
        lambda t, c: scale(t, f"{DOWN}.input_scale", 0),
        "input_scale_bad",
        f"{DOWN}.input_scale",
    ),
    "negative input scale": (
        lambda t, c: scale(t, f"{DOWN}.input_scale", -1),
        "input_scale_bad",
        f"{DOWN}.input_scale",
    ),
    "input divisor": (
        lambda t, c: scale(t, f"{DOWN}.input_scale", 2688 / 10),
        "input_scale_inverted",
        f"{DOWN}.input_scale",
    ),
    "gate and up scales": (
        lambda t, c: scale(t, f"{UP}.weight_scale_2", t[f"{UP}.weight_scale_2"] * 1.5),
        "fused_tensor_scale",
        GATE,
    ),
    "q and v input scales": (
        lambda t, c: scale(t, f"{V}.input_scale", 0.005),
        "fused_input_scale",
        None,
    ),
    "all-zero tensor": (
        lambda t, c: t.update({f"{DOWN}.weight": np.zeros_like(t[f"{DOWN}.weight"])}),
        "all_zero",
        f"{DOWN}.weight",
    ),
    "all-zero plain linear": (
        lambda t, c: t.update({"lm_head.weight": np.zeros_like(t["lm_head.weight"])}),
        "all_zero",
        "lm_head.weight",
    ),
    "NaN in a norm": (
        lambda t, c: byte(t, "model.norm.weight", 0xFF, (slice(0, 2),)),
        "not_finite",
        "model.norm.weight",
    ),
    "group size": (
        lambda t, c: quant(c)["config_groups"]["group_0"]["weights"].update(group_size=32),
        "group_size",
        f"{GATE}.weight_scale",
    ),
    "scale of the wrong shape": (
        lambda t, c: t.update(
            {f"{GATE}.weight_scale": np.zeros((640, 16), ml_dtypes.float8_e4m3fn)}
        ),
        "scale_shape",
        f"{GATE}.weight_scale",
    ),
    "scale of the wrong type": (
        lambda t, c: t.update({f"{GATE}.weight_scale": t[f"{GATE}.weight_scale"].view(np.uint8)}),
        "scale_dtype",
        f"{GATE}.weight_scale",
    ),
    "no block scale": (
        lambda t, c: t.pop(f"{GATE}.weight_scale"),
        "block_scale_missing",
        f"{GATE}.weight",
    ),
    "scale without a weight": (
        lambda t, c: t.pop(f"{GATE}.weight"),
        "orphan_scale",
        f"{GATE}.weight_scale",
    ),
    "excluded and quantized": (
        lambda t, c: quant(c)["ignore"].append("model.layers.1.mlp*"),
        "excluded_but_quantized",
        GATE,
    ),
    "plain and not excluded": (
        lambda t, c: quant(c)["ignore"].remove("lm_head"),
        "not_excluded",
        "lm_head",
    ),
    "activation scale left over": (
        lambda t, c: t.update({f"{DOWN}.pre_quant_scale": np.ones(512, ml_dtypes.bfloat16)}),
        "pre_quant_scale",
        f"{DOWN}.pre_quant_scale",
    ),
    "only hf_quant_config": (
        lambda t, c: c.pop("quantization_config"),
        "config_missing",
        "config.json",
    ),
    "algorithms differ": (
        lambda t, c: quant(c).update(quant_algo="W4A16_NVFP4"),
        "config_disagrees",
        "hf_quant_config.json",
    ),
    "class against model type": (
        lambda t, c: c.update(architectures=["Qwen3_5ForConditionalGeneration"]),
        "names_disagree",
        "config.json",
    ),
    "tensors without the prefix of their class": (
        lambda t, c: c.update(
            architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5"
        ),
        "prefix_disagrees",
        "model.layers.0.input_layernorm.weight",
    ),
    "linear_attn missing from ignore": (
        lambda t, c: quant(c).update(
            ignore=[n for n in quant(c)["ignore"] if "linear_attn" not in n]
        ),
        "not_excluded",
        "model.layers.0.linear_attn.in_proj_a",
    ),
    "block scales below Marlin's range": (
        lambda t, c: t.update({f"{DOWN}.weight_scale": small_scales(t[f"{DOWN}.weight_scale"])}),
        "block_scale_underflow",
        f"{DOWN}.weight_scale",
    ),
    "one of a fused group is plain": (lambda t, c: plain_again(t, c, UP), "fused_mixed", GATE),
}


def small_scales(scales: np.ndarray) -> np.ndarray:
    """Return block scales divided by 2^14, so that all are subnormal."""
    small = (scales.astype(np.float32) / 2**14).astype(ml_dtypes.float8_e4m3fn)
    return np.maximum(small.view(np.uint8), 1).view(ml_dtypes.float8_e4m3fn)


def folded(source: Path, right: bool, only: tuple[str, ...] = ("gate", "up")):
    """Return a fold of the MLP's input scale into the norm before it, right or as ModelOpt 0.47 does it, and the norm."""
    plain = zoo.read(source)
    s = np.random.default_rng(5).uniform(0.5, 2.0, 256)
    norm = "model.layers.1.post_attention_layernorm.weight"

    def change(t: dict, c: dict) -> None:
        both = [awq(plain, f"model.layers.1.mlp.{k}_proj", s) for k in only]
        shared = max(float(b[n]) for b in both for n in b if n.endswith("_2"))
        for b in both:
            t.update(b)
        del shared
        w = plain[norm].astype(np.float64)
        t[norm] = ((1 + w) / s - 1 if right else w / s).astype(ml_dtypes.bfloat16)

    return change, norm


def fp8_too(t: dict, c: dict) -> None:
    """Store one attention output in FP8, as mixed-precision checkpoints do."""
    module = "model.layers.3.self_attn.o_proj"
    for suffix in ("weight_scale", "weight_scale_2", "input_scale", "weight"):
        t.pop(f"{module}.{suffix}")
    w = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32) * 0.05
    scale = np.float32(np.abs(w).max() / 448)
    t[f"{module}.weight"] = (w / scale).astype(ml_dtypes.float8_e4m3fn)
    t[f"{module}.weight_scale"] = np.array(scale)
    t[f"{module}.input_scale"] = np.array(0.01, np.float32)
    from annie_quant.checkpoint.dialects import modelopt

    formats = {n.removesuffix(".weight_scale"): NVFP4 for n in t if n.endswith(".weight_scale")} | {
        module: FP8
    }
    c["quantization_config"] = modelopt.settings(formats, [], 16).quantization_config


def plain_again(t: dict, c: dict, module: str) -> None:
    for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
        t.pop(f"{module}.{suffix}")
    t[f"{module}.weight"] = np.ones((512, 256), ml_dtypes.bfloat16)
    quant(c)["ignore"].append(module)


def awq(source: dict, module: str, s: np.ndarray) -> dict[str, np.ndarray]:
    """Return the linear's tensors after a fold of s into its columns."""
    from annie_quant import nvfp4

    t = nvfp4.pack((source[f"{module}.weight"].astype(np.float32) * s).astype(np.float32))
    return {
        f"{module}.weight": np.asarray(t.codes),
        f"{module}.weight_scale": np.asarray(t.block_scale),
        f"{module}.weight_scale_2": np.array(t.tensor_scale, np.float32),
    }
