"""Run one strategy: a job from the caller's arguments, its plan, and an output folder that appears only when it is complete."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec

from annie_quant import __version__, models, nvfp4
from annie_quant.checkpoint.adapters import plan_merge
from annie_quant.checkpoint.conversion import left_out_files, left_out_line
from annie_quant.checkpoint.other_formats import refuse_other_folder
from annie_quant.checkpoint.shards import COMPANIONS, ModelFolder, inside, read_object
from annie_quant.checkpoint.writer import check_name, check_output, staged
from annie_quant.core.errors import CheckpointError, UsageError, need
from annie_quant.core.files import sha256_text, write_json
from annie_quant.core.progress import Progress, as_progress
from annie_quant.data.behaviours import GIVEN_MIXTURE, Mixture, compare, mixture_of
from annie_quant.data.row_rules import text_of
from annie_quant.data.rows import check_prompt_hash, read_conversations
from annie_quant.documents import RECIPE_FILE, AdapterRecord, Recipe, salvage_or_default
from annie_quant.quantize import strategies
from annie_quant.quantize.formats import expected_bytes
from annie_quant.quantize.merged_base import merge_notes, merged_base
from annie_quant.quantize.plan import QuantizationPlan, export
from annie_quant.quantize.strategy import (
    AnswerSource,
    EngineName,
    Job,
    Strategy,
    StrategyOptions,
    sha256_of,
)

KV_CACHES = ("none", "fp8", "fp8_cast")  # fp8_cast, ModelOpt's name: FP8 without scales


class QuantizeResult(msgspec.Struct):
    """The result of a run.

    expected_bytes: size of the tensors by their formats.
    size_bytes, source_bytes: of the weight files.
    notes: the conversations that were used, and what to check before the checkpoint is served, one
        sentence each.
    """

    strategy: str
    output: str
    seconds: float
    expected_bytes: int
    size_bytes: int
    source_bytes: int
    notes: list[str] = []


def available() -> dict[str, str]:
    """Return name → summary of every strategy."""
    return {name: strategy.summary for name, strategy in strategies.available().items()}


def run(
    strategy: str,
    model: str | os.PathLike,
    output: str | os.PathLike,
    calib_data: str | os.PathLike | None = None,
    calib_samples: int = 512,
    calib_tokens: int | None = None,
    answers: AnswerSource = "own",
    mixture: str = "given",
    engine: EngineName = "own",
    exclude: str | tuple[str, ...] = (),
    scale: str | None = None,
    force: bool = False,
    report: Progress | Callable[[str], object] | None = None,
    seed: int = 0,
    persona: str | None = None,
    allow_prompt_mismatch: bool = False,
    kv_cache: str = "none",
    work: Path | None = None,
    adapter: str | os.PathLike | None = None,
    **options: object,
) -> QuantizeResult:
    """Quantize `model` into `output`.

    calib_samples: conversations that are used at most.
    calib_tokens: tokens of a conversation at most; longer ones are left out. None: the model's context, or what memory allows.
    answers: "own": the model answers the conversations' prompts itself, greedily; "given": the file's answers are used.
    mixture: how much an answer counts, by its behaviour (data/behaviours.py): "given", each once; "gates" or "logs", as often
    as these have them; or factors, as "declines=2,calls=0.5".
    engine: "own", or "modelopt" where ModelOpt has a configuration of the strategy's recipe and is to run it.
    persona: name or file of the production system prompt that the conversations must have, by default the one they
    name; another prompt is refused unless allow_prompt_mismatch. Its hash is stored in annie_quant.json.
    report: receives the progress; a function takes one line per report.
    kv_cache: "fp8" (scales calibrated on the conversations), "fp8_cast" (without scales) or "none".
    work: folder of measurements that outlives the run, for runs whose budgets alone differ.
    adapter: folder of a LoRA adapter. It is merged into `model`, its 16-bit base, before anything else.
    options: of the strategy.
    Raises UsageError where a pattern matches nothing or the output is in the way, CheckpointError where the model
    folder cannot be used. The output appears under its name only when it is complete.
    """
    part, settings = strategies.engine_of(strategy, engine, options)
    source = Path(model)
    output = check_name(output)
    if not (source / "config.json").is_file():
        refuse_other_folder(source)
        raise CheckpointError(
            f"{source}: no config.json there, so it is not a model folder",
            "give --model the folder of a bf16 checkpoint",
        )
    job = Job(
        model=source,
        output=output,
        calib_data=Path(calib_data) if calib_data else None,
        calib_samples=calib_samples,
        calib_tokens=calib_tokens,
        answers=answers,
        exclude=exclude_patterns(exclude),
        scale=scale_rule(part, scale),
        options=part.settings(settings),
        seed=seed,
        work=work or output.with_name(f".{output.name}.work"),
    )
    _check_kv_cache(kv_cache)
    if part.external and (scale or kv_cache != "none"):
        raise UsageError(
            f"{part.name} chooses block scales and the KV cache itself: --scale and --kv-cache are not for it",
            "a configuration of ModelOpt may have them: --strategy modelopt --set config=general/ptq/nvfp4_default-kv_fp8",
        )
    # What needs no library is reported before libraries and the model are loaded.
    check_output(job.output, force, (source, job.calib_data, adapter))
    merge_plan = None if adapter is None else plan_merge(source, Path(adapter))
    if part.cost.passes:
        _ = job.conversations
    job = replace(job, mixture=_mixture(part, job, mixture, persona))
    strategies.check_family(part, read_object(job.model / "config.json") or {})
    prompts, mismatch = _prompt_hashes(job.calib_data, persona, allow_prompt_mismatch)
    for package in part.requires:
        need(package, "quantize")
    start = time.monotonic()
    progress = as_progress(report)
    with merged_base(merge_plan, source, output, part, progress) as merged:
        job = replace(job, model=merged)
        plan = _quantize(part, job, progress, force, kv_cache, prompts, mismatch)
        size = expected_bytes(ModelFolder(job.model), plan.formats)
        source_bytes = weight_bytes(job.model)
        notes = [*_calibration_notes(plan), *plan.notes, *_family_notes(source)]
        if adapter is not None:
            notes += merge_notes(merged, source, Path(adapter), output)
    if work is None:
        shutil.rmtree(job.work, ignore_errors=True)
    seconds = round(time.monotonic() - start, 2)
    written = weight_bytes(job.output)
    return QuantizeResult(part.name, str(output), seconds, size, written, source_bytes, notes)


def _quantize(
    part: Strategy,
    job: Job[StrategyOptions],
    progress: Progress,
    force: bool,
    kv_cache: str,
    prompts: list[str],
    mismatch: str | None,
) -> QuantizationPlan:
    """Plan and write one quantization, and return its plan. prompts, mismatch: see _prompt_hashes."""
    key = None
    if part.resume_key:
        key = {"strategy": part.name, "version": __version__, **part.resume_key(job)}
        if kv_cache == "fp8":
            key["kv_text"] = [sha256_of(job.calib_data), job.calib_samples, job.calib_tokens]
    with staged(job.output, key, force, inputs=(job.model, job.calib_data)) as folder:
        plan = part.plan(job, progress)
        plan.kv_cache = None if kv_cache == "none" else "FP8"
        if kv_cache == "fp8":
            from annie_quant.quantize import input_stats

            input_stats.calibrate_kv_cache(job, plan, progress)
        _write(part, replace(job, output=folder), plan, progress)
        recipe = Recipe(
            version=__version__,
            strategy=part.name,
            calib_data_sha256=sha256_of(job.calib_data),
            calib_samples=job.calib_samples,
            exclude=list(job.exclude),
            scale=job.scale,
            options=msgspec.structs.asdict(job.options),
            seed=job.seed,
            prompt_sha256=prompts,
            prompt_mismatch=mismatch,
            kv_cache=kv_cache,
            held_out=plan.held_out,
            ingredients=plan.ingredients,
            frontier=plan.frontier,
            calibration=plan.calibration,
            adapters=salvage_or_default(AdapterRecord, job.model / RECIPE_FILE).adapters,
            mixture=job.mixture.name,
        )
        write_json(folder / RECIPE_FILE, msgspec.to_builtins(recipe))
    return plan


def exclude_patterns(exclude: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns of --exclude-layers."""
    patterns = exclude.split(",") if isinstance(exclude, str) else exclude
    return tuple(p.strip() for p in patterns if p.strip())


def _mixture(part: Strategy, job: Job[StrategyOptions], text: str, persona: str | None) -> Mixture:
    """Return how much an answer of the job's conversations counts. Raises UsageError for what cannot be weighed."""
    if text != "given" and not part.cost.reads_answers:
        readers = ", ".join(s.name for s in strategies.by_rank() if s.cost.reads_answers)
        raise UsageError(
            f"--mixture weighs answers, and {part.name} reads whole conversations",
            f"these read answers: {readers}",
        )
    if job.calib_data is None:
        return GIVEN_MIXTURE
    return mixture_of(text, compare(job.calib_data, persona))


def _check_kv_cache(kind: str) -> None:
    """Raise UsageError for an unknown KV cache, and for NVFP4 with the reason."""
    if kind == "nvfp4":
        raise UsageError(
            "an NVFP4 KV cache is not written here: SGLang takes it as an option, and vLLM's releases have none for SM12x",
            "--kv-cache fp8 with --calib-data",
        )
    if kind not in KV_CACHES:
        raise UsageError(f"unknown KV cache {kind!r}", f"choose one of: {', '.join(KV_CACHES)}")


def scale_rule(part: Strategy, scale: str | None) -> nvfp4.Scale:
    """Return the rule by which block scales are chosen, by default the strategy's. Raises UsageError for an unknown one."""
    rule: Any = scale or part.scale
    if rule not in get_args(nvfp4.Scale):
        raise UsageError(f"--scale {scale!r}", f"choose one of: {', '.join(get_args(nvfp4.Scale))}")
    return rule


def _write(
    part: Strategy, job: Job[StrategyOptions], plan: QuantizationPlan, progress: Progress
) -> None:
    """Write the plan into job.output, with the reports and the files that a serving runtime needs besides the weights."""
    if plan.tokens:
        from annie_quant.quantize.input_stats import coverage_line

        progress.message(coverage_line(plan.tokens))
    if part.write:
        part.write(job, plan, progress)
    else:
        export(ModelFolder(job.model), job.output, plan)
    copy_companions(job.model, job.output)


def _calibration_notes(plan: QuantizationPlan) -> list[str]:
    """Return one line that names the conversations that were used, where there are any."""
    return [f"calibration: {plan.calibration.line()}"] if plan.calibration else []


def _family_notes(model: Path) -> list[str]:
    """Return what to check for a model whose family is not known here: its linears are taken for those of Qwen3.5."""
    folder = ModelFolder(model)
    left_out = left_out_files(folder)
    notes = [left_out_line(left_out)] if left_out else []
    try:
        models.family_of(folder.config)
    except CheckpointError as error:
        return [
            *notes,
            f"{error.message} ({error.hint}): linears and norms were taken for Qwen3.5's; compare the checkpoint with "
            "its source before serving it: annie-quant eval",
        ]
    return notes


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, template, processor and licence files from the source."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(inside(source, source / name), target / name)


def weight_bytes(folder: Path) -> int:
    """Return the size of a folder's safetensors files."""
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


def _prompt_hashes(
    calib_data: Path | None, persona: str | None, allow: bool
) -> tuple[list[str], str | None]:
    """Return the hashes of the conversations' system prompts, and a sentence where they are not production's prompt.

    Raises UsageError where they are not the production prompt (see check_prompt_hash), unless `allow`.
    """
    if calib_data is None:
        return [], None
    rows = read_conversations(calib_data)
    mismatch = check_prompt_hash(rows, persona, allow=allow)
    hashes = set()
    for row in rows:
        first = row["messages"][0]
        provenance = row.get("provenance") or {}
        if first["role"] == "system":
            hashes.add(sha256_text(text_of(first.get("content"))))
        # A logged prompt may differ from the persona's in white space, a date or a name.
        if provenance.get("teacher") == "log" and provenance.get("prompt_sha256"):
            hashes.add(provenance["prompt_sha256"])
    return sorted(hashes), mismatch
