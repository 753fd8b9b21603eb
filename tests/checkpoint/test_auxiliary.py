"""The MTP head and the vision tower: their faults are named, and a repair takes both from the source."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint_zoo as zoo
import numpy as np
import pytest

import annie_quant as aq
from annie_quant.checkpoint import repair

FC, NORM = "mtp.fc.weight", "mtp.norm.weight"
UP = "mtp.layers.0.mlp.up_proj"
PATCH, POSITION = "model.visual.patch_embed.proj.weight", "model.visual.pos_embed.weight"


def multimodal(t: dict, c: dict) -> None:
    zoo.multimodal(t, c)
    rng = np.random.default_rng(3)
    t[PATCH] = rng.standard_normal((32, 16)).astype(zoo.BF16)
    t[POSITION] = rng.standard_normal((4, 4)).astype(zoo.BF16)
    c["vision_config"] = {"depth": 1}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("auxiliary")
    text = zoo.bf16(home / "text", mtp_num_hidden_layers=1)
    source = zoo.spoil(text, home / "source", multimodal)
    plain = lambda n: not n.startswith("mtp.") and "visual." not in n  # noqa: E731
    return {
        "text": text,
        "source": source,
        "sound": zoo.nvfp4(home / "sound", source, plain),
        "sound text": zoo.nvfp4(home / "sound_text", text, plain),
        "no head": zoo.bf16(home / "no_head"),
    }


@pytest.mark.parametrize(
    ("folder", "source", "mtp"),
    [
        ("sound", "source", "15 BF16"),
        ("sound text", "text", "15 BF16"),
        ("sound text", "source", "15 BF16"),  # a text class needs no tower
        ("text", None, "15 BF16"),
        ("no head", None, None),
    ],
)
def test_sound_checkpoints_have_no_finding(checkpoints, folder, source, mtp):
    audit = aq.checkpoint.audit(checkpoints[folder], source=source and checkpoints[source])
    assert audit.findings == [] and audit.summary.mtp == mtp


def without(prefix: str):
    return lambda t, c: [t.pop(n) for n in list(t) if n.startswith(prefix)]


def quantize_up(t: dict, c: dict) -> None:
    packed = aq.nvfp4.pack(t[f"{UP}.weight"].astype(np.float32))
    t[f"{UP}.weight"] = np.asarray(packed.codes)
    t[f"{UP}.weight_scale"] = np.asarray(packed.block_scale)
    t[f"{UP}.weight_scale_2"] = np.array(packed.tensor_scale, np.float32)
    t[f"{UP}.input_scale"] = np.array(0.004, np.float32)
    gate = UP.replace("up_", "gate_")
    t |= {
        f"{gate}.{end}": t[f"{UP}.{end}"].copy()
        for end in ("weight", "weight_scale", "weight_scale_2", "input_scale")
    }
    ignore = c["quantization_config"]["ignore"]
    c["quantization_config"]["ignore"] = [n for n in ignore if n not in (UP, gate)]


def flip(t: dict, c: dict) -> None:
    t[PATCH].view(np.uint8)[0, 0] ^= 1  # the last bit of one mantissa


# name → (change, needs the source, code, tensor)
FAULTS = {
    "the head is missing": (without("mtp."), False, "mtp_missing", "config.json"),
    "the head is missing, and the settings do not name it": (
        lambda t, c: (without("mtp.")(t, c), c["text_config"].pop("mtp_num_hidden_layers")),
        True,
        "mtp_missing",
        FC,
    ),
    "one tensor of the head is missing": (without(NORM), False, "mtp_missing", NORM),
    "the head of a smaller model": (
        lambda t, c: t.update({FC: t[FC][:, :256]}),
        False,
        "mtp_shape",
        FC,
    ),
    "a layer of a smaller model": (
        lambda t, c: t.update({f"{UP}.weight": t[f"{UP}.weight"][:128]}),
        False,
        "mtp_shape",
        f"{UP}.weight",
    ),
    "the tower is missing": (without("model.visual."), True, "vision_missing", PATCH),
    "one bit of the tower differs": (flip, True, "vision_differs", PATCH),
    "the tower in another type": (
        lambda t, c: t.update({PATCH: t[PATCH].astype(np.float32)}),
        True,
        "vision_differs",
        PATCH,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_and_repaired(checkpoints, tmp_path, fault):
    change, needs_source, code, tensor = FAULTS[fault]
    bad = zoo.spoil(checkpoints["sound"], tmp_path / "bad", change)
    (bad / "hf_quant_config.json").unlink()
    source = checkpoints["source"]
    audit = aq.checkpoint.audit(bad, source=source if needs_source else None)
    assert [(f.code, f.tensor) for f in audit.findings] == [(code, tensor)]
    if fault.startswith("the head is missing"):
        assert audit.summary.mtp == (None if "settings" in fault else "missing")
    result = repair(bad, source)
    assert result.remaining == [] and result.actions
    before, after = zoo.read(checkpoints["sound"]), zoo.read(Path(result.path))
    assert {n: t.tobytes() for n, t in after.items()} == {n: t.tobytes() for n, t in before.items()}
    config = json.loads((Path(result.path) / "config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 1 and config["vision_config"] == {
        "depth": 1
    }


def test_a_head_in_nvfp4_is_no_fault_and_servers_differ(checkpoints, tmp_path):
    """llama.cpp accepts its drafts as those of a 16-bit head; SGLang builds the head in 16 bits."""
    bad = zoo.spoil(checkpoints["sound"], tmp_path / "nvfp4", quantize_up)
    (bad / "hf_quant_config.json").unlink()
    audit = aq.checkpoint.audit(bad)
    assert audit.findings == []
    notes = {support.server: support.note for support in audit.summary.servers}
    assert "without drafts" in notes["SGLang"] and "NVFP4" in notes["SGLang"]
    sound = aq.checkpoint.audit(checkpoints["sound"]).summary.servers
    assert not any("without drafts" in support.note for support in sound)
