"""audit, convert, compare and quantize --strategy direct on the command line: outputs, exit codes, one-line errors."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import checkpoint_zoo as zoo
import numpy as np
import pytest
from command_line import annie_quant as run


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    return zoo.source_and_nvfp4(tmp_path_factory.mktemp("checkpoints"))


def test_audit_lists_every_tensor_and_every_server(checkpoints):
    done = run("audit", checkpoints[1], "--source", checkpoints[0], "--tensors")
    assert done.returncode == 0, done.stderr
    line = next(
        line
        for line in done.stdout.splitlines()
        if line.startswith("model.layers.1.mlp.down_proj ")
    )
    assert line.split()[1:4] == ["nvfp4", "256x512", "16"] and 0.08 < float(line.split()[-1]) < 0.11
    errors = [float(row.split()[-1]) for row in done.stdout.splitlines() if " nvfp4 " in row]
    (summary,) = [row for row in done.stdout.splitlines() if "error against the source" in row]
    assert f"of {len(errors)} tensors" in summary
    assert f"largest {max(errors):.4f} in " in summary
    for server in ("vLLM", "SGLang", "runtimes on transformers 4.57", "transformers", "llama.cpp"):
        assert any(text.startswith(f"  {server}: ") for text in done.stdout.splitlines())
    assert "sound" in done.stdout


def test_audit_of_a_fault_and_its_repair(checkpoints, tmp_path):
    bad = zoo.spoil(
        checkpoints[1],
        tmp_path / "bad",
        lambda t, c: (
            t["model.layers.1.mlp.up_proj.weight_scale"].view(np.uint8).__setitem__((0, 0), 0x7F)
        ),
    )
    done = run("audit", bad, "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 1 and [f["code"] for f in result["findings"]] == ["block_scale_nan"]
    refused = run("audit", bad, "--repair")
    assert refused.returncode == 2 and "--source" in refused.stderr
    done = run(
        "audit",
        bad,
        "--repair",
        "--source",
        checkpoints[0],
        "--names",
        "old",
        "--output",
        tmp_path / "good",
    )
    assert done.returncode == 0, done.stderr
    assert "repaired: model.layers.1.mlp.up_proj: 1 blocks quantized again" in done.stderr
    again = run("audit", bad, "--repair", "--source", checkpoints[0], "--output", tmp_path / "good")
    assert again.returncode == 2 and "--force" in again.stderr
    assert run("audit", bad, "--names", "old").returncode == 2


def test_findings_of_one_code_are_one_line_and_the_last_line_repairs(checkpoints, tmp_path):
    def negative_and_unlisted(t, c):
        for name in t:
            if name.endswith(".weight_scale"):
                t[name].view(np.uint8)[0, 0] = 0x7F
        c["quantization_config"]["ignore"].remove("lm_head")

    bad = zoo.spoil(checkpoints[1], tmp_path / "bad", negative_and_unlisted)
    done = run("audit", bad)
    assert done.returncode == 1, done.stderr
    findings = json.loads(run("audit", bad, "--json").stdout)["findings"]
    nan = [f for f in findings if f["code"] == "block_scale_nan"]
    lines = [line for line in done.stdout.splitlines() if line.startswith("block_scale_nan ")]
    assert len(nan) > 20 and lines == [
        f"block_scale_nan ({len(nan)} findings) such as {nan[0]['message']}"
    ]
    assert (
        "not_excluded lm_head: not quantized on disk and not listed as excluded"
        in done.stdout.splitlines()
    )
    every = run("audit", bad, "--tensors").stdout.splitlines()
    assert sum(line.startswith("block_scale_nan ") for line in every) == len(nan)
    last = done.stdout.splitlines()[-1]
    command = last.partition("annie-quant ")[2].partition(" (SOURCE")[0]
    assert command.endswith("--repair --source SOURCE")
    words = [str(checkpoints[0]) if word == "SOURCE" else word for word in shlex.split(command)]
    done = run(*words)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "sound", (
        done.stdout + done.stderr
    )


def test_settings_are_repaired_without_a_source_and_missing_files_by_no_command(
    checkpoints, tmp_path
):
    bad = zoo.spoil(
        checkpoints[1],
        tmp_path / "bad",
        lambda t, c: c["quantization_config"]["ignore"].remove("lm_head"),
    )
    command = run("audit", bad).stdout.splitlines()[-1].partition("annie-quant ")[2]
    assert command.endswith(f"audit {bad} --repair") and run(*shlex.split(command)).returncode == 0
    next(bad.glob("*.safetensors")).write_bytes(b"")
    done = run("audit", bad)
    assert done.returncode == 1 and "no command repairs" in done.stdout.splitlines()[-1]


def test_convert_reports_losses_and_replaces_only_with_force(checkpoints, tmp_path):
    done = run("convert", checkpoints[1], "--to", "compressed-tensors", "--output", tmp_path / "ct")
    assert (
        done.returncode == 0 and "lost in conversion: global scales are reciprocals" in done.stderr
    )
    again = run(
        "convert", checkpoints[1], "--to", "compressed-tensors", "--output", tmp_path / "ct"
    )
    assert again.returncode == 2 and again.stderr.count("\n") == 2 and "--force" in again.stderr
    assert (
        run(
            "convert",
            checkpoints[1],
            "--to",
            "compressed-tensors",
            "--output",
            tmp_path / "ct",
            "--force",
        ).returncode
        == 0
    )


def test_compare_lists_the_worst(checkpoints):
    done = run("compare", checkpoints[0], checkpoints[1], "--worst", "2", "--json")
    result = json.loads(done.stdout)
    assert len(result["worst"]["nvfp4"]) == 2
    wrong = run("compare", checkpoints[0], checkpoints[1], checkpoints[1])
    assert wrong.returncode == 2 and "given twice" in wrong.stderr


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("--set", "shard_size=big"), 2, "--set shard_size=2GB"),
        (("--set", "shards=3"), 2, "shard_size"),
        (("--exclude-layers", "layers.9"), 2, "matches none"),
    ],
)
def test_direct_refuses_in_one_line_and_leaves_no_files(
    checkpoints, tmp_path, words, code, expected
):
    done = run(
        "quantize",
        "--strategy",
        "direct",
        "--model",
        checkpoints[0],
        "--output",
        tmp_path / "x",
        *words,
    )
    assert done.returncode == code and expected in done.stderr and done.stderr.count("\n") <= 2, (
        done.stderr
    )
    assert list(tmp_path.iterdir()) == []


def test_compare_without_a_form_is_a_usage_error(checkpoints):
    done = run("compare", checkpoints[0])
    assert done.returncode == 2 and "nothing to compare with SOURCE" in done.stderr
