"""Finding the parts that come one to a file: strategies, dialects, runtimes, gates, teachers.

A part is a module in its folder with a NAME; adding a file adds the part, and nothing else is touched.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from annie_quant.errors import UsageError


def names(package: ModuleType) -> list[str]:
    """The parts' file names, in order; nothing is imported."""
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def find(package: ModuleType, name: str, kind: str) -> ModuleType:
    """The part called `name` (dashes and dots read as underscores)."""
    wanted = name.replace("-", "_").replace(".", "_")
    have = names(package)
    if wanted not in have:
        raise UsageError(f"there is no {kind} called {name!r}", f"choose one of: {', '.join(have)}")
    return importlib.import_module(f"{package.__name__}.{wanted}")
