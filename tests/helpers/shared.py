"""Folders that are made once per test session, by whichever worker of pytest-xdist needs one first.

Each worker has its own module fixtures; what is slow to make and the same in all of them is made here.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

root: Path  # of this session, the same for all workers; set by tests/conftest.py


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` has filled, in this process or another one. Tests must not change what is in it."""
    root.mkdir(exist_ok=True)
    folder, unfinished = root / name, root / f"{name}.part"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a worker that dies releases it, too
        if not folder.exists():
            unfinished.mkdir(exist_ok=True)
            make(unfinished)
            os.rename(unfinished, folder)
    return folder
