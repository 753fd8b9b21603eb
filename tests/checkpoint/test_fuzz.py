"""Broken configurations: an audit gives findings or one clear error, and never crashes."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from fuzz.mutate import mutate_json

import annie_quant as aq
from annie_quant.checkpoint import ModelFolder, ShardError, planned, write
from annie_quant.checkpoint.dialects import compressed_tensors, modelopt
from annie_quant.checkpoint.shards import INDEX
from annie_quant.core.errors import CheckpointError
from annie_quant.models.formats import FP8, NVFP4

FUZZ = int(os.environ.get("ANNIE_QUANT_FUZZ", "4000"))


def small(folder: Path, dialect) -> tuple[dict, dict]:
    """Write a checkpoint of two linears, and return its two configurations."""
    rng = np.random.default_rng(0)
    tensors = {
        "model.norm.weight": np.ones(64, ml_dtypes.bfloat16),
        "lm_head.weight": np.ones((4, 64), ml_dtypes.bfloat16),
    }
    ct = dialect is compressed_tensors
    for k in ("gate_proj", "up_proj"):
        p = f"model.layers.0.mlp.{k}."
        tensors |= {
            p + ("weight_packed" if ct else "weight"): rng.integers(
                1, 255, (8, 32), dtype=np.uint8
            ),
            p + "weight_scale": np.ones((8, 4), ml_dtypes.float8_e4m3fn),
            p + ("weight_global_scale" if ct else "weight_scale_2"): np.array(
                [50.0] if ct else 0.02, np.float32
            ),
            p + ("input_global_scale" if ct else "input_scale"): np.array(
                [50.0] if ct else 0.02, np.float32
            ),
        }
    write(folder, [planned(n, t) for n, t in tensors.items()])
    formats = {f"model.layers.0.mlp.{k}": NVFP4 for k in ("gate_proj", "up_proj")}
    settings = dialect.settings(formats, ["lm_head"], 16)
    config = {"model_type": "qwen3_5_text", "quantization_config": settings.quantization_config}
    return config, settings.files.get("hf_quant_config.json", {})


@pytest.mark.parametrize("dialect", [modelopt, compressed_tensors], ids=lambda d: d.NAME)
def test_readers_take_any_json(dialect):
    """The settings' readers give a QuantConfig for any JSON object."""
    rng = random.Random(5)
    base = dialect.settings({"a": NVFP4, "b": FP8}, ["lm_head", "x*"], 16).quantization_config
    for _ in range(FUZZ):
        config = dialect.read(mutate_json(rng, base))
        assert isinstance(config.algo, str) and (config.group is None or config.group > 0)
        assert all(isinstance(e, str) for e in config.excluded)


@pytest.mark.parametrize("dialect", [modelopt, compressed_tensors], ids=lambda d: d.NAME)
def test_audit_takes_any_configuration(tmp_path, dialect):
    config, second = small(tmp_path, dialect)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if second:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(second))
    assert aq.checkpoint.audit(tmp_path).ok, aq.checkpoint.audit(tmp_path).findings
    rng = random.Random(6)
    codes = set()
    for _ in range(max(200, FUZZ // 50)):
        (tmp_path / "config.json").write_text(json.dumps(mutate_json(rng, config)))
        if second:
            (tmp_path / "hf_quant_config.json").write_text(
                json.dumps(mutate_json(rng, second) if rng.random() < 0.5 else second)
            )
        try:
            audit = aq.checkpoint.audit(tmp_path)
        except CheckpointError as error:
            assert "\n" not in error.message
            continue
        codes |= {f.code for f in audit.findings}
        json.dumps(audit.to_dict())
    assert len(codes) >= 3  # the mutations reach the checks


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"{", b"\xff\xfe", b'{"quantization_config": []}', b"[" * 100_000],
)
def test_broken_config_files_are_findings(tmp_path, content):
    config, _ = small(tmp_path, modelopt)
    (tmp_path / "config.json").write_bytes(content)
    assert not aq.checkpoint.audit(tmp_path).ok
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_bytes(content)
    audit = aq.checkpoint.audit(tmp_path)
    assert "config_unreadable" in {f.code for f in audit.findings}


def test_a_mutated_gguf_is_read_or_refused(tmp_path):
    """Flipped bytes and extreme numbers in a GGUF header: tensors inside the file, or one clear error; never a hang."""
    gguf = pytest.importorskip("gguf", reason="the serve extra is not installed")
    from annie_quant.checkpoint.gguf.reader import open_gguf

    path = tmp_path / "x.gguf"
    out = gguf.GGUFWriter(path, "qwen35")
    out.add_name("x")
    out.add_array("some.array", ["a", "b", "c"])
    out.add_tensor("a.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    out.add_tensor("b.weight", np.arange(32, dtype=np.float32))
    for step in (
        out.write_header_to_file,
        out.write_kv_data_to_file,
        out.write_tensors_to_file,
        out.close,
    ):
        step()
    whole = path.read_bytes()
    assert set(open_gguf(path)) == {"a.weight", "b.weight"}
    rng = random.Random(8)
    refused = 0
    for _ in range(max(500, FUZZ // 10)):
        raw = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(330)
            if rng.random() < 0.5:
                raw[at] = rng.randrange(256)
            else:
                raw[at : at + 8] = rng.choice(
                    [0, 1, 255, 1 << 31, 1 << 40, (1 << 64) - 1]
                ).to_bytes(8, "little")
        if rng.random() < 0.2:
            del raw[rng.randrange(len(raw)) :]
        path.write_bytes(raw)
        try:
            tensors = open_gguf(path)
        except CheckpointError as error:
            refused += 1
            assert "\n" not in error.message
        else:
            assert all(t.data.nbytes <= len(raw) for t in tensors.values())
    assert refused > 100


def test_any_index_is_read_or_refused(tmp_path):
    """Mutated index files over three shards: every tensor is in the folder, or one ShardError; nothing is read outside."""
    tensors = {f"t{i}": np.full(4, i, np.float32) for i in range(6)}
    write(tmp_path / "m", [planned(n, t) for n, t in tensors.items()], 32)
    (tmp_path / "outside.safetensors").write_bytes(
        next((tmp_path / "m").glob("*.safetensors")).read_bytes()
    )
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    wild = [*names, "../outside.safetensors", str(tmp_path / "outside.safetensors"), ".", "..", "", "\0", "a/b", "x" * 300,
            "config.json", "model.safetensors", "a\nb", "\ud800"]  # fmt: skip
    rng = random.Random(9)
    opened = refused = 0
    for _ in range(max(500, FUZZ // 20)):
        changed = copy.deepcopy(index)
        for _ in range(rng.randint(1, 3)):
            key = rng.choice([*tensors, "t9", "", "../t", "t\n", "\ud800"])
            changed["weight_map"][key] = rng.choice(wild)
            if rng.random() < 0.2:
                changed["weight_map"].pop(rng.choice(list(changed["weight_map"])), None)
        text = json.dumps(changed if rng.random() < 0.7 else mutate_json(rng, changed))
        if rng.random() < 0.1:
            text = text[: rng.randrange(len(text))]
        (tmp_path / "m" / INDEX).write_text(text)
        try:
            folder = ModelFolder(tmp_path / "m")
        except ShardError as error:
            refused += 1
            assert "\n" not in error.message and len(error.message) < 500
            continue
        opened += 1
        assert all((folder.tensor(n) == int(n[1:])).all() for n in folder)
        assert {s.path.parent for s in folder.shards.values()} == {tmp_path / "m"}
    assert opened and refused
