"""Quantize with NVIDIA ModelOpt: load, calibrate on conversations, export. Shared by the strategies that use it.

From ModelOpt 0.47.0: `quant_cfg` is an ordered list of entries and later entries win; with the `max` algorithm the
quantizers are off while text runs through, so it works on a CPU; linears that servers merge share their tensor scale at
export.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import modelopt.torch.export
import modelopt.torch.quantization
import torch
import transformers

from annie_quant import models
from annie_quant.checkpoint.linears import all_linears
from annie_quant.checkpoint.remote_code import loading_tokenizer, refused
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data.rows import read_conversations
from annie_quant.errors import CheckpointError
from annie_quant.hf.experts import separate
from annie_quant.hf.loading import check_names
from annie_quant.progress import Progress
from annie_quant.quantize.calibration_samples import token_ids
from annie_quant.quantize.export import export
from annie_quant.quantize.formats import NVFP4
from annie_quant.quantize.input_stats import Coverage
from annie_quant.quantize.job import Job
from annie_quant.quantize.library_output import quiet
from annie_quant.quantize.plan import Plan
from annie_quant.quantize.select import excluded

MAX_BATCH_TOKENS = 8192


def quantize(job: Job, config: dict[str, Any], progress: Progress) -> None:
    """Quantize job.model with a ModelOpt config, except for what job.exclude names, and export it to job.output.

    ModelOpt's exporter knows the text model only: of a multimodal source it would lose the vision part and the
    configuration that fits its tensors' names. Such a source is exported by export.py, with ModelOpt's calibration.
    So is a mixture, with one linear per expert and matrix: ModelOpt sees merged experts only where transformers computes
    them with its slow ("eager") form, and else leaves them out without a message (#1340).
    """
    conversations = job.conversations
    folder = ModelFolder(job.model)
    model, tokenizer = load(job)
    separate(model, folder.family)
    rows = read_conversations(conversations, job.calib_samples)
    batches = batches_of_equal_length(token_ids(tokenizer, rows))
    config = copy.deepcopy(config)
    config["quant_cfg"] += exclusions(job, model)
    progress.message(f"calibrating on {len(rows)} conversations, {sum(len(b) * len(b[0]) for b in batches)} tokens")

    def forward_loop(m: Any) -> None:
        with torch.inference_mode():
            for number, batch in enumerate(batches, 1):
                m(torch.tensor(batch, device=m.device), use_cache=False)
                progress.update(number, len(batches), f"calibrating: batch {number} of {len(batches)}")

    with quiet(progress):
        modelopt.torch.quantization.quantize(model, config, forward_loop)
        if "text_config" not in folder.config and folder.family.experts is None:
            modelopt.torch.export.export_hf_checkpoint(model, export_dir=str(job.output))
            return
    amax = calibrated(model, folder)
    coverage_of(amax, folder).report(job.output, progress)
    export(folder, job, Plan(dict.fromkeys(amax, NVFP4), amax))


def calibrated(model: Any, folder: ModelFolder) -> dict[str, float]:
    """Return the largest input of every linear that ModelOpt quantizes, by the checkpoint's name."""
    modules = dict(model.named_modules())
    amax = {}
    for name in all_linears(folder):
        module: Any = modules.get(folder.family.in_form(name, multimodal=False))
        if hasattr(module, "weight_quantizer") and module.weight_quantizer.is_enabled:
            largest = module.input_quantizer.amax
            amax[name] = 0.0 if largest is None else float(largest)  # None: an expert that saw no token
    return amax


def coverage_of(amax: Mapping[str, float], folder: ModelFolder) -> Coverage:
    """Return which experts saw tokens: 1 or 0 each, because ModelOpt does not count them."""
    coverage, experts = Coverage(counted=False), folder.family.experts
    for name, largest in amax.items():
        if experts and (expert := experts.split(name)):
            coverage.add(expert[0], [[models.in_layer(name)]], {models.in_layer(name): int(largest > 0)})
    return coverage


def load(job: Job) -> tuple[Any, Any]:
    """Return the source model in bfloat16, on a GPU where there is one, and its tokenizer."""
    try:
        with loading_tokenizer(job.model):
            tokenizer = transformers.AutoTokenizer.from_pretrained(job.model, trust_remote_code=False)
        with quiet(), refused(job.model):
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                job.model, dtype=torch.bfloat16, output_loading_info=True, trust_remote_code=False
            )
        model, info = loaded
        check_names(job.model, info)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{job.model}: transformers cannot load it: {str(error).splitlines()[0]}", f"annie-quant audit {job.model}"
        ) from error
    if torch.cuda.is_available():
        model.to("cuda")
    return model.eval(), tokenizer


def batches_of_equal_length(ids: list[list[int]]) -> list[list[list[int]]]:
    """Return batches of rows of equal length: Qwen3.5's linear attention carries state over padding."""
    by_length: dict[int, list[list[int]]] = {}
    for row in ids:
        if row:
            by_length.setdefault(len(row), []).append(row)
    batches = []
    for length, rows in sorted(by_length.items()):
        step = max(1, MAX_BATCH_TOKENS // length)
        batches += [rows[i : i + step] for i in range(0, len(rows), step)]
    return batches


def exclusions(job: Job, model: Any) -> list[dict[str, object]]:
    """Return an entry of quant_cfg for every module that --exclude-layers names. Later entries win."""
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [{"quantizer_name": f"{name}.*", "enable": False} for name in sorted(excluded(job.exclude, linears))]
