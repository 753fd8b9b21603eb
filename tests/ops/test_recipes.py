"""Container recipes: printed and never run here; a missing program is a one-line error."""

from __future__ import annotations

import re
import shlex
from unittest.mock import patch

import checkpoint_zoo as zoo
import pytest

import annie_quant as aq
from annie_quant.core.errors import AnnieError, EnvironmentFault, UsageError
from annie_quant.ops import server as process
from annie_quant.ops import serving as recipes
from annie_quant.ops.serving import RECIPE_RUNTIMES, RecipeRuntime, load_recipes

PARSERS = ("--reasoning-parser qwen3", "--tool-call-parser qwen3_coder")


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
def test_command_mounts_the_model_and_sets_the_parsers(tmp_path, runtime):
    line = aq.serve.command(tmp_path / "a model", runtime=runtime, port=8123)
    words = shlex.split(line)
    assert words[:3] == ["docker", "run", "--rm"] and "-d" not in words
    assert f"{tmp_path / 'a model'}:/model:ro" in words and "8123:8123" in words
    assert all(p in line for p in PARSERS)
    assert not any("{" in w for w in words)


def test_the_recipe_of_the_original_plan_is_unchanged(tmp_path):
    line = aq.serve.command(tmp_path, runtime="vllm", recipe="2026-03")
    assert "--enforce-eager" in line and "--quantization modelopt" in line
    assert "--enforce-eager" not in aq.serve.command(tmp_path, runtime="vllm")


def test_unknown_runtime_and_recipe_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="no runtime called 'triton'"):
        aq.serve.start(tmp_path, runtime="triton")
    with pytest.raises(UsageError, match="no recipe '1999'"):
        aq.serve.command(tmp_path, runtime="vllm", recipe="1999")


def test_without_docker_the_error_names_the_dry_run(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFault, match="docker is not installed") as caught:
        aq.serve.start(tmp_path, runtime="vllm")
    assert "--dry-run" in caught.value.hint


def test_a_gguf_file_is_not_for_vllm(tmp_path):
    with pytest.raises(AnnieError, match="is not a model folder"):
        aq.serve.start(tmp_path / "x.gguf", runtime="vllm")


def test_a_container_is_started_and_stopped(tmp_path, monkeypatch):
    """With a fake docker that serves /health."""
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
        ("", "no output"),
    ],
)
def test_the_line_of_a_log_that_has_the_cause(tmp_path, text, line):
    log = tmp_path / "log"
    log.write_text(text)
    assert process.cause_line(log) == line


@pytest.mark.parametrize(
    "name", ["2026-11", "2026-11-27b", "2026-11-mtp", "2026-11-two-sparks", "2026-03"]
)
def test_a_recipe_file_is_yaml_with_the_same_command(tmp_path, name):
    """Parsed by a YAML library and formatted as its users do, the command is the dry run's except for the model."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    model = tmp_path / "annie-9b"
    path = aq.serve.write_recipe(
        model, tmp_path / "annie.yaml", runtime="vllm", port=8123, recipe=name
    )
    recipe = yaml.safe_load(path.read_text())
    assert recipe["recipe_version"] == "1" and recipe["model"] == str(model) and recipe["container"]
    words = shlex.split(recipe["command"].format(**recipe["defaults"]))
    assert words[:3] == ["vllm", "serve", str(model)] and words[words.index("--port") + 1] == "8123"
    dry_run = shlex.split(aq.serve.command(model, runtime="vllm", port=8123, recipe=name))
    own = dry_run[dry_run.index(recipe["container"]) + 1 :]
    assert (
        words[3:] == [w for i, w in enumerate(own) if w != "--model" and own[i - 1] != "--model"]
        or name == "2026-03"
    )
    assert set(words[3:]) == set(own) - {"--model", "/model"} - {"annie-9b"} | (
        {"annie-9b"} if "annie-9b" in own else set()
    )
    assert recipe.get("cluster_only", False) is (name == "2026-11-two-sparks")


@pytest.mark.parametrize("runtime", RECIPE_RUNTIMES, ids=lambda runtime: runtime.name)
def test_every_recipe_can_be_used_and_has_its_source_with_a_date(tmp_path, runtime):
    for name, recipe in load_recipes(runtime.name).items():
        assert re.match(r"20\d\d-\d\d", recipe.source) and recipe.note, name
        assert recipe.image or runtime.program, f"{name}: neither an image nor a program"
        words = shlex.split(
            aq.serve.command(tmp_path, runtime=runtime.name, port=8123, recipe=name)
        )
        assert "8123" in words and not {"{model}", "{name}", "{port}", "{parsers}"} & set(words)
        assert recipe.command.count("{parsers}") == 1, name
        assert "--tool-call-parser" in words and "--tool-call-parser" not in recipe.command, name
        if "--speculative-config" in words:
            assert "--no-enable-prefix-caching" in words, name


def test_a_runtime_without_a_rule_is_served_with_a_note(tmp_path):
    """Whether it loads a checkpoint is not known, which is different from a checkpoint that it does not load."""
    source = zoo.nvfp4(tmp_path / "nvfp4", zoo.bf16(tmp_path / "bf16"))
    recipe = next(iter(load_recipes("sglang").values()))
    server = RecipeRuntime("new-server", "New Server")
    with patch.object(recipes, "_choose", return_value=("2026-11", recipe)):
        notes = server.check(source)
    assert "whether New Server loads it is not checked" in " ".join(notes)


def test_the_bare_recipe_runs_what_is_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("ANNIE_QUANT_VLLM", "/opt/own/vllm")
    line = aq.serve.command(tmp_path, runtime="vllm", port=8123, recipe="cpu")
    assert (
        "docker" not in line
        and f"/opt/own/vllm serve {tmp_path}" in line
        and "VLLM_CPU_KVCACHE_SPACE=1" in line
    )
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EnvironmentFault, match="/opt/own/vllm is not installed"):
        aq.serve.start(tmp_path, runtime="vllm", recipe="cpu")
    with pytest.raises(UsageError, match="cannot be written"):
        aq.serve.write_recipe(tmp_path, tmp_path / "x.yaml", recipe="cpu")
    with pytest.raises(UsageError, match="no recipe files"):
        aq.serve.write_recipe(tmp_path, tmp_path / "x.yaml", runtime="llama.cpp")


# Lines as servers print them (R20, issue threads of vLLM and SGLang, docker's own messages).
LINES = [
    ("ValueError: The checkpoint you are trying to load has model type `qwen3_5_text` but Transformers does not recognize "
     "this architecture.", "transformers"),
    ('"message":"\\"auto\\" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set"', "parser"),
    ("RuntimeError: cuDNN version incompatibility: PyTorch was compiled against (9, 16, 0)", "cuDNN"),
    ("OSError: /model does not appear to have a file named preprocessor_config.json.", "visual part"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "memory"),
    ("ValueError: No available memory for the cache blocks.", "memory"),
    ("docker: Error response from daemon: could not select device driver \"\" with capabilities: [[gpu]].", "NVIDIA runtime"),
    ("permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock", "docker"),
    ("exec /usr/bin/python3: exec format error", "processor"),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "machine code"),
    ("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'", "ptxas"),
    ("OSError: [Errno 98] Address already in use", "port"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "word"), LINES)
def test_known_errors_are_recognised_and_have_a_fix(line, word):
    from annie_quant.ops import known_faults

    known = known_faults.find_error(f"INFO starting\n{line}\nINFO bye")
    assert word in known.cause and known.fix


def test_ordinary_lines_are_not_known_errors():
    from annie_quant.ops import known_faults

    ordinary = (
        "INFO 11-21 Loading safetensors checkpoint shards: 100% Completed | 1/1\nINFO Started server process [8082]\n"
        "INFO Using AnnieNvFp4LinearKernel for NVFP4 GEMM\nINFO non-default args: {'quantization': 'modelopt'}\n"
    )
    assert known_faults.find_error(ordinary) is None
    assert known_faults.phase(ordinary) == "loading weights"
    assert known_faults.phase(ordinary + "INFO: Application startup complete.") == "ready"
    assert known_faults.phase("") == "starting"


def test_a_server_that_ends_early_reports_the_fix(tmp_path):
    program = tmp_path / "vllm"
    program.write_text(
        "#!/bin/sh\necho 'CUDA error: no kernel image is available for execution on the device'; exit 1\n"
    )
    program.chmod(0o755)
    (tmp_path / "config.json").write_text("{}")
    import os

    from annie_quant.core.errors import ServerError

    old = os.environ.get("ANNIE_QUANT_VLLM")
    os.environ["ANNIE_QUANT_VLLM"] = str(program)
    try:
        with pytest.raises(ServerError, match="no kernel image") as caught:
            aq.serve.start(tmp_path, runtime="vllm", recipe="cpu", port=8917, timeout_s=20)
    finally:
        os.environ.pop("ANNIE_QUANT_VLLM") if old is None else os.environ.update(
            ANNIE_QUANT_VLLM=old
        )
    assert "121a" in caught.value.hint


def test_only_plain_nvfp4_of_modelopt_is_served_with_its_quantization_option(tmp_path):
    """SGLang's documentation: no --quantization for a quantized model; modelopt_fp4 (R15) is for ModelOpt's plain NVFP4."""
    source = zoo.bf16(tmp_path / "bf16")
    nvfp4 = zoo.nvfp4(tmp_path / "nvfp4", source)
    packed = aq.checkpoint.convert(nvfp4, "compressed-tensors", tmp_path / "packed").path
    mixed = zoo.spoil(
        nvfp4,
        tmp_path / "mixed",
        lambda t, c: c["quantization_config"].update(quant_algo="MIXED_PRECISION"),
    )
    (mixed / "hf_quant_config.json").unlink(missing_ok=True)
    for runtime, recipe, option in (
        ("sglang", None, "modelopt_fp4"),
        ("vllm", "2026-03", "modelopt"),
    ):
        for model, fits in ((nvfp4, True), (packed, False), (mixed, False), (source, False)):
            words = shlex.split(aq.serve.command(model, runtime=runtime, recipe=recipe))
            file = aq.serve.write_recipe(
                model, tmp_path / f"{runtime}.yaml", runtime=runtime, recipe=recipe
            )
            assert (f"--quantization {option}" in " ".join(words)) == fits, (runtime, model)
            assert ("--quantization" in words) == ("--quantization" in file.read_text()) == fits, (
                runtime,
                model,
            )
            assert words[words.index("/model") + 1].startswith("--")
