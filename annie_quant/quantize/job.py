"""One quantization: what goes in, which strategy, and an output folder that appears only when it is complete."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from annie_quant import nvfp4, registry
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
    scale: how block scales are chosen where our codec chooses them.  options: what only one strategy understands,
    every name of its OPTIONS, with the given or the default value.  seed: of whatever draws.
    expected_bytes: what the strategy said that the output's tensors will take, once it knows.
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
    scale: str | None = None,
    force: bool = False,
    report: Report = lambda line: None,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Quantize `model` into `output` and return what came of it.

    The result: strategy, output, seconds, expected_bytes (None where unknown before), size_bytes, source_bytes.

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
    chosen = settled(part, options)
    rule: Any = scale or getattr(part, "SCALE", "amax")
    if rule not in get_args(nvfp4.Scale):
        raise UsageError(f"--scale {scale!r}", f"choose one of: {', '.join(get_args(nvfp4.Scale))}")
    patterns = tuple(p.strip() for p in exclude.split(",") if p.strip()) if isinstance(exclude, str) else tuple(exclude)
    staging = output.with_name(f".{output.name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    job = Job(
        model,
        staging,
        Path(calib_data) if calib_data else None,
        calib_samples,
        patterns,
        rule,
        chosen,
        seed,
    )
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
        "expected_bytes": job.expected_bytes,
        "size_bytes": weight_bytes(output),
        "source_bytes": weight_bytes(model),
    }


def settled(part: Any, given: dict[str, Any]) -> dict[str, Any]:
    """A strategy's OPTIONS (name → default) with the given values, which take the default's type."""
    known = getattr(part, "OPTIONS", {})
    for name, value in given.items():
        if name not in known:
            raise UsageError(f"{part.NAME} has no setting {name!r}", f"it has: {', '.join(known) or 'none'}")
        try:
            type(known[name])(value)
        except ValueError:
            raise UsageError(f"{name}={value}: expected something like {known[name]!r}") from None
    return {name: type(default)(given.get(name, default)) for name, default in known.items()}


def carry_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, template and processor files that the exporter did not write.

    The chat template and the tokenizer always come from the source: an exporter's re-serialised copy may differ.
    """
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def weight_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))
