"""Parts that are one module each in a package: the strategies and the teachers.

Adding a file adds the part. A file whose name begins with an underscore is not a part.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType

from annie_quant.core.errors import UsageError


def names(package: ModuleType) -> list[str]:
    """Return the sorted module names of the parts in `package`. Imports none of them."""
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def find(package: ModuleType, name: str, kind: str, spelling: Callable[[str], str] = str) -> ModuleType:
    """Import and return the part called `name`; dashes and dots count as underscores.

    kind: what a part is, for the error message: "strategy", "teacher".
    spelling: converts a module's name to the name that users write.
    Raises UsageError that lists the available parts.
    """
    module_name = name.replace("-", "_").replace(".", "_")
    available = names(package)
    if module_name not in available:
        raise UsageError(f"there is no {kind} called {name!r}", f"choose one of: {', '.join(map(spelling, available))}")
    return importlib.import_module(f"{package.__name__}.{module_name}")
