"""Python programs under a preloaded library (LD_PRELOAD) that is compiled here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def run_preloaded(
    folder: Path, library: str, script: str, *arguments: str, **environment: str
) -> str:
    """Return the output of a script whose process has a library of this C source before all others."""
    if not shutil.which("gcc"):
        pytest.skip("gcc builds the preloaded library, and it is not installed")
    source = folder / "shim.c"
    shim = str(folder / "shim.so")
    source.write_text("#define _GNU_SOURCE\n#include <dlfcn.h>\n" + library)
    compiler = ["gcc", "-O1", "-shared", "-fPIC", str(source), "-o", shim, "-ldl"]
    subprocess.run(compiler, check=True)
    preload = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), shim]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env={**os.environ, "LD_PRELOAD": preload, "SHIM": shim, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
