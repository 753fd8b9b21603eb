"""Small Qwen3.5 checkpoints with random weights for the tests, made with NumPy only, and changed copies of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from paths import TINY_ANNIE

from annie_quant.checkpoint import writer
from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.linears import is_linear
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.models.formats import NVFP4, W4A16

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 1536,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "attention_bias": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
BF16 = ml_dtypes.bfloat16


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a text-only Qwen3.5 model, with multi-token prediction if config has it."""
    h, v = config["hidden_size"], config["vocab_size"]
    out = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,), "lm_head.weight": (v, h)}
    for i, kind in enumerate(config["layer_types"]):
        out |= layer(config, f"model.layers.{i}.", kind)
    for i in range(config.get("mtp_num_hidden_layers", 0)):
        out |= layer(config, f"mtp.layers.{i}.", "full_attention")
        out |= {
            "mtp.fc.weight": (h, 2 * h),
            "mtp.norm.weight": (h,),
            "mtp.pre_fc_norm_embedding.weight": (h,),
            "mtp.pre_fc_norm_hidden.weight": (h,),
        }
    return out


def layer(c: dict, p: str, kind: str) -> dict[str, tuple[int, ...]]:
    h, f = c["hidden_size"], c["intermediate_size"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    q, kv, d = (
        c["num_attention_heads"] * c["head_dim"],
        c["num_key_value_heads"] * c["head_dim"],
        c["head_dim"],
    )
    out = {
        p + "input_layernorm.weight": (h,),
        p + "post_attention_layernorm.weight": (h,),
        p + "mlp.gate_proj.weight": (f, h),
        p + "mlp.up_proj.weight": (f, h),
        p + "mlp.down_proj.weight": (h, f),
    }
    if kind == "full_attention":
        a = p + "self_attn."
        return out | {
            a + "q_proj.weight": (2 * q, h),
            a + "k_proj.weight": (kv, h),
            a + "v_proj.weight": (kv, h),
            a + "o_proj.weight": (h, q),
            a + "q_norm.weight": (d,),
            a + "k_norm.weight": (d,),
        }
    a, n = p + "linear_attn.", c["linear_num_value_heads"]
    return out | {
        a + "in_proj_qkv.weight": (2 * keys + values, h),
        a + "in_proj_z.weight": (values, h),
        a + "in_proj_a.weight": (n, h),
        a + "in_proj_b.weight": (n, h),
        a + "out_proj.weight": (h, values),
        a + "conv1d.weight": (2 * keys + values, 1, 4),
        a + "norm.weight": (c["linear_value_head_dim"],),
        a + "A_log": (n,),
        a + "dt_bias": (n,),
    }


def weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random bf16 weights that keep activations in a normal range, so that the logits have clear maxima."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in shapes(config).items():
        if name.endswith("A_log"):
            value = np.log(rng.uniform(1, 16, shape))
        elif name.endswith("linear_attn.norm.weight"):
            value = 1 + 0.1 * rng.standard_normal(shape)
        elif len(shape) == 1:
            value = 0.1 * rng.standard_normal(shape)
        else:
            value = rng.standard_normal(shape) * (
                0.3 if "conv1d" in name else 1.5 / np.sqrt(shape[-1])
            )
        out[name] = value.astype(BF16)
    return out


def save(
    folder: Path, tensors: dict[str, np.ndarray], config: dict, shard_bytes: int = 1 << 40
) -> Path:
    writer.write(folder, [writer.planned(n, t) for n, t in tensors.items()], shard_bytes)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in TOKENIZER:
        shutil.copyfile(TINY_ANNIE / name, folder / name)
    return folder


def bf16(folder: Path, seed: int = 0, shard_bytes: int = 1 << 40, **changes) -> Path:
    """Write a plain checkpoint."""
    config = CONFIG | changes
    return save(folder, weights(config, seed), config, shard_bytes)


def quantizable(name: str, shape: tuple[int, ...]) -> bool:
    return is_linear(name, shape) and not any(
        k in name for k in ("lm_head", "in_proj_a", "in_proj_b")
    )


def nvfp4(
    folder: Path,
    source: Path,
    only: Callable[[str], bool] = lambda name: True,
    with_input: bool = True,
) -> Path:
    """Write the checkpoint as ModelOpt would export it: shared scales for fused linears, both configurations."""
    from annie_quant import nvfp4 as codec

    plain = ModelFolder(source)
    modules = {n[:-7] for n in plain if quantizable(n, plain.info(n).shape) and only(n)}
    amax = {m: float(np.abs(plain.tensor(f"{m}.weight").astype(np.float32)).max()) for m in modules}
    for group in plain.family.fused_groups(modules):
        amax |= dict.fromkeys(group, max(amax[m] for m in group))
    out: dict[str, np.ndarray] = {}
    for name in plain:
        module = name.removesuffix(".weight")
        if module not in modules:
            out[name] = plain.tensor(name)
            continue
        t = codec.pack(plain.tensor(name), tensor_scale=np.float32(amax[module]) / np.float32(2688))
        out |= {
            name: np.asarray(t.codes),
            f"{module}.weight_scale": np.asarray(t.block_scale),
            f"{module}.weight_scale_2": np.array(t.tensor_scale, np.float32),
        }
        if with_input:
            out[f"{module}.input_scale"] = np.array(0.004, np.float32)
    unquantized = sorted(
        n[:-7] for n in plain if is_linear(n, plain.info(n).shape) and n[:-7] not in modules
    )
    settings = modelopt.settings(
        dict.fromkeys(modules, NVFP4 if with_input else W4A16), unquantized, 16
    )
    save(folder, out, plain.config)
    writer.write_settings(folder, plain.config, settings)
    return folder


def source_and_nvfp4(folder: Path) -> tuple[Path, Path]:
    """Write a bf16 checkpoint and its NVFP4 export."""
    source = bf16(folder / "bf16")
    return source, nvfp4(folder / "nvfp4", source)


def multimodal(t: dict, c: dict) -> None:
    """Change a model to its multimodal form, as for runtimes on transformers 4.57, except for the class names."""
    for name in [n for n in t if n.startswith("model.") and "visual." not in n]:
        t[name.replace("model.", "model.language_model.", 1)] = t.pop(name)
    quantization = c.pop("quantization_config", None)
    text = dict(c, model_type="qwen3_5_text")
    text.pop("architectures")
    c.clear()
    c |= {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
    }
    if quantization:
        deeper = [n.replace("model.", "model.language_model.", 1) for n in quantization["ignore"]]
        c["quantization_config"] = quantization | {"ignore": deeper}


def read(folder: Path) -> dict[str, np.ndarray]:
    """Return copies of all tensors."""
    opened = ModelFolder(folder)
    return {n: opened.tensor(n).copy() for n in opened}


def spoil(folder: Path, target: Path, change: Callable[[dict, dict], None]) -> Path:
    """Write a copy of a checkpoint after `change(tensors, config)`."""
    shutil.copytree(folder, target)
    tensors, config = read(folder), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    return save(target, tensors, config)
