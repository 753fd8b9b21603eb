"""NVIDIA ModelOpt as we drive it: load, calibrate on conversations, export. Shared by the strategies that use it.

Read off ModelOpt 0.47.0: `quant_cfg` is an ordered list of entries and later entries win; with the `max` algorithm the
quantizers are off while text runs through, so it works on a CPU; q/k/v, gate/up and in_proj_qkv/in_proj_z share their
tensor scale at export.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import warnings
from collections.abc import Iterator
from typing import Any

from annie_quant.checkpoint.remote_code import refused
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data.rows import read_conversations
from annie_quant.errors import CheckpointError, UsageError, need
from annie_quant.quantize.exclude import excluded
from annie_quant.quantize.export import NVFP4, Decided, export, linears_of
from annie_quant.quantize.job import Job, Report
from annie_quant.quantize.kl_trial import in_model
from annie_quant.quantize.modelopt_samples import token_ids

MAX_BATCH_TOKENS = 8192


def run(job: Job, config: dict[str, Any], report: Report) -> None:
    """Quantize job.model by a ModelOpt config, less what job.exclude names, and export it to job.output.

    ModelOpt's exporter knows the text model alone: of a multimodal source it would lose the vision tower and the
    configuration that its tensors' names go with. Such a source is exported by us, with what ModelOpt calibrated.
    """
    torch, mtq, exporter = (
        need("torch", "quantize"),
        need("modelopt.torch.quantization", "quantize"),
        need("modelopt.torch.export", "quantize"),
    )
    if job.calib_data is None:
        raise UsageError(
            "this strategy calibrates activations and needs conversations",
            "annie-quant data --persona annie --output calibration.jsonl, then --calib-data calibration.jsonl",
        )
    folder = ModelFolder(job.model)
    model, tokenizer = load(job)
    rows = read_conversations(job.calib_data, job.calib_samples)
    batches = make_batches(token_ids(tokenizer, rows))
    config = with_exclusions(config, job, model)
    report(f"calibrating on {len(rows)} conversations, {sum(len(b) * len(b[0]) for b in batches)} tokens")

    def forward_loop(m: Any) -> None:
        with torch.inference_mode():
            for number, batch in enumerate(batches, 1):
                m(torch.tensor(batch, device=m.device), use_cache=False)
                report(f"calibrating: batch {number} of {len(batches)}")

    with quiet(report):
        mtq.quantize(model, config, forward_loop)
        if "text_config" not in folder.config:
            exporter.export_hf_checkpoint(model, export_dir=str(job.output))
            return
    amax = calibrated(model, folder)
    export(folder, job, Decided(dict.fromkeys(amax, NVFP4), amax))


def calibrated(model: Any, folder: ModelFolder) -> dict[str, float]:
    """Linear, as the checkpoint calls it → the largest input that ModelOpt saw, of all that it quantizes."""
    modules = dict(model.named_modules())
    known = {name: modules[in_model(name)] for name in linears_of(folder) if in_model(name) in modules}
    chosen = {n: m for n, m in known.items() if hasattr(m, "weight_quantizer") and m.weight_quantizer.is_enabled}
    return {n: float(m.input_quantizer.amax) for n, m in chosen.items()}


def load(job: Job) -> tuple[Any, Any]:
    torch, transformers = need("torch", "quantize"), need("transformers", "quantize")
    try:
        with quiet(lambda line: None), refused(job.model):
            tokenizer = transformers.AutoTokenizer.from_pretrained(job.model, trust_remote_code=False)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                job.model, dtype=torch.bfloat16, trust_remote_code=False
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{job.model}: transformers cannot load it: {str(error).splitlines()[0]}", f"annie-quant audit {job.model}"
        ) from error
    if torch.cuda.is_available():
        model.to("cuda")
    return model.eval(), tokenizer


def make_batches(ids: list[list[int]]) -> list[list[list[int]]]:
    """Groups of equal length: Qwen3.5's linear attention carries state over padding, so nothing is padded."""
    by_length: dict[int, list[list[int]]] = {}
    for row in ids:
        if row:
            by_length.setdefault(len(row), []).append(row)
    batches = []
    for length, rows in sorted(by_length.items()):
        step = max(1, MAX_BATCH_TOKENS // length)
        batches += [rows[i : i + step] for i in range(0, len(rows), step)]
    return batches


def with_exclusions(config: dict[str, Any], job: Job, model: Any) -> dict[str, Any]:
    """The config with an entry at the end for every module that --exclude-layers names."""
    torch = need("torch", "quantize")
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    config = copy.deepcopy(config)
    for name in sorted(excluded(job.exclude, linears)):
        config["quant_cfg"].append({"quantizer_name": f"{name}.*", "enable": False})
    return config


@contextlib.contextmanager
def quiet(report: Report) -> Iterator[None]:
    """Keep the libraries' prints, bars and warnings off the terminal; the last line is reported if they raise."""
    transformers = need("transformers", "quantize")
    noise = io.StringIO()
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with contextlib.redirect_stdout(noise), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception:
        tail = noise.getvalue().strip().splitlines()[-1:]
        if tail:
            report(tail[0])
        raise
    finally:
        transformers.logging.set_verbosity(before)
