"""The package as a whole: imports, version, build, atomic writes, resuming."""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import command_line
import pytest
from paths import ROOT

import annie_quant
from annie_quant.cli import doctor
from annie_quant.cli.pipeline.stages import RunDirectory
from annie_quant.core import files, native
from annie_quant.core.errors import EnvironmentFault, need
from annie_quant.stream.client import system_ca_file


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_importing_the_package_imports_no_large_library() -> None:
    loaded = python(
        "import sys, annie_quant; print(','.join(m for m in ('torch','transformers','modelopt','scipy','rich','click',"
        "'pydantic','jinja2','matplotlib','xllamacpp') if m in sys.modules))"
    )
    assert loaded.strip() == ""


def test_the_bench_and_the_judge_never_import_torch() -> None:
    assert (
        python(
            "import sys, annie_quant.bench, annie_quant.judge, annie_quant.report; print('torch' in sys.modules)"
        )
        == "False\n"
    )


@pytest.mark.parametrize("name", [name for name in annie_quant.__all__ if name != "__version__"])
def test_every_public_part_can_be_imported(name: str) -> None:
    try:
        part = getattr(annie_quant, name)
    except EnvironmentFault as missing:  # a C module that is not built here
        assert missing.hint
        return
    places = {"errors": "core.errors", "serve": "ops.serving"}
    assert part is importlib.import_module(f"annie_quant.{places.get(name, name)}")


def test_an_unknown_part_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        annie_quant.nonsense  # noqa: B018


def test_a_missing_library_names_its_extra() -> None:
    with pytest.raises(EnvironmentFault) as refused:
        need("no_such_library_here", "quantize")
    assert "no_such_library_here" in refused.value.message
    assert refused.value.hint == 'pip install "annie-quant[quantize]"'


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    files.write_json(target, {"old": True})
    with pytest.raises(RuntimeError), files.replacing(target, "w") as file:
        file.write("half")
        raise RuntimeError
    assert json.loads(target.read_text()) == {"old": True}
    assert [f.name for f in tmp_path.iterdir()] == ["run.json"]


def test_a_stage_that_fails_leaves_no_stamp(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run.stage("bench", {}, [], lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run.finished("bench", "") is None and not list((tmp_path / "run/stages").iterdir())


def test_a_run_directory_under_a_file_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot be created"):
        RunDirectory(tmp_path / "file" / "run")


# ---- version


def annie(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "annie_quant", *args], capture_output=True, text=True
    )


def test_the_version_is_written_once() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and 'attr = "annie_quant.__version__"' in project
    assert not re.search(r"^version = \"", project, re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", annie_quant.__version__)
    assert annie("--version").stdout == f"annie-quant, version {annie_quant.__version__}\n"


def test_version_json_agrees_with_what_can_be_imported() -> None:
    process = annie("--version", "--json")
    info = json.loads(process.stdout)
    assert info["version"] == annie_quant.__version__ and process.stderr == ""
    for name, module in info["modules"].items():
        imported = (
            subprocess.run(
                [sys.executable, "-c", f"import annie_quant.{name}"], capture_output=True
            ).returncode
            == 0
        )
        assert module["loaded"] is imported, name
        assert (name in info["fixes"]) is not imported
    assert info["modules"]["_nvfp4"]["variant"] == annie_quant.nvfp4.variant()
    lines = annie("--version", "--verbose").stdout.splitlines()
    assert lines[0] == f"annie-quant {annie_quant.__version__}"
    assert [line for line in lines if line.strip().startswith(">")] == [
        line for line in lines if line.strip().removeprefix("> ") in info["fixes"].values()
    ]


def test_a_module_that_is_not_built_names_its_requirement_and_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "annie_quant._gemm", None)  # makes its import fail
    info = doctor.inspect_installation()
    assert info["modules"]["_gemm"]["loaded"] is False and "nvcc" in info["modules"]["_gemm"]["why"]
    assert "a clone, or an unpacked source" in info["fixes"]["_gemm"]  # a wheel has no _gemm
    text = "\n".join(doctor.version_lines(info))
    assert "all else works" in text and info["fixes"]["_gemm"] in text


def test_a_module_that_is_built_and_does_not_load_reports_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> None:
        raise ImportError("libcurl.so.4: cannot open shared object file")

    monkeypatch.setattr(native.importlib, "import_module", broken)
    with pytest.raises(EnvironmentFault, match=r"_stream does not load: libcurl\.so\.4"):
        native.load("_stream")


def test_extras_are_read_from_the_metadata() -> None:
    requirements = [
        "numpy>=1.26",
        'scipy>=1.11; extra == "quantize"',
        'No-Such_Library.here[more]<2,>=1; python_version >= "3.10" and extra == "quantize"',
        'ruff; extra == "dev"',
    ]
    assert doctor.inspect_extras(requirements) == {
        "quantize": {
            "installed": {"scipy": importlib.metadata.version("scipy")},
            "missing": ["No-Such_Library.here"],
        }
    }


@pytest.mark.parametrize("option", ["--verbose", "--json"])
def test_options_of_version_alone_are_a_usage_error(option: str) -> None:
    refused = command_line.annie_quant(option)
    assert refused.returncode == 2 and "--version" in refused.stderr


def test_no_command_prints_the_help() -> None:
    shown = command_line.annie_quant()
    assert shown.stdout.startswith("Usage:") and shown.returncode == 0


# ---- building


def build(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "-q", command, "--help"],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )


def test_a_build_without_a_compiler_is_one_line_before_the_build_starts() -> None:
    pytest.importorskip(
        "setuptools", reason="setuptools is not installed, so nothing is built here"
    )
    refused = build("bdist_wheel", CC="/no/such/cc")
    assert refused.returncode == 1 and refused.stdout == ""
    last = refused.stderr.splitlines()[-1]
    assert (
        "no C compiler is installed (/no/such/cc)" in last
        and "apt-get install build-essential" in last
    )
    assert build("--version", CC="/no/such/cc").returncode == 0  # a query is not a build


def test_every_bundled_library_has_its_licence() -> None:
    """tools/sbom.py and csrc/licences name the same libraries; the wheel's own check is tools/try_install.py --wheel."""
    text = (ROOT / "csrc/licences/README.txt").read_text()
    bill = (ROOT / "tools/sbom.py").read_text()
    for name in ("curl", "nghttp2", "OpenSSL"):
        assert name in text and name in bill
    for named in re.findall(r"\b([a-z0-9-]+\.txt)\b", text):
        assert (ROOT / "csrc/licences" / named).stat().st_size > 500, named


def test_the_pinned_sources_of_libcurl_are_the_ones_that_are_declared() -> None:
    script = (ROOT / ".ci/libcurl").read_text()
    pinned = re.findall(
        r"^unpack (\w+)-([\d.]+) ([0-9a-f]{64}) \\\n\s+(https://\S+)$", script, re.MULTILINE
    )
    assert {name for name, *_ in pinned} == {"curl", "nghttp2", "openssl"}
    assert all(version in url for _, version, _, url in pinned)


def test_certificates_are_the_systems_unless_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "mine.pem"))
    assert system_ca_file() == str(tmp_path / "mine.pem")
    monkeypatch.delenv("SSL_CERT_FILE")
    result = system_ca_file()
    assert result is None or b"BEGIN CERTIFICATE" in Path(result).read_bytes()
