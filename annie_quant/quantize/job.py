"""One quantization: what goes in, which strategy, and an output folder that appears only when it is complete."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from annie_quant import registry
from annie_quant.errors import CheckpointError, UsageError

Report = Callable[[str], None]

# What a serving runtime needs beside the weights; ModelOpt's exporter leaves some of it behind.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "LICENSE",
)


@dataclass
class Job:
    """Everything a strategy may read.

    model: folder of the bf16 checkpoint.  output: folder to make.  calib_data: JSON lines of conversations, or None.
    calib_samples: conversations used at most.  exclude: patterns of the command line, on top of a strategy's own.
    scale: how block scales are chosen where our codec chooses them.  options: what only one strategy understands.
    """

    model: Path
    output: Path
    calib_data: Path | None = None
    calib_samples: int = 512
    exclude: tuple[str, ...] = ()
    scale: str = "amax"
    options: dict[str, Any] = field(default_factory=dict)


def available() -> dict[str, str]:
    """Name → one line on each strategy."""
    from annie_quant.quantize import strategies as package

    return {name: registry.find(package, name, "strategy").SUMMARY for name in registry.names(package)}


def run(
    strategy: str,
    model: str | os.PathLike,
    output: str | os.PathLike,
    calib_data: str | os.PathLike | None = None,
    calib_samples: int = 512,
    exclude: str | tuple[str, ...] = (),
    scale: str = "amax",
    force: bool = False,
    report: Report = lambda line: None,
    **options: Any,
) -> dict[str, Any]:
    """Quantize `model` into `output` and return {"strategy", "output", "seconds", "size_bytes", "source_bytes"}.

    Raises UsageError where a pattern matches nothing or the output is in the way, CheckpointError where the model
    folder cannot be used. The output appears under its name only when it is complete.
    """
    from annie_quant.quantize import strategies as package

    part = registry.find(package, strategy, "strategy")
    model, output = Path(model), Path(output)
    if not (model / "config.json").is_file():
        raise CheckpointError(
            f"{model}: no config.json there, so it is no model folder", "give --model the folder of a bf16 checkpoint"
        )
    if output.exists() and any(output.iterdir()) and not force:
        raise UsageError(f"{output} exists and is not empty", "choose another --output, or add --force")
    patterns = tuple(p.strip() for p in exclude.split(",") if p.strip()) if isinstance(exclude, str) else tuple(exclude)
    staging = output.with_name(f".{output.name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    job = Job(model, staging, Path(calib_data) if calib_data else None, calib_samples, patterns, scale, options)
    start = time.monotonic()
    try:
        part.quantize(job, report)
        carry_companions(model, staging)
        if output.exists():
            shutil.rmtree(output)
        staging.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return {
        "strategy": part.NAME,
        "output": str(output),
        "seconds": round(time.monotonic() - start, 2),
        "size_bytes": weight_bytes(output),
        "source_bytes": weight_bytes(model),
    }


def carry_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, template and processor files that the exporter did not write.

    The chat template and the tokenizer always come from the source: an exporter's re-serialised copy may differ.
    """
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def weight_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))
