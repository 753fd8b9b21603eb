"""Every example runs with the command in its first line, prints what it should, and is short."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

import annie_quant as aq

EXAMPLES = {p.stem: p for p in (ROOT / "examples").glob("*.py")}
TINY = Path(aq.__file__).parent / "assets" / "tiny-annie"


def run(name: str, *arguments: object, cwd: Path, code: int = 0, path: Path = ROOT) -> str:
    """Run an example. path: searched for modules before the repository."""
    folders = os.pathsep.join(map(str, (path, ROOT)))
    environment = os.environ | {"PYTHONPATH": folders, "OMP_WAIT_POLICY": "PASSIVE"}
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES[name]), *map(str, arguments)],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr[-2000:]
    return ended.stdout


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    pytest.importorskip("gguf", reason="gguf writes the files that the examples compare")
    folder = tmp_path_factory.mktemp("forms")
    return folder, run("convert_checkpoint", TINY, folder, cwd=folder)


def test_examples_are_about_twenty_lines_with_their_command():
    assert len(EXAMPLES) == 7
    for name, path in EXAMPLES.items():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 25, name
        assert f"python examples/{name}.py" in text.splitlines()[0]


def test_pack_tensor(tmp_path):
    output = run("pack_tensor", cwd=tmp_path)
    errors = dict(re.findall(r"relative error ([\d.]+)  \((\w+)\)", output))
    assert list(errors.values()) == ["amax", "four_over_six", "sweep"]
    assert [float(e) for e in errors] == sorted(map(float, errors), reverse=True), (
        "each search is no worse"
    )
    assert "bf16      33.6 MB" in output and "NVFP4      9.4 MB" in output


def test_convert_checkpoint(forms):
    folder, output = forms
    assert (folder / "nvfp4.gguf").stat().st_size < (folder / "q4_k_m.gguf").stat().st_size * 1.4
    assert output.count("MB") == 4 - 1


def test_audit_checkpoint(forms, tmp_path):
    folder, _ = forms
    output = run("audit_checkpoint", folder / "nvfp4", TINY, cwd=tmp_path)
    assert (
        "bits_per_weight: " in output
        and "vLLM: yes" in output
        and output.count("relative error") == 3
    )
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (folder / "nvfp4").iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(
            content[:-500] if file.suffix == ".safetensors" else content
        )
    assert "✗" in run("audit_checkpoint", broken, cwd=tmp_path, code=1)


def test_compare_checkpoints(forms, tmp_path):
    folder, _ = forms
    output = run(
        "compare_checkpoints", TINY, folder / "nvfp4", folder / "q4_k_m.gguf", cwd=tmp_path
    )
    assert "nvfp4: " in output and "q4_k_m.gguf: " in output and output.count("worst: ") == 6


def test_evaluate_offline(forms, tmp_path, monkeypatch):
    pytest.importorskip(
        "torch", reason="torch computes the answers without a server; not installed"
    )
    pytest.importorskip("transformers", reason="transformers loads the model; not installed")
    folder, _ = forms
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["evaluate_offline.py", *map(str, (folder / "nvfp4", TINY, 1))]
    )
    with contextlib.redirect_stdout(
        io.StringIO()
    ) as printed:  # in this process, which may have imported torch
        runpy.run_path(str(EXAMPLES["evaluate_offline"]), run_name="__main__")
    output = printed.getvalue()
    assert "w4a16: mean KL" in output and re.search(r"tool_call +\d/1", output)


LM_EVAL = """
def simple_evaluate(model, tasks):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model.pretrained, dtype=model.dtype)
    kinds = {type(m).__name__ for m in loaded.modules()}
    return {"results": {t: {"alias": t, "acc,none": float("NVFP4Linear" in kinds)} for t in tasks}}
"""


def test_lm_eval_scores(forms, tmp_path):
    """lm-eval's hf model loads the folder by transformers; a stand-in for it does that alone."""
    pytest.importorskip("torch", reason="torch computes the scores; not installed")
    pytest.importorskip("transformers", reason="transformers loads the model; not installed")
    models = tmp_path / "lm_eval" / "models"
    models.mkdir(parents=True)
    (models.parent / "__init__.py").write_text(f"import transformers\n{LM_EVAL}")
    (models / "__init__.py").touch()
    (models / "huggingface.py").write_text("from types import SimpleNamespace as HFLM\n")
    folder, _ = forms
    arguments = (folder / "nvfp4", "arc_easy")
    output = run("lm_eval_scores", *arguments, cwd=tmp_path, path=tmp_path)
    assert output.split() == ["arc_easy", "acc,none", "1.0000"]


def test_time_stream(tmp_path):
    pytest.importorskip("aiohttp", reason="aiohttp is the fake server")
    import fake_server

    with fake_server.FakeServer(
        lambda body: fake_server.words("Tokyo is the capital of Japan.", gap_s=0.002)
    ) as server:
        output = run("time_stream", server.url, cwd=tmp_path)
    lines = [float(x) for x in re.findall(r"between pieces ([\d.]+) ms", output)]
    assert len(lines) == 3 and all(1 < gap < 200 for gap in lines)
    assert (tmp_path / "timings").is_dir()
    assert "error" not in output
    nobody = run("time_stream", "http://127.0.0.1:9", cwd=tmp_path, code=1)
    assert nobody.count("connection refused") == 3 and "first word" not in nobody
