"""Run one strategy: a Job from the caller's arguments, and an output folder that appears only when it is complete."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec

from annie_quant import __version__, models, nvfp4
from annie_quant.checkpoint.shards import ModelFolder, inside, read_object
from annie_quant.checkpoint.writer import check_name, check_output, staged
from annie_quant.core.errors import CheckpointError, UsageError, need
from annie_quant.core.files import write_json
from annie_quant.core.progress import Progress, as_progress
from annie_quant.documents import RECIPE_FILE, Recipe
from annie_quant.quantize import kv_cache as kv_cache_format
from annie_quant.quantize import prompt_provenance, strategies
from annie_quant.quantize.job import Job, rank, sha256_of

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
    notes: what to check before the checkpoint is served, one sentence each.
    """

    strategy: str
    output: str
    seconds: float
    expected_bytes: int | None
    size_bytes: int
    source_bytes: int
    notes: list[str] = []


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
    # What needs no library is reported before libraries and the model are loaded.
    check_output(output, force or rank() > 0, (model, job.calib_data))
    if part.cost.passes:
        _ = job.conversations
    strategies.check_family(part, read_object(model / "config.json") or {})
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
        part.name, str(output), seconds, job.expected_bytes, weight_bytes(output), weight_bytes(model), notes_on(model)
    )


def notes_on(model: Path) -> list[str]:
    """Return what to check for a model whose family is not known here: its linears are taken for those of Qwen3.5."""
    config = ModelFolder(model).config
    try:
        models.family_of(config)
    except CheckpointError as error:
        return [
            f"{error.message} ({error.hint}): linears and norms were taken for Qwen3.5's; compare the checkpoint with "
            "its source before serving it: annie-quant eval"
        ]
    return []


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
        held_out=job.held_out,
        ingredients=job.ingredients,
    )


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
