"""One quantization's inputs, and what an interrupted one keeps. runner.py runs it."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from annie_quant import nvfp4
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import source_key
from annie_quant.core.errors import UsageError
from annie_quant.core.resume import KeyedJson, keyed_folder
from annie_quant.documents import HeldOut, Ingredient

WAIT_FOR_FIRST_S = 60.0  # how long further processes wait for the first one's work folder


@dataclass
class Job:
    """Everything that a strategy may read.

    model: folder of the bf16 checkpoint.  output: folder to write into.
    calib_data: JSON lines of conversations, or None.  calib_samples: conversations used at most.
    exclude: patterns of --exclude-layers.  scale: how block scales are chosen.
    options: every option of the strategy, with its value or default.  seed: for random choices.
    expected_bytes: set by the strategy, once it knows the size of the output's tensors.
    work: folder for what a killed run should not have to repeat; it is removed after success.
    held_out, ingredients: set by a strategy that compares recipes, for the checkpoint's annie_quant.json.
    """

    model: Path
    output: Path
    calib_data: Path | None = None
    calib_samples: int = 512
    exclude: tuple[str, ...] = ()
    scale: nvfp4.Scale = "amax"
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    expected_bytes: int | None = None
    work: Path = Path(".work")
    held_out: HeldOut | None = None
    ingredients: list[Ingredient] = field(default_factory=list)

    @property
    def conversations(self) -> Path:
        """The file of conversations. Raises UsageError where the job has none."""
        if self.calib_data is None:
            raise UsageError(
                "this strategy needs conversations to calibrate with",
                "annie-quant data --persona annie --output calibration.jsonl, then --calib-data calibration.jsonl",
            )
        return self.calib_data

    def key(self) -> dict[str, object]:
        """Return what must be equal for a rerun to use what an interrupted run measured."""
        return {
            "model": source_key(ModelFolder(self.model)),
            "calib_data": sha256_of(self.calib_data),
            "settings": [self.calib_samples, self.exclude, self.scale, self.options, self.seed],
        }

    def measurements(self, name: str) -> KeyedJson:
        """Return the file of measurements called `name`, which outlives a killed run with the same key."""
        return KeyedJson(self.work / name, self.key())

    def work_folder(self) -> Path:
        """Return the work folder, emptied unless it was made with the same key. The first process makes it."""
        return keyed_folder(self.work, self.key(), wait_s=WAIT_FOR_FIRST_S if rank() else 0.0)

    def remove(self, name: str) -> None:
        """Remove a folder inside the work folder."""
        shutil.rmtree(self.work / name, ignore_errors=True)


def rank() -> int:
    """Return which of a launcher's processes (torchrun, accelerate launch) this is; 0 where there is one."""
    return int(os.environ.get("RANK", "0"))


def sha256_of(file: Path | None) -> str | None:
    return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
