"""Stores exported folders here: settings by name, weights once for all that have the same bytes.

    python tests/data/dialects/keep.py FOLDER [FOLDER ...]

NAME.json holds the folder's JSON files and the name of its weights below weights/.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = ("config.json", "hf_quant_config.json")


def keep(folder: Path) -> None:
    weights = folder / "model.safetensors"
    stem = hashlib.sha256(weights.read_bytes()).hexdigest()[:12]
    shutil.copyfile(weights, HERE / "weights" / f"{stem}.safetensors")
    files = {
        name: json.loads((folder / name).read_text()) for name in FILES if (folder / name).is_file()
    }
    (HERE / f"{folder.name}.json").write_text(
        json.dumps({"weights": stem, **files}, indent=1) + "\n"
    )


def unpack(name: str, folder: Path) -> Path:
    """A stored sample as the model folder it was."""
    held = json.loads((HERE / f"{name}.json").read_text())
    folder.mkdir()
    shutil.copyfile(
        HERE / "weights" / f"{held.pop('weights')}.safetensors", folder / "model.safetensors"
    )
    for file, content in held.items():
        (folder / file).write_text(json.dumps(content))
    return folder


if __name__ == "__main__":
    (HERE / "weights").mkdir(exist_ok=True)
    for given in sys.argv[1:]:
        keep(Path(given))
