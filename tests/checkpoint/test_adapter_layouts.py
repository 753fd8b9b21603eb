"""Adapters of other writers than peft's save_pretrained, and bases of another form than the class that was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import adapter_models
import numpy as np
import pytest
from adapter_models import Form, rewrite
from safetensors.torch import load_file, save_file

from annie_quant.checkpoint import ModelFolder, adapters, planned, write
from annie_quant.core.errors import CheckpointError

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DENSE = Form("qwen3.5", {"target_modules": ["q_proj", "up_proj", "in_proj_a"]})
MIXTURE = Form("qwen3.5-moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS})


class Trained:
    """A base, an adapter of it, and peft's merge."""

    def __init__(self, home: Path, form: Form) -> None:
        self.base = adapter_models.save_base(home / "base", form.kind)
        adapted = adapter_models.trained(self.base, form)
        self.adapter = adapter_models.save_adapter(adapted, home / "adapter")
        self.expected = adapter_models.merged_by_peft(adapted)

    def copy(self, target: Path) -> Path:
        return Path(shutil.copytree(self.adapter, target))


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Trained:
    return Trained(tmp_path_factory.mktemp("dense"), DENSE)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Trained:
    return Trained(tmp_path_factory.mktemp("mixture"), MIXTURE)


def bits(folder: Path) -> dict[str, bytes]:
    model = ModelFolder(folder)
    return {name: np.asarray(model.tensor(name)).tobytes() for name in model}


def expected_bits(expected: dict) -> dict[str, bytes]:
    import torch

    return {n: t.contiguous().view(torch.int16).numpy().tobytes() for n, t in expected.items()}


RENAMES = {
    "the adapter's own name": lambda n: n.replace(".weight", ".default.weight"),
    "no prefix": lambda n: n.removeprefix("base_model.model."),
    "the multimodal class": lambda n: n.replace(".model.layers", ".model.language_model.layers"),
    "an older multimodal class": lambda n: n.replace(
        ".model.layers", ".language_model.model.layers"
    ),
    "no inner model": lambda n: n.replace("base_model.model.model.", "base_model.model."),
    "FSDP": lambda n: n.replace(".self_attn.", "._fsdp_wrapped_module.self_attn."),
    "torch.compile": lambda n: n.replace("base_model.model.", "base_model.model._orig_mod."),
    "checkpointing": lambda n: n.replace(".mlp.", "._checkpoint_wrapped_module.mlp."),
}


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
def test_names_of_other_writers(rename, dense: Trained, tmp_path: Path) -> None:
    adapter = rewrite(dense.copy(tmp_path / "adapter"), rename)
    names = load_file(adapter / "adapter_model.safetensors").keys()
    assert names != load_file(dense.adapter / "adapter_model.safetensors").keys()
    adapters.merge(dense.base, adapter, tmp_path / "merged")
    assert bits(tmp_path / "merged") == expected_bits(dense.expected)


def multimodal(base: Path, folder: Path) -> dict:
    """Write the multimodal form of a text model, with a vision tower and a head for multi-token prediction whose layers have the
    decoder's numbers and names; return those further tensors."""
    import torch

    shutil.copytree(base, folder)
    text = json.loads((base / "config.json").read_text())
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": text | {"model_type": "qwen3_5_text"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        n.replace("model.", "model.language_model.", 1) if n.startswith("model.") else n: t
        for n, t in load_file(base / "model.safetensors").items()
    }
    torch.manual_seed(5)
    further = {}
    for name in ("mtp.layers.1.", "model.visual.layers.1.", "model.visual.blocks.1."):
        further[f"{name}self_attn.q_proj.weight"] = torch.randn(128, 64).bfloat16()
        further[f"{name}mlp.up_proj.weight"] = torch.randn(128, 64).bfloat16()
    save_file(tensors | further, folder / "model.safetensors", {"format": "pt"})
    return further


def test_a_text_adapter_in_a_multimodal_base_leaves_vision_and_mtp(
    dense: Trained, tmp_path: Path
) -> None:
    further = multimodal(dense.base, tmp_path / "base")
    record = adapters.merge(tmp_path / "base", dense.adapter, tmp_path / "merged")
    assert any("(mtp.*) is the base's" in note for note in record.notes)
    merged = bits(tmp_path / "merged")
    for name, raw in expected_bits(further).items():
        assert merged.pop(name) == raw
    named = {n.replace("model.language_model.", "model."): raw for n, raw in merged.items()}
    assert named == expected_bits(dense.expected)


def test_adapters_of_vision_and_mtp_change_these_only(dense: Trained, tmp_path: Path) -> None:
    multimodal(dense.base, tmp_path / "base")
    before = bits(tmp_path / "base")
    for place in ("mtp.layers.1", "model.visual.blocks.1"):

        def move(name: str, place: str = place) -> str:
            return name.replace("model.model.layers.1", f"model.{place}")

        adapter = rewrite(dense.copy(tmp_path / place / "adapter"), move, keep_only(place))
        record = adapters.merge(tmp_path / "base", adapter, tmp_path / place / "merged")
        is_trained = place.startswith("mtp")
        assert any("mtp.*" in note for note in record.notes) != is_trained
        after = bits(tmp_path / place / "merged")
        assert {n for n in after if after[n] != before[n]} == {
            f"{place}.self_attn.q_proj.weight",
            f"{place}.mlp.up_proj.weight",
        }


def keep_only(place: str):
    """Return a change that keeps the tensors with a place in their names."""

    def change(tensors: dict) -> None:
        for name in list(tensors):
            if place not in name:
                del tensors[name]

    return change


def test_shards_with_an_index_are_merged_into_shards(dense: Trained, tmp_path: Path) -> None:
    source = ModelFolder(dense.base)
    plan = [planned(name, np.asarray(source.tensor(name))) for name in source]
    write(tmp_path / "base", plan, shard_bytes=40_000)
    shutil.copyfile(dense.base / "config.json", tmp_path / "base/config.json")
    adapters.merge(tmp_path / "base", dense.adapter, tmp_path / "merged", shard_bytes=30_000)
    shards = list((tmp_path / "merged").glob("*.safetensors"))
    assert len(shards) > len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    assert (tmp_path / "merged/model.safetensors.index.json").exists()
    assert bits(tmp_path / "merged") == expected_bits(dense.expected)


# ---- mixtures of experts


def single_names(base: Path, folder: Path) -> Path:
    """Write a base with a name per expert, cut by torch."""
    shutil.copytree(base, folder)
    tensors = split_experts(load_file(base / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def split_experts(tensors: dict) -> dict:
    cut = {}
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        if parameter not in ("gate_up_proj", "down_proj"):
            cut[name] = tensor
            continue
        for number, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if parameter == "gate_up_proj":
                gate, up = matrix.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            for linear, part in parts.items():
                cut[f"{module}.{number}.{linear}.weight"] = part.contiguous().clone()
    return cut


def test_an_adapter_of_merged_experts_in_single_experts(mixture: Trained, tmp_path: Path) -> None:
    base = single_names(mixture.base, tmp_path / "base")
    adapters.merge(base, mixture.adapter, tmp_path / "merged")
    assert bits(tmp_path / "merged") == expected_bits(split_experts(mixture.expected))


@pytest.mark.parametrize("is_merged", [False, True], ids=["single experts", "merged experts"])
def test_an_adapter_of_single_experts(is_merged: bool, mixture: Trained, tmp_path: Path) -> None:
    """transformers 4 has one linear per expert; its adapters are compared with peft's product of each."""
    import torch

    base = mixture.base if is_merged else single_names(mixture.base, tmp_path / "base")
    torch.manual_seed(3)
    factors = {}
    expected = load_file(mixture.base / "model.safetensors")
    for number, linear in ((0, "gate_proj"), (0, "up_proj"), (3, "up_proj"), (2, "down_proj")):
        module = f"model.layers.1.mlp.experts.{number}.{linear}"
        parameter = "down_proj" if linear == "down_proj" else "gate_up_proj"
        rows = slice(32, 64) if linear == "up_proj" else slice(0, 32)
        rows = slice(None) if linear == "down_proj" else rows
        whole = expected[f"model.layers.1.mlp.experts.{parameter}"]
        weight = whole[number, rows]
        a = torch.randn(4, weight.shape[1]) * 0.1
        b = torch.randn(weight.shape[0], 4) * 0.1
        factors |= {f"base_model.model.{module}.lora_A.weight": a}
        factors |= {f"base_model.model.{module}.lora_B.weight": b}
        whole[number, rows] = (weight.float() + (b @ a) * 1.5).bfloat16()
    adapter = mixture.copy(tmp_path / "adapter")
    save_file(factors, adapter / "adapter_model.safetensors")
    rewrite(adapter, target_parameters=None, target_modules=["gate_proj", "up_proj", "down_proj"])
    adapters.merge(base, adapter, tmp_path / "merged")
    if not is_merged:
        expected = split_experts(expected)
    assert bits(tmp_path / "merged") == expected_bits(expected)


def swap(tensors: dict) -> None:
    """Write experts as peft 0.18 does: A over the outputs, B over the inputs, with the same products."""
    for name in [n for n in tensors if ".experts." in n and ".lora_A." in n]:
        a = tensors[name]
        b = tensors[name.replace("lora_A", "lora_B")]
        rank = len(a) // 4
        by_expert_a = a.reshape(4, rank, -1)
        by_expert_b = b.reshape(len(b), rank, 4)
        tensors[name] = by_expert_b.permute(2, 1, 0).reshape(4 * rank, -1).contiguous()
        swapped = by_expert_a.permute(2, 1, 0).reshape(a.shape[1], -1)
        tensors[name.replace("lora_A", "lora_B")] = swapped.contiguous()


def test_experts_of_peft_018_have_inputs_and_outputs_exchanged(
    mixture: Trained, tmp_path: Path
) -> None:
    adapter = rewrite(mixture.copy(tmp_path / "adapter"), change=swap, peft_version="0.18.1")
    adapters.merge(mixture.base, adapter, tmp_path / "merged")
    merged = bits(tmp_path / "merged")
    assert merged == expected_bits(mixture.expected)


def square(home: Path) -> Trained:
    """Return a mixture whose experts' down_proj is square, so that its shape shows no orientation."""
    settings = adapter_models.CLASSES["qwen3-moe"][1] | {"moe_intermediate_size": 64}
    adapter_models.CLASSES["square"] = ("Qwen3MoeConfig", settings)
    form = Form("square", {"target_modules": [], "target_parameters": EXPERTS[1:]})
    return Trained(home, form)


def test_the_orientation_of_square_experts_is_that_of_the_version(tmp_path: Path) -> None:
    trained = square(tmp_path)
    expected = expected_bits(trained.expected)
    for version, change in (("0.21.2", None), ("0.19.0", None), ("0.18.0.dev1", swap)):
        adapter = rewrite(
            trained.copy(tmp_path / version / "a"), change=change, peft_version=version
        )
        adapters.merge(trained.base, adapter, tmp_path / version / "merged")
        assert bits(tmp_path / version / "merged") == expected, version
    adapter = rewrite(trained.copy(tmp_path / "none"), peft_version=None)
    with pytest.raises(CheckpointError, match="depends on the version of peft"):
        adapters.merge(trained.base, adapter, tmp_path / "out")


def group(tensors: dict) -> None:
    """Write lora_B as Unsloth trained it until September 2026: an expert's columns next to each other."""
    for name in [n for n in tensors if ".experts." in n and ".lora_B." in n]:
        b = tensors[name]
        by_expert = b.reshape(len(b), -1, 4).permute(0, 2, 1)
        tensors[name] = by_expert.reshape(b.shape).contiguous()


def test_unsloths_two_orders_of_experts(mixture: Trained, tmp_path: Path) -> None:
    expected = expected_bits(mixture.expected)
    grouped = mixture.copy(tmp_path / "grouped")
    rewrite(grouped, change=group, lora_B_layout="grouped_by_expert")
    adapters.merge(mixture.base, grouped, tmp_path / "merged")
    assert bits(tmp_path / "merged") == expected
    ranked = rewrite(mixture.copy(tmp_path / "ranked"), lora_B_layout="rank_major")
    adapters.merge(mixture.base, ranked, tmp_path / "other")
    assert bits(tmp_path / "other") == expected


@pytest.mark.parametrize("sign", ["base", "mapping", "card"])
def test_unsloths_experts_without_a_stated_order_are_refused(
    sign: str, mixture: Trained, tmp_path: Path
) -> None:
    adapter = mixture.copy(tmp_path / "adapter")
    if sign == "card":
        (adapter / "README.md").write_text("Trained 2x faster with [Unsloth](https://unsloth.ai)")
    elif sign == "mapping":
        rewrite(adapter, auto_mapping={"base_model_class": "X", "unsloth_fixed": True})
    else:
        rewrite(adapter, base_model_name_or_path="unsloth/Qwen3.5-35B-A3B")
    with pytest.raises(CheckpointError, match="ordered the experts in lora_B in two ways"):
        adapters.merge(mixture.base, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_unsloths_name_of_an_expert_parameter(mixture: Trained, tmp_path: Path) -> None:
    """Where Unsloth unwraps the module, the parameter is in the name."""

    def rename(name: str) -> str:
        name = name.replace("experts.base_layer.lora", "experts.gate_up_proj.lora")
        return name.replace("experts.lora", "experts.down_proj.lora")

    adapter = rewrite(mixture.copy(tmp_path / "adapter"), rename, target_parameters=None)
    adapters.merge(mixture.base, adapter, tmp_path / "merged")
    assert bits(tmp_path / "merged") == expected_bits(mixture.expected)
