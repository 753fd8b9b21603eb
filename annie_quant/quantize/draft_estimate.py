"""Estimate the memory and time of `annie-quant draft` before anything starts.

Operations divided by a machine's rates (rates.py), with the shares of work_estimate.py; tests/perf/drafts.md compares with measured
times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from annie_quant.checkpoint.draft_heads import find_head, head_tensors
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import UsageError
from annie_quant.quantize import draft_tuning, estimates
from annie_quant.quantize.draft import GENERAL_PROMPTS, GENERAL_WORKLOADS, MAX_ANSWERS
from annie_quant.quantize.estimates import format_bytes, format_seconds
from annie_quant.quantize.rates import SPARK_RATES, Rates, measure_rates
from annie_quant.quantize.work_estimate import (
    ANSWER_TOKENS,
    DECODE_SHARE,
    DECODE_STEPS,
    DECODED_ROWS,
    FORWARD_SHARE,
    PROCESS_BYTES,
    START_S,
    STEP_S,
)

# Of a published model's conversations, which are not given: tokens per prompt, of which so many are shared by all.
PROMPT_TOKENS = 300
# Forward passes over the prompts: which given answers stay, what is decoded, hidden states.
PROMPT_PASSES = 3
# float32: the weight, its gradient, two moments and the best head so far.
HEAD_COPIES = 5
BACKWARD = 3  # a forward and a backward pass, in forward passes
GENERAL_TOKENS = 300


@dataclass(frozen=True)
class DraftEstimate:
    """answers, tokens: that are learned from. peak_bytes: most memory in use. seconds: step → duration."""

    model: str
    answers: int
    tokens: int
    peak_bytes: float
    seconds: Mapping[str, float]
    rates: Rates

    def lines(self) -> list[str]:
        """Return the estimate as text."""
        steps = " + ".join(f"{name} {format_seconds(s)}" for name, s in self.seconds.items())
        fits = "fits" if self.peak_bytes <= self.rates.memory else "DOES NOT FIT"
        memory = f"{format_bytes(self.peak_bytes)} of {format_bytes(self.rates.memory)}: {fits}"
        return [
            f"draft on {self.model}: {self.answers:,} answers, about {self.tokens:,} tokens of them",
            f"  memory  about {memory}",
            f"  time    at most {format_seconds(sum(self.seconds.values()))} ({steps})",
            f"  rates   {self.rates.description}",
        ]


def estimate(
    model: Path, base: Path | None, calib_data: Path, answers: int, epochs: int
) -> DraftEstimate:
    """Return the estimate for a model folder here, or for a published size ("9b") on a DGX Spark.

    Raises what draft.run raises for a head and for answers that cannot be used.
    """
    published = estimates.published_sizes().get(str(model))
    if published is not None:
        count = min(answers, MAX_ANSWERS)
        layer = sum(published.counts.values()) / published.layers
        sizes = _Sizes(
            weights=sum(published.counts.values()),
            weight_bytes=0.6 * sum(published.counts.values()),
            head=layer + 2 * published.hidden_size**2,
            output=published.counts["head"],
            hidden=published.hidden_size,
        )
        prompt_tokens = count * PROMPT_TOKENS
        answer_tokens = count * ANSWER_TOKENS
        return _estimate(
            str(model), sizes, count, prompt_tokens, answer_tokens, epochs, SPARK_RATES
        )
    from annie_quant.offline.prompts import Template
    from annie_quant.quantize.draft import prompts_of

    folder = ModelFolder(model)
    source = find_head(folder, ModelFolder(base) if base else None)
    given = prompts_of(Template(model), calib_data, answers)
    size = estimates.size_of_folder(model)
    head = sum(source.info(name).elements for name in head_tensors(source).values())
    output = size.counts["head"] or size.counts["embedding"]
    sizes = _Sizes(
        weights=sum(size.counts.values()),
        weight_bytes=folder.weight_bytes,
        head=head,
        output=output,
        hidden=size.hidden_size,
    )
    prompt_tokens = sum(len(answer.prompt) for answer in given)
    answer_tokens = sum(len(answer.target) for answer in given)
    if not size.hidden_size:
        raise UsageError(f"{model}: config.json has no hidden_size", "run it without --dry-run")
    return _estimate(
        str(model), sizes, len(given), prompt_tokens, answer_tokens, epochs, measure_rates()
    )


@dataclass(frozen=True)
class _Sizes:
    """weights, head, output: numbers of weights of the model, the head and the output layer. hidden: columns."""

    weights: float
    weight_bytes: float
    head: float
    output: float
    hidden: int


def _estimate(
    model: str,
    sizes: _Sizes,
    answers: int,
    prompt_tokens: int,
    answer_tokens: int,
    epochs: int,
    rates: Rates,
) -> DraftEstimate:
    device = "cpu" if rates.on_cpu else "cuda"
    element = 4 if rates.on_cpu else 2
    rate = rates.float32_flop_s if rates.on_cpu else rates.flop_s
    general = len(GENERAL_WORKLOADS) * GENERAL_PROMPTS * GENERAL_TOKENS
    decoded = answer_tokens + general
    computed = prompt_tokens + decoded
    forward_s = 2 * sizes.weights * computed / (FORWARD_SHARE * rate)
    batches = max(1, -(-answers // DECODED_ROWS[device]))
    decode_s = batches * DECODE_STEPS * STEP_S
    if rates.on_cpu:
        decode_s = 2 * sizes.weights * decoded / (DECODE_SHARE * rate)
    steps = draft_tuning.STEPS
    of_head = 2 * sizes.head * (computed + (steps - 1) * decoded)
    of_output = 2 * sizes.output * decoded * steps
    of_targets = 2 * sizes.output * decoded * steps / BACKWARD
    training = BACKWARD * (of_head + of_output + of_targets)
    tuning_s = epochs * training / (FORWARD_SHARE * rate)
    seconds = {
        "start": START_S[device],
        "answers": PROMPT_PASSES * forward_s + decode_s,
        "tuning": tuning_s,
    }
    peak = PROCESS_BYTES + sizes.weight_bytes
    peak += HEAD_COPIES * 4 * sizes.head + element * sizes.output
    peak += element * sizes.hidden * computed
    peak += 4 * 4 * draft_tuning.CHUNK_LOGITS
    return DraftEstimate(model, answers, answer_tokens, peak, seconds, rates)
