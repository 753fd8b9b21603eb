"""From which version on a server loads a folder: what its formats, its head and its class need, and what was not read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import checkpoint_zoo as zoo
import msgspec
import pytest
from command_line import annie_quant

from annie_quant.checkpoint import ModelFolder, dialects, loader_support
from annie_quant.core.errors import CheckpointError
from annie_quant.ops import serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("checkpoints")
    return zoo.nvfp4(home / "nvfp4", zoo.bf16(home / "bf16"))


def variant(source: Path, target: Path, quantization: dict[str, Any], **config: Any) -> Path:
    """Return a copy with other settings: only what the table reads, not a checkpoint that could be served."""
    shutil.copytree(source, target)
    stored = json.loads((target / "config.json").read_text()) | config
    stored["quantization_config"] = stored["quantization_config"] | quantization
    (target / "config.json").write_text(json.dumps(stored))
    (target / "hf_quant_config.json").unlink(missing_ok=True)
    return target


def since(path: Path) -> dict[str, str | None]:
    return {v.server: v.since for v in loader_support.versions(dialects.read(ModelFolder(path)))}


def mixed(path: Path, algorithm: str) -> dict[str, Any]:
    linears = list(dialects.linears(ModelFolder(path)))
    layers = {name: {"quant_algo": "NVFP4"} for name in linears[1:]} | {
        linears[0]: {"quant_algo": algorithm}
    }
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


TEXT, VISION = ["Qwen3_5ForCausalLM"], ["Qwen3_5ForConditionalGeneration"]


def test_the_class_decides_where_the_format_is_old(folder: Path, tmp_path: Path) -> None:
    assert since(folder) == {"vLLM": "0.27.0", "SGLang": "0.5.17", "llama.cpp": "b8672"}
    older = since(variant(folder, tmp_path / "vision", {}, architectures=VISION))
    assert (older["vLLM"], older["SGLang"]) == ("0.17.0", "0.5.9")


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_algo": "W4A16_NVFP4"}, ("0.21.0", "0.5.19")),
        ("NVFP4", ("0.17.0", "0.5.15")),
        ("W4A16_NVFP4", ("0.22.0", "0.5.15")),
        ("FP8_PER_CHANNEL_PER_TOKEN", ("0.30.0", None)),
    ],
)
def test_the_formats_decide(
    folder: Path,
    tmp_path: Path,
    quantization: dict[str, Any] | str,
    expected: tuple[str, str | None],
) -> None:
    settings = mixed(folder, quantization) if isinstance(quantization, str) else quantization
    found = since(variant(folder, tmp_path / "copy", settings, architectures=VISION))
    assert (found["vLLM"], found["SGLang"]) == expected


def test_what_was_not_read_is_not_claimed(folder: Path, tmp_path: Path) -> None:
    found = loader_support.versions(
        dialects.read(
            ModelFolder(variant(folder, tmp_path / "copy", {}, architectures=["NewForCausalLM"]))
        )
    )
    assert [v.since for v in found] == ["", "", "b8672"] and "NewForCausalLM was not read" in str(
        found[0]
    )


def test_a_server_that_cannot_load_the_plan_is_one_error_that_names_those_that_can(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = loader_support.table()
    without = known["SGLang"].features | {"NVFP4": loader_support.Feature(None, "a source")}
    changed = known | {"SGLang": msgspec.structs.replace(known["SGLang"], features=without)}
    monkeypatch.setattr(loader_support, "table", lambda: changed)
    with pytest.raises(
        CheckpointError, match=r"SGLang: no version that was read \(NVFP4: a source; .* loads "
    ) as error:
        serving.check(folder, runtime="sglang")
    assert "loaded by vLLM, llama.cpp" in str(error.value.hint)
    assert any("no version" in note for note in serving.check(folder, runtime="vllm"))


def test_dry_run_states_the_versions_of_all_servers_with_date_and_source(folder: Path) -> None:
    done = annie_quant("serve", folder, "--runtime", "vllm", "--dry-run")
    lines = [line for line in done.stderr.splitlines() if "versions that load it" in line]
    assert done.returncode == 0 and len(lines) == 3 and done.stdout.count("\n") == 1
    assert "vLLM: from 0.27.0 (Qwen3_5ForCausalLM: #50210" in lines[0] and "2026-11-27" in lines[0]


def test_every_row_has_a_version_that_was_read_and_a_source() -> None:
    for server, known in loader_support.table().items():
        assert known.features and "2026-" in known.read, server
        for name, row in known.features.items():
            assert row.source and (
                row.since is None
                or loader_support.version_key(row.since) <= loader_support.version_key(known.newest)
            ), name


def test_an_older_server_is_refused_by_its_version(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """#42566: vLLM 0.19.1 lacks W4A16_NVFP4 in mixtures. SGLang 0.5.14 takes any but Nemotron-H's for W4AFP8."""
    settings = mixed(folder, "W4A16_NVFP4")
    path = variant(folder, tmp_path / "mixed", settings, architectures=VISION)
    model = dialects.read(ModelFolder(path))
    old = loader_support.too_old(model, "vllm", "0.19.1")
    assert "from 0.22.0 (W4A16_NVFP4 in MIXED_PRECISION" in old
    assert "0.5.15" in loader_support.too_old(model, "sglang", "0.5.14")
    for server, version in (
        ("vllm", "0.22.0"),
        ("vllm", "0.33.1rc1.dev3+g12"),
        ("vllm", "0.1.dev1+g12"),
        ("sglang", "0.5.15.post1"),
        ("trtllm", "1.0"),
    ):
        assert not loader_support.too_old(model, server, version), (server, version)
    plain = dialects.read(ModelFolder(variant(folder, tmp_path / "p", {}, architectures=VISION)))
    assert not loader_support.too_old(plain, "vllm", "0.19.1")


def test_the_audit_states_the_first_version_for_a_mixture(folder: Path, tmp_path: Path) -> None:
    settings = mixed(folder, "W4A16_NVFP4")
    model = dialects.read(
        ModelFolder(variant(folder, tmp_path / "mixed", settings, architectures=VISION))
    )
    by_server = {s.server: s for s in loader_support.verdicts(model, [])}
    for server, since_version in (("vLLM", "0.22.0"), ("SGLang", "0.5.15")):
        if by_server[server].loads != "no":
            assert f"from {since_version}" in by_server[server].note
    plain = loader_support.verdicts(dialects.read(ModelFolder(folder)), [])
    assert not any("from 0." in support.note for support in plain)


def test_serve_refuses_an_installed_or_tagged_version_that_is_too_old(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from annie_quant.core import host

    monkeypatch.setattr(host, "package_version", lambda name: "0.19.1")
    monkeypatch.delenv("ANNIE_QUANT_VLLM", raising=False)
    with pytest.raises(CheckpointError, match=r"vLLM 0\.19\.1 is too old: from 0\.27\.0"):
        serving.check(folder, runtime="vllm", recipe="own-kernel")
    assert serving.check(folder, runtime="vllm"), "the image's tag moves: not known"
    vllm = serving.find_runtime("vllm")
    recipe = vllm.find(None)
    for image, version in (
        ("vllm/vllm-openai:v0.19.1", "0.19.1"),
        ("vllm/vllm-openai:v0.33.0-cu130", "0.33.0"),
        ("vllm/vllm-openai:cu130-nightly", None),
        ("lmsysorg/sglang:spark", None),
    ):
        assert vllm.version(msgspec.structs.replace(recipe, image=image)) == version


@pytest.mark.parametrize(
    ("runtime", "version", "named"),
    [("vllm", "0.19.1", True), ("vllm", "0.33.0", False), ("llama.cpp", "b1", False)],
)
def test_doctor_names_a_running_server_that_is_too_old(
    folder: Path, runtime: str, version: str, named: bool
) -> None:
    from annie_quant.documents import Identity
    from annie_quant.ops.served_model import version_findings

    found = version_findings(Identity(name="s", runtime=runtime, version=version), folder)
    assert [f.level for f in found] == ["fault"] * named
    assert all("from 0.27.0" in f.message for f in found)
