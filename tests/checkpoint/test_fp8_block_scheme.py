"""llm-compressor's FP8_BLOCK (compressed-tensors, a scale per block): the same numbers as a release in Qwen's block FP8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_zoo as zoo
import numpy as np
import published_models as published
import pytest

import annie_quant as aq
from annie_quant.checkpoint import ModelFolder, dialects

WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "block",
    "symmetric": True,
    "block_structure": [128, 128],
}
ACTIVATIONS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "group",
    "group_size": 128,
    "symmetric": True,
    "dynamic": True,
}


def rewrite(folder: Path, output: Path, weights: dict[str, Any] = WEIGHTS) -> Path:
    """Write a folder in Qwen's block FP8 with the names and settings of llm-compressor."""
    tensors = {
        n.replace("weight_scale_inv", "weight_scale"): t for n, t in zoo.read(folder).items()
    }
    config = json.loads((folder / "config.json").read_text())
    ignore = [
        n.removesuffix(".weight")
        for n in tensors
        if n.endswith(".weight") and f"{n}_scale" not in tensors
    ]
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": ACTIVATIONS,
        "format": "float-quantized",
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ignore, "kv_cache_scheme": None,
    }  # fmt: skip
    zoo.save(output, tensors, config)
    return output


def change(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    zoo.save(folder, tensors, json.loads((folder / "config.json").read_text()))
    return folder


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("fp8")
    block = published.write("Qwen/Qwen3.6-35B-A3B-FP8", home / "block")
    return block, rewrite(block, home / "scheme")


def test_it_is_read_audited_and_converted_as_the_other_layout(
    both: tuple[Path, Path], tmp_path: Path
) -> None:
    scheme = both[1]
    first, second = (dialects.linears(ModelFolder(f)) for f in both)
    assert first.keys() == second.keys() and {x.block for x in second.values()} == {(128, 128)}
    assert dialects.config(ModelFolder(scheme)).algo == "FP8_BLOCK"
    assert aq.checkpoint.audit(scheme).findings == []
    plain = [zoo.read(Path(aq.checkpoint.convert(f, "bf16", tmp_path / f.name).path)) for f in both]
    assert plain[0].keys() == plain[1].keys()
    assert all(plain[0][n].tobytes() == plain[1][n].tobytes() for n in plain[0])


def test_faults_are_named(both: tuple[Path, Path], tmp_path: Path) -> None:
    folder = rewrite(both[0], tmp_path / "other", WEIGHTS | {"block_structure": [64, 128]})
    assert {f.code for f in aq.checkpoint.audit(folder).findings} == {"scale_shape"}
    folder = rewrite(both[0], tmp_path / "missing")
    tensors = zoo.read(folder)
    name = next(n for n in sorted(tensors) if n.endswith("o_proj.weight_scale"))
    del tensors[name]
    change(folder, tensors)
    assert "fp8_scale_missing" in {f.code for f in aq.checkpoint.audit(folder).findings}
    folder = rewrite(both[0], tmp_path / "bad")
    tensors = zoo.read(folder)
    tensors[name] = np.where(
        np.arange(tensors[name].size).reshape(tensors[name].shape) == 0, -1, tensors[name]
    ).astype(tensors[name].dtype)
    change(folder, tensors)
    assert "fp8_scale_bad" in {f.code for f in aq.checkpoint.audit(folder).findings}


def test_the_runtime_computes_the_same_logits(both: tuple[Path, Path]) -> None:
    torch = pytest.importorskip(
        "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
    )
    import annie_quant.offline

    ids = torch.arange(5, 21)[None]
    with torch.inference_mode():
        logits = [annie_quant.offline.load(f, dtype=torch.float32)(ids).logits for f in both]
    assert torch.equal(*logits)
