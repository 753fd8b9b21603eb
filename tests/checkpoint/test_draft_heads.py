"""Another MTP head in a checkpoint: which base fits, what is written, and that nothing else changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch", reason="tiny-annie is made with torch")

from paths import TINY_ANNIE
from tiny_variants import save_with_head

import annie_quant as aq
from annie_quant.checkpoint import ModelFolder
from annie_quant.checkpoint.draft_heads import (
    SGLANG_FAULT,
    find_head,
    head_tensors,
    write_with_head,
)
from annie_quant.core.errors import AnnieError


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_head(tmp_path_factory.mktemp("base") / "bf16")


@pytest.fixture(scope="module")
def fine_tune(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In NVFP4, without a head, as fine-tunes are."""
    folder = tmp_path_factory.mktemp("tune") / "nvfp4"
    aq.quantize.run("direct", TINY_ANNIE, folder)
    return folder


def with_settings(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tuned_head(base: Path) -> dict[str, np.ndarray]:
    """Return the base's head with other values."""
    folder = ModelFolder(base)
    return {
        new: (folder.tensor(old).astype(np.float32) + 0.5).astype(ml_dtypes.bfloat16)
        for new, old in head_tensors(folder).items()
    }


@pytest.mark.parametrize(
    ("model", "other", "message"),
    [
        ("tune", None, "has no MTP head"),
        ("tune", "tune", "no head to graft"),
        ("tune", "wide", "intermediate_size is 1024, expected 768"),
        ("flash", "base", "Qwen3.8-Flash-Next is of another class"),
        ("base", "llama", "no MTP head that is known here"),
        ("deep", None, "mtp_num_hidden_layers is 2"),
    ],
)
def test_what_cannot_be_grafted_is_refused_in_one_line(
    base: Path, fine_tune: Path, tmp_path: Path, model: str, other: str | None, message: str
) -> None:
    changes: dict[str, Callable[[dict[str, Any]], None]] = {
        "wide": lambda config: config.update(intermediate_size=1024),
        "flash": lambda config: config.update(model_type="qwen4_exp_text"),
        "llama": lambda config: config.update(model_type="llama"),
        "deep": lambda config: config.update(mtp_num_hidden_layers=2),
    }
    folders = {"base": base, "tune": fine_tune}
    for name in {model, other} & changes.keys():
        folders[name] = with_settings(base, tmp_path / name, changes[name])
    with pytest.raises(AnnieError, match=message) as raised:
        find_head(ModelFolder(folders[model]), ModelFolder(folders[other]) if other else None)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("layout", "form"),
    [("modelopt", "text"), ("modelopt", "multimodal"), ("compressed-tensors", "text")],
)
def test_a_head_is_written_in_16_bits_and_excluded(
    base: Path, fine_tune: Path, tmp_path: Path, layout: str, form: str
) -> None:
    model = fine_tune
    if layout != "modelopt":
        model = Path(aq.checkpoint.convert(fine_tune, layout, tmp_path / "layout").path)
    if form == "multimodal":
        model = Path(aq.checkpoint.repair(model, output=tmp_path / "old", names="old").path)
    head = tuned_head(base)
    target = tmp_path / "out"
    written = write_with_head(ModelFolder(model), head, ModelFolder(base), target)
    assert (written.tensors, written.changed) == (15, 15)
    assert written.notes == ([SGLANG_FAULT] if layout == "compressed-tensors" else [])
    audit = aq.checkpoint.audit(target)
    assert audit.findings == [] and audit.summary.mtp == "15 BF16"
    before, after = ModelFolder(model), ModelFolder(target)
    assert set(after) == {*before, *head}
    assert all(after.tensor(n).tobytes() == before.tensor(n).tobytes() for n in before)
    assert after.text_config["mtp_num_hidden_layers"] == 1
    quantization = after.config["quantization_config"]
    if layout == "modelopt":
        exported = json.loads((target / "hf_quant_config.json").read_text())["quantization"]
        for excluded in (quantization["ignore"], exported["exclude_modules"]):
            assert [n for n in excluded if "mtp" in n] == ["mtp.fc", "mtp.layers.0*"]
    else:
        assert {"mtp.fc", "mtp.layers.0.mlp.up_proj"} <= set(quantization["ignore"])


def test_a_written_head_that_is_the_bases_is_counted(
    base: Path, fine_tune: Path, tmp_path: Path
) -> None:
    """Exports have copied the pretrained head over the tuned one."""
    source = ModelFolder(base)
    head = {new: source.tensor(old) for new, old in head_tensors(source).items()}
    written = write_with_head(ModelFolder(fine_tune), head, source, tmp_path / "out")
    assert (written.tensors, written.changed) == (15, 0)


def test_a_head_replaces_the_one_that_was_there(base: Path, tmp_path: Path) -> None:
    head = tuned_head(base)
    target = tmp_path / "out"
    write_with_head(ModelFolder(base), head, ModelFolder(base), target)
    assert all(ModelFolder(target).tensor(n).tobytes() == a.tobytes() for n, a in head.items())
    assert len(list(ModelFolder(target))) == len(list(ModelFolder(base)))
