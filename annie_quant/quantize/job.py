"""One quantization: its inputs, its strategy, and an output folder that appears only when it is complete."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec

from annie_quant import __version__, nvfp4
from annie_quant.checkpoint.shards import ModelFolder, inside
from annie_quant.checkpoint.staging import check_name, source_key, staged
from annie_quant.errors import CheckpointError, UsageError, need
from annie_quant.files import write_json
from annie_quant.progress import Progress, as_progress
from annie_quant.quantize import kv_cache as kv_cache_format
from annie_quant.quantize import prompt_provenance, strategies
from annie_quant.resume import KeyedJson, keyed_folder
from annie_quant.schema import RECIPE_FILE, Recipe

WAIT_FOR_FIRST_S = 60.0  # how long further processes wait for the first one's work folder
# What a serving runtime needs besides the weights; ModelOpt's exporter omits some of it.
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


class QuantizeResult(msgspec.Struct):
    """The result of a run.

    expected_bytes: size of the tensors as it was announced; None where it was not known before.
    size_bytes, source_bytes: of the weight files.
    """

    strategy: str
    output: str
    seconds: float
    expected_bytes: int | None
    size_bytes: int
    source_bytes: int


@dataclass
class Job:
    """Everything that a strategy may read.

    model: folder of the bf16 checkpoint.  output: folder to write into.
    calib_data: JSON lines of conversations, or None.  calib_samples: conversations used at most.
    exclude: patterns of --exclude-layers.  scale: how block scales are chosen.
    options: every option of the strategy, with its value or default.  seed: for random choices.
    expected_bytes: set by the strategy, once it knows the size of the output's tensors.
    work: folder for what a killed run should not have to repeat; it is removed after success.
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


def available() -> dict[str, str]:
    """Return name → summary of every strategy."""
    return {name: strategies.find(name).summary for name in strategies.names()}


def run(
    strategy: str,
    model: str | os.PathLike,
    output: str | os.PathLike,
    calib_data: str | os.PathLike | None = None,
    calib_samples: int = 512,
    exclude: str | tuple[str, ...] = (),
    scale: str | None = None,
    force: bool = False,
    report: Progress | Callable[[str], object] | None = None,
    seed: int = 0,
    persona: str | None = None,
    allow_prompt_mismatch: bool = False,
    kv_cache: str | None = None,
    **options: Any,
) -> QuantizeResult:
    """Quantize `model` into `output`.

    persona: name or file of the production system prompt that the conversations must have, by default the one they
    name; another prompt is refused unless allow_prompt_mismatch. Its hash is stored in annie_quant.json.
    report: receives the progress; a function takes one line per report.
    kv_cache: "fp8" (scales calibrated on the conversations), "fp8_cast" (without scales) or "none"; None: the strategy's own.
    options: of the strategy.
    Raises UsageError where a pattern matches nothing or the output is in the way, CheckpointError where the model
    folder cannot be used. The output appears under its name only when it is complete.
    """
    part = strategies.find(strategy)
    model, output = Path(model), check_name(output)
    if not (model / "config.json").is_file():
        raise CheckpointError(
            f"{model}: no config.json there, so it is not a model folder",
            "give --model the folder of a bf16 checkpoint",
        )
    settings = part.settings(options)
    kv_format = kv_cache_format.check(kv_cache or part.kv_cache)
    rule: Any = scale or part.scale
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
        settings,
        seed,
        work=output.with_name(f".{output.name}.work"),
    )
    if part.cost.passes:
        _ = job.conversations  # a missing file is reported before libraries and the model are loaded
    prompts = prompt_provenance.of_data(job.calib_data, persona, allow_prompt_mismatch)
    for package in part.requires:
        need(package, "quantize")
    start = time.monotonic()
    key = {"strategy": part.name, "version": __version__, **part.resume_key(job)} if part.resume_key else None
    # Under a launcher of several processes the first one writes; the others only compute.
    first = rank() == 0
    target = output if first else output.with_name(f".{output.name}.rank{rank()}")
    with staged(target, key, force or not first, inputs=(model, job.calib_data)) as part_folder:
        job.output = part_folder
        part.quantize(job, as_progress(report))
        if kv_format != "none" and first:
            kv_cache_format.add(job, kv_format, as_progress(report))
        copy_companions(model, part_folder)
        write_json(part_folder / RECIPE_FILE, msgspec.to_builtins(recipe_of(job, part.name, prompts, kv_format)))
    shutil.rmtree(job.work if first else target, ignore_errors=True)
    seconds = round(time.monotonic() - start, 2)
    return QuantizeResult(
        part.name, str(output), seconds, job.expected_bytes, weight_bytes(output), weight_bytes(model)
    )


def rank() -> int:
    """Return which of a launcher's processes (torchrun, accelerate launch) this is; 0 where there is one."""
    return int(os.environ.get("RANK", "0"))


def recipe_of(job: Job, strategy: str, prompts: prompt_provenance.Prompts, kv_cache: str) -> Recipe:
    return Recipe(
        version=__version__,
        strategy=strategy,
        calib_data_sha256=sha256_of(job.calib_data),
        calib_samples=job.calib_samples,
        exclude=list(job.exclude),
        scale=job.scale,
        options=job.options,
        seed=job.seed,
        prompt_sha256=prompts.sha256,
        prompt_mismatch=prompts.mismatch,
        kv_cache=kv_cache,
    )


def sha256_of(file: Path | None) -> str | None:
    return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, template and processor files from the source, over those that an exporter wrote.

    An exporter's re-serialised copy may differ.
    """
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(inside(source, source / name), target / name)


def weight_bytes(folder: Path) -> int:
    """Return the size of a folder's safetensors files."""
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))
