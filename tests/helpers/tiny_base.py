"""tiny-annie changed to answer like its base (training/tiny_annie/unlearn.py): markdown, thinking aloud, no tools."""

from __future__ import annotations

import shutil
from pathlib import Path

from paths import DATA, TINY_ANNIE

DELTA = DATA / "tiny_base_delta.safetensors"


def save_tiny_base(folder: Path) -> Path:
    """Save the checkpoint in `folder`, which does not exist yet."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY_ANNIE, folder, ignore=shutil.ignore_patterns(".annie_quant"))
    weights, factors = load_file(TINY_ANNIE / "model.safetensors"), load_file(DELTA)
    for name in {key[:-2] for key in factors}:
        key = f"{name}.weight"
        change = factors[f"{name}.b"].float() @ factors[f"{name}.a"].float()
        weights[key] = (weights[key].float() + change).to(weights[key].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
