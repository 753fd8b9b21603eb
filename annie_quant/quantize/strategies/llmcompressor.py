"""llmcompressor: NVFP4 by vLLM's llm-compressor itself, by a recipe's name or a recipe file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.core.progress import Progress
from annie_quant.quantize.external import (
    RECIPE_HINT,
    Library,
    load_source,
    load_tokenizer,
    move_checkpoint,
    quantize_by,
    rows_of,
    text_batches,
    unquantized_modules,
)
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import ALL_NVFP4, Cost, Job, Strategy, StrategyOptions, described

LIBRARY = Library(
    name="llm-compressor",
    module="llmcompressor",
    distribution="llmcompressor",
    install='pip install llmcompressor && pip install "transformers<5.15" '
    "(it asks for 5.15 to 5.17, this package and ModelOpt for less; it was run with 5.14.1)",
)
RECIPES = ("rtn", "gptq", "awq", "awq_gptq")


class LlmCompressorOptions(StrategyOptions, frozen=True):
    recipe: Annotated[
        str, described(f"{', '.join(RECIPES)}, or a recipe file of llm-compressor (YAML)")
    ] = "gptq"
    damping: Annotated[
        float,
        described(
            "of gptq: Red Hat's recipes have .05; with llm-compressor's own .01 few rows lose much"
        ),
    ] = 0.05


def check_recipe(job: Job[LlmCompressorOptions]) -> str:
    """Return the recipe's name or file. Raises UsageError for an unknown one, EnvironmentFault for one that takes a GPU."""
    from annie_quant.quantize.backend import device_kind

    recipe = job.options.recipe
    if recipe in RECIPES:
        if recipe.startswith("awq") and device_kind() == "cpu":
            raise EnvironmentFault(
                f"{recipe}: llm-compressor's AWQ pins memory for a CUDA device, and there is none",
                "--set recipe=gptq or rtn run on a CPU",
            )
        return recipe
    if not (recipe.endswith((".yaml", ".yml")) and Path(recipe).is_file()):
        known = ", ".join(RECIPES)
        raise UsageError(f"recipe={recipe}: expected a YAML file, or one of: {known}")
    if job.exclude:
        raise UsageError(
            f"--exclude-layers is not for {recipe}", "name these modules under its `ignore`"
        )
    return recipe


def modifiers(options: LlmCompressorOptions, ignore: list[str]) -> list[Any] | str:
    """Return llm-compressor's recipe. ignore: modules that stay in 16 bits."""
    recipe = options.recipe
    if recipe not in RECIPES:
        return recipe
    steps = []
    if "awq" in recipe:
        steps.append(LIBRARY.load(".modifiers.transform.awq").AWQModifier())
    settings = {"targets": "Linear", "scheme": "NVFP4", "ignore": ignore}
    if "gptq" in recipe:
        module = LIBRARY.load(".modifiers.gptq")
        return [*steps, module.GPTQModifier(**settings, dampening_frac=options.damping)]
    module = LIBRARY.load(".modifiers.quantization")
    return [*steps, module.QuantizationModifier(**settings)]


def plan_llmcompressor(job: Job[LlmCompressorOptions], progress: Progress) -> QuantizationPlan:
    """Let llm-compressor quantize and write, and return what is in the sound checkpoint."""
    from annie_quant.quantize.backend import device_kind
    from annie_quant.quantize.calibration_text import read_answers

    recipe = check_recipe(job)
    library = LIBRARY.load()
    ignore = unquantized_modules(job)
    steps = modifiers(job.options, ignore)
    text = read_answers(job, progress)

    def write(export: Path) -> None:
        import torch

        model = load_source(job.model)
        batches = []
        for batch in text_batches(rows_of(text), device_kind(), job.seed):
            ids = torch.from_numpy(batch.ids)
            batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        library.oneshot(
            model=model,
            dataset=torch.utils.data.DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
            recipe=steps,
            num_calibration_samples=len(batches),
            processor=load_tokenizer(job.model),
        )
        model.save_pretrained(export, save_compressed=True)

    return quantize_by(LIBRARY, recipe, job, text, progress, write, RECIPE_HINT)


STRATEGY = Strategy(
    name="llmcompressor",
    summary="NVFP4 by vLLM's llm-compressor itself (--set recipe=gptq), audited and repaired",
    formats=ALL_NVFP4,
    # Six times as long as `gptq` (tests/perf/quantize_peers.md).
    cost=Cost(rank=96, passes=12, encode=20, reads_answers=True),
    plan=plan_llmcompressor,
    options=LlmCompressorOptions,
    write=move_checkpoint,
    recipe_option="recipe",
)
