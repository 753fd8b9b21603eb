"""Folders that are made once per run of pytest, by whichever worker of pytest-xdist needs one first.

Each worker has its own module fixtures; what is slow to make and the same in all of them is made here.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

_root: list[Path] = []


def set_root(folder: Path) -> None:
    """Set the folder of this run of pytest, the same for all workers."""
    _root[:] = [folder]


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` has filled, in this process or another one. Tests must not change what is in it."""
    (root,) = _root
    root.mkdir(exist_ok=True)
    folder, unfinished = root / name, root / f"{name}.part"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a worker that dies releases it, too
        if not folder.exists():
            unfinished.mkdir(exist_ok=True)
            make(unfinished)
            unfinished.rename(folder)
    return folder
