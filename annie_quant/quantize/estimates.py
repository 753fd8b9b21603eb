"""Estimate the size of a result, and the memory and time that it takes, before anything starts.

Sizes are counted from the model's own tensors (or a published model's shapes) and the formats of a strategy. Times are operations
divided by rates: measured on this machine in a second, or those of a DGX Spark. The rates of a CPU are per processor second, so
that other processes change them little: a crowded machine takes longer than estimated.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from annie_quant import models, nvfp4
from annie_quant.checkpoint import decode_speed
from annie_quant.checkpoint.decode_speed import TokenBytes
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import bytes_per_token
from annie_quant.core.errors import CheckpointError
from annie_quant.data.rows import read_conversations
from annie_quant.documents import Device, PredictedSpeed
from annie_quant.models.family import ModelSize
from annie_quant.models.formats import BF16
from annie_quant.quantize import strategies
from annie_quant.quantize.strategy import Cost, Strategy, in_float32


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
# Shares of the matmul rate, measured on a CPU (SmolLM2-135M) and consistent with an H200 (Qwen2.5-Coder-0.5B and 1.5B).
FORWARD_SHARE = 0.6
HESSIAN_SHARE = 0.9
FACTOR_SHARE = {
    True: 0.45,
    False: 0.01,
}  # on a CPU; on a GPU, of its float32 rate and with the copy to the host
COLUMNS_SHARE = 0.75
PER_COLUMN = 1500  # operations per weight that the rounding of columns takes at any width
HESSIAN_TOKENS = 0.6  # share of the tokens that a Hessian multiplies (gptq.Sampling)
START_S = {True: 8.0, False: 20.0}  # imports and tokenizer; on a GPU also CUDA
ROW_S = 0.01  # template and tokens of a conversation
BATCH_S = 2e-3  # of one layer and batch
DISK = 1e9  # bytes per second, assumed
TOKENIZED_S = 2e6  # tokens per second, of which most belong to a prompt that was tokenized before
TEXT_BYTES = 24  # of a token's number and kind, in the samples of all answers
CHARACTERS = 6  # of a conversation's JSON per token
HIDDEN_COPIES = (
    3  # of the text: a layer's inputs and outputs, and the gathered inputs or the second stream
)
BASE_BYTES = 0.4e9  # Python, torch, the mapped shard that is being read
BATCH_TOKENS = 4096


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
) -> Estimate:
    """Estimate a strategy on a model folder, or on a published model ("9b", "27b").

    samples, tokens: of calibration text, conversations and tokens per conversation.  calib_data: file to count them in instead.
    calib_tokens: tokens of a conversation at most; None: the model's context, or what memory allows.
    rates: by default measured here for a folder, those of a DGX Spark for a published model.
    options: of the strategy. Raises UsageError for one that it does not have.
    device: that decodes, by default this machine where it was measured, else a GB10.
    """
    chosen = strategies.find(strategy)
    chosen.settings(options or {})  # refuses settings that the strategy does not have
    cost = chosen.cost
    published = published_sizes().get(str(model))
    layerwise = cost.layerwise
    if not published:
        config = ModelFolder(model).config
        strategies.check_family(chosen, config)
        layerwise &= not chosen.any_family or models.is_known(config)
    size = published or size_of_folder(Path(model))
    rates = rates or (SPARK_RATES if published else measure_rates())
    weights = sum(size.counts.values())
    size_bytes = sum(n * chosen.bits(kind) / 8 for kind, n in size.counts.items())
    rounded = sum(n for kind, n in size.counts.items() if chosen.bits(kind) < BF16.bits)
    text = NO_TEXT
    if cost.passes and calib_data:
        text = text_of_file(calib_data, samples, None if published else Path(model), calib_tokens)
    elif cost.passes:
        text = assumed_text(samples, tokens)
    width = 4 if in_float32(2 * weights, rates.on_cpu) else 2  # bytes of a number
    if layerwise:
        peak = layerwise_bytes(cost, size, text, width)
        peak += size_bytes if cost.keeps_results else 0
    else:
        # A batch's logits in float32; the vocabulary is the number of rows of the head or the tied embedding.
        vocabulary = max(size.counts["head"], size.counts["embedding"]) / size.hidden_size
        logits = 4 * min(text.computed, BATCH_TOKENS) * vocabulary
        peak = BASE_BYTES + cost.bytes_per_weight * weights + logits
    if cost.whole_model:
        whole = width / 2 * cost.whole_model * rounded + width * (weights - rounded)
        peak = max(peak, BASE_BYTES + whole)
    seconds = {
        "read": 2 * weights / DISK,
        "encode": cost.encode * 2 * rounded / rates.encode,
        "write": size_bytes / DISK,
    }
    if cost.passes:
        seconds |= calibration_seconds(cost, size, rates, text, rounded)
    read = TokenBytes(size_bytes - size.counts.get("embedding", 0) * 2, size.layers)
    if not published:
        shards = ModelFolder(model)
        read = decode_speed.token_bytes(shards, strategy_read_bytes(shards, chosen))
    return Estimate(
        strategy=chosen.name,
        model=size.label,
        weights=weights,
        size_bytes=round(size_bytes),
        bits_per_weight=8 * size_bytes / weights,
        speed=decode_speed.speed_of(read, device),
        peak_bytes=round(peak),
        layerwise=layerwise and not cost.whole_model,
        seconds=seconds,
        rates=rates,
        text=text.line,
    )


def layerwise_bytes(cost: Cost, size: ModelSize, text: TextSize, width: int) -> float:
    """Return the memory of a strategy with one layer at a time, without its results. width: bytes of a number."""
    total = BASE_BYTES + cost.hessians * 4 * size.intermediate_size**2
    if not cost.passes:
        return total
    outside = size.counts.get("embedding", 0) + size.counts.get("head", 0)
    layer = (sum(size.counts.values()) - outside) / max(1, size.layers)
    total += (cost.bytes_per_layer_weight + width - 2) * layer
    total += HIDDEN_COPIES * text.computed * size.hidden_size * width + TEXT_BYTES * text.tokens
    # The inputs of a block's last linear.
    inputs = [width * text.computed * n for n in (size.hidden_size, size.intermediate_size)]
    return total + max((stored for stored in inputs if stored <= cost.kept_inputs), default=0)


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


NO_TEXT = TextSize()


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
    from annie_quant.offline.caches import common_prefix

    rows = read_conversations(file, samples)
    if model is not None:
        from annie_quant.quantize.calibration_text import text_of_rows

        use = text_of_rows(model, rows, calib_tokens).use
        return TextSize(use.conversations, use.tokens, use.computed, use.prefix, use.line())
    texts = sorted(json.dumps([row.get("tools"), row["messages"]]) for row in rows)
    tokens = sum(map(len, texts)) // CHARACTERS
    shared = sum(common_prefix(a, b) for a, b in itertools.pairwise(texts)) // CHARACTERS
    line = f"{len(rows)} conversations, about {tokens:,} tokens"
    return TextSize(len(rows), tokens, tokens - shared, line=line)


def calibration_seconds(
    cost: Cost, size: ModelSize, rates: Rates, text: TextSize, rounded: int
) -> dict[str, float]:
    """Return the durations of what calibration does. rounded: number of weights that are rounded."""
    positions = text.computed
    hidden = size.hidden_size
    width = size.intermediate_size
    layers = size.layers
    mlp = size.counts.get("mlp", 0)
    body = sum(size.counts.values()) - size.counts.get("embedding", 0) - size.counts.get("head", 0)
    in_full = in_float32(2 * sum(size.counts.values()), rates.on_cpu)
    rate = rates.float32_flop_s if in_full else rates.flop_s
    tokens = cost.passes * positions
    rounds = 1
    if cost.held_out_look and rates.on_cpu:  # trials have few tokens there, and rounding counts
        from annie_quant.quantize import held_out, mixed_formats

        of_trial = text.prefix + min(positions, mixed_formats.POSITIONS)
        scored = text.prefix + min(positions, held_out.TRIAL_POSITIONS["cpu"])
        tokens = mixed_formats.BANDS * of_trial + 4 * scored + 2 * positions
        rounds = 2
    # Bytes that norms, attention and gates read and write.
    activations = 4 * tokens * layers * (20 * hidden + 6 * width)
    batches = cost.passes + tokens / BATCH_TOKENS
    # Scores and values of all earlier tokens, in the layers whose attention sees them.
    attention_layers = layers / 4 if size.counts.get("deltanet") else layers
    attended = 2 * tokens * text.tokens / max(1, text.conversations) * hidden * attention_layers
    seconds = {
        "start": START_S[rates.on_cpu] + ROW_S * text.conversations + text.tokens / TOKENIZED_S,
        "text": (2 * body * tokens + attended) / (rate * FORWARD_SHARE)
        + activations / rates.copy
        + layers * batches * BATCH_S,
    }
    if cost.column_feedback:
        groups = layers * (3 * hidden**2 + width**2)
        experts = max(layers, mlp / (3 * hidden * width))
        cubes = layers * 2 * hidden**3 + experts * (hidden**3 + width**3)
        columns = mlp / 3 * (width + PER_COLUMN) + (rounded - mlp / 3) * (hidden + PER_COLUMN)
        hessian_flop = 2 * HESSIAN_TOKENS * positions * groups
        hessian_rate = rates.float32_flop_s * HESSIAN_SHARE
        factor_rate = rates.float32_flop_s * FACTOR_SHARE[rates.on_cpu]
        column_rate = rates.cpu_flop_s * COLUMNS_SHARE
        seconds |= {
            "Hessians": rounds * hessian_flop / hessian_rate,
            "factors": rounds * 4 / 3 * cubes / factor_rate,
            "columns": rounds * columns / column_rate,
        }
    return seconds


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
