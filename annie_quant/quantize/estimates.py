"""Estimate the size of a result, and the memory and time that it takes, before anything starts.

Sizes are counted from the model's own tensors (or a published model's shapes) and the formats of a strategy. Times are operations
divided by rates: measured on this machine in a second, or those of a DGX Spark. The rates of a CPU are per processor second, so
that other processes change them little: a crowded machine takes longer than estimated.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from annie_quant import models, nvfp4
from annie_quant.checkpoint import decode_speed, first_token, prompt_work
from annie_quant.checkpoint.decode_speed import TokenBytes
from annie_quant.checkpoint.first_token import Prompt
from annie_quant.checkpoint.linears import read_struct
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import AttentionShape, bytes_per_token, caches_of
from annie_quant.core.errors import CheckpointError
from annie_quant.data.rows import read_conversations
from annie_quant.documents import Device, PredictedSpeed
from annie_quant.models.family import ModelSize
from annie_quant.models.formats import BF16, NVFP4, W4A16, Format
from annie_quant.quantize import strategies
from annie_quant.quantize.strategy import (
    ALL_NVFP4,
    TRIAL_POSITIONS,
    TRIAL_TOKENS,
    AnswerSource,
    Cost,
    Strategy,
    in_float32,
)


@dataclass(frozen=True)
class Rates:
    """A machine.

    flop_s: operations per second of a large matmul in bf16
    float32_flop_s: in float32
    cpu_flop_s: in float32 on the CPU
    copy: bytes that a copy in the device's memory reads and writes per second
    encode: bytes of bf16 rounded to NVFP4 per second
    memory: free bytes
    description: one line
    """

    flop_s: float
    float32_flop_s: float
    cpu_flop_s: float
    copy: float
    encode: float
    memory: float
    description: str

    @property
    def on_cpu(self) -> bool:
        return self.float32_flop_s == self.cpu_flop_s


# The matmul and the memory were measured on a GB10 (tests/perf/gemm.md), the codec on two x86 cores.
SPARK_RATES = Rates(
    91e12,
    20e12,
    5e11,
    decode_speed.DEVICES["gb10"].read_bytes_s,
    12e9,
    119e9,
    "DGX Spark: 91 bf16 TFLOP/s and 232 GB/s measured; 119 GB free, 20 float32 TFLOP/s, codec 12 GB/s and CPU 0.5 TFLOP/s assumed",
)
# ---- constants of times: shares of the matmul rate, measured on a CPU with SmolLM2-135M (tests/perf/strategies.md) and consistent
# with an H200 (tests/quantize/test_estimates.py has both measurements)

FORWARD_SHARE = 0.6
HESSIAN_SHARE = 0.9
# On a CPU; on a GPU, of its float32 rate and with the copy to the host.
FACTOR_SHARE = {"cpu": 0.45, "cuda": 0.01}
COLUMNS_SHARE = 0.75
PER_COLUMN = 1500  # operations per weight that the rounding of columns takes at any width
HESSIAN_TOKENS = 0.6  # share of the tokens that a Hessian multiplies (gptq.Sampling)
# Imports and tokenizer; on a GPU also CUDA: naive of Coder-0.5B takes 5 s after its imports (tests/perf/long_prompts.md).
START_S = {"cpu": 8.0, "cuda": 8.0}
ROW_S = 0.01  # template and tokens of a conversation
BATCH_S = 2e-3  # of one layer and batch
DISK = 1e9  # bytes per second, assumed
TOKENIZED_S = 2e6  # tokens per second, of which most belong to a prompt that was tokenized before
CHARACTERS = 6  # of a conversation's JSON per token

# ---- constants of memory, set by the peaks in tests/perf/long_prompts.md: on a CPU the process's largest resident set, on a GPU
# torch's largest allocation

PROCESS_BYTES = 0.4e9  # Python, torch and this package; on a GPU what a forward pass computes
BF16_BYTES = 2  # of a weight
TEXT_BYTES = 24  # of a token's number and kind, in the samples of all answers
# Of the text's hidden states: a layer's inputs and outputs, and the gathered inputs or the second stream.
HIDDEN_COPIES = 3
# Numbers per token that a forward pass through one layer has in memory on a CPU: this many hidden states and MLP inputs.
PASS_HIDDEN = 12
PASS_INTERMEDIATE = 4
PASS_TOKENS = {"cpu": 4096, "cuda": 32768}  # of a pass through one layer (shared_text.PASS_COSTS)
# Tokens that a trial's forward pass adds to the prompt that they share, and of an estimate's batch (offline/engine.py).
BATCH_TOKENS = 4096
TRIAL_CACHES = 2  # keys and values of the batch that is scored and of the one that is computed
# Of the own answers of a batch (own_answers.py): decode steps, and seconds of one on a GPU, as 256 prompts of Coder-0.5B took on an
# H200; on a CPU the tokens of an answer are computed at a share of the matmul rate, because a step has few rows.
DECODED_COLUMNS = 1 << 19  # engine.MAX_DECODED_COLUMNS
DECODED_ROWS = {"cpu": 128, "cuda": 512}
DECODE_STEPS = 512
STEP_S = 0.02
ANSWER_TOKENS = 60
DECODE_SHARE = 0.3
# float32 scores of a head for a batch and all earlier tokens, on a GPU.
SCORE_COPIES = 4


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
    first_token: the predicted time to the first token as text; "" where the shape is not known.
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
    first_token: str = ""

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.rates.memory

    def lines(self) -> list[str]:
        """Return the estimate as text."""
        parts = " + ".join(f"{name} {_time(s)}" for name, s in self.seconds.items() if s >= 0.5)
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
            f"  result  {_bytes(self.size_bytes)}, {self.bits_per_weight:.2f} bits per weight",
            f"  decode  {decode_speed.describe(self.speed)}",
            *([f"  prefill {self.first_token}"] if self.first_token else []),
            *([f"  text    {self.text}"] if self.text else []),
            f"  memory  about {_bytes(self.peak_bytes)} ({how}) of {_bytes(self.rates.memory)}: {fits}",
            f"  time    about {_time(sum(self.seconds.values()))}"
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
) -> Estimate:
    """Estimate a strategy on a model folder, or on a published model ("9b", "27b").

    samples, tokens: of calibration text, conversations and tokens per conversation.  calib_data: file to count them in instead.
    calib_tokens: tokens of a conversation at most; None: the model's context, or what memory allows.
    rates: by default measured here for a folder, those of a DGX Spark for a published model.
    options: of the strategy. Raises UsageError for one that it does not have.
    answers: "own": the model first answers the prompts itself, which its own weights in memory take.
    device: that decodes, by default this machine where it was measured, else a GB10.
    prompt: of the predicted time to the first token, in vLLM.
    """
    chosen = strategies.find(strategy)
    chosen.settings(options or {})  # refuses settings that the strategy does not have
    published = published_sizes().get(str(model))
    folder = None if published else ModelFolder(model)
    layerwise = chosen.cost.layerwise
    if folder is not None:
        strategies.check_family(chosen, folder.config)
        layerwise &= not chosen.any_family or models.is_known(folder.config)
    size = published or size_of_folder(Path(model))
    rates = rates or (SPARK_RATES if published else measure_rates())
    text = _NO_TEXT
    if chosen.cost.passes and calib_data:
        source = None if folder is None else folder.path
        text = text_of_file(calib_data, samples, source, calib_tokens)
    elif chosen.cost.passes:
        text = assumed_text(samples, tokens)
    size_bytes = sum(n * chosen.bits(kind) / 8 for kind, n in size.counts.items())
    rounded = sum(n for kind, n in size.counts.items() if chosen.bits(kind) < BF16.bits)
    shape = AttentionSize.of(size, folder)
    own = chosen.cost.reads_answers and answers == "own"
    work = WorkEstimate(chosen.cost, size, shape, text, rates, rounded, size_bytes, own)
    read = TokenBytes(size_bytes - size.counts.get("embedding", 0) * BF16_BYTES, size.layers)
    if folder is not None:
        read = decode_speed.token_bytes(folder, strategy_read_bytes(folder, chosen))
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
        first_token=_first_token(chosen, size, folder, options or {}, device, prompt or Prompt()),
    )


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
            work = prompt_work.work_of(folder, planned=planned)
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


@dataclass(frozen=True)
class TextSize:
    """The calibration text.

    conversations: number of them.
    tokens: of all conversations.
    computed: of these tokens, where a prefix that several rows share counts once.
    prefix: tokens that most conversations share, which each trial computes.
    line: describes it.
    """

    conversations: int = 0
    tokens: int = 0
    computed: int = 0
    prefix: int = 0
    line: str = ""


_NO_TEXT = TextSize()


def assumed_text(samples: int, tokens: int) -> TextSize:
    """Return the size of a text that is not given."""
    line = f"{samples} conversations of {tokens} tokens, assumed: --calib-data counts your own"
    return TextSize(samples, samples * tokens, samples * tokens, line=line)


def text_of_file(
    file: Path, samples: int, model: Path | None = None, calib_tokens: int | None = None
) -> TextSize:
    """Return the size of the text that a strategy reads from a file.

    model: folder whose tokenizer counts; None: tokens are estimated from characters.
    Raises UsageError where fewer than half of the conversations can be used.
    """
    rows = read_conversations(file, samples)
    if model is not None:
        from annie_quant.quantize.calibration_text import text_of_rows

        use = text_of_rows(model, rows, calib_tokens).use
        return TextSize(use.conversations, use.tokens, use.computed, use.prefix, use.line())
    from annie_quant.quantize.shared_text import distinct_positions

    texts = [json.dumps([row.get("tools"), row["messages"]]) for row in rows]
    tokens = sum(map(len, texts)) // CHARACTERS
    computed = distinct_positions(texts) // CHARACTERS
    line = f"{len(rows)} conversations, about {tokens:,} tokens"
    return TextSize(len(rows), tokens, computed, line=line)


@dataclass(frozen=True)
class AttentionSize:
    """The shape of attention, which decides the memory and time of long prompts.

    layers: number of layers whose attention sees all earlier tokens.
    heads: of the queries.
    position: elements of keys and values of a token in all layers.
    """

    layers: float
    heads: int
    position: float

    @classmethod
    def of(cls, size: ModelSize, folder: ModelFolder | None) -> AttentionSize:
        """Return the shape of a folder's model; of a published one what models of its kind have."""
        layers = size.layers / 4 if size.counts.get("deltanet") else size.layers
        heads = max(1, size.hidden_size // 128)
        if folder is None:
            return cls(layers, heads, 2 * layers * size.hidden_size / 4)
        shape = read_struct(AttentionShape, folder.text_config)
        position = caches_of(shape, element=1).position
        return cls(layers, shape.num_attention_heads or heads, position)


@dataclass(frozen=True)
class WorkEstimate:
    """What a strategy computes, for its memory and time.

    rounded: number of weights that are rounded.
    size_bytes: of the result.
    own_answers: the model answers the prompts first.
    """

    cost: Cost
    size: ModelSize
    attention: AttentionSize
    text: TextSize
    rates: Rates
    rounded: int
    size_bytes: float
    own_answers: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.rates.on_cpu else "cuda"

    @property
    def weights(self) -> int:
        return sum(self.size.counts.values())

    @property
    def body(self) -> int:
        """Number of weights in the decoder's layers."""
        counts = self.size.counts
        return self.weights - counts.get("embedding", 0) - counts.get("head", 0)

    @property
    def vocabulary(self) -> float:
        counts = self.size.counts
        return max(counts["head"], counts["embedding"]) / self.size.hidden_size

    @property
    def in_float32(self) -> bool:
        return in_float32(BF16_BYTES * self.weights, self.rates.on_cpu)

    @property
    def width(self) -> int:
        """Bytes of a number that is computed."""
        return 4 if self.in_float32 else 2

    # ---- memory

    def peak_bytes(self, layerwise: bool) -> float:
        """Return the most memory in use. layerwise: one layer at a time; else the whole model."""
        if not layerwise:
            logits = 4 * min(self.text.computed, BATCH_TOKENS) * self.vocabulary
            return PROCESS_BYTES + BF16_BYTES * self.weights + logits
        results = self.size_bytes if self.cost.trials else 0.0
        peaks = [self.layerwise_bytes() + results]
        if self.cost.trials:
            peaks.append(self.trial_bytes())
        if self.own_answers:
            peaks.append(self.answer_bytes())
        return max(peaks)

    def layerwise_bytes(self) -> float:
        """Return the memory of one layer, its Hessians and the states of the text."""
        hidden = self.size.hidden_size
        intermediate = self.size.intermediate_size
        total = PROCESS_BYTES + self.cost.hessians * 4 * intermediate**2
        if not self.cost.passes:
            return total
        layer = self.body / max(1, self.size.layers)
        total += (self.cost.bytes_per_layer_weight + self.width - BF16_BYTES) * layer
        tokens = self.text.computed
        total += HIDDEN_COPIES * tokens * hidden * self.width + TEXT_BYTES * self.text.tokens
        # The inputs of a block's last linear.
        inputs = [self.width * tokens * n for n in (hidden, intermediate)]
        total += max((stored for stored in inputs if stored <= self.cost.kept_inputs), default=0)
        return total + self.pass_bytes(PASS_TOKENS["cpu"])

    def pass_bytes(self, tokens: int) -> float:
        """Return what a forward pass through one layer computes, on a CPU; on a GPU it is part of PROCESS_BYTES."""
        if not self.rates.on_cpu:
            return 0.0
        of_token = PASS_HIDDEN * self.size.hidden_size
        of_token += PASS_INTERMEDIATE * self.size.intermediate_size
        return min(tokens, self.text.computed) * of_token * self.width

    def trial_bytes(self) -> float:
        """Return the memory of trials: the whole model, the reference's logits, keys and values of a batch, and its scores."""
        new = max(1, self.text.computed // max(1, self.text.conversations))
        row = self.text.prefix + new
        rows = max(1, min(self.text.conversations, BATCH_TOKENS // new))
        caches = TRIAL_CACHES * rows * row * self.attention.position * self.width
        answers = min(self.text.computed, TRIAL_TOKENS[self.device])
        logits = 2 * answers * self.vocabulary
        scores = 0.0
        if not self.rates.on_cpu:
            scores = SCORE_COPIES * 4 * rows * new * row * self.attention.heads
        model = self.width * self.weights
        computed = self.pass_bytes(max(BATCH_TOKENS, self.text.prefix))
        return PROCESS_BYTES + model + logits + caches + scores + computed

    def answer_bytes(self) -> float:
        """Return the memory of answering the prompts: the whole model, and keys and values of a batch of rows."""
        conversations = max(1, self.text.conversations)
        row = self.text.prefix + self.text.computed // conversations
        columns = min(conversations * row, DECODED_COLUMNS)
        caches = columns * self.attention.position * self.width
        computed = self.pass_bytes(max(BATCH_TOKENS, self.text.prefix))
        return PROCESS_BYTES + self.width * self.weights + caches + computed

    # ---- time

    def seconds(self) -> dict[str, float]:
        """Return step → duration."""
        seconds = {
            "read": BF16_BYTES * self.weights / DISK,
            "encode": self.cost.encode * BF16_BYTES * self.rounded / self.rates.encode,
            "write": self.size_bytes / DISK,
        }
        if self.cost.passes:
            seconds |= self.text_seconds()
        if self.own_answers:
            seconds["own answers"] = self.answer_seconds()
        if self.cost.passes and self.cost.column_feedback:
            seconds |= self.column_seconds()
        return seconds

    @property
    def few_trials(self) -> bool:
        """Whether trials have few tokens, so that `passes` does not hold: on a CPU."""
        return self.cost.held_out_look and self.rates.on_cpu

    def passed_tokens(self) -> float:
        """Return how many tokens go through the whole model."""
        positions = self.text.computed
        if not self.few_trials:
            return self.cost.passes * positions
        from annie_quant.quantize import mixed_formats

        of_inputs = self.text.prefix + min(positions, mixed_formats.POSITIONS)
        of_formats = self.text.prefix + min(positions, TRIAL_POSITIONS["cpu"])
        return mixed_formats.BANDS * of_inputs + 4 * of_formats + 2 * positions

    def text_seconds(self) -> dict[str, float]:
        """Return the durations of the start and of the text's forward passes."""
        size = self.size
        text = self.text
        tokens = self.passed_tokens()
        rate = self.rates.float32_flop_s if self.in_float32 else self.rates.flop_s
        linears = 2 * self.body * tokens
        # Scores and values of all earlier tokens.
        earlier = text.tokens / max(1, text.conversations)
        attended = 2 * tokens * earlier * size.hidden_size * self.attention.layers
        # Bytes that norms, attention and gates read and write.
        of_token = 20 * size.hidden_size + 6 * size.intermediate_size
        activations = 4 * tokens * size.layers * of_token
        batches = self.cost.passes + tokens / BATCH_TOKENS
        reading = ROW_S * text.conversations + text.tokens / TOKENIZED_S
        computing = (linears + attended) / (rate * FORWARD_SHARE)
        computing += activations / self.rates.copy + size.layers * batches * BATCH_S
        return {"start": START_S[self.device] + reading, "text": computing}

    def answer_seconds(self) -> float:
        """Return the duration of the model's own answers where none is stored."""
        conversations = self.text.conversations
        rate = self.rates.float32_flop_s if self.in_float32 else self.rates.flop_s
        reading = 2 * self.body * self.text.computed / (rate * FORWARD_SHARE)
        if self.rates.on_cpu:
            tokens = ANSWER_TOKENS * conversations
            return reading + 2 * self.body * tokens / (rate * DECODE_SHARE)
        row = self.text.prefix + self.text.computed // max(1, conversations)
        by_memory = math.ceil(conversations * row / DECODED_COLUMNS)
        batches = max(by_memory, math.ceil(conversations / DECODED_ROWS[self.device]))
        return reading + batches * DECODE_STEPS * STEP_S

    def column_seconds(self) -> dict[str, float]:
        """Return the durations of GPTQ's Hessians, their factors and the rounding of columns."""
        hidden = self.size.hidden_size
        width = self.size.intermediate_size
        layers = self.size.layers
        mlp = self.size.counts.get("mlp", 0)
        rounds = 2 if self.few_trials else 1
        groups = layers * (3 * hidden**2 + width**2)
        experts = max(layers, mlp / (3 * hidden * width))
        cubes = layers * 2 * hidden**3 + experts * (hidden**3 + width**3)
        outputs = mlp / 3  # weights of the MLPs' last linears
        columns = outputs * (width + PER_COLUMN) + (self.rounded - outputs) * (hidden + PER_COLUMN)
        hessians = 2 * HESSIAN_TOKENS * self.text.computed * groups
        float32 = self.rates.float32_flop_s
        return {
            "Hessians": rounds * hessians / (float32 * HESSIAN_SHARE),
            "factors": rounds * 4 / 3 * cubes / (float32 * FACTOR_SHARE[self.device]),
            "columns": rounds * columns / (self.rates.cpu_flop_s * COLUMNS_SHARE),
        }


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


def measure_rates() -> Rates:
    """Measure this machine's rates in about a second: matmul, a copy, the codec, the free memory."""
    import ml_dtypes
    import numpy as np
    import torch

    from annie_quant.quantize.backend import device_kind, free_memory_bytes

    threads = torch.get_num_threads()
    device = device_kind()
    memory = free_memory_bytes()

    def matmul(device: str, dtype: torch.dtype) -> float:
        size = 8192 if device == "cuda" else 1024
        a = torch.randn(size, size, device=device, dtype=dtype)
        return 2 * size**3 / fastest_seconds(lambda: a @ a, device)

    w = (
        np.random.default_rng(0)
        .standard_normal((1024, 2048), np.float32)
        .astype(ml_dtypes.bfloat16)
    )
    source = torch.zeros(1 << 24, device=device)
    target = torch.ones_like(source)
    torch.set_num_threads(1)
    try:
        float32 = cpu = matmul("cpu", torch.float32) * threads
        flop_s = matmul("cpu", torch.bfloat16) * threads
        copy = 2 * source.nbytes / fastest_seconds(lambda: target.copy_(source), device)
        encode = w.nbytes / fastest_seconds(lambda: nvfp4.pack(w), "cpu") * threads
    finally:
        torch.set_num_threads(threads)
    if device == "cuda":
        flop_s = matmul(device, torch.bfloat16)
        float32 = matmul(device, torch.float32)
    description = (
        f"measured here on {device}: matmul {flop_s / 1e12:,.2f} TFLOP/s (float32 {float32 / 1e12:,.2f}), "
        f"memory {copy / 1e9:,.0f} GB/s, codec {encode / 1e9:,.1f} GB/s"
    )
    return Rates(flop_s, float32, cpu, copy, encode, memory, description)


def fastest_seconds(work: Callable[[], object], device: str) -> float:
    """Return the seconds of the fastest of a few runs, on a CPU processor seconds of all threads.

    A GPU that other processes use, too, shows its rate in few of many short runs.
    """
    least = math.inf
    for _ in range(3 if device == "cpu" else 20):
        start = clock(device)
        work()
        least = min(least, clock(device) - start)
    return max(least, 1e-9)


def clock(device: str) -> float:
    """Return the processor time of this process, or the time after all work of the GPU."""
    if device == "cpu":
        return time.process_time()
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def _bytes(n: float) -> str:
    return f"{n / 1e9:,.1f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
