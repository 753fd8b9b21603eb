"""`quantize --adapter`: the result is that of the merged model, which is next to the output only while the run needs it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
from collections import namedtuple
from pathlib import Path

import adapter_models
import pytest
import runtime_models
from adapter_models import Form
from command_line import annie_quant as command
from paths import CALIBRATION

from annie_quant import checkpoint, quantize
from annie_quant.core.errors import CheckpointError, DiskFull, UsageError
from annie_quant.core.files import sha256_file
from annie_quant.documents import Recipe, decode
from annie_quant.quantize import merged_base, strategies

FORM = Form("qwen3.5", {"target_modules": ["q_proj", "up_proj", "in_proj_qkv"]})


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Return a folder with a base that has a tokenizer, an adapter, and the merged model of `convert`."""
    folder = tmp_path_factory.mktemp("adapted")
    base = runtime_models.save_reference(folder / "base", gain=2.0, layers=2)
    adapted = adapter_models.trained(base, FORM)
    adapter_models.save_adapter(adapted, folder / "adapter")
    checkpoint.convert(base, to="bf16", adapter=folder / "adapter", output=folder / "merged")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint but the record of its making."""
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name != "annie_quant.json"}


@pytest.mark.parametrize("strategy", ["direct", "naive", "gptq"])
def test_the_result_is_that_of_the_merged_model(strategy: str, home: Path, tmp_path: Path) -> None:
    given = {"calib_data": CALIBRATION, "calib_samples": 4, "calib_tokens": 1200}
    given |= {"answers": "given", "allow_prompt_mismatch": True}
    settings = {} if strategy == "direct" else given
    quantize.run(strategy, home / "merged", tmp_path / "expected", **settings)
    out = tmp_path / "out"
    result = quantize.run(strategy, home / "base", out, adapter=home / "adapter", **settings)
    assert files(out) == files(tmp_path / "expected")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["expected", "out"]
    written = decode(Recipe, out / "annie_quant.json")
    expected = decode(Recipe, tmp_path / "expected/annie_quant.json")
    assert written == expected
    (record,) = written.adapters
    assert record.weights_sha256 == sha256_file(home / "adapter/adapter_model.safetensors")
    assert record.config_sha256 == sha256_file(home / "adapter/adapter_config.json")
    assert any("8 of 8 tensors used, 4 tensors of" in note for note in result.notes)


def test_the_printed_command_makes_the_reference(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = quantize.run("direct", home / "base", out, adapter=home / "adapter")
    (note,) = [note for note in result.notes if "reference of an evaluation" in note]
    convert, evaluate = re.findall(r"annie-quant [^&]+", note)
    done = command(*shlex.split(convert)[1:])
    assert done.returncode == 0, done.stderr
    assert shlex.split(evaluate)[1:] == ["eval", str(out), "--reference", f"{out}-bf16"]
    assert files(Path(f"{out}-bf16")) == files(home / "merged")
    assert checkpoint.audit(out, source=f"{out}-bf16").ok
    assert not checkpoint.audit(out, source=home / "base").ok


class Interrupted(BaseException):
    """Ctrl-C, or a kill that Python sees."""


def failing(monkeypatch, error: BaseException) -> None:
    """Make the strategy `direct` raise an error after the merge."""

    def plan(job: object, progress: object) -> None:
        raise error

    broken = dataclasses.replace(strategies.find("direct"), plan=plan)
    monkeypatch.setattr(strategies, "find", lambda name: broken)


def test_an_interrupted_run_uses_the_merged_model_again(home, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        failing(patched, Interrupted())
        with pytest.raises(Interrupted):
            quantize.run("direct", home / "base", out, adapter=home / "adapter")
    merged = merged_base.merged_folder(out)
    assert files(merged).keys() >= files(home / "merged").keys()
    with monkeypatch.context() as patched:
        patched.setattr(merged_base, "write_merged", None)  # a second merge would call it
        quantize.run("direct", home / "base", out, adapter=home / "adapter")
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_the_merged_model_of_other_settings_is_not_used(home, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        failing(patched, Interrupted())
        with pytest.raises(Interrupted):
            quantize.run("direct", home / "base", out, adapter=home / "adapter")
    other = shutil.copytree(home / "adapter", tmp_path / "adapter")
    adapter_models.rewrite(other, lora_alpha=60)
    quantize.run("direct", home / "base", out, adapter=other)
    checkpoint.convert(home / "base", to="bf16", adapter=other, output=tmp_path / "merged")
    quantize.run("direct", tmp_path / "merged", tmp_path / "expected")
    assert files(out) == files(tmp_path / "expected")


def test_a_fault_of_the_model_leaves_nothing(home, tmp_path, monkeypatch) -> None:
    failing(monkeypatch, CheckpointError("a fault"))
    with pytest.raises(CheckpointError):
        quantize.run("direct", home / "base", tmp_path / "out", adapter=home / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_is_said_before_the_merge(home, tmp_path, monkeypatch) -> None:
    size = sum(f.stat().st_size for f in (home / "merged").glob("*.safetensors"))
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(size + 1000))
    with pytest.raises(DiskFull, match="GB to write"):
        quantize.run("direct", home / "base", tmp_path / "out", adapter=home / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_the_adapter_is_refused(home: Path) -> None:
    with pytest.raises(UsageError, match="is the checkpoint itself"):
        quantize.run(
            "direct", home / "base", home / "adapter", adapter=home / "adapter", force=True
        )


def test_dry_run_names_adapter_and_disk(home: Path, tmp_path: Path) -> None:
    options = ["quantize", "--strategy", "direct", "--model", home / "base", "--output"]
    options += [tmp_path / "out", "--dry-run", "--adapter"]
    done = command(*options, home / "adapter")
    assert done.returncode == 0, done.stderr
    assert "8 of 8 tensors used, 4 of " in done.stdout
    assert "for the merged model, until the end" in done.stdout
    assert "tokenizer, chat template" in done.stdout
    assert list(tmp_path.iterdir()) == []
    refused = command(*options, home / "base")
    assert refused.returncode == 3 and "no adapter_config.json" in refused.stderr
    options[4] = "9b"
    refused = command(*options, home / "adapter")
    assert refused.returncode == 2 and "only a size" in refused.stderr


def test_the_command_line_quantizes_and_converts(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--adapter", home / "adapter", "--output"]
    done = command(
        "quantize", "--strategy", "direct", "--model", home / "base", *options, out, "--json"
    )
    assert done.returncode == 0, done.stderr
    assert any("tensors used" in note for note in json.loads(done.stdout)["notes"])
    done = command("convert", home / "base", *options, tmp_path / "merged")
    assert done.returncode == 0 and "tensors used" in done.stderr + done.stdout
    assert files(tmp_path / "merged") == files(home / "merged")
    done = command("convert", home / "base")
    assert done.returncode == 2 and "--to, or --adapter" in done.stderr
    for target in ("gguf", "hf"):
        done = command("convert", home / "base", "--to", target, *options, tmp_path / "x")
        assert done.returncode == 2 and "merged into a bf16 folder" in done.stderr
