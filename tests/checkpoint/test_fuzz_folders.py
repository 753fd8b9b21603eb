"""Checkpoint folders that a fuzzer changes by their grammar: tensors, shards, index, settings.

Every command ends in one line or a result, and bytes that were planted in a tensor nobody understands are in no result.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import checkpoint_zoo as zoo
import ml_dtypes
import numpy as np
import pytest
from paths import ROOT

import annie_quant as aq
from annie_quant.checkpoint import ModelFolder, planned, write
from annie_quant.checkpoint.checks.contents import read_input
from annie_quant.checkpoint.shards import INDEX
from annie_quant.core.errors import AnnieError
from annie_quant.quantize import run

ROUNDS = int(os.environ.get("ANNIE_QUANT_FUZZ_FOLDERS", "60"))
TINY = ROOT / "annie_quant/assets/tiny-annie"
MARKER = bytes(range(0x51, 0x61))  # 16 bytes that no sound tensor has in a row
TYPES = (
    np.uint8,
    np.int8,
    np.int32,
    np.uint32,
    np.float32,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
)
NAMES = (
    "model.layers.0.mlp.experts.w13_weight",
    "model.layers.1.mlp.up_proj.qweight",
    "model.layers.1.mlp.up_proj.codes",
    "model.layers.2.mlp.up_proj_packed",
    "model.layers.2.moe.gate.weight",
    "model.layers.3.self_attn.q_scale",
    "model.layers.3.self_attn.qkv_proj.weight",
    "model.layers.3.self_attn.q_proj.lora_A.default.weight",
    "optimizer.exp_avg",
    "score.weight",
    "mtp.other.weight",
    "_orig_mod.model.layers.0.mlp.up_proj.weight",
)
Tensors = dict[str, np.ndarray]
FIELDS = (
    "model_type",
    "architectures",
    "num_hidden_layers",
    "vocab_size",
    "hidden_size",
    "tie_word_embeddings",
    "text_config",
    "quantization_config",
    "eos_token_id",
    "layer_types",
)
VALUES: tuple[object, ...] = (None, -1, 0, 3, 10**9, "x", [], {}, [1, "a"], True, 0.5)


def plant(rng: random.Random, t: Tensors, c: dict) -> None:
    """Add a tensor that nobody knows, full of the marker."""
    dtype = np.dtype(rng.choice(TYPES))
    shape = rng.choice([(16,), (16, 64), (4, 16, 64)])
    raw = np.frombuffer(MARKER * (int(np.prod(shape)) * dtype.itemsize // 16), dtype)
    t[rng.choice(NAMES)] = raw.reshape(shape).copy()


def retype(rng: random.Random, t: Tensors, c: dict) -> None:
    """Store a tensor's place with integers or codes of the marker."""
    name = rng.choice(sorted(t))
    dtype = np.dtype(rng.choice([np.uint8, np.int8, np.int32, np.uint32]))
    raw = np.frombuffer(MARKER * max(1, t[name].size * dtype.itemsize // 16 + 1), dtype)
    t[name] = raw[: t[name].size].reshape(t[name].shape).copy()


def rename(rng: random.Random, t: Tensors, c: dict) -> None:
    name = rng.choice(sorted(t))
    parts = name.split(".")
    at = rng.randrange(len(parts))
    parts[at] = rng.choice([parts[at] + "x", "model", "7", "", "weight", "layers"])
    t[".".join(parts) or "x"] = t.pop(name)


def reshape(rng: random.Random, t: Tensors, c: dict) -> None:
    name = rng.choice(sorted(t))
    array = t[name]
    change = rng.choice(
        [lambda a: a.reshape(-1), lambda a: a[:-1], lambda a: a[None], lambda a: a[:0]]
    )
    t[name] = change(np.atleast_1d(array)).copy()


def remove(rng: random.Random, t: Tensors, c: dict) -> None:
    t.pop(rng.choice(sorted(t)))


def double(rng: random.Random, t: Tensors, c: dict) -> None:
    name = rng.choice([n for n in sorted(t) if n.startswith("model.")])
    t[name.replace("model.", "model.language_model.", 1)] = t[name].copy()


def setting(rng: random.Random, t: Tensors, c: dict) -> None:
    target = c
    quant = c.get("quantization_config")
    if isinstance(quant, dict) and quant and rng.random() < 0.5:
        target = quant
    name = rng.choice(sorted(target) or ["x"]) if rng.random() < 0.5 else rng.choice(FIELDS)
    target[name] = rng.choice(VALUES)


def move_settings(rng: random.Random, t: Tensors, c: dict) -> None:
    """Move fields into text_config, or the settings of the quantization one level down."""
    quant = c.get("quantization_config")
    if isinstance(quant, dict) and rng.random() < 0.5:
        c["quantization_config"] = {
            "quant_method": quant.get("quant_method"),
            "quantization": quant,
        }
        return
    names = rng.sample(sorted(c), min(3, len(c)))
    c["text_config"] = {name: c.pop(name) for name in names}


CHANGES = (plant, plant, retype, rename, reshape, remove, double, setting, move_settings)


def spread(rng: random.Random, folder: Path, tensors: Tensors) -> None:
    """Write the tensors over shards, and fault their index or a copy."""
    shutil.rmtree(folder / "shards", ignore_errors=True)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        write(folder / "shards", [planned(n, tensors[n]) for n in part])
        shutil.move(folder / "shards/model.safetensors", folder / file)
        weight_map |= dict.fromkeys(part, file)
    shutil.rmtree(folder / "shards")
    fault = rng.choice(
        ["none", "unlisted", "other file", "no index", "further file", "unknown file"]
    )
    victim = rng.choice(names)
    if fault == "unlisted":
        weight_map.pop(victim)
    elif fault == "other file":
        weight_map[victim] = f"model-{rng.choice([1, 2]):05d}-of-00002.safetensors"
    elif fault == "unknown file":
        weight_map[victim] = "model-00003-of-00002.safetensors"
    elif fault == "further file":
        shutil.copyfile(folder / "model-00001-of-00002.safetensors", folder / "copy.safetensors")
    if fault != "no index":
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def change(rng: random.Random, base: Path, folder: Path) -> Path:
    shutil.copytree(base, folder)
    tensors = zoo.read(base)
    config = json.loads((base / "config.json").read_text())
    for _ in range(rng.randint(1, 2)):
        rng.choice(CHANGES)(rng, tensors, config)
    (folder / "config.json").write_text(json.dumps(config))
    for file in folder.glob("*.safetensors"):
        file.unlink()
    if rng.random() < 0.25:
        spread(rng, folder, tensors)
    else:
        write(folder, [planned(n, t) for n, t in tensors.items()])
    return folder


def outcome(command: Callable[[], object]) -> str:
    """Return "done", or the one line in which a command refuses. Any other exception fails the test."""
    try:
        command()
    except AnnieError as error:
        assert "\n" not in error.message and error.message
        return error.message
    return "done"


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("bases")
    nvfp4 = zoo.nvfp4(home / "nvfp4", TINY)
    compressed = Path(aq.checkpoint.convert(nvfp4, "compressed-tensors", home / "ct").path)
    return {"plain": TINY, "modelopt": nvfp4, "compressed-tensors": compressed}


def has_marker(path: Path) -> bool:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return any(MARKER * 2 in file.read_bytes() for file in files)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_changed_folder_gives_a_result_or_one_line(bases, tmp_path, seed):
    rng = random.Random(seed)
    name = rng.choice(sorted(bases))
    folder = change(rng, bases[name], tmp_path / "x")
    outcome(lambda: json.dumps(aq.checkpoint.audit(folder).to_dict()))
    understood = outcome(lambda: read_input(ModelFolder(folder)))
    results = {}
    for to in ("bf16", "modelopt", "compressed-tensors", "gguf"):
        target = tmp_path / f"out-{to}"
        results[target] = outcome(
            lambda to=to, target=target: aq.checkpoint.convert(folder, to, target)
        )
    target = tmp_path / "out-direct"
    results[target] = outcome(lambda: run("direct", folder, target))
    for path, result in results.items():
        assert result == "done" or not path.exists(), result
        if result == "done":
            assert understood == "done" and not has_marker(path), (path, name)


@pytest.mark.parametrize("seed", range(max(8, ROUNDS // 5)))
def test_a_changed_folder_is_loaded_or_refused_in_one_line(bases, tmp_path, seed):
    pytest.importorskip("torch", reason="the quantize extra is not installed")
    from annie_quant.offline.loading import load

    rng = random.Random(1000 + seed)
    folder = change(rng, bases[rng.choice(sorted(bases))], tmp_path / "x")
    outcome(lambda: load(folder))


def test_the_fuzzer_plants_a_marker_that_a_copy_would_have(bases, tmp_path):
    """Negative control."""
    tensors = zoo.read(bases["plain"])
    plant(random.Random(1), tensors, {})
    write(tmp_path, [planned(n, t) for n, t in tensors.items()])
    assert has_marker(tmp_path) and not has_marker(bases["plain"])
