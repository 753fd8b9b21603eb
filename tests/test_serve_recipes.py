"""Container recipes: printed as they would run, never run here; what is missing is one clear line."""

from __future__ import annotations

import shlex

import pytest

import annie_quant as aq
from annie_quant.errors import AnnieError, EnvironmentFault, UsageError
from annie_quant.serve import server as process

PARSERS = ("--reasoning-parser qwen3", "--tool-call-parser qwen3_coder")


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
def test_command_mounts_the_model_and_sets_the_parsers(tmp_path, runtime):
    line = aq.serve.command(tmp_path / "a model", runtime=runtime, port=8123)
    words = shlex.split(line)
    assert words[:3] == ["docker", "run", "--rm"] and "-d" not in words
    assert f"{tmp_path / 'a model'}:/model:ro" in words and "8123:8123" in words
    assert all(p in line for p in PARSERS)
    assert not any("{" in w for w in words)


def test_the_founding_recipe_is_kept(tmp_path):
    line = aq.serve.command(tmp_path, runtime="vllm", recipe="2026-03")
    assert "--enforce-eager" in line and "--quantization modelopt" in line
    assert "--enforce-eager" not in aq.serve.command(tmp_path, runtime="vllm")


def test_unknown_runtime_and_recipe_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="no runtime called 'triton'"):
        aq.serve.start(tmp_path, runtime="triton")
    with pytest.raises(UsageError, match="no recipe '1999'"):
        aq.serve.command(tmp_path, runtime="vllm", recipe="1999")


def test_without_docker_the_way_out_is_named(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFault, match="docker is not installed") as caught:
        aq.serve.start(tmp_path, runtime="vllm")
    assert "--dry-run" in caught.value.hint


def test_a_gguf_file_is_not_for_vllm(tmp_path):
    with pytest.raises(AnnieError, match="is no model folder"):
        aq.serve.start(tmp_path / "x.gguf", runtime="vllm")


def test_a_container_is_waited_for_and_ended(tmp_path, monkeypatch):
    """A stand-in docker that serves /health: started, ready, gone after stop."""
    (tmp_path / "config.json").write_text("{}")
    fake = tmp_path / "docker"
    fake.write_text(
        '#!/bin/sh\nfor a in "$@"; do case "$a" in *:*[0-9]) p=${a%%:*};; esac; done\n'
        'cd "$(dirname "$0")/www" && exec python3 -m http.server "$p" --bind 127.0.0.1\n'
    )
    fake.chmod(0o755)
    (tmp_path / "www").mkdir()
    (tmp_path / "www/health").write_text("ok")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with aq.serve.start(tmp_path, runtime="sglang", port=port, timeout_s=20) as server:
        assert server.url == f"http://127.0.0.1:{port}" and server.alive
    assert not server.alive


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("loading\n0.00.1 E gguf: bad magic\n0.00.2 E failed to load\n", "gguf: bad magic"),
        ("starting\nValueError: unknown quantization\nbye\n", "ValueError: unknown quantization"),
        ("one\ntwo\n\n", "two"),
        ("", "it said nothing"),
    ],
)
def test_the_telling_line_of_a_log(tmp_path, text, line):
    log = tmp_path / "log"
    log.write_text(text)
    assert process.telling_line(log) == line
