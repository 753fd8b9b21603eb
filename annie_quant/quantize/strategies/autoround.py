"""autoround: NVFP4 by Intel's AutoRound itself, which learns the rounding of a layer in steps of signed gradient descent."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from annie_quant.core.progress import Progress
from annie_quant.quantize.external import (
    RECIPE_HINT,
    Library,
    load_source,
    load_tokenizer,
    move_checkpoint,
    quantize_by,
    rows_of,
    unquantized_modules,
)
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import ALL_NVFP4, Cost, Job, Strategy, StrategyOptions, described

LIBRARY = Library(
    name="AutoRound",
    module="auto_round",
    distribution="auto-round",
    install="pip install auto-round compressed-tensors",
)
WRITER = replace(LIBRARY, name="AutoRound's compressed-tensors", module="compressed_tensors")
# Steps and learning rate (None: 1 / steps) of AutoRound's own presets.
RECIPES = {"rtn": (0, None), "light": (50, 5e-3), "default": (200, None), "best": (1000, None)}
MAX_ROWS = 128
ROWS_PER_STEP = 8


class AutoRoundOptions(StrategyOptions, frozen=True):
    recipe: Annotated[
        Literal["rtn", "light", "default", "best"],
        described("AutoRound's preset: 0, 50, 200 or 1,000 steps per layer"),
    ] = "light"


def equal_rows(rows: list[tuple[int, ...]]) -> np.ndarray:
    """Return rows evenly spread over all as int64 [B, T]: AutoRound takes one length.

    Shorter rows repeat their own tokens, so that the loss is over natural text. B is a multiple of a step's rows where there
    are as many.
    """
    count = min(MAX_ROWS, len(rows))
    if count > ROWS_PER_STEP:
        count -= count % ROWS_PER_STEP
    chosen = [rows[i * len(rows) // count] for i in range(count)]
    width = max(map(len, chosen))
    return np.stack([np.resize(np.asarray(row, np.int64), width) for row in chosen])


def plan_autoround(job: Job[AutoRoundOptions], progress: Progress) -> QuantizationPlan:
    """Let AutoRound quantize and write, and return what is in the sound checkpoint."""
    from annie_quant.quantize.backend import device_kind
    from annie_quant.quantize.calibration_text import read_answers

    library = LIBRARY.load()
    WRITER.load()
    ignore = unquantized_modules(job)
    text = read_answers(job, progress)
    recipe = job.options.recipe
    steps, rate = RECIPES[recipe]

    def write(export: Path) -> None:
        import torch

        ids = torch.from_numpy(equal_rows(rows_of(text)))
        rounder = library.AutoRound(
            load_source(job.model),
            load_tokenizer(job.model),
            scheme="NVFP4",
            # Without a mask: of a hybrid model it gives full attention the one of DeltaNet.
            dataset=[
                {"input_ids": part, "attention_mask": None} for part in ids.split(ROWS_PER_STEP)
            ],
            iters=steps,
            lr=rate,
            nsamples=len(ids),
            seqlen=ids.shape[1],
            batch_size=min(ROWS_PER_STEP, len(ids)),
            seed=job.seed,
            device_map=device_kind(),
            ignore_layers=",".join(ignore),
        )
        rounder.quantize_and_save(str(export), format="llm_compressor")
        flatten(export)

    return quantize_by(LIBRARY, recipe, job, text, progress, write, RECIPE_HINT)


def flatten(export: Path) -> None:
    """Move the files of AutoRound's subfolder (MODEL-nvfp-w4g16) into the folder that it was given."""
    if (export / "config.json").is_file():
        return
    inner = next(folder for folder in export.iterdir() if folder.is_dir())
    for file in inner.iterdir():
        shutil.move(file, export / file.name)
    inner.rmdir()


STRATEGY = Strategy(
    name="autoround",
    summary="NVFP4 by Intel's AutoRound itself (--set recipe=light), audited and repaired",
    formats=ALL_NVFP4,
    # 80 times as long as `gptq` with 50 steps (tests/perf/quantize_peers.md).
    cost=Cost(rank=97, passes=150, encode=20, reads_answers=True),
    plan=plan_autoround,
    options=AutoRoundOptions,
    write=move_checkpoint,
    recipe_option="recipe",
)
