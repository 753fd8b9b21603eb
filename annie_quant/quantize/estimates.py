"""Estimate the size of a result, and the memory and time that it takes, before anything starts.

Sizes are counted from the model's own tensors (or a published model's shapes) and the formats of a strategy.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from annie_quant import models
from annie_quant.checkpoint import decode_speed, first_token, prompt_work
from annie_quant.checkpoint.decode_speed import TokenBytes
from annie_quant.checkpoint.first_token import Prompt
from annie_quant.checkpoint.linears import all_linears
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import bytes_per_token
from annie_quant.core.errors import CheckpointError
from annie_quant.data.behaviours import GIVEN_MIXTURE, Mixture
from annie_quant.data.rows import read_conversations
from annie_quant.documents import Device, PredictedSpeed
from annie_quant.models.family import ModelSize
from annie_quant.models.formats import BF16, NVFP4, W4A16, Format
from annie_quant.quantize import strategies
from annie_quant.quantize.rates import SPARK_RATES, Rates, measure_rates
from annie_quant.quantize.strategy import (
    ALL_NVFP4,
    AnswerSource,
    Job,
    Strategy,
    StrategyOptions,
)
from annie_quant.quantize.work_estimate import (
    BF16_BYTES,
    CHARACTERS,
    AttentionSize,
    TextSize,
    WorkEstimate,
)

if TYPE_CHECKING:
    from annie_quant.quantize.format_planner import FormatPlanner
    from annie_quant.quantize.frontier import Limits


@dataclass(frozen=True)
class Estimate:
    """What one strategy makes of one model, and what that takes.

    weights: number of the model's weights.
    size_bytes, bits_per_weight: of the result.
    speed: predicted for one stream.
    peak_bytes: most memory in use.
    layerwise: one layer is in memory at a time.
    seconds: step → duration.
    rates: the machine's.
    text: describes the calibration text; "" where none is read.
    answers: describes what its answers do; "" where that is not known.
    first_token: the predicted time to the first token as text; "" where the shape is not known.
    limits: what they make of the model, as text; "" without limits.
    """

    strategy: str
    model: str
    weights: int
    size_bytes: int
    bits_per_weight: float
    speed: PredictedSpeed
    peak_bytes: int
    layerwise: bool
    seconds: Mapping[str, float]
    rates: Rates
    text: str = ""
    answers: str = ""
    first_token: str = ""
    limits: str = ""

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.rates.memory

    def lines(self) -> list[str]:
        """Return the estimate as text."""
        parts = " + ".join(
            f"{name} {format_seconds(s)}" for name, s in self.seconds.items() if s >= 0.5
        )
        how = "one layer at a time" if self.layerwise else "the whole model in memory"
        smaller = ", ".join(
            s.name for s in strategies.by_rank() if s.cost.layerwise and s.name != self.strategy
        )
        fits = (
            "fits"
            if self.fits
            else f"DOES NOT FIT: choose a strategy that loads one layer at a time ({smaller})"
        )
        return [
            f"{self.strategy} on {self.model}: {self.weights / 1e9:.2f} B weights, {2 * self.weights / 1e9:.1f} GB in bf16",
            *([f"  limits  {self.limits}"] if self.limits else []),
            f"  result  {format_bytes(self.size_bytes)}, {self.bits_per_weight:.2f} bits per weight",
            f"  decode  {decode_speed.describe(self.speed)}",
            *([f"  prefill {self.first_token}"] if self.first_token else []),
            *([f"  text    {self.text}"] if self.text else []),
            *([f"  answers {self.answers}"] if self.answers else []),
            f"  memory  about {format_bytes(self.peak_bytes)} ({how}) of {format_bytes(self.rates.memory)}: {fits}",
            f"  time    about {format_seconds(sum(self.seconds.values()))}"
            + (f" ({parts})" if parts else ""),
            f"  rates   {self.rates.description}",
        ]


def estimate(
    model: str | os.PathLike,
    strategy: str,
    samples: int = 512,
    tokens: int = 600,
    rates: Rates | None = None,
    options: Mapping[str, object] | None = None,
    calib_data: Path | None = None,
    calib_tokens: int | None = None,
    device: Device | None = None,
    answers: AnswerSource = "own",
    prompt: Prompt | None = None,
    exclude: Sequence[str] = (),
    mixture: Mixture = GIVEN_MIXTURE,
) -> Estimate:
    """Estimate a strategy on a model folder, or on a published model ("9b", "27b").

    samples, tokens: of calibration text, conversations and tokens per conversation.  calib_data: file to count them in instead.
    calib_tokens: tokens of a conversation at most; None: the model's context, or what memory allows.
    rates: by default measured here for a folder, those of a DGX Spark for a published model.
    options: of the strategy. Raises UsageError for one that it does not have.
    answers: "own": the model first answers the prompts itself, which its own weights in memory take.
    device: that decodes, by default this machine where it was measured, else a GB10.
    prompt: of the predicted time to the first token, in vLLM.
    exclude: patterns of --exclude-layers, for limits.
    mixture: how much an answer counts, by its behaviour.
    Raises UsageError for limits that no choice of formats satisfies.
    """
    chosen = strategies.find(strategy)
    settings = chosen.settings(options or {})  # refuses settings that the strategy does not have
    published = published_sizes().get(str(model))
    folder = None if published else ModelFolder(model)
    layerwise = chosen.cost.layerwise
    if folder is not None:
        strategies.check_family(chosen, folder.config)
        layerwise &= not chosen.any_family or models.is_known(folder.config)
    size = published or size_of_folder(Path(model))
    rates = rates or (SPARK_RATES if published else measure_rates())
    own = chosen.cost.reads_answers and answers == "own"
    text = _NO_TEXT
    if chosen.cost.passes and calib_data:
        source = None if folder is None else folder.path
        text = text_of_file(calib_data, samples, source, calib_tokens, mixture, own)
    elif chosen.cost.passes:
        text = assumed_text(samples, tokens)
    size_bytes = sum(n * chosen.bits(kind) / 8 for kind, n in size.counts.items())
    rounded = sum(n for kind, n in size.counts.items() if chosen.bits(kind) < BF16.bits)
    shape = AttentionSize.of(size, folder)
    work = WorkEstimate(chosen.cost, size, shape, text, rates, rounded, size_bytes, own)
    read = TokenBytes(size_bytes - size.counts.get("embedding", 0) * BF16_BYTES, size.layers)
    if folder is not None:
        read = decode_speed.token_bytes(folder, strategy_read_bytes(folder, chosen))
    predicted = _first_token(chosen, size, folder, options or {}, device, prompt or Prompt())
    limits = chosen.limits(settings)
    line = ""
    if limits:
        from annie_quant.quantize.frontier_plan import expected_choice

        planner = _planner(size, folder, limits, options or {}, exclude)
        choices, line = expected_choice(planner)
        size_bytes = planner.bytes_of(choices, "size")
        read = replace(planner.read, weights=planner.bytes_of(choices, "read"))
        ms = planner.ttft_ms(choices)
        if ms is not None:
            time = first_token.with_interval(ms, "vllm", limits.device, planner.prompt)
            predicted = (
                f"first token after {first_token.interval_text(time)}: {planner.prompt_text}"
            )
    return Estimate(
        strategy=chosen.name,
        model=size.label,
        weights=work.weights,
        size_bytes=round(size_bytes),
        bits_per_weight=8 * size_bytes / work.weights,
        speed=decode_speed.speed_of(read, device),
        peak_bytes=round(work.peak_bytes(layerwise)),
        layerwise=layerwise and not chosen.cost.trials and not own,
        seconds=work.seconds(),
        rates=rates,
        text=text.line,
        answers=text.behaviours if chosen.cost.reads_answers else "",
        first_token=predicted,
        limits=line,
    )


def _planner(
    size: ModelSize,
    folder: ModelFolder | None,
    limits: Limits,
    options: Mapping[str, object],
    exclude: Sequence[str],
) -> FormatPlanner:
    """Return the planner of limits. Without a limit of the time to the first token its inputs have one format."""
    from annie_quant.quantize import frontier_plan
    from annie_quant.quantize.formats import choose

    four_bit: tuple[Format, ...] = (W4A16,) if options.get("activations") == 16 else (NVFP4,)
    if limits.max_ttft_ms < math.inf and options.get("activations", "mixed") == "mixed":
        four_bit = (NVFP4, W4A16)
    if folder is None:
        return frontier_plan.planner_of_size(size, limits, four_bit)
    job: Job[StrategyOptions] = Job(folder.path, folder.path, exclude=tuple(exclude))
    return frontier_plan.planner_of(job, limits, dict.fromkeys(choose(folder, exclude), four_bit))


def _first_token(
    strategy: Strategy,
    size: ModelSize,
    folder: ModelFolder | None,
    options: Mapping[str, object],
    device: Device | None,
    prompt: Prompt,
) -> str:
    """Return the predicted time to the first token of a strategy's result as text.

    A strategy that chooses formats by trials has two alternatives: the inputs of all linears in 4 bits, and of none.
    """
    formats = {kind: f for kind, f in strategy.formats.items() if isinstance(f, Format)}
    unrounded = {kind: W4A16 if f == NVFP4 else f for kind, f in formats.items()}
    # Without a pass there are no input scales.
    if options.get("activations") == 16 or not strategy.cost.passes:
        formats = unrounded
    alternatives = {"": formats}
    if strategy.cost.trials:
        alternatives = {
            " with all inputs in 4 bits": ALL_NVFP4,
            " with all in 16": dict.fromkeys(ALL_NVFP4, W4A16),
        }
    checked = prompt.within(folder)
    works = {}
    for name, planned in alternatives.items():
        if folder is None:
            work = _work_of_published(size, planned)
        else:
            of_linears = {
                n: planned.get(folder.family.kind_of(n), BF16) for n in all_linears(folder)
            }
            work = prompt_work.work_of(folder, planned=of_linears)
        if work is None:
            return ""
        works[name] = work
    return first_token.describe(works, "vllm", device, checked)


def _work_of_published(
    size: ModelSize, formats: Mapping[str, Format]
) -> prompt_work.PromptWork | None:
    """Return what a prompt computes in a published model; None where its shape is not known."""
    shape = first_token.prefill().models.get(size.label)
    if shape is None:
        return None
    linears: prompt_work.Sizes = {}
    for kind in size.counts.keys() - {"head", "embedding", "rest"}:
        chosen = formats.get(kind, BF16)
        weights = size.counts[kind]
        kernel = prompt_work.kernel_of(chosen.name, "vllm")
        prompt_work.add(linears, kernel, weights, weights * chosen.bits / 8)
    head_bytes = size.counts["head"] * formats.get("head", BF16).bits / 8
    return prompt_work.PromptWork(shape, linears, head_bytes)


def strategy_read_bytes(folder: ModelFolder, strategy: Strategy) -> float:
    """Return the bytes of weights per token of a model that a strategy has quantized, by its formats."""
    return bytes_per_token(
        folder,
        lambda name: folder.info(name).elements * strategy.bits(folder.family.kind_of(name)) / 8,
    )


_NO_TEXT = TextSize()


def assumed_text(samples: int, tokens: int) -> TextSize:
    """Return the size of a text that is not given."""
    line = f"{samples} conversations of {tokens} tokens, assumed: --calib-data counts your own"
    return TextSize(samples, samples * tokens, samples * tokens, answers=samples, line=line)


def text_of_file(
    file: Path,
    samples: int,
    model: Path | None = None,
    calib_tokens: int | None = None,
    mixture: Mixture = GIVEN_MIXTURE,
    own: bool = False,
) -> TextSize:
    """Return the size of the text that a strategy reads from a file.

    model: folder whose tokenizer counts; None: tokens are estimated from characters.
    own: the model answers the prompts first, also those that have no answer yet.
    Raises UsageError where fewer than half of the conversations can be used.
    """
    rows = read_conversations(file, samples)
    if model is not None:
        from annie_quant.quantize.calibration_text import text_of_rows

        use = text_of_rows(model, rows, calib_tokens, mixture=mixture, with_open=own).use
        return TextSize(
            conversations=use.conversations,
            tokens=use.tokens,
            computed=use.computed,
            prefix=use.prefix,
            answers=use.n_answers,
            line=use.line(),
            behaviours=use.behaviour_line(),
        )
    from annie_quant.quantize.shared_text import distinct_positions

    texts = [json.dumps([row.get("tools"), row["messages"]]) for row in rows]
    tokens = sum(map(len, texts)) // CHARACTERS
    computed = distinct_positions(texts) // CHARACTERS
    line = f"{len(rows)} conversations, about {tokens:,} tokens"
    return TextSize(len(rows), tokens, computed, answers=len(rows), line=line)


def is_large(model: Path) -> bool:
    """Return whether an estimate is worth a second before starting: one gigabyte of weights or more."""
    return sum(f.stat().st_size for f in model.glob("*.safetensors")) >= 1e9


def published_sizes() -> dict[str, ModelSize]:
    """Return the published models of all families by their short name."""
    return {name: size for family in models.families() for name, size in family.published.items()}


def size_of_folder(folder: Path) -> ModelSize:
    """Return a model folder's weights per kind of part, from the headers and the config."""
    shards = ModelFolder(folder)
    counts = dict.fromkeys([*shards.family.kinds, "head", "embedding", "rest"], 0)
    for name in shards:
        counts[shards.family.kind_of(name)] += shards.info(name).elements
    config = shards.text_config
    experts = shards.family.experts
    layers = config.get("num_hidden_layers")
    hidden = config.get("hidden_size")
    if not isinstance(layers, int) or not isinstance(hidden, int) or min(layers, hidden) < 1:
        raise CheckpointError(
            f"{folder}/config.json has no num_hidden_layers and hidden_size, so nothing can be estimated",
            "quantize it without --dry-run",
        )
    width = (
        config.get("intermediate_size")
        or (config.get(experts.width) if experts else None)
        or hidden
    )
    return ModelSize(folder.name, counts, layers, hidden, width)


def format_bytes(n: float) -> str:
    return f"{n / 1e9:,.1f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"


def format_seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
