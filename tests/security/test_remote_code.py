"""A checkpoint with Python files: they never run, not even after "y" on a terminal, and an error names them."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import annie_quant
from paths import TINY_ANNIE

from annie_quant.data import generate

pytest.importorskip("transformers", reason="needs the quantize extra")

EVIL = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
class Config(PreTrainedConfig): model_type = "custom_code_checkpoint"
class Model(PreTrainedModel): pass
class Tokenizer(PreTrainedTokenizerFast): pass
"""


@pytest.fixture
def custom_code_checkpoint(tmp_path) -> Path:
    """tiny-annie as a custom architecture, whose configuration, model and tokenizer are code in the folder."""
    folder = tmp_path / "custom_code_checkpoint"
    shutil.copytree(TINY_ANNIE, folder)
    (folder / "modeling_evil.py").write_text(EVIL)
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "Config", "AutoModelForCausalLM": "Model", "AutoModel": "Model"}
    config |= {"model_type": "custom_code_checkpoint", "architectures": ["EvilForCausalLM"]}
    config |= {"auto_map": {auto: f"modeling_evil.{name}" for auto, name in code.items()}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {
        "tokenizer_class": "EvilTokenizer",
        "auto_map": {"AutoTokenizer": ["modeling_evil.Tokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    generate("annie", n=10, output=path)
    return path


COMMANDS = {
    "eval": [
        "eval",
        "{custom_code_checkpoint}",
        "--reference",
        "{custom_code_checkpoint}",
        "--n",
        "1",
    ],
    "eval of it against tiny-annie": [
        "eval",
        "{custom_code_checkpoint}",
        "--reference",
        str(TINY_ANNIE),
        "--n",
        "1",
    ],
    "naive": [
        "quantize",
        "--strategy",
        "naive",
        "--model",
        "{custom_code_checkpoint}",
        "--calib-data",
        "{rows}",
        "--output",
        "{out}",
    ],
    "gptq": [
        "quantize",
        "--strategy",
        "gptq",
        "--model",
        "{custom_code_checkpoint}",
        "--calib-data",
        "{rows}",
        "--output",
        "{out}",
    ],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_its_code_never_runs_even_after_yes(custom_code_checkpoint, rows, tmp_path, name):
    """One command on a terminal and in its own process; the others' questions would read the same answers."""
    places = {
        "custom_code_checkpoint": custom_code_checkpoint,
        "rows": rows,
        "out": tmp_path / "out",
    }
    words = [w.format(**places) for w in COMMANDS[name]]
    if name == "gptq":
        master, slave = pty.openpty()
        os.write(master, b"y\ny\ny\n")
        command = [sys.executable, "-m", "annie_quant", *words]
        done = subprocess.run(
            command, stdin=slave, capture_output=True, text=True, timeout=300, cwd=tmp_path
        )
        os.close(slave)
        os.close(master)
    else:
        done = annie_quant(*words, stdin="y\ny\ny\n")
    assert not list(custom_code_checkpoint.glob("ran")), "the checkpoint's Python was run"
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "modeling_evil." in done.stderr
    assert "never runs" in " ".join(done.stderr.split())
