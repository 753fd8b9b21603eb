"""auto_mixed (the founding strategy C): ModelOpt's auto_quantize picks NVFP4, FP8 or bf16 by KL on response tokens.

The constraint is stated over what may be quantized: ModelOpt counts disabled layers at 16 bits otherwise, and 4.8 bits
are then out of reach. Its quantized forwards run on our codec, so a CPU will do. ModelOpt keeps scores only when all are
there; the scoring loop is therefore ours, the same steps with every score kept, and a killed run goes on from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import UsageError, need
from annie_quant.files import read_json, write_json
from annie_quant.quantize import calibration_samples, kl_trial
from annie_quant.quantize.export import FP8, NVFP4, Decided, choose, effective_bits, export, linears_of, say_size
from annie_quant.quantize.job import Job, Report
from annie_quant.quantize.modelopt import quiet

NAME = "auto_mixed"
SUMMARY = "C: ModelOpt's auto_quantize, NVFP4, FP8 or bf16 by KL on response tokens (--set bits=4.8)"
# bits: a weight, over the linears that may be quantized. answers: how many of the calibration answers are scored.
OPTIONS = {"bits": 4.8, "answers": 48}


def quantize(job: Job, report: Report) -> None:
    mtq = need("modelopt.torch.quantization", "quantize")
    from annie_quant.hf import modelopt_backend

    folder = ModelFolder(job.model)
    chosen = choose(folder, job)
    report(
        f"the smallest that can come of this: {say(folder, chosen)}; it is to have {job.options['bits']} bits a weight"
    )
    conversations = calibration_samples.read(job)
    scored = calibration_samples.batches(list(kl_trial.spread(conversations))[: job.options["answers"]])
    calibrating = calibration_samples.batches(conversations)
    model = kl_trial.load(folder)
    left = ["*conv1d", *(kl_trial.in_model(n) for n in linears_of(folder) if n not in set(chosen))]
    kept = job.kept("auto_mixed", NVFP4, FP8)
    modelopt_backend.register()
    try:
        with quiet(report), scores_kept(kept, len(scored), report):
            model, state = mtq.auto_quantize(
                model,
                constraints={"effective_bits": job.options["bits"], "cost": {"excluded_module_name_patterns": left}},
                quantization_formats=[modelopt_backend.with_backend(mtq.NVFP4_DEFAULT_CFG), mtq.FP8_DEFAULT_CFG],
                data_loader=Loader(calibrating, scored),
                forward_step=forward_step,
                disabled_layers=left,
                num_calib_steps=len(calibrating),
                num_score_steps=len(scored),
                method="kl_div",
                verbose=False,
            )
    except ValueError as error:
        if "infeasible" in str(error) or "effective" in str(error):
            raise UsageError(f"bits={job.options['bits']}: {str(error).splitlines()[0]}", "--set bits=5") from error
        raise
    formats, amax = picked(model, state, folder)
    report(f"{effective_bits(folder, formats):.2f} bits a weight over the decoder's linears")
    say_size(folder, formats, job, report)
    export(folder, job, Decided(formats, amax, job.scale))


def say(folder: ModelFolder, chosen: list[str]) -> str:
    from annie_quant.quantize.export import expected_bytes

    return f"{expected_bytes(folder, dict.fromkeys(chosen, NVFP4)) / 1e6:,.1f} MB"


class Loader:
    """What auto_quantize iterates over: first the calibration batches, once a format, then the scored ones."""

    def __init__(self, calibrating: list[calibration_samples.Batch], scored: list[calibration_samples.Batch]) -> None:
        self.calibrating, self.scored, self.scoring = calibrating, scored, False

    def __iter__(self) -> Iterator[calibration_samples.Batch]:
        return iter(self.scored if self.scoring else self.calibrating)


def forward_step(model: Any, batch: calibration_samples.Batch) -> Any:
    """Logits of the response tokens alone [n, V]: so the divergence is theirs alone."""
    torch = need("torch", "quantize")
    ids = torch.from_numpy(batch.ids).to(model.device)
    with torch.inference_mode():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return model.get_output_embeddings()(
            hidden[torch.from_numpy(batch.marks > calibration_samples.PROMPT).to(model.device)]
        )


@contextlib.contextmanager
def scores_kept(kept: Path, batches: int, report: Report) -> Iterator[None]:
    """ModelOpt's KL scoring with every score on disk as soon as it is there."""
    from modelopt.torch.quantization import algorithms

    searcher = algorithms.AutoQuantizeKLDivSearcher
    theirs: Callable[..., None] = searcher.estimate_sensitivity_scores
    searcher.estimate_sensitivity_scores = lambda self: score(self, kept / "scores.json", report)
    try:
        yield
    finally:
        searcher.estimate_sensitivity_scores = theirs


def score(searcher: Any, file: Path, report: Report) -> None:
    """Sum of KL(unquantized || quantized) over the scored batches for each group of linears and format.

    The same loop as ModelOpt 0.47's estimate_sensitivity_scores, one group and format after the other.
    """
    from modelopt.torch.opt.utils import named_hparams
    from modelopt.torch.quantization import algorithms

    torch = need("torch", "quantize")
    model, loader = searcher.model, searcher.config["data_loader"]
    loader.scoring = True
    plain = algorithms.QuantRecipe(quant_cfg=None)
    every = [(n, h) for n, h in named_hparams(model, unique=True) if isinstance(h, algorithms.QuantRecipeHparam)]
    groups = [(n, h) for n, h in every if h.is_configurable]
    for _, group in groups:
        group.active = plain
    known: dict[str, float] = read_json(file) if file.is_file() else {}
    work = [(n, h, r) for n, h in groups for r in h.choices if r != plain]
    model.eval()
    reference = [torch.log_softmax(searcher.config["forward_step"](model, b).float(), -1) for b in loader]
    for done, (name, group, recipe) in enumerate(work, 1):
        key = f"{name} {recipe}"
        if key not in known:
            group.active = recipe
            total = 0.0
            for batch, p in zip(loader, reference, strict=True):
                q = torch.log_softmax(searcher.config["forward_step"](model, batch).float(), -1)
                total += float((p.exp() * (p - q)).sum())
            group.active = plain
            known[key] = total
            report(f"scoring: {done} of {len(work)}, {key}: {total:.3g}")
            write_json(file, known)
        group._importance_dict[recipe][group.score_modules[0]] = torch.tensor(known[key])


def picked(model: Any, state: dict[str, Any], folder: ModelFolder) -> tuple[dict[str, str], dict[str, float]]:
    """(linear → format, linear → largest input) of what the search settled on."""
    names = {kl_trial.in_model(n): n for n in linears_of(folder)}
    formats, amax = {}, {}
    for key, recipe in state["best"]["recipe"].items():
        kind = NVFP4 if "NVFP4" in str(recipe) or "CUSTOM" in str(recipe) else FP8 if "FP8" in str(recipe) else None
        if kind is None:
            continue
        for member in state["candidate_stats"][key]["module_names"]:
            formats[names[member]] = kind
            amax[names[member]] = float(model.get_submodule(member).input_quantizer.amax)
    return formats, amax
