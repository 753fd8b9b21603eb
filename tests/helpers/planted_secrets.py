"""Planted secrets, and the search for them in everything that a command writes."""

from __future__ import annotations

import contextlib
import zipfile
from pathlib import Path

KEY = "sk-planted-0123456789abcdefghijklmnop"
PASSWORD = "planted-password-77"
HUB = "hf_plantedplantedplantedplantedplanted"


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder, with compressed parts unpacked."""
    result = {}
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        result[str(path)] = path.read_bytes()
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as held:
            result |= {f"{path}:{name}": held.read(name) for name in held.namelist()}
    return result


def where(folder: Path, *printed: str) -> list[str]:
    """Return each position of a planted secret, or of half of one."""
    texts = bytes_of(folder) | {f"printed {i}": text.encode() for i, text in enumerate(printed)}
    words = [s.encode() for secret in (KEY, PASSWORD, HUB) for s in (secret, secret[:14])]
    return sorted({name for name, text in texts.items() for word in words if word in text})
