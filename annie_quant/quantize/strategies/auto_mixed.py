"""auto_mixed (strategy C): ModelOpt's auto_quantize picks NVFP4, FP8 or bf16 by KL on response tokens.

The constraint is stated over what may be quantized: ModelOpt counts disabled layers at 16 bits otherwise, and 4.8 bits
are then out of reach. Its quantized forward passes run on our codec, so a CPU is enough. ModelOpt keeps scores only when
it has all of them; the scoring loop is therefore ours, with the same steps and every score stored, and a killed run resumes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from annie_quant.checkpoint.linears import all_linears
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import Progress
from annie_quant.core.resume import KeyedJson
from annie_quant.quantize.formats import FP8, NVFP4
from annie_quant.quantize.job import Job
from annie_quant.quantize.plan import Plan, announce_size, effective_bits, expected_bytes
from annie_quant.quantize.select import choose
from annie_quant.quantize.strategy import Cost, Option, Strategy

if TYPE_CHECKING:
    from annie_quant.quantize.calibration_samples import Batch, Sample

BITS_OPTION = Option(4.8, "bits per weight, over the linears that may be quantized")


def quantize(job: Job, progress: Progress) -> None:
    import modelopt.torch.quantization as mtq

    from annie_quant.offline import modelopt_backend
    from annie_quant.quantize import calibration_samples, kl_trial
    from annie_quant.quantize.export import export
    from annie_quant.quantize.layerwise import use_own_delta_rule
    from annie_quant.quantize.library_output import quiet

    folder = ModelFolder(job.model)
    chosen = choose(folder, job.exclude)
    least = expected_bytes(folder, dict.fromkeys(chosen, NVFP4))
    progress.message(
        f"smallest possible result: {least / 1e6:,.1f} MB; it will have {job.options['bits']} bits per weight"
    )
    samples = calibration_samples.read_samples(job)
    scored = list(kl_trial.spread(samples))[: job.options["answers"]]
    calibrating = calibration_samples.make_batches(samples)
    model = kl_trial.load(folder)
    if model.device.type == "cuda":
        use_own_delta_rule(model, "cuda")  # transformers' form launches thousands of small kernels per forward pass
    names = {folder.family.in_form(n, multimodal=False): n for n in all_linears(folder)}
    disabled = ["*conv1d", *(m for m, n in names.items() if n not in set(chosen))]
    modelopt_backend.register()
    try:
        with quiet(progress), stored_scores(scored, job.measurements("scores.json"), progress):
            model, state = mtq.auto_quantize(
                model,
                constraints={
                    "effective_bits": job.options["bits"],
                    "cost": {"excluded_module_name_patterns": disabled},
                },
                quantization_formats=[modelopt_backend.with_backend(mtq.NVFP4_DEFAULT_CFG), mtq.FP8_DEFAULT_CFG],
                data_loader=calibrating,
                forward_step=forward_step,
                disabled_layers=disabled,
                num_calib_steps=len(calibrating),
                num_score_steps=len(scored),
                method="kl_div",
                verbose=False,
            )
    except ValueError as error:
        if "infeasible" in str(error) or "effective" in str(error):
            raise UsageError(f"bits={job.options['bits']}: {str(error).splitlines()[0]}", "--set bits=5") from error
        raise
    formats, amax = picked(model, state, names)
    progress.message(f"{effective_bits(folder, formats):.2f} bits per weight over the decoder's linears")
    announce_size(folder, formats, job, progress)
    export(folder, job, Plan(formats, amax, job.scale))


def forward_step(model: Any, batch: Batch) -> Any:
    """Calibrate on a batch, and return the logits of its response tokens [n, V]: a quantized head is calibrated on these only."""
    import torch

    from annie_quant.quantize.calibration_samples import PROMPT

    ids = torch.from_numpy(batch.ids).to(model.device)
    with torch.inference_mode():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return model.get_output_embeddings()(hidden[torch.from_numpy(batch.kinds > PROMPT).to(model.device)])


@contextlib.contextmanager
def stored_scores(scored: Sequence[Sample], file: KeyedJson, progress: Progress) -> Iterator[None]:
    """Replace ModelOpt's KL scoring by one that stores every score as soon as it is measured, and its progress bars by ours.

    scored: answers.
    """
    from modelopt.torch.quantization import algorithms

    searcher: Any = algorithms.AutoQuantizeKLDivSearcher
    original: Callable[..., None] = searcher.estimate_sensitivity_scores
    bar = algorithms.tqdm

    def calibrating(batches: Iterable[Any], total: int | None = None, **_: Any) -> Iterator[Any]:
        for done, batch in enumerate(batches, 1):
            progress.update(done, total, f"calibrating: batch {done} of {total}")
            yield batch

    searcher.estimate_sensitivity_scores = lambda self: score(self, scored, file, progress)
    algorithms.tqdm = calibrating
    try:
        yield
    finally:
        searcher.estimate_sensitivity_scores = original
        algorithms.tqdm = bar


def score(searcher: Any, scored: Sequence[Sample], file: KeyedJson, progress: Progress) -> None:
    """Set the sum of KL(unquantized || quantized) over the scored answers' tokens for each group of linears and format.

    What ModelOpt 0.47's estimate_sensitivity_scores computes, one group and format after the other; prompts that answers share
    are computed once per trial.
    """
    import torch
    from modelopt.torch.opt.utils import named_hparams
    from modelopt.torch.quantization import algorithms

    from annie_quant.offline.engine import Engine, Row

    model = searcher.model
    plain = algorithms.QuantRecipe(quant_cfg=None)
    recipes = [(n, h) for n, h in named_hparams(model, unique=True) if isinstance(h, algorithms.QuantRecipeHparam)]
    groups = [(n, h) for n, h in recipes if h.is_configurable]
    for _, group in groups:
        group.active = plain
    scores: dict[str, float] = file.load({})
    work = [(n, h, r) for n, h in groups for r in h.choices if r != plain]
    model.eval()
    engine, rows = Engine(model), [Row(s.prompt, s.answer) for s in scored]
    reference = {i: torch.log_softmax(logits, -1) for i, logits in engine.scores(rows)}
    for done, (name, group, recipe) in enumerate(work, 1):
        key = f"{name} {recipe}"
        if key not in scores:
            group.active = recipe
            total = 0.0
            for i, logits in engine.scores(rows):
                p = reference[i]
                total += float((p.exp() * (p - torch.log_softmax(logits, -1))).sum())
            group.active = plain
            scores[key] = total
            file.save(scores)
            progress.update(done, len(work), f"scoring: {done} of {len(work)}, {key}: {total:.3g}")
        group._importance_dict[recipe][group.score_modules[0]] = torch.tensor(scores[key])


def picked(model: Any, state: dict[str, Any], names: dict[str, str]) -> tuple[dict[str, str], dict[str, float]]:
    """Return (linear → format, linear → largest input) of the search's result.

    names: the model's name of a linear → the checkpoint's.
    """
    formats, amax = {}, {}
    for key, recipe in state["best"]["recipe"].items():
        kind = NVFP4 if "NVFP4" in str(recipe) or "CUSTOM" in str(recipe) else FP8 if "FP8" in str(recipe) else None
        if kind is None:
            continue
        for member in state["candidate_stats"][key]["module_names"]:
            formats[names[member]] = kind
            largest = model.get_submodule(member).input_quantizer.amax
            amax[names[member]] = 0.0 if largest is None else float(largest)  # None: an expert that saw no token
    return formats, amax


STRATEGY = Strategy(
    name="auto_mixed",
    summary="C: ModelOpt's auto_quantize, NVFP4, FP8 or bf16 by KL on response tokens (--set bits=4.8)",
    formats=dict.fromkeys(("mlp", "attention", "deltanet"), BITS_OPTION.default),
    cost=Cost(rank=90, passes=200),
    quantize=quantize,
    options={"bits": BITS_OPTION, "answers": Option(48, "calibration answers that are scored")},
    requires=("torch", "transformers", "modelopt"),
    conservative=True,
)
