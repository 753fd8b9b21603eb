"""Repair: every fault of the zoo that can be mended is, what was sound keeps its bytes, and the result audits clean."""

from __future__ import annotations

from pathlib import Path

import checkpoint_zoo as zoo
import ml_dtypes
import numpy as np
import pytest
from test_checkpoint_audit import DOWN, FAULTS, folded

import annie_quant as aq
from annie_quant.checkpoint import ModelFolder
from annie_quant.checkpoint.repair import repair
from annie_quant.errors import CheckpointError, UsageError

pytest.importorskip("annie_quant.nvfp4", reason="the C codec is not built")

# Calibration alone could bring these back, so the weights alone stay quantized.
WEIGHT_ONLY = {"no input scale", "zero input scale", "negative input scale", "input divisor"}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("made")
    source = zoo.bf16(home / "bf16")
    return source, zoo.nvfp4(home / "nvfp4", source)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_mended_from_the_source(made, tmp_path, fault):
    source, sound = made
    bad = zoo.spoil(sound, tmp_path / "bad", FAULTS[fault][0])
    result = repair(bad, source)
    assert result["remaining"] == [], (result["actions"], result["remaining"])
    assert result["actions"]
    before, after = zoo.read(sound), zoo.read(Path(result["path"]))
    if fault in WEIGHT_ONLY:
        before = {n: t for n, t in before.items() if not n.endswith("input_scale")}
        assert any("input scales removed" in a for a in result["actions"])
    if fault == "q and v input scales":
        assert "largest" in result["actions"][0]
        before |= {f"model.layers.3.self_attn.{k}_proj.input_scale": np.array(0.005, np.float32) for k in "qkv"}
    assert {n: t.tobytes() for n, t in after.items()} == {n: t.tobytes() for n, t in before.items()}
    assert not list(bad.glob("*repaired*"))


@pytest.mark.parametrize("right", [True, False])
def test_awq_becomes_plain_nvfp4(made, tmp_path, right):
    """A folded layer and a left-over activation scale: the source's norms, fresh codes, no pre_quant_scale."""
    source, sound = made
    change, norm = folded(source, right)

    def awq(t: dict, c: dict) -> None:
        change(t, c)
        t[f"{DOWN}.pre_quant_scale"] = np.full(512, 0.5, ml_dtypes.bfloat16)
        c["quantization_config"]["quant_algo"] = "NVFP4_AWQ"

    bad = zoo.spoil(sound, tmp_path / "awq", awq)
    result = repair(bad, source)
    assert result["remaining"] == []
    after, original = zoo.read(Path(result["path"])), zoo.read(source)
    assert after[norm].tobytes() == original[norm].tobytes()
    assert not any(n.endswith("pre_quant_scale") for n in after)
    assert ModelFolder(result["path"]).config["quantization_config"]["quant_algo"] == "NVFP4"
    # inputs were halved before they met the scale on disk, so the mended one must hold twice as much
    assert float(after[f"{DOWN}.input_scale"]) == pytest.approx(2 * 0.004)


def test_a_sound_checkpoint_stays_as_it_is(made, tmp_path):
    source, sound = made
    result = repair(sound, source, tmp_path / "same")
    assert result["actions"] == [] and result["remaining"] == []
    a, b = zoo.read(sound), zoo.read(tmp_path / "same")
    assert {n: t.tobytes() for n, t in a.items()} == {n: t.tobytes() for n, t in b.items()}


def test_configurations_are_mended_without_the_source(made, tmp_path):
    bad = zoo.spoil(made[1], tmp_path / "bad", FAULTS["only hf_quant_config"][0])
    assert repair(bad)["remaining"] == []


def test_what_only_the_source_can_mend_asks_for_it(made, tmp_path):
    bad = zoo.spoil(made[1], tmp_path / "bad", FAULTS["NaN block scale"][0])
    with pytest.raises(UsageError, match="can only be mended from the bf16 checkpoint") as caught:
        repair(bad)
    assert "--source" in caught.value.hint and not (tmp_path / "bad-repaired").exists()


def test_what_is_no_checkpoint_of_ours_is_refused(made, tmp_path):
    with pytest.raises(CheckpointError, match="no NVFP4 in ModelOpt's layout"):
        repair(made[0], made[0], tmp_path / "x")
    with pytest.raises(UsageError, match="is the checkpoint itself"):
        repair(made[1], made[0], made[1])
    assert aq.checkpoint.audit(made[1]).ok
