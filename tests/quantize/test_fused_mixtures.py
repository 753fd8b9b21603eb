"""Linears that servers multiply as one matrix have one format in every checkpoint that is written, or nothing is written."""

from __future__ import annotations

import json
import random
from pathlib import Path

import checkpoint_zoo as zoo
import pytest

from annie_quant.checkpoint import ModelFolder
from annie_quant.checkpoint.linears import all_linears
from annie_quant.core.errors import CheckpointError
from annie_quant.models.formats import BF16, FP8, NVFP4, W4A16, Format
from annie_quant.quantize.plan import QuantizationPlan, export

# Names of vLLM's packed_modules_mapping of Qwen3.5 (qkv_proj, gate_up_proj, in_proj_qkvz).
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("in_proj_qkv", "in_proj_z"))
CHOICES = (NVFP4, W4A16, FP8, BF16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder(zoo.bf16(tmp_path_factory.mktemp("plain") / "bf16"))


def siblings(name: str) -> list[str]:
    parent, _, last = name.rpartition(".")
    group = next((members for members in FUSED if last in members), (last,))
    return [f"{parent}.{member}" for member in group]


def write(folder: ModelFolder, output: Path, formats: dict[str, Format]) -> None:
    quantized = {name: kind for name, kind in formats.items() if kind is not BF16}
    plan = QuantizationPlan.of(quantized, dict.fromkeys(quantized, 1.0))
    output.mkdir()
    export(folder, output, plan)


@pytest.mark.parametrize("seed", range(12))
def test_a_mixture_is_written_if_fused_linears_agree_and_refused_if_not(
    folder: ModelFolder, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    weights = [f"{name}.weight" for name in all_linears(folder)]
    chosen_weights = [n for n in weights if zoo.quantizable(n, folder.info(n).shape)]
    names = [name.removesuffix(".weight") for name in chosen_weights]
    formats: dict[str, Format] = {}
    for name in names:
        if name not in formats:
            chosen = rng.choice(CHOICES)
            formats |= {member: chosen for member in siblings(name) if member in names}
    write(folder, tmp_path / "sound", formats)
    settings = json.loads((tmp_path / "sound/config.json").read_text())["quantization_config"]
    layers = settings.get("quantized_layers", {})
    for name in layers:
        algorithms = {layers.get(member, {}).get("quant_algo") for member in siblings(name)}
        assert len(algorithms) == 1, name
    group = rng.choice([siblings(n) for n in names if len(siblings(n)) > 1])
    member = rng.choice(group)
    others = [kind for kind in CHOICES if kind is not formats[member]]
    formats[member] = rng.choice(others)
    with pytest.raises(CheckpointError, match="served together and would differ in format"):
        write(folder, tmp_path / "mixed", formats)
    assert not list((tmp_path / "mixed").iterdir())
