"""tiny-annie changed by a small difference: "base" (markdown, thinking aloud, no tools), "thin-1", "thin-2" and "robust".

And tiny-annie with its head for multi-token prediction (MTP).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from paths import TINY_ANNIE

VARIANTS = TINY_ANNIE.with_name("tiny-annie-variants")


def save_variant(name: str, folder: Path) -> Path:
    """Save the checkpoint in `folder`, which does not exist yet (training/tiny_annie/ship.py makes the differences)."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY_ANNIE, folder, ignore=shutil.ignore_patterns(".annie_quant"))
    weights, factors = (
        load_file(TINY_ANNIE / "model.safetensors"),
        load_file(VARIANTS / f"{name}.safetensors"),
    )
    for linear in {key[:-2] for key in factors}:
        key = f"{linear}.weight"
        change = factors[f"{linear}.b"].float() @ factors[f"{linear}.a"].float()
        weights[key] = (weights[key].float() + change).to(weights[key].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_with_head(folder: Path) -> Path:
    """Save tiny-annie with its MTP head in `folder`, which does not exist yet (training/tiny_annie/mtp.py trains the head)."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY_ANNIE, folder, ignore=shutil.ignore_patterns(".annie_quant"))
    weights = load_file(TINY_ANNIE / "model.safetensors") | load_file(VARIANTS / "mtp.safetensors")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return folder
