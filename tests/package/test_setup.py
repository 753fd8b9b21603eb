"""setup.py with a compiler for CUDA that only records its calls: what another build of the same folder compiles and links again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

pytestmark = pytest.mark.skipif(
    not shutil.which("gcc"), reason="setup.py links the module with gcc, which is not installed"
)
FILES = len(list((ROOT / "csrc/gemm").glob("*.cu")))
NVCC = """#!/bin/sh
case "$*" in *--dryrun*) echo "#$ TOP={top}" >&2; exit 0 ;; esac
test "$1" != --version || {{ cat {top}/version; exit 0; }}
echo "$*" >> {log}
for last; do :; done
gcc -c -x c /dev/null -o "$last"
"""


@pytest.fixture
def build(tmp_path: Path):
    """Return a function that builds for some targets and returns nvcc's calls and the module's bytes."""
    top, log = tmp_path / "cuda", tmp_path / "calls"
    (top / "bin").mkdir(parents=True)
    (top / "include").mkdir()
    (top / "lib64").mkdir()
    subprocess.run(["ar", "rc", str(top / "lib64/libcudart_static.a")], check=True)
    nvcc = top / "bin/nvcc"
    nvcc.write_text(NVCC.format(top=top, log=log))
    nvcc.chmod(0o755)
    (top / "version").write_text("release 13.0")

    def run(
        archs: str, *options: str, version: str = "13.0", **settings: str
    ) -> tuple[list[str], bytes]:
        log.write_text("")
        (top / "version").write_text(f"release {version}")
        environment = {
            **os.environ,
            **settings,
            "CUDA_HOME": str(top),
            "ANNIE_QUANT_ARCHS": archs,
            "ANNIE_QUANT_ONLY": "_gemm",
        }
        words = [
            "build_ext",
            "--build-temp",
            str(tmp_path / "temp"),
            "--build-lib",
            str(tmp_path / "lib"),
            *options,
        ]
        subprocess.run(
            [sys.executable, "setup.py", "-q", *words],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
        )
        (module,) = (tmp_path / "lib/annie_quant").glob("_gemm*.so")
        return log.read_text().splitlines(), module.read_bytes()

    return run


def test_other_targets_are_compiled_and_linked_again(build) -> None:
    calls, module = build("80,86")
    assert len(calls) == FILES and all(
        "arch=compute_80,code=sm_80" in call and "code=sm_86" in call for call in calls
    )
    assert b"80,86\0" in module
    assert build("80,86") == ([], module)
    calls, module = build("90a,90-virtual", "--parallel", "4")
    assert len(calls) == FILES and all("arch=compute_90,code=compute_90" in call for call in calls)
    assert b"90a,90-virtual\0" in module and b"80,86\0" not in module
    calls, module = build("80,86")
    assert calls == [] and b"80,86\0" in module, (
        "the objects are still there, and the module is linked from them"
    )


def test_another_compiler_or_other_flags_compile_again(build) -> None:
    """Objects of another nvcc, or without -Werror, were linked as if they were of this one."""
    build("90a")
    assert len(build("90a", version="13.1")[0]) == FILES
    assert len(build("90a", ANNIE_QUANT_WERROR="1")[0]) == FILES
    assert len(build("90a", NVCC_APPEND_FLAGS="-DAQ_RACECHECK")[0]) == FILES
    assert build("90a")[0] == []
