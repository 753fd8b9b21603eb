"""Adapters that peft makes are merged bit for bit as peft merges them in float32."""

from __future__ import annotations

import shutil
import tracemalloc
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
    "biases of Qwen3.5": Form("qwen3.5", {"target_modules": DELTANET, "bias": "all"}),
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


def test_the_base_alone_differs_from_pefts_merge(bases, tmp_path: Path) -> None:
    """The comparison above is one that can fail."""
    form = FORMS["lora"]
    adapted = adapter_models.trained(bases(form.kind), form)
    expected = adapter_models.merged_by_peft(adapted)
    changed = differing(bases(form.kind), expected)
    assert len(changed) == 15 and min(changed.values()) > 1


def test_a_rank_above_128_differs_at_most_by_the_next_number(bases, tmp_path: Path) -> None:
    """NumPy's and torch's products of so many terms add them in blocks of different sizes."""
    import torch

    form = Form("llama", {"target_modules": ALL_LINEAR, "r": 256})
    base = bases(form.kind)
    adapted = adapter_models.trained(base, form)
    adapter = adapter_models.save_adapter(adapted, tmp_path / "adapter")
    adapters.merge(base, adapter, tmp_path / "merged")
    expected = adapter_models.merged_by_peft(adapted)
    changed = 0
    for name, tensor in tensors_of(tmp_path / "merged").items():
        distance = tensor.view(torch.int16).int() - expected[name].view(torch.int16).int()
        assert distance.abs().max() <= 1
        changed += int(distance.count_nonzero())
    assert changed < 200


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_adapter_in_16_bits_is_merged_as_peft_loads_it(dtype, bases, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel

    form = FORMS["patterns"]
    base = bases(form.kind)
    adapter = adapter_models.save_adapter(adapter_models.trained(base, form), tmp_path / "adapter")

    def halve(tensors: dict) -> None:
        tensors.update({n: t.to(getattr(torch, dtype)) for n, t in tensors.items()})

    adapter_models.rewrite(adapter, change=halve)
    adapters.merge(base, adapter, tmp_path / "merged")
    loaded = PeftModel.from_pretrained(adapter_models.load_float32(base), adapter)
    assert differing(tmp_path / "merged", adapter_models.merged_by_peft(loaded)) == {}


@pytest.mark.parametrize("name", ["lora", "rslora", "experts", "dora"])
def test_a_float32_base_has_pefts_sums_unrounded(name: str, bases, tmp_path: Path) -> None:
    """DoRA's norms are sums in another order; all other bits are equal."""
    import torch
    from safetensors.torch import save_file

    form = FORMS[name]
    base = Path(shutil.copytree(bases(form.kind), tmp_path / "base"))
    noisy = {n: t.float() * (1 + 2**-12) for n, t in tensors_of(base).items()}
    save_file(noisy, base / "model.safetensors", {"format": "pt"})
    adapted = adapter_models.trained(base, form)
    adapter = adapter_models.save_adapter(adapted, tmp_path / "adapter")
    adapters.merge(base, adapter, tmp_path / "merged")
    expected = adapted.merge_and_unload().state_dict()
    for tensor_name, tensor in tensors_of(tmp_path / "merged").items():
        assert tensor.dtype == torch.float32
        if name == "dora":
            assert torch.allclose(tensor, expected[tensor_name], rtol=1e-6, atol=0)
        else:
            assert torch.equal(tensor, expected[tensor_name]), tensor_name


def test_memory_is_that_of_a_block_of_rows(tmp_path: Path) -> None:
    """One tensor of 64 MB is merged in pieces of 16 M elements."""
    import ml_dtypes
    import numpy as np

    from annie_quant.checkpoint.adapters.updates import (
        ChangeSize,
        LowRankUpdate,
        TensorUpdate,
        merged_rows,
    )

    rows = (1 << 25) // 1024
    weight = np.ones((rows, 1024), ml_dtypes.bfloat16)

    class Base:
        def tensor(self, name: str) -> np.ndarray:
            return weight

        def release(self, name: str, begin: int, end: int) -> None: ...

    left = np.ones((rows, 1), np.float32)
    product = LowRankUpdate(0, left, np.full((1, 1024), 0.5, np.float32), 2.0)
    update = TensorUpdate("w", "w", "BF16", weight.shape, "mlp", low_rank=[product])
    tracemalloc.start()
    for block in merged_rows(update, Base(), ChangeSize()):  # type: ignore[arg-type]
        assert (block == 2).all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4.5 * 4 * (1 << 24)
