"""Published Qwen checkpoints: their settings, the tables of their tensors, and small copies with random weights.

The facts are from the models' public config.json, hf_quant_config.json, safetensors headers and cards (read 2026-11-22 through
ai-dynamo/aiconfigurator's model_configs, vLLM's and SGLang's threads, and loaders that list the headers). `table` returns name →
(dtype, shape) at the published size or of a small copy; tests/models/test_published.py compares its counts with figures that
others counted on the real files.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoint_zoo as zoo
import ml_dtypes
import numpy as np

Table = dict[str, tuple[str, tuple[int, ...]]]
ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}
HYBRID = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "bos_token_id": 248044,
    "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "pad_token_id": None,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_parameters": ROPE, "tie_word_embeddings": False,
    "use_cache": True, "vocab_size": 248320,
}  # fmt: skip
VISION = {
    "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
    "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "num_heads": 16,
    "num_position_embeddings": 2304, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
TOKENS = {
    "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
}  # fmt: skip
PLAIN = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MIXTURE = {"num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001}
ATTENTION = r"self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)"
MLP = r"mlp\.(gate|up|down)_proj"
SCHEME4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
SCHEME8 = {"dynamic": False, "num_bits": 8, "type": "float"}


@dataclass(frozen=True)
class Release:
    """One published checkpoint.

    text: fields of its text settings that differ from its architecture's.  dense: no experts.  multimodal: it has the vision
    tower, and its decoder's names the longer prefix.  merged: its experts are in merged tensors.
    formats: pattern of a linear's name inside the model → "nvfp4", "w4a16", "fp8", "fp8_channel" or "fp8_block"; the first
    that fits counts.  dialect: of the settings.  kv: names of the scales of the KV cache.  mtp: format of the MTP head.
    """

    text: dict[str, Any]
    multimodal: bool = True
    merged: bool = False
    formats: dict[str, str] = field(default_factory=dict)
    dialect: str = ""
    kv: tuple[str, ...] = ()
    mtp: str = ""

    @property
    def hybrid(self) -> bool:
        return "linear_num_value_heads" in self.text

    @property
    def experts(self) -> bool:
        return "num_experts" in self.text


def dense27b(**more) -> dict:
    size = {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "num_key_value_heads": 4, "linear_num_value_heads": 48, "output_gate_type": "swish",
    }  # fmt: skip
    return HYBRID | size | more


def hybrid_mixture(hidden: int, width: int, layers: int, heads: int, values: int) -> dict:
    size = {
        "hidden_size": hidden, "moe_intermediate_size": width, "shared_expert_intermediate_size": width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 2, "num_experts": 256,
        "linear_num_value_heads": values,
    }  # fmt: skip
    return HYBRID | MIXTURE | size


def plain_mixture(hidden: int, dense: int, width: int, layers: int, heads: int) -> dict:
    size = {
        "hidden_size": hidden, "intermediate_size": dense, "moe_intermediate_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 4, "num_experts": 128, "max_window_layers": layers,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    }  # fmt: skip
    return PLAIN | MIXTURE | size


NVIDIA_MIXED = {ATTENTION: "fp8", rf"lm_head|{MLP}|mlp\.(experts|shared_expert)\..*": "w4a16"}
RELEASES = {
    "Qwen/Qwen3-8B": Release(
        PLAIN
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
        }
        | {"num_key_value_heads": 8, "max_window_layers": 36},
        multimodal=False,
    ),
    "Qwen/Qwen3.6-27B": Release(dense27b()),
    "Qwen/Qwen3.8-27B": Release(dense27b()),
    "Qwen/Qwen3.6-35B-A3B": Release(hybrid_mixture(2048, 512, 40, 16, 32), merged=True),
    "Qwen/Qwen3.5-122B-A10B": Release(hybrid_mixture(3072, 1024, 48, 32, 64), merged=True),
    "Qwen/Qwen3-30B-A3B": Release(plain_mixture(2048, 6144, 768, 48, 32), multimodal=False),
    "Qwen/Qwen3.6-35B-A3B-FP8": Release(
        hybrid_mixture(2048, 512, 40, 16, 32),
        formats={rf"{ATTENTION}|mlp\.(experts|shared_expert)\..*": "fp8_block"},
        dialect="fp8",
        mtp="fp8_block",
    ),
    "nvidia/Qwen3.6-27B-NVFP4": Release(dense27b(), formats=NVIDIA_MIXED, dialect="modelopt"),
    "nvidia/Qwen3.6-35B-A3B-NVFP4": Release(
        hybrid_mixture(2048, 512, 40, 16, 32), formats=NVIDIA_MIXED, dialect="modelopt"
    ),
    "nvidia/Qwen3.5-122B-A10B-NVFP4": Release(
        hybrid_mixture(3072, 1024, 48, 32, 64),
        formats={r"mlp\.experts\..*": "nvfp4"},
        dialect="modelopt",
    ),
    "nvidia/Qwen3-235B-A22B-NVFP4": Release(
        plain_mixture(4096, 12288, 1536, 94, 64),
        multimodal=False,
        formats={r"self_attn\.[qkvo]_proj|mlp\.experts\..*": "nvfp4"},
        dialect="modelopt",
        kv=("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ),
    "unsloth/Qwen3.8-27B-NVFP4": Release(
        dense27b(),
        formats={rf"lm_head|{ATTENTION}|layers\.(LAST)\.{MLP}": "fp8_channel", MLP: "nvfp4"},
        dialect="compressed-tensors",
        kv=("self_attn.k_scale", "self_attn.v_scale"),
    ),
}
LAST = 8  # layers whose MLPs are FP8 in unsloth's release
SMALL = {
    "vocab_size": 1536, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
SMALL_VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "num_position_embeddings": 16,
}


def text_settings(release: Release, small: bool = False) -> dict[str, Any]:
    """Return the text model's settings."""
    text = dict(release.text)
    if small:
        text |= {k: v for k, v in SMALL.items() if k in text}
    if release.hybrid:
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        text["layer_types"] = kinds * (text["num_hidden_layers"] // 4)
    return text


def config(name: str, small: bool = False) -> dict[str, Any]:
    """Return config.json of a release."""
    release = RELEASES[name]
    text, quantization = text_settings(release, small), settings(name, small)
    if not release.hybrid:
        kind, cls = (
            ("qwen3_moe", "Qwen3MoeForCausalLM")
            if release.experts
            else ("qwen3", "Qwen3ForCausalLM")
        )
        return {"architectures": [cls], "model_type": kind, **text} | quantization
    kind = "qwen3_5_moe" if release.experts else "qwen3_5"
    cls = "Qwen3_5Moe" if release.experts else "Qwen3_5"
    vision = (
        VISION
        | (SMALL_VISION if small else {})
        | {"model_type": kind, "out_hidden_size": text["hidden_size"]}
    )
    if not release.multimodal:
        return {
            "architectures": [f"{cls}ForCausalLM"],
            "model_type": f"{kind}_text",
            **text,
        } | quantization
    return {
        "architectures": [f"{cls}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": {**text, "model_type": f"{kind}_text"},
        "vision_config": vision,
        "tie_word_embeddings": False,
        **TOKENS,
    } | quantization


def settings(name: str, small: bool = False) -> dict[str, Any]:
    """Return {"quantization_config": ...} of a quantized release, {} of another."""
    release = RELEASES[name]
    if not release.dialect:
        return {}
    if release.dialect == "fp8":
        return {"quantization_config": fp8_settings(name, small)}
    if release.dialect == "compressed-tensors":
        return {"quantization_config": compressed_tensors_settings(release, small)}
    return {
        "quantization_config": modelopt_settings(
            release, dict(formats(name, small)), text_settings(release, small)
        )
    }


def fp8_settings(name: str, small: bool) -> dict[str, Any]:
    """Return the settings of Qwen's FP8 releases, which list each 16-bit module (norms, routers, gates) by its name."""
    release = RELEASES[name]
    quantized = dict(formats(name, small))
    modules = (n.removesuffix(".weight") for n in shapes(release, text_settings(release, small)))
    return {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": [*(m for m in modules if m not in quantized), "model.visual.blocks.0.attn.proj"],
    }  # fmt: skip


def compressed_tensors_settings(release: Release, small: bool) -> dict[str, Any]:
    last = "|".join(str(i) for i in last_layers(release, small))
    targets = [
        r"re:.*self_attn\.(q|k|v|o)_proj$", r"re:.*linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$", "re:.*lm_head",
        rf"re:.*layers\.({last})\.{MLP}$",
    ]  # fmt: skip
    channel = SCHEME8 | {"strategy": "channel", "symmetric": True}
    token = channel | {"strategy": "token", "dynamic": True}
    four = SCHEME4 | {"strategy": "tensor_group", "symmetric": True}
    return {
        "config_groups": {
            "group_0": {"weights": channel, "input_activations": token, "targets": targets, "format": "float-quantized"},
            "group_1": {
                "weights": four, "input_activations": four | {"dynamic": "local"}, "targets": [rf"re:.*{MLP}$"],
                "format": "nvfp4-pack-quantized",
            },
        },
        "format": "mixed-precision",
        "ignore": [r"re:.*linear_attn\.in_proj_[ab]$", "re:.*visual.*", "re:^mtp.*"],
        "kv_cache_scheme": SCHEME8 | {"strategy": "tensor", "symmetric": True},
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }  # fmt: skip


def modelopt_settings(
    release: Release, linears: dict[str, str], text: dict[str, Any]
) -> dict[str, Any]:
    """linears: module → format. text: the text model's settings."""
    base = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.45.0"}}
    if len(set(linears.values())) > 1:  # experts of a layer have one entry
        algorithms = {
            "w4a16": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            "fp8": {"quant_algo": "FP8"},
        }
        layers = {
            re.sub(r"(experts)\.\d+\..*", r"\1", m): algorithms[f] for m, f in linears.items()
        }
        return base | {
            "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ["mtp*", "mtp.layers.0*"],
        }  # fmt: skip
    ignore = ["lm_head"]
    for i, kind in enumerate(text.get("layer_types", [])):
        p = f"model.language_model.layers.{i}."
        ignore += [
            p + "linear_attn*" if kind[0] == "l" else p + "self_attn*",
            p + "mlp.shared_expert*",
        ]
    if release.hybrid:
        ignore += [
            "model.language_model.layers.*.mlp.gate",
            "model.visual*",
            "mtp.layers.0*",
            "mtp*",
        ]
    else:
        ignore += [f"model.layers.{i}.mlp.gate" for i in range(text["num_hidden_layers"])]
    return base | {
        "quant_algo": "NVFP4", "ignore": ignore, "kv_cache_scheme": SCHEME8,
        "config_groups": {"group_0": {"input_activations": SCHEME4, "weights": SCHEME4, "targets": ["Linear"]}},
    }  # fmt: skip


def last_layers(release: Release, small: bool) -> range:
    """Return the layers whose MLPs are FP8 in unsloth's release; of a small copy the last one."""
    layers = text_settings(release, small)["num_hidden_layers"]
    return range(layers - (1 if small else LAST), layers)


@functools.cache
def formats(name: str, small: bool = False) -> tuple[tuple[str, str], ...]:
    """Return (module, format) of each quantized linear of a release."""
    release = RELEASES[name]
    last = "|".join(str(i) for i in last_layers(release, small))
    patterns = {p.replace("LAST", last): f for p, f in release.formats.items()}

    @functools.cache
    def kind_of(module: str) -> str | None:
        if module.startswith("mtp."):
            return (
                release.mtp
                if release.mtp and any(re.search(rf"\b({p})$", module) for p in patterns)
                else None
            )
        return next((f for p, f in patterns.items() if re.search(rf"(^|\.)({p})$", module)), None)

    out = []
    for tensor, shape in shapes(release, text_settings(release, small)).items():
        if tensor.endswith(".weight") and len(shape) == 2 and "visual" not in tensor:
            module = tensor.removesuffix(".weight")
            # No pattern has an expert's number.
            if kind := kind_of(re.sub(r"experts\.\d+", "experts.0", module)):
                out.append((module, kind))
    return tuple(out)


@functools.cache
def table(name: str, small: bool = False) -> Table:
    """Return name → (dtype, shape) of every tensor of a release. Do not change it: it is cached."""
    release = RELEASES[name]
    text = text_settings(release, small)
    quantized = dict(formats(name, small))
    out: Table = {}
    for tensor, shape in shapes(release, text).items():
        kind = quantized.get(tensor.removesuffix(".weight")) if tensor.endswith(".weight") else None
        out |= stored(tensor, shape, kind, release.dialect)
    if release.multimodal:
        vision = VISION | (SMALL_VISION if small else {})
        out |= {
            f"model.visual.{n}": ("BF16", s) for n, s in tower(vision, text["hidden_size"]).items()
        }
    for i in range(text["num_hidden_layers"]):
        if text.get("layer_types", ["full_attention"] * (i + 1))[i] == "full_attention":
            for scale in release.kv:
                packed = release.dialect == "compressed-tensors"
                out[f"{prefix(release)}layers.{i}.{scale}"] = (
                    ("BF16", (1,)) if packed else ("F32", ())
                )
    return out


def stored(tensor: str, shape: tuple[int, ...], kind: str | None, dialect: str) -> Table:
    """Return the tensors of one weight as its format stores them."""
    if kind is None:
        return {tensor: ("BF16", shape)}
    base, (rows, columns) = tensor.removesuffix(".weight"), shape
    if kind in ("nvfp4", "w4a16"):
        codes, scales = ("U8", (rows, columns // 2)), ("F8_E4M3", (rows, columns // 16))
        if dialect == "compressed-tensors":
            ends = {"weight_packed": codes, "weight_scale": scales}
            ends |= {"weight_global_scale": ("F32", (1,)), "input_global_scale": ("F32", (1,))}
        else:
            ends = {
                "weight": codes,
                "weight_scale": scales,
                "weight_scale_2": ("F32", ()),
                "input_scale": ("F32", ()),
            }
        return {f"{base}.{end}": info for end, info in ends.items()}
    out: Table = {tensor: ("F8_E4M3", shape)}
    if kind == "fp8_block":
        return out | {f"{base}.weight_scale_inv": ("BF16", (-(-rows // 128), -(-columns // 128)))}
    if kind == "fp8_channel":
        return out | {f"{base}.weight_scale": ("BF16", (rows, 1))}
    return out | {f"{base}.weight_scale": ("F32", ()), f"{base}.input_scale": ("F32", ())}


def prefix(release: Release) -> str:
    return "model.language_model." if release.multimodal else "model."


def shapes(release: Release, c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight outside of the vision tower, as in 16 bits."""
    h, v = c["hidden_size"], c["vocab_size"]
    p = prefix(release)
    out = {f"{p}embed_tokens.weight": (v, h), f"{p}norm.weight": (h,), "lm_head.weight": (v, h)}
    for i in range(c["num_hidden_layers"]):
        kind = c["layer_types"][i] if release.hybrid else "full_attention"
        out |= layer(release, c, f"{p}layers.{i}.", kind, release.merged)
    if release.hybrid:
        # NVIDIA's MTP head keeps merged experts; Qwen's FP8 release has single ones
        out |= layer(
            release, c, "mtp.layers.0.", "full_attention", merged=release.mtp != "fp8_block"
        )
        out |= {"mtp.fc.weight": (h, 2 * h)}
        out |= {
            f"mtp.{n}.weight": (h,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        }
    return out


def layer(release: Release, c: dict, p: str, kind: str, merged: bool) -> dict[str, tuple[int, ...]]:
    h, mlp = c["hidden_size"], f"{p}mlp."
    d, gated = c["head_dim"], 2 if release.hybrid else 1
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    if release.hybrid and kind == "linear_attention":
        out = {
            n: s
            for n, s in zoo.layer(c | {"intermediate_size": 1}, p, kind).items()
            if ".mlp." not in n
        }
    else:
        a = f"{p}self_attn."
        out = {f"{p}{n}_layernorm.weight": (h,) for n in ("input", "post_attention")} | {
            a + "q_proj.weight": (gated * q, h), a + "k_proj.weight": (kv, h), a + "v_proj.weight": (kv, h),
            a + "o_proj.weight": (h, q), a + "q_norm.weight": (d,), a + "k_norm.weight": (d,),
        }  # fmt: skip
    if not release.experts:
        return out | mlp_shapes(mlp, c["intermediate_size"], h)
    width, count = c["moe_intermediate_size"], c["num_experts"]
    out[f"{mlp}gate.weight"] = (count, h)
    if release.hybrid:
        out |= mlp_shapes(f"{mlp}shared_expert.", c["shared_expert_intermediate_size"], h)
        out[f"{mlp}shared_expert_gate.weight"] = (1, h)
    if merged:
        return out | {
            f"{mlp}experts.gate_up_proj": (count, 2 * width, h),
            f"{mlp}experts.down_proj": (count, h, width),
        }
    for e in range(count):
        out |= mlp_shapes(f"{mlp}experts.{e}.", width, h)
    return out


def mlp_shapes(base: str, width: int, h: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{base}{k}_proj.weight": (h, width) if k == "down" else (width, h)
        for k in ("gate", "up", "down")
    }


def tower(v: dict[str, Any], out_hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the vision tower."""
    d, merged = v["hidden_size"], v["hidden_size"] * v["spatial_merge_size"] ** 2
    patch = (d, v["in_channels"], v["temporal_patch_size"], v["patch_size"], v["patch_size"])
    out: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": patch, "patch_embed.proj.bias": (d,),
        "pos_embed.weight": (v["num_position_embeddings"], d),
        "merger.norm.weight": (d,), "merger.norm.bias": (d,),
        "merger.linear_fc1.weight": (merged, merged), "merger.linear_fc1.bias": (merged,),
        "merger.linear_fc2.weight": (out_hidden, merged), "merger.linear_fc2.bias": (out_hidden,),
    }  # fmt: skip
    for i in range(v["depth"]):
        b = f"blocks.{i}."
        linears = {"attn.qkv": (3 * d, d), "attn.proj": (d, d)}
        linears |= {
            "mlp.linear_fc1": (v["intermediate_size"], d),
            "mlp.linear_fc2": (d, v["intermediate_size"]),
        }
        for n, s in linears.items():
            out |= {f"{b}{n}.weight": s, f"{b}{n}.bias": s[:1]}
        out |= {f"{b}norm{k}.{e}": (d,) for k in (1, 2) for e in ("weight", "bias")}
    return out


# -- small copies


def write(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a small copy of a release: random weights, quantized in NumPy by the definitions of the formats."""
    release = RELEASES[name]
    text = text_settings(release, small=True)
    quantized = dict(formats(name, small=True))
    rng = np.random.default_rng(seed)
    plain = {n: random_weight(rng, n, s, release.hybrid) for n, s in shapes(release, text).items()}
    amax = {m: float(np.abs(plain[f"{m}.weight"].astype(np.float32)).max()) for m in quantized}
    share_scales(amax)
    tensors: dict[str, np.ndarray] = {}
    for tensor, value in plain.items():
        module = tensor.removesuffix(".weight")
        kind = quantized.get(module) if tensor.endswith(".weight") else None
        tensors |= packed(tensor, value, kind, release.dialect, amax.get(module, 0.0))
    expected = table(name, small=True)
    for tensor, (dtype, shape) in expected.items():
        if tensor not in tensors:
            value = rng.standard_normal(shape) * 0.1 if "visual" in tensor else np.full(shape, 0.02)
            tensors[tensor] = value.astype(zoo.BF16 if dtype == "BF16" else np.float32)
    document = config(name, small=True)
    zoo.save(folder, tensors, document)
    if release.dialect == "modelopt":
        quantization = document["quantization_config"]
        values = {"quant_algo": quantization["quant_algo"], "kv_cache_quant_algo": "FP8"}
        values |= {"exclude_modules": quantization["ignore"]}
        if "quantized_layers" in quantization:
            values["quantized_layers"] = quantization["quantized_layers"]
        else:
            values["group_size"] = 16
        (folder / "hf_quant_config.json").write_text(
            json.dumps({"producer": quantization["producer"], "quantization": values})
        )
    if release.multimodal:
        (folder / "preprocessor_config.json").write_text(
            '{"image_processor_type": "Qwen2VLImageProcessorFast"}'
        )
    return folder


def random_weight(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], adds_one: bool
) -> np.ndarray:
    if name.endswith("A_log"):
        value = np.log(rng.uniform(1, 16, shape))
    elif len(shape) == 1:
        one = not adds_one or name.endswith("linear_attn.norm.weight")
        value = one + 0.1 * rng.standard_normal(shape)
    else:
        value = rng.standard_normal(shape) * (0.3 if "conv1d" in name else 1.5 / np.sqrt(shape[-1]))
    return value.astype(zoo.BF16)


GROUPS = (
    r"self_attn\.[qkv]_proj$",
    r"mlp\.(experts\.\d+\.|shared_expert\.)?(gate|up)_proj$",
    r"in_proj_(qkv|z)$",
)


def share_scales(amax: dict[str, float]) -> None:
    """Set the largest value of linears that servers merge to that of the group."""
    groups: dict[tuple[str, int], list[str]] = {}
    for module in amax:
        for i, pattern in enumerate(GROUPS):
            if re.search(pattern, module):
                groups.setdefault((module.rpartition(".")[0], i), []).append(module)
    for members in groups.values():
        amax |= dict.fromkeys(members, max(amax[m] for m in members))


def packed(
    tensor: str, value: np.ndarray, kind: str | None, dialect: str, amax: float
) -> dict[str, np.ndarray]:
    if kind is None:
        return {tensor: value}
    from annie_quant import nvfp4

    base, w = tensor.removesuffix(".weight"), value.astype(np.float32)
    if kind in ("nvfp4", "w4a16"):
        t = nvfp4.pack(w, tensor_scale=np.float32(amax) / np.float32(2688))
        codes, scale, one = (
            np.asarray(t.codes),
            np.asarray(t.block_scale),
            np.float32(t.tensor_scale),
        )
        if dialect == "compressed-tensors":
            ends = {"weight_packed": codes, "weight_scale": scale}
            ends |= {"weight_global_scale": np.array([1 / one], np.float32)}
            ends |= {"input_global_scale": np.array([250], np.float32)}
        else:
            ends = {"weight": codes, "weight_scale": scale}
            ends |= {"weight_scale_2": np.array(one), "input_scale": np.array(0.004, np.float32)}
        return {f"{base}.{end}": a for end, a in ends.items()}
    if kind == "fp8_channel":
        scale = (np.abs(w).max(axis=1, keepdims=True) / 448).astype(zoo.BF16)
        codes = np.clip(w / scale.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return {tensor: codes, f"{base}.weight_scale": scale}
    if kind == "fp8_block":
        rows, columns = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
        padded = np.zeros((rows * 128, columns * 128), np.float32)
        padded[: w.shape[0], : w.shape[1]] = w
        blocks = padded.reshape(rows, 128, columns, 128)
        scale = (np.abs(blocks).max(axis=(1, 3)) / 448).astype(zoo.BF16)
        codes = blocks / scale.astype(np.float32)[:, None, :, None]
        codes = np.clip(codes, -448, 448).reshape(padded.shape)[: w.shape[0], : w.shape[1]]
        return {tensor: codes.astype(ml_dtypes.float8_e4m3fn), f"{base}.weight_scale_inv": scale}
    scale = np.float32(amax / 448)
    codes = (w / scale).astype(ml_dtypes.float8_e4m3fn)
    return {
        tensor: codes,
        f"{base}.weight_scale": np.array(scale),
        f"{base}.input_scale": np.array(0.01, np.float32),
    }


def text_only(source: Path, folder: Path) -> Path:
    """Write the text model of a small multimodal copy, as fine-tuning tools store it: short prefix, settings on top."""
    tensors, settings = zoo.read(source), json.loads((source / "config.json").read_text())
    text = settings["text_config"]
    form = settings["architectures"][0].replace("ForConditionalGeneration", "ForCausalLM")
    shutil.copytree(source, folder)
    values = {
        n.replace("model.language_model.", "model."): t
        for n, t in tensors.items()
        if "visual" not in n
    }
    (folder / "preprocessor_config.json").unlink()
    return zoo.save(folder, values, {"architectures": [form], **text})
