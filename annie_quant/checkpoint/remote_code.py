"""Python that a checkpoint brings along (auto_map). It is never run: transformers is told so at every call, and what it
then refuses is one line that names the code.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from annie_quant.errors import CheckpointError

FILES = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
LARGEST = 100 << 20  # of such a file, in bytes


@contextlib.contextmanager
def refused(folder: Path) -> Iterator[None]:
    """Around calls with trust_remote_code=False: CheckpointError where transformers would need the checkpoint's code."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        code = ", ".join(auto_map(folder)) or "auto_map"
        raise CheckpointError(
            f"{folder.name} brings Python code of its own ({code}), which annie_quant never runs",
            "use a checkpoint of an architecture that transformers has itself, or remove auto_map from its JSON files",
        ) from error


def auto_map(folder: Path) -> list[str]:
    """What the folder's JSON files map to code of their own, as "file: class → code"."""
    found = []
    for name in FILES:
        try:
            if (folder / name).stat().st_size > LARGEST:
                continue
            mapping = json.loads((folder / name).read_bytes()).get("auto_map")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        if isinstance(mapping, dict):
            found += [f"{name}: {_short(auto)} → {_short(code)}" for auto, code in list(mapping.items())[:4]]
    return found


def _short(value: object) -> str:
    return "".join(c if c.isprintable() else "?" for c in str(value))[:80]
