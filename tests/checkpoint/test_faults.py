"""Faults in lists of layers, shapes and files, and a check that every code of a finding has a test."""

from __future__ import annotations

import re
from pathlib import Path

import checkpoint_zoo as zoo
import ml_dtypes
import numpy as np
import pytest
from checkpoint_faults import DOWN, GATE, fp8_too
from paths import HELPERS, ROOT, TESTS

import annie_quant as aq
from annie_quant.checkpoint import ModelFolder, ShardError
from annie_quant.checkpoint.comparison import compare
from annie_quant.checkpoint.repairs import repair
from annie_quant.core.errors import CheckpointError

OUT = "model.layers.3.self_attn.o_proj"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    return zoo.source_and_nvfp4(tmp_path_factory.mktemp("checkpoints"))


def layers(config: dict) -> dict:
    return config["quantization_config"]["quantized_layers"]


def plain(t: dict, module: str) -> None:
    for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
        t.pop(f"{module}.{suffix}", None)
    t[f"{module}.weight"] = np.ones((256, 256), ml_dtypes.bfloat16)


LISTS = {
    "quantized and not in quantized_layers": (lambda t, c: layers(c).pop(DOWN), "not_listed", DOWN),
    "in quantized_layers and plain": (lambda t, c: plain(t, OUT), "listed_but_plain", OUT),
}


@pytest.mark.parametrize("fault", LISTS)
def test_lists_of_mixed_precision(checkpoints, tmp_path, fault):
    change, code, tensor = LISTS[fault]
    mixed = zoo.spoil(checkpoints[1], tmp_path / "mixed", fp8_too)
    (mixed / "hf_quant_config.json").unlink()
    assert aq.checkpoint.audit(mixed).ok
    bad = zoo.spoil(mixed, tmp_path / "bad", change)
    assert [(f.code, f.tensor) for f in aq.checkpoint.audit(bad).findings] == [(code, tensor)]
    assert repair(bad, None if code == "not_listed" else checkpoints[0]).remaining == []


@pytest.mark.parametrize(
    "name", ["self_attn.qkv_proj", "mlp.gate_up_proj", "linear_attn.in_proj_qkvz"]
)
def test_an_ignore_list_against_fused_names(checkpoints, tmp_path, name):
    """Servers look a fused matrix up by its parts, so an entry with the fused name excludes nothing."""
    entry = f"model.layers.3.{name}"
    bad = zoo.spoil(
        checkpoints[1],
        tmp_path / "bad",
        lambda t, c: c["quantization_config"]["ignore"].append(entry),
    )
    assert ("excluded_fused_name", entry) in {
        (f.code, f.tensor) for f in aq.checkpoint.audit(bad).findings
    }
    assert repair(bad).remaining == []


def narrow(columns: int):
    """Return a change that cuts a linear to `columns` columns and rounds the number of its scales up."""

    def change(t: dict, c: dict) -> None:
        t[f"{DOWN}.weight"] = t[f"{DOWN}.weight"][:, : columns // 2]
        t[f"{DOWN}.weight_scale"] = t[f"{DOWN}.weight_scale"][:, : -(-columns // 16)]

    return change


def test_rows_that_are_not_whole_blocks(checkpoints, tmp_path):
    audit = aq.checkpoint.audit(zoo.spoil(checkpoints[1], tmp_path / "x", narrow(40)))
    assert [(f.code, f.tensor) for f in audit.findings] == [("scale_shape", f"{DOWN}.weight_scale")]
    assert all(": no, scale_shape" in line for line in audit.summary.loads)


def test_rows_that_are_not_whole_ggml_blocks_are_sound(checkpoints, tmp_path):
    folder = zoo.spoil(checkpoints[1], tmp_path / "x", narrow(96))
    audit = aq.checkpoint.audit(folder)
    assert audit.ok and "rows not a multiple of 64 as 16-bit numbers" in audit.summary.loads[-1]


def test_a_weight_of_another_shape_than_the_source(checkpoints, tmp_path):
    audit = aq.checkpoint.audit(
        zoo.spoil(checkpoints[1], tmp_path / "x", narrow(96)), source=checkpoints[0]
    )
    assert [(f.code, f.tensor) for f in audit.findings] == [("source_shape", DOWN)]
    assert repair(tmp_path / "x", checkpoints[0]).remaining == []


def test_codes_of_three_dimensions(checkpoints, tmp_path):
    def fold(t: dict, c: dict) -> None:
        t[f"{GATE}.weight"] = t[f"{GATE}.weight"].reshape(4, 128, -1)

    audit = aq.checkpoint.audit(zoo.spoil(checkpoints[1], tmp_path / "x", fold))
    assert [(f.code, f.tensor) for f in audit.findings] == [("weight_shape", f"{GATE}.weight")]


def test_a_module_that_the_source_does_not_have(checkpoints, tmp_path):
    extra = "model.layers.9.mlp.down_proj"

    def change(t: dict, c: dict) -> None:
        for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            t[f"{extra}.{suffix}"] = t[f"{DOWN}.{suffix}"]

    audit = aq.checkpoint.audit(
        zoo.spoil(checkpoints[1], tmp_path / "x", change), source=checkpoints[0]
    )
    assert ("not_in_source", extra) in {(f.code, f.tensor) for f in audit.findings}


def test_a_source_of_another_size_is_named(checkpoints, tmp_path):
    """A wrong --source or --reference is a common mistake: no shape of it fits."""
    other = zoo.bf16(tmp_path / "other", hidden_size=128, intermediate_size=256)
    findings = {
        (f.code, f.tensor) for f in aq.checkpoint.audit(checkpoints[1], source=other).findings
    }
    assert {("source_shape", DOWN), ("source_shape", "model.norm.weight")} <= findings
    assert ("source_shape", "model.layers.0.linear_attn.dt_bias") not in findings, (
        "its shape is the source's"
    )
    for form in (checkpoints[0], checkpoints[1]):
        with pytest.raises(
            CheckpointError,
            match=r"model\.embed_tokens\.weight: \[1536, 256\] in .*, \[1536, 128\] in",
        ) as caught:
            compare(other, {"form": form})
        assert "of one model" in caught.value.hint


def test_settings_of_an_unquantized_checkpoint(checkpoints, tmp_path):
    config = ModelFolder(checkpoints[1]).config["quantization_config"]
    bad = zoo.spoil(
        checkpoints[0], tmp_path / "x", lambda t, c: c.update(quantization_config=config)
    )
    assert [f.code for f in aq.checkpoint.audit(bad).findings] == ["nothing_quantized"]


def test_files(checkpoints, tmp_path):
    """A missing shard, a tensor in two files, a tensor that is not in its file, weights of another format."""
    folder = zoo.bf16(tmp_path / "m", shard_bytes=1_000_000)
    shards = sorted(folder.glob("model-*"))
    whole = shards[0].read_bytes()
    shards[0].unlink()
    assert [f.code for f in aq.checkpoint.audit(folder).findings] == ["shard_missing"]
    shards[0].write_bytes(whole)
    shards[1].write_bytes(whole)
    assert [f.code for f in aq.checkpoint.audit(folder).findings] == ["tensor_missing"]
    (folder / "model.safetensors.index.json").unlink()
    assert [f.code for f in aq.checkpoint.audit(folder).findings] == ["duplicate_tensor"]
    shards[1].unlink()
    shards[1].symlink_to(shards[1].name)
    with pytest.raises(ShardError) as caught:
        ModelFolder(folder)
    assert caught.value.code in ("shard_unreadable", "shard_missing", "path_escapes")
    for shard in shards:
        shard.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    (audit,) = aq.checkpoint.audit(folder).findings
    assert audit.code == "no_weights" and "pytorch_model.bin" in audit.message
    with pytest.raises(ShardError, match="expected a model folder") as caught:
        aq.checkpoint.audit(tmp_path / "nowhere")
    assert caught.value.code == "no_folder"


def test_a_link_out_of_the_folder_is_not_copied(checkpoints, tmp_path):
    (tmp_path / "secret").write_text("not yours")
    bad = zoo.spoil(checkpoints[0], tmp_path / "bad", lambda t, c: None)
    (bad / "chat_template.jinja").unlink()
    (bad / "chat_template.jinja").symlink_to("../secret")
    with pytest.raises(ShardError, match="a link that leaves the folder"):
        aq.quantize.run("direct", bad, tmp_path / "out")
    quantized = zoo.spoil(checkpoints[1], tmp_path / "quantized", lambda t, c: None)
    (quantized / "LICENSE").symlink_to("/etc/hostname")
    with pytest.raises(ShardError, match="LICENSE: a link that leaves the folder"):
        aq.checkpoint.convert(quantized, "compressed-tensors", tmp_path / "ct")
    assert {f.name for f in tmp_path.iterdir()} == {"secret", "bad", "quantized"}


def test_every_code_has_a_test():
    package = ROOT / "annie_quant/checkpoint"
    code = "".join(f.read_text() for f in package.rglob("*.py"))
    codes = set(re.findall(r'(?:add|fault|ShardError)\(\s*"([a-z_]+)"', code))
    tests = "".join(
        f.read_text()
        for f in [
            *(TESTS / "checkpoint").glob("*.py"),
            *HELPERS.glob("*_faults.py"),
            HELPERS / "expert_zoo.py",
            TESTS / "models/test_published.py",
        ]
    )
    # raised where a GGUF file is written, and tested there by their messages
    elsewhere = {
        "vocab_size",
        "tokenizer_missing",
        "tokenizer_unknown",
        "index_mismatch",
        "shard_unreadable",
    }
    assert len(codes) > 30
    assert sorted(n for n in codes - elsewhere if f'"{n}"' not in tests) == []
