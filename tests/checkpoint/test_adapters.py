"""Adapters that peft makes are merged bit for bit as peft merges them in float32."""

from __future__ import annotations

from pathlib import Path

import adapter_models
import pytest
from adapter_models import Form

from annie_quant.checkpoint import adapters

ALL_LINEAR = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
]
DELTANET = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
EXPERTS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
FORMS = {
    "lora": Form("qwen3.5", {"target_modules": ALL_LINEAR + DELTANET}),
    "rslora": Form("llama", {"target_modules": ALL_LINEAR, "use_rslora": True}),
    "dora": Form("qwen3.5", {"target_modules": ALL_LINEAR + DELTANET, "use_dora": True}),
    "patterns": Form(
        "llama",
        {
            "target_modules": ALL_LINEAR,
            "rank_pattern": {"q_proj": 8, "model.layers.1.mlp.up_proj": 2},
            "alpha_pattern": {r"layers\.0\.self_attn\..*": 3, "^model.layers.1.mlp.down_proj": 9},
        },
    ),
    "bias of all": Form("llama-bias", {"target_modules": ["q_proj", "up_proj"], "bias": "all"}),
    "bias of adapted": Form("llama-bias", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "bias of lora_B": Form("llama-bias", {"target_modules": ALL_LINEAR, "lora_bias": True}),
    "modules to save": Form(
        "qwen3.5",
        {
            "target_modules": ALL_LINEAR,
            "modules_to_save": ["lm_head", "embed_tokens", "input_layernorm", "linear_attn"],
        },
    ),
    "embedding and head": Form("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "trained tokens": Form(
        "llama", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 95]}
    ),
    "trained tokens of both": Form(
        "llama",
        {
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [7]},
        },
    ),
    "added tokens": Form("llama", {"target_modules": ["q_proj"]}, tokens=100),
    "added tokens, saved modules": Form(
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        tokens=100,
    ),
    "added tokens, adapted": Form(
        "llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, tokens=100
    ),
    "added tokens, trained alone": Form(
        "llama", {"target_modules": ["q_proj"], "trainable_token_indices": [97, 98]}, tokens=100
    ),
    "experts": Form("qwen3.5-moe", {"target_modules": DELTANET, "target_parameters": EXPERTS}),
    "one expert parameter": Form(
        "qwen3-moe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": EXPERTS[:1],
            "rank_pattern": {"experts.down_proj": 8},
            "alpha_pattern": {"experts.down_proj": 5},
        },
    ),
    "router as a parameter": Form(
        "qwen3-moe", {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}
    ),
    "tied, trained tokens": Form(
        "llama-tied", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 95]}
    ),
    "tied, added tokens": Form("llama-tied", {"target_modules": ["q_proj"]}, tokens=100),
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return a function that gives the base of a kind, made once."""
    home = tmp_path_factory.mktemp("bases")

    def base(kind: str) -> Path:
        folder = home / kind
        if not folder.exists():
            adapter_models.save_base(folder, kind)
        return folder

    return base


def tensors_of(folder: Path):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def differing(merged: Path, expected: dict) -> dict[str, int]:
    """Return tensor → number of elements that differ from peft's merge; -1 for another shape."""
    tensors = tensors_of(merged)
    differences = {}
    for name, tensor in tensors.items():
        other = expected[name]
        same_shape = tensor.shape == other.shape and tensor.dtype == other.dtype
        differences[name] = int((tensor != other).sum()) if same_shape else -1
    return {name: count for name, count in differences.items() if count}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_merge_has_the_bits_of_pefts(form: Form, bases, tmp_path: Path) -> None:
    base = bases(form.kind)
    adapted = adapter_models.trained(base, form)
    adapter = adapter_models.save_adapter(adapted, tmp_path / "adapter")
    adapters.merge(base, adapter, tmp_path / "merged")
    expected = adapter_models.merged_by_peft(adapted)
    assert differing(tmp_path / "merged", expected) == {}
    written = set(tensors_of(tmp_path / "merged"))
    assert written >= expected.keys() - {"lm_head.weight"}
