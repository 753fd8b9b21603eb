"""Which modules stay as they are: the founding `--exclude-layers` flag, made exact.

A pattern with *, ? or [ is an fnmatch over the full module name. Anything else names whole dotted parts:
`layers.0` means model.layers.0.* and not layers.01 or layers.10; `linear_attn` means any part called so.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable

from annie_quant.errors import UsageError


def matches(pattern: str, name: str) -> bool:
    if any(c in pattern for c in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."


def excluded(patterns: Iterable[str], modules: Iterable[str]) -> set[str]:
    """The modules that the patterns name. A pattern that names none is refused, with what it may have meant."""
    modules = list(modules)
    chosen: set[str] = set()
    for pattern in patterns:
        hit = {m for m in modules if matches(pattern, m)}
        if not hit:
            parts = {
                ".".join(m.split(".")[i:j]) for m in modules for i in range(len(m.split("."))) for j in (i + 1, i + 2)
            }
            close = difflib.get_close_matches(pattern.strip("*."), sorted(parts), n=3, cutoff=0.5)
            raise UsageError(
                f"--exclude-layers: {pattern!r} matches none of the model's {len(modules)} linear layers",
                f"did you mean {' or '.join(close)}?" if close else f"a full name is {modules[0]!r}" if modules else "",
            )
        chosen |= hit
    return chosen
