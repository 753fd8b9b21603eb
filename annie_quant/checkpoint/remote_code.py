"""Refuse Python code in a checkpoint (auto_map): it is never run.

transformers is always called with trust_remote_code=False; its refusal becomes one line that names the code.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from annie_quant.checkpoint.shards import CLASS_FILES
from annie_quant.core.errors import AnnieError, CheckpointError
from annie_quant.core.text import printable

MAX_FILE_BYTES = 100 << 20


@contextlib.contextmanager
def loading_tokenizer(folder: Path) -> Iterator[None]:
    """Raise CheckpointError for the many types of errors that transformers raises for a tokenizer's files."""
    try:
        with refused(folder):
            yield
    except (AnnieError, MemoryError):
        raise
    except BaseException as error:  # the tokenizers library panics with a type outside Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            raise
        reason = printable(f"{type(error).__name__}: {error}", 300)
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be loaded ({reason})",
            "copy the tokenizer's files from the source checkpoint",
        ) from error


@contextlib.contextmanager
def refused(folder: Path) -> Iterator[None]:
    """Raise CheckpointError where a call inside, with trust_remote_code=False, would need the checkpoint's code."""
    try:
        yield
    except AnnieError:
        raise
    except Exception as error:
        if "trust_remote_code" not in str(error):
            raise
        code = ", ".join(auto_map(folder)) or "auto_map"
        raise CheckpointError(
            f"{folder.name} brings Python code of its own ({code}), which annie_quant never runs",
            "use a checkpoint of an architecture that transformers has itself, or remove auto_map from its JSON files",
        ) from error


def auto_map(folder: Path) -> list[str]:
    """Return the auto_map entries of the folder's JSON files as "file: class → code"."""
    entries = []
    for name in ("config.json", *CLASS_FILES):
        try:
            if (folder / name).stat().st_size > MAX_FILE_BYTES:
                continue
            mapping = json.loads((folder / name).read_bytes()).get("auto_map")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        if isinstance(mapping, dict):
            entries += [
                f"{name}: {printable(str(auto), 80)} → {printable(str(code), 80)}"
                for auto, code in list(mapping.items())[:4]
            ]
    return entries
