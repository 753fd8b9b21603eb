"""Repair: every fault that can be repaired is, sound tensors keep their bytes, and the audit of the result is clean."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import checkpoint_zoo as zoo
import ml_dtypes
import numpy as np
import pytest
from checkpoint_faults import DOWN, FAULTS, folded

import annie_quant as aq
from annie_quant.checkpoint import ModelFolder
from annie_quant.checkpoint.repairs import repair
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.models.formats import W4A16

pytest.importorskip("annie_quant.nvfp4", reason="the C codec is not built")

# Only calibration could restore these, so only the weights stay quantized.
WEIGHT_ONLY = {"no input scale", "zero input scale", "negative input scale", "input divisor"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    return zoo.source_and_nvfp4(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_repaired_from_the_source(checkpoints, tmp_path, fault):
    source, sound = checkpoints
    bad = zoo.spoil(sound, tmp_path / "bad", FAULTS[fault][0])
    result = repair(bad, source)
    assert result.remaining == [], (result.actions, result.remaining)
    assert result.actions
    before, after = zoo.read(sound), zoo.read(Path(result.path))
    if fault in WEIGHT_ONLY:
        before = {n: t for n, t in before.items() if not n.endswith("input_scale")}
        assert any("input scales removed" in a for a in result.actions)
    if fault.startswith("tensors without the prefix"):
        before = {n.replace("model.", "model.language_model.", 1): t for n, t in before.items()}
    if fault == "q and v input scales":
        assert "largest" in result.actions[0]
        before |= {
            f"model.layers.3.self_attn.{k}_proj.input_scale": np.array(0.005, np.float32)
            for k in "qkv"
        }
    assert {n: t.tobytes() for n, t in after.items()} == {n: t.tobytes() for n, t in before.items()}
    assert not list(bad.glob("*repaired*"))


@pytest.mark.parametrize("right", [True, False])
def test_awq_becomes_plain_nvfp4(checkpoints, tmp_path, right):
    """A folded layer with an activation scale gets the source's norms, new codes, and no pre_quant_scale."""
    source, sound = checkpoints
    change, norm = folded(source, right)

    def awq(t: dict, c: dict) -> None:
        change(t, c)
        t[f"{DOWN}.pre_quant_scale"] = np.full(512, 0.5, ml_dtypes.bfloat16)
        c["quantization_config"]["quant_algo"] = "NVFP4_AWQ"

    bad = zoo.spoil(sound, tmp_path / "awq", awq)
    result = repair(bad, source)
    assert result.remaining == []
    after, original = zoo.read(Path(result.path)), zoo.read(source)
    assert after[norm].tobytes() == original[norm].tobytes()
    assert not any(n.endswith("pre_quant_scale") for n in after)
    assert ModelFolder(result.path).config["quantization_config"]["quant_algo"] == "NVFP4"
    # inputs were halved before they met the scale on disk, so the repaired scale must be twice as large
    assert float(after[f"{DOWN}.input_scale"]) == pytest.approx(2 * 0.004)


# -- names for old and new runtimes


def small(folder: Path, file: str) -> dict:
    return json.loads((folder / file).read_text())


def test_names_for_old_runtimes_and_back(checkpoints, tmp_path):
    """Classes, the tensors' prefix and the multimodal configuration; converting back gives the same files."""
    source, sound = checkpoints
    new = shutil.copytree(sound, tmp_path / "new")
    (new / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "TokenizersBackend", "kept": 1})
    )
    (new / "processor_config.json").write_text(
        json.dumps(
            {"processor_class": "Qwen3VLProcessor", "video_processor_type": "Qwen3VLVideoProcessor"}
        )
    )
    assert any(
        "4.57: no, model_type 'qwen3_5_text'" in line
        for line in aq.checkpoint.audit(new).summary.loads
    )
    done = repair(new, source, tmp_path / "old", names="old")
    old = tmp_path / "old"
    assert done.remaining == [] and len(done.actions) >= 8
    config = small(old, "config.json")
    assert config["model_type"] == "qwen3_5" and config["architectures"] == [
        "Qwen3_5ForConditionalGeneration"
    ]
    assert (
        config["text_config"]["model_type"] == "qwen3_5_text"
        and config["text_config"]["hidden_size"] == 256
    )
    assert small(old, "tokenizer_config.json") == {"tokenizer_class": "Qwen2Tokenizer", "kept": 1}
    assert small(old, "processor_config.json") == {
        "processor_class": "Qwen2VLProcessor",
        "video_processor_type": "Qwen2VLVideoProcessor",
    }
    stub = small(old, "preprocessor_config.json")
    assert stub["image_processor_type"] == "Qwen2VLImageProcessor" and stub["patch_size"] == 16
    names = set(zoo.read(old))
    assert (
        "model.language_model.layers.0.mlp.gate_proj.weight" in names and "lm_head.weight" in names
    )
    assert not any(n.startswith("model.layers") for n in names)
    assert "4.57: yes" in " ".join(aq.checkpoint.audit(old).summary.loads)
    back = repair(old, source, tmp_path / "back", names="new")
    assert back.remaining == []
    a, b = zoo.read(new), zoo.read(tmp_path / "back")
    assert {n: t.tobytes() for n, t in a.items()} == {n: t.tobytes() for n, t in b.items()}
    for file in (
        "config.json",
        "hf_quant_config.json",
        "tokenizer_config.json",
        "processor_config.json",
    ):
        assert small(tmp_path / "back", file) == small(new, file), file


def test_a_checkpoint_with_vision_keeps_the_multimodal_form(checkpoints, tmp_path):
    def vision(t: dict, c: dict) -> None:
        zoo.multimodal(t, c)
        t["model.visual.pos_embed.weight"] = np.ones((4, 4), ml_dtypes.bfloat16)

    folder = zoo.spoil(checkpoints[1], tmp_path / "x", vision)
    (folder / "hf_quant_config.json").unlink()
    done = repair(folder, None, tmp_path / "new", names="new")
    assert done.remaining == [] and "model.visual.pos_embed.weight" in zoo.read(tmp_path / "new")
    assert small(tmp_path / "new", "config.json")["model_type"] == "qwen3_5"
    assert (tmp_path / "new/preprocessor_config.json").exists()


def test_the_source_s_own_processor_is_used(checkpoints, tmp_path):
    source = shutil.copytree(checkpoints[0], tmp_path / "source")
    (source / "preprocessor_config.json").write_text(
        '{"image_processor_type": "Qwen2VLImageProcessorFast", "mine": 7}'
    )
    done = repair(checkpoints[1], source, tmp_path / "old", names="old")
    assert done.remaining == []
    preprocessor = small(tmp_path / "old", "preprocessor_config.json")
    assert preprocessor == {"image_processor_type": "Qwen2VLImageProcessor", "mine": 7}


@pytest.mark.parametrize("names", ["old", "new"])
def test_both_forms_load_in_transformers(checkpoints, tmp_path, names):
    """transformers' own classes have the renamed tensors' names."""
    transformers = pytest.importorskip("transformers", reason="the quantize extra is not installed")
    import torch

    done = repair(checkpoints[1], checkpoints[0], tmp_path / names, names=names)
    config = transformers.AutoConfig.from_pretrained(done.path)
    text = config.get_text_config()
    assert config.model_type == {"old": "qwen3_5", "new": "qwen3_5_text"}[names]
    assert (text.hidden_size, text.num_hidden_layers, text.layer_types) == (
        256,
        4,
        zoo.CONFIG["layer_types"],
    )
    assert text.linear_num_value_heads == 4 and text.vocab_size == 1536
    kind = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        expected = set(kind(config).state_dict())
    there = {n for n in ModelFolder(done.path) if not n.endswith(("_scale", "_scale_2"))}
    assert {n for n in expected if "visual." not in n} == there


def test_only_bad_blocks_are_packed_again(checkpoints, tmp_path):
    """Codes from a better search are kept, except for those of corrupted blocks."""
    source, _ = checkpoints
    swept = tmp_path / "swept"
    aq.quantize.run("direct", source, swept, scale="sweep")
    module = "model.layers.1.mlp.gate_proj"
    bad = zoo.spoil(swept, tmp_path / "bad", lambda t, c: spoil_block(t, f"{module}.weight_scale"))
    result = repair(bad, source)
    assert result.remaining == [] and f"{module}: 1 blocks quantized again" in result.actions[0]
    before, after = zoo.read(swept), zoo.read(Path(result.path))
    changed = {n for n in before if before[n].tobytes() != after[n].tobytes()}
    assert changed <= {f"{module}.weight", f"{module}.weight_scale"}
    different = np.argwhere(before[f"{module}.weight"] != after[f"{module}.weight"])
    assert all(row == 3 and 5 * 8 <= column < 6 * 8 for row, column in different)


def spoil_block(t: dict, name: str) -> None:
    t[name].view(np.uint8)[3, 5] = 0x7F


def test_a_group_of_32_is_kept(checkpoints, tmp_path):
    """ModelOpt's NVFP4_MLP_WEIGHT_ONLY_CFG has blocks of 32; a linear that is packed again has them, too."""
    from annie_quant import nvfp4
    from annie_quant.checkpoint.dialects import modelopt

    plain = zoo.read(checkpoints[0])

    def wide(t: dict, c: dict) -> None:
        for name in [n for n in t if n.endswith(".weight_scale")]:
            module = name.removesuffix(".weight_scale")
            scale = float(t[f"{module}.weight_scale_2"])
            packed = nvfp4.pack(plain[f"{module}.weight"], tensor_scale=scale, group=32)
            t[f"{module}.weight"], t[name] = (
                np.asarray(packed.codes),
                np.asarray(packed.block_scale),
            )
            t.pop(f"{module}.input_scale")
        c["quantization_config"] = modelopt.settings(
            {n[:-13]: W4A16 for n in t if n.endswith(".weight_scale")},
            c["quantization_config"]["ignore"],
            32,
        ).quantization_config

    folder = zoo.spoil(checkpoints[1], tmp_path / "wide", wide)
    (folder / "hf_quant_config.json").unlink()
    assert aq.checkpoint.audit(folder, source=checkpoints[0]).ok
    bad = zoo.spoil(folder, tmp_path / "bad", lambda t, c: t.pop(f"{DOWN}.weight_scale_2"))
    result = repair(bad, checkpoints[0])
    assert result.remaining == []
    a, b = zoo.read(folder), zoo.read(Path(result.path))
    assert {n: t.tobytes() for n, t in a.items()} == {n: t.tobytes() for n, t in b.items()}


def test_a_sound_checkpoint_stays_as_it_is(checkpoints, tmp_path):
    source, sound = checkpoints
    result = repair(sound, source, tmp_path / "same")
    assert result.actions == [] and result.remaining == []
    a, b = zoo.read(sound), zoo.read(tmp_path / "same")
    assert {n: t.tobytes() for n, t in a.items()} == {n: t.tobytes() for n, t in b.items()}


def test_settings_are_repaired_without_the_source(checkpoints, tmp_path):
    bad = zoo.spoil(checkpoints[1], tmp_path / "bad", FAULTS["only hf_quant_config"][0])
    assert repair(bad).remaining == []


def test_a_repair_that_needs_the_source_asks_for_it(checkpoints, tmp_path):
    bad = zoo.spoil(checkpoints[1], tmp_path / "bad", FAULTS["NaN block scale"][0])
    with pytest.raises(UsageError, match="can only be repaired from the bf16 checkpoint") as caught:
        repair(bad)
    assert "--source" in caught.value.hint and not (tmp_path / "bad-repaired").exists()


def test_other_folders_are_refused(checkpoints, tmp_path):
    with pytest.raises(CheckpointError, match="no NVFP4 in ModelOpt's layout"):
        repair(checkpoints[0], checkpoints[0], tmp_path / "x")
    with pytest.raises(UsageError, match="is the checkpoint itself"):
        repair(checkpoints[1], checkpoints[0], checkpoints[1])
    assert aq.checkpoint.audit(checkpoints[1]).ok
