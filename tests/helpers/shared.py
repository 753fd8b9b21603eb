"""Folders that other programs fill, made once for all runs of pytest by whichever worker needs one first.

Only for what ModelOpt or a compiler computes: the product's own results are computed in each run.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from paths import ROOT

STORED = ROOT / "build/tests"


def stored(name: str, inputs: bytes, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` has filled, in this run or an earlier one. Tests must not change what is in it.

    inputs: all that the content depends on, versions included.
    """
    STORED.mkdir(parents=True, exist_ok=True)
    folder = STORED / f"{name}-{hashlib.sha256(inputs).hexdigest()[:24]}"
    unfinished = folder.with_suffix(".part")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a worker that dies releases it, too
        if not folder.exists():
            shutil.rmtree(unfinished, ignore_errors=True)  # of a worker that died
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


def modelopt_inputs(source: Path, *own: object) -> bytes:
    """Return what ModelOpt's work on a checkpoint depends on: the folder's files, versions, and `own`."""
    files = [f.name.encode() + f.read_bytes() for f in sorted(source.iterdir()) if f.is_file()]
    versions = [
        metadata.version(package) for package in ("nvidia-modelopt", "torch", "transformers")
    ]
    return b"\n".join([*files, repr((own, versions)).encode()])


@functools.cache
def c_sources(*folders: str) -> bytes:
    """Return what a program depends on that gcc makes of the C files in these folders of the repository."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.[ch]"))]
    version = subprocess.run(["gcc", "--version"], check=True, capture_output=True).stdout
    return b"\n".join([version, *(str(file).encode() + file.read_bytes() for file in files)])
