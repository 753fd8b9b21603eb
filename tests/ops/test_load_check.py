"""A command is printed only for a checkpoint that the runtime loads, with the recipe's date and source."""

from __future__ import annotations

import shlex

import checkpoint_zoo as zoo
import numpy as np
import pytest
from command_line import annie_quant
from paths import TINY_ANNIE

from annie_quant.core.errors import UsageError
from annie_quant.ops import serving
from annie_quant.ops.serving import ServingRecipe


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    home = tmp_path_factory.mktemp("checkpoints")
    return zoo.nvfp4(home / "nvfp4", zoo.bf16(home / "bf16"))


def dry_run(model, runtime, *words):
    return annie_quant("serve", model, "--runtime", runtime, "--dry-run", *words)


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
def test_a_sound_checkpoint_gets_its_command_alone_on_stdout_and_the_recipe_on_stderr(
    sound, runtime
):
    done = dry_run(sound, runtime)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and shlex.split(done.stdout)[:3] == [
        "docker",
        "run",
        "--rm",
    ]
    assert f"recipe {runtime} 2026-" in done.stderr and "not run by this project" in done.stderr


def test_llama_cpp_refuses_a_folder_and_names_the_conversion(sound):
    done = dry_run(sound, "llama.cpp")
    assert (
        done.returncode == 2
        and done.stdout == ""
        and f"annie-quant convert {sound} --to gguf" in done.stderr
    )


def test_llama_cpp_accepts_a_gguf_file(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(20))
    done = dry_run(tmp_path / "x.gguf", "llama.cpp")
    assert done.returncode == 0 and done.stdout.startswith("llama-server --model ")
    assert "not predicted for a GGUF file" in done.stderr


def nan_scale(t, c):
    t["model.layers.1.mlp.up_proj.weight_scale"].view(np.uint8)[0, 0] = 0x7F


@pytest.mark.parametrize("words", [(), ("--write-recipe", "recipe.yaml")])
def test_a_broken_checkpoint_is_refused_and_nothing_is_written(sound, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    done = dry_run(zoo.spoil(sound, tmp_path / "bad", nan_scale), "vllm", *words)
    assert done.returncode == 3 and done.stdout == "" and "block_scale_nan" in done.stderr
    assert f"annie-quant audit {tmp_path / 'bad'}" in done.stderr
    assert not (tmp_path / "recipe.yaml").exists()


def test_missing_weights_and_a_missing_folder_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert dry_run(tmp_path, "vllm").returncode == 3
    assert dry_run(tmp_path / "nowhere", "vllm").returncode == 2


def test_a_bf16_checkpoint_is_served_too():
    assert "annie" in dry_run(TINY_ANNIE, "vllm").stdout


def test_findings_that_the_runtime_tolerates_are_noted(sound, tmp_path):
    def change(t, c):
        t["model.layers.1.mlp.up_proj.weight_scale"].view(np.uint8)[0, 0] |= 0x80

    notes = serving.check(zoo.spoil(sound, tmp_path / "negative", change), runtime="vllm")
    assert any("1 findings" in note and "annie-quant audit" in note for note in notes), notes


def test_an_unknown_recipe_is_a_usage_error(sound):
    with pytest.raises(UsageError, match="no recipe '1999'"):
        serving.check(sound, runtime="vllm", recipe="1999")


@pytest.mark.parametrize(
    ("image", "moves"),
    [
        ("vllm/vllm-openai:cu130-nightly", True), ("lmsysorg/sglang:spark", True), ("vllm/vllm-openai", True),
        ("vllm/vllm-openai:v0.26.0", False), ("nvcr.io/nvidia/pytorch:25.11-py3", False), ("localhost:5000/x", True),
        ("vllm/vllm-openai@sha256:" + "0" * 64, False),
    ],
)  # fmt: skip
def test_an_image_whose_tag_moves_is_named(image, moves):
    assert ServingRecipe("", "", [], image).tag_moves == moves


def test_the_note_has_the_command_that_pins_the_image(sound):
    notes = serving.check(sound, runtime="vllm")
    assert any("cu130-nightly moves" in note and "docker inspect" in note for note in notes), notes
