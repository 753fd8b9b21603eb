"""best: every linear in NVFP4, as small as naive, by the recipe that keeps held-out conversations closest to the source.

First the source answers with the inputs of one group of linears rounded at a time: those that carry most of the harm stay W4A16
(format_choice.py). Then recipes are compared on conversations that none of them rounds with (recipe_choice.py), and the best one
rounds with all conversations. --effort is how many are tried. A killed run continues after its last trial, recipe or layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import Progress
from annie_quant.quantize.formats import NVFP4, W4A16
from annie_quant.quantize.job import Job
from annie_quant.quantize.plan import announce_size
from annie_quant.quantize.select import choose
from annie_quant.quantize.strategy import ALL_NVFP4, SWEEP_TIME, Cost, Option, Strategy

STEPS = {"fast": 0, "normal": 100, "max": 1000}  # of learned rounding per layer, of a fixed recipe
ROUNDING = (
    "prompt",
    "markup",
    "fold",
    "damping",
    "order",
    "codes",
    "cross",
)  # options that a recipe has under the same name


def quantize(job: Job, progress: Progress) -> None:
    from annie_quant.quantize import calibration_samples as text
    from annie_quant.quantize import format_choice, recipe_choice
    from annie_quant.quantize.export import export

    options = job.options
    if not 0 <= options["share"] <= 1:
        raise UsageError(f"share={options['share']}: expected a share of 0 to 1", "--set share=0.05")
    folder = ModelFolder(job.model)
    chosen = choose(folder, job.exclude)
    formats = dict.fromkeys(chosen, W4A16 if options["activations"] == "16" else NVFP4)
    samples = text.read_samples(job)
    if options["activations"] == "mixed":
        formats = format_choice.formats_of_inputs(folder, chosen, samples, options["share"], job, progress)
    announce_size(folder, formats, job, progress)
    if options["recipe"] == "fixed":
        steps = options["steps"] if options["steps"] >= 0 else STEPS[options["effort"]]
        recipe = recipe_choice.Rounding(
            layers=True, served=options["inputs"] == "served", steps=steps, **{n: options[n] for n in ROUNDING}
        )
    else:
        own = {n: options[n] for n in ROUNDING if options[n] != STRATEGY.options[n].default}
        if options["steps"] >= 0:
            own |= {"steps": options["steps"], "served": bool(options["steps"])}
        if own.keys() & {"order", "codes", "cross"} or own.get("served"):
            own["layers"] = True
        start = recipe_choice.Rounding(**own)
        tried = recipe_choice.ingredients(options["effort"], own)
        recipe = recipe_choice.choose(folder, formats, samples, job, progress, start, tried)
    plan = recipe.round(folder, formats, samples, job, progress)
    export(folder, job, plan)


def whole_model_bytes(options: Mapping[str, Any]) -> float:
    """Return the bytes per weight of the trials with the whole model, in bf16."""
    return 2.0 if options["activations"] == "mixed" or options["recipe"] == "measured" else 0.0


STRATEGY = Strategy(
    name="best",
    summary="ours: all linears NVFP4 by the recipe that keeps held-out answers closest, W4A4 where that does little harm",
    formats=ALL_NVFP4,
    # Memory as rounding_job.memory_needed counts it, with learned rounding. Of the passes (counted, not measured) 16 are trials of
    # inputs, 22 the search of folds, 8 GPTQ's recipes and the final one, 18 layers on served inputs and learned rounding.
    cost=Cost(rank=12, layerwise=True, passes=64, encode=SWEEP_TIME, column_feedback=True, bytes_per_layer_weight=44,
              hidden_copies=4, hessians=5, keeps_results=True, whole_model=whole_model_bytes),
    quantize=quantize,
    options={
        "recipe": Option("measured", "measured: what held-out conversations choose; fixed: that of the options below",
                         ("measured", "fixed")),
        "effort": Option("normal", "how many recipes are compared; of a fixed one: 0, 100 or 1,000 steps of learned rounding",
                         ("fast", "normal", "max")),
        "steps": Option(-1, "steps of learned rounding per layer, instead of those of the effort"),
        "damping": Option(0.05, "added to the Hessian's diagonal, relative to its mean"),
        "cross": Option(0.0, "damping of the correction for inputs that the layers before changed; 0: no correction"),
        "inputs": Option("served", "of a fixed recipe's Hessians: rounded as a server does, or unrounded",
                         ("served", "unrounded")),
        "order": Option("blocks", "columns in natural order, by falling Hessian in blocks of 16, or one by one",
                        ("natural", "blocks", "columns")),
        "codes": Option("near", "block scales tried: near that of the largest magnitude, or all of E4M3", ("near", "all")),
        "prompt": Option(0.1, "weight of a prompt's token relative to a response's"),
        "markup": Option(1.0, "weight of tool-call markup and ends of turns relative to other response tokens"),
        "fold": Option("none", "fold activation-aware scales into the layer first", ("none", "awq")),
        "activations": Option("mixed", "bits of the inputs: 4 or 16 of all linears, or 4 for the most weights that `share` allows",
                              ("mixed", "4", "16")),
        "share": Option(0.05, "of the divergence that rounding all inputs adds, what activations=mixed may leave"),
    },
    scale="sweep",
)  # fmt: skip
