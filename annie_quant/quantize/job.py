"""One quantization: what goes in, which strategy, and an output folder that appears only when it is complete."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from annie_quant import __version__, nvfp4, registry
from annie_quant.checkpoint.shards import ModelFolder, inside
from annie_quant.checkpoint.staging import fingerprint, named, staged
from annie_quant.errors import CheckpointError, UsageError
from annie_quant.files import read_json, write_json
from annie_quant.quantize import prompt_provenance

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
    work: folder for what a killed run should not have to do again; see `kept`.
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
    work: Path | None = None

    def kept(self, *what: Any) -> Path:
        """A folder that outlives a killed run and is emptied when model, text, settings or `what` differ from then."""
        assert self.work is not None
        key = {
            "model": fingerprint(ModelFolder(self.model)),
            "calib_data": None if self.calib_data is None else hashlib.sha256(self.calib_data.read_bytes()).hexdigest(),
            "settings": [self.calib_samples, self.exclude, self.scale, self.options, self.seed, *what],
        }
        key = json.loads(json.dumps(key))
        file = self.work / "key.json"
        for _ in range(600 if rank() else 0):  # the first process makes the folder
            if file.is_file() and read_json(file) == key:
                return self.work
            time.sleep(0.1)
        if not file.is_file() or read_json(file) != key:
            shutil.rmtree(self.work, ignore_errors=True)
            self.work.mkdir(parents=True)
            write_json(file, key)
        return self.work


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
    persona: str | None = None,
    allow_prompt_mismatch: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Quantize `model` into `output` and return what came of it.

    persona: name or file of the production system prompt that the conversations must carry, default what they name;
    another prompt is refused unless allow_prompt_mismatch. The checkpoint keeps the prompt's hash in annie_quant.json.
    The result: strategy, output, seconds, expected_bytes (None where unknown before), size_bytes, source_bytes.

    Raises UsageError where a pattern matches nothing or the output is in the way, CheckpointError where the model
    folder cannot be used. The output appears under its name only when it is complete.
    """
    from annie_quant.quantize import strategies as package

    part = registry.find(package, strategy, "strategy")
    model, output = Path(model), named(output)
    if not (model / "config.json").is_file():
        raise CheckpointError(
            f"{model}: no config.json there, so it is no model folder", "give --model the folder of a bf16 checkpoint"
        )
    chosen = settled(part, options)
    rule: Any = scale or getattr(part, "SCALE", "amax")
    if rule not in get_args(nvfp4.Scale):
        raise UsageError(f"--scale {scale!r}", f"choose one of: {', '.join(get_args(nvfp4.Scale))}")
    patterns = tuple(p.strip() for p in exclude.split(",") if p.strip()) if isinstance(exclude, str) else tuple(exclude)
    job = Job(
        model,
        output,
        Path(calib_data) if calib_data else None,
        calib_samples,
        patterns,
        rule,
        chosen,
        seed,
        work=output.with_name(f".{output.name}.work"),
    )
    asked = prompt_provenance.of_data(job.calib_data, persona, allow_prompt_mismatch)
    start = time.monotonic()
    # A strategy with a stamp goes on from what a stopped run left; the others start anew.
    stamp = {"strategy": part.NAME, "version": __version__, **part.stamp(job)} if hasattr(part, "stamp") else None
    # Under a launcher of several processes the first one writes; the others compute with it and leave nothing behind.
    follows = rank() > 0
    target = output.with_name(f".{output.name}.rank{rank()}") if follows else output
    with staged(target, stamp, force or follows) as staging:
        job.output = staging
        part.quantize(job, report)
        carry_companions(model, staging)
        write_json(staging / prompt_provenance.PROVENANCE, provenance(job, part.NAME) | asked)
    shutil.rmtree(target if follows else output.with_name(f".{output.name}.work"), ignore_errors=True)
    return {
        "strategy": part.NAME,
        "output": str(output),
        "seconds": round(time.monotonic() - start, 2),
        "expected_bytes": job.expected_bytes,
        "size_bytes": weight_bytes(output),
        "source_bytes": weight_bytes(model),
    }


def rank() -> int:
    """Which of a launcher's processes (torchrun, accelerate launch) this is; 0 where there is one."""
    return int(os.environ.get("RANK", "0"))


def provenance(job: Job, strategy: str) -> dict[str, Any]:
    """How a checkpoint was made; no path and no time, so that the same seed gives the same bytes."""
    data = None if job.calib_data is None else hashlib.sha256(job.calib_data.read_bytes()).hexdigest()
    return {
        "version": __version__,
        "strategy": strategy,
        "calib_data_sha256": data,
        "calib_samples": job.calib_samples,
        "exclude": list(job.exclude),
        "scale": job.scale,
        "options": job.options,
        "seed": job.seed,
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
            shutil.copyfile(inside(source, source / name), target / name)


def weight_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))
