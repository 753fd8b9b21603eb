"""An adapter's folder: its settings, and its tensors as views of the file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from annie_quant.checkpoint.adapters.keys import AdapterKey, parse_all
from annie_quant.checkpoint.adapters.settings import CONFIG_FILE, AdapterSettings, read_settings
from annie_quant.checkpoint.header import Shard
from annie_quant.checkpoint.shards import ROWS_ELEMENTS, inside
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.core.files import sha256_file

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
MAX_CARD_BYTES = 1 << 20
FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Adapter:
    """An adapter on disk.

    keys: the names of its tensors, taken apart.
    """

    path: Path
    settings: AdapterSettings
    weights: Shard
    keys: list[AdapterKey]

    def tensor(self, key: AdapterKey) -> np.ndarray:
        """Return a tensor, read-only, in the type of the file."""
        return self.weights.tensor(self.weights.tensors[key.key])

    def shape(self, key: AdapterKey) -> tuple[int, ...]:
        return self.weights.tensors[key.key].shape

    @cached_property
    def is_from_unsloth(self) -> bool:
        """Whether Unsloth trained it, by its settings or its card."""
        base = self.settings.base_model_name_or_path or ""
        mapping = self.settings.auto_mapping or {}
        return (
            base.startswith("unsloth/")
            or "unsloth_fixed" in mapping
            or "unsloth" in self.card.lower()
        )

    @cached_property
    def card(self) -> str:
        """The beginning of its README.md; "" where it has none."""
        path = self.path / "README.md"
        if not path.is_file():
            return ""
        with inside(self.path, path).open("rb") as file:
            return file.read(MAX_CARD_BYTES).decode(errors="replace")

    @cached_property
    def weights_sha256(self) -> str:
        return sha256_file(self.path / WEIGHTS_FILE)

    @cached_property
    def config_sha256(self) -> str:
        return sha256_file(self.path / CONFIG_FILE)

    def is_zero(self, key: AdapterKey) -> bool:
        """Return whether every element of a tensor is zero.

        Raises CheckpointError where one is not finite.
        """
        flat = self.tensor(key).reshape(-1)
        zero = True
        for start in range(0, flat.size, ROWS_ELEMENTS):
            piece = flat[start : start + ROWS_ELEMENTS].astype(np.float32)
            if not np.isfinite(piece).all():
                raise CheckpointError(
                    f"the adapter's tensor {key.key} has values that are not finite",
                    "take an earlier checkpoint of the training",
                )
            zero = zero and not piece.any()
        return zero


def read_adapter(folder: Path) -> Adapter:
    """Return the adapter in a folder.

    Raises UsageError or CheckpointError for a folder that has none, and for one that cannot be
    merged.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", "give --adapter the adapter's folder")
    settings = read_settings(folder)
    path = folder / WEIGHTS_FILE
    if not path.exists():
        pickled = (folder / PICKLED_FILE).exists()
        reason = f"{PICKLED_FILE} is pickled, which is never read" if pickled else "it has none"
        hint = "load it with peft and save it with save_pretrained, which writes safetensors"
        raise CheckpointError(f"{folder}: no {WEIGHTS_FILE}: {reason}", hint)
    weights = Shard(inside(folder, path))
    for info in weights.tensors.values():
        if info.dtype not in FLOATS or not info.elements:
            expected = f"expected {', '.join(FLOATS)}"
            raise CheckpointError(
                f"the adapter's tensor {info.name}: {info.dtype} {list(info.shape)}, {expected}, "
                "not empty",
                "gather the parts of DeepSpeed or FSDP before the adapter is saved",
            )
    if not weights.tensors:
        raise CheckpointError(f"{path}: it has no tensor", "save the adapter again")
    return Adapter(folder, settings, weights, parse_all(weights.tensors))
