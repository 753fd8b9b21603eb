"""Lookup of parts that are one file each: strategies, dialects, runtimes, gates, teachers.

A part is a module in its package's folder and defines NAME. Adding a file adds the part.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from annie_quant.errors import UsageError


def names(package: ModuleType) -> list[str]:
    """Return the file names of all parts, sorted, without importing them."""
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def find(package: ModuleType, name: str, kind: str) -> ModuleType:
    """Import the part called `name` (dashes and dots count as underscores). Raises UsageError if there is none."""
    module = name.replace("-", "_").replace(".", "_")
    known = names(package)
    if module not in known:
        raise UsageError(f"there is no {kind} called {name!r}", f"choose one of: {', '.join(known)}")
    return importlib.import_module(f"{package.__name__}.{module}")
