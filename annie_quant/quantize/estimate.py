"""How large a result will be, and what making it takes: memory and time, before anything starts.

Sizes are counted from the model's own tensors (or from the published shapes of Qwen3.5-9B and 27B) and the formats that a
strategy gives them. Times come from rates: measured here in a second, or those of a DGX Spark.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from annie_quant.errors import UsageError

NVFP4_BITS, FP8_BITS, BF16_BITS = 4.5, 8.0, 16.0  # a block of 16 codes carries one byte of scale
GB10_READ = 232e9  # bytes a second, measured (spec/gemm.md)
PARTS = ("mlp", "attention", "deltanet", "head", "embedding", "rest")

# Published shapes: hidden, FFN, layers, heads, KV heads, head size, DeltaNet key and value heads (x 128), vocabulary, untied.
SHAPES = {
    "9b": (4096, 12288, 32, 16, 4, 256, 16, 32, 248320),
    "27b": (5120, 17408, 64, 24, 4, 256, 16, 48, 248320),
}


@dataclass(frozen=True)
class Recipe:
    """What a strategy does to each part (bits; what is not named stays bf16), and what that costs.

    walks: goes layer by layer, so one layer is in memory. passes: forwards of the calibration text through the whole
    model, or their equivalent. encode: seconds of codec for each second that plain rounding takes.
    columns: each rounded column corrects those after it, on the CPU (two operations a weight and column).
    bytes_a_weight: in memory where the whole model is.
    """

    bits: Mapping[str, float]
    walks: bool = False
    passes: float = 0.0
    encode: float = 1.0
    columns: bool = False
    bytes_a_weight: float = 2.0


_ALL = {"mlp": NVFP4_BITS, "attention": NVFP4_BITS, "deltanet": NVFP4_BITS}
_D = {"mlp": NVFP4_BITS, "head": NVFP4_BITS, "attention": FP8_BITS, "deltanet": FP8_BITS}
SWEEP = 8.1  # exact sweep against amax, one thread (tests/perf/codec.md)
RECIPES = {
    "naive": Recipe(_ALL, passes=1),
    "direct": Recipe(_ALL, walks=True),
    "awq_lite": Recipe(_ALL, walks=True, passes=22, encode=20),
    "manners": Recipe(_ALL, walks=True, passes=1, encode=SWEEP),
    "gptq": Recipe(_ALL, walks=True, passes=3, encode=SWEEP, columns=True),
    "w4a16_mixed": Recipe(_D, walks=True, passes=1, encode=SWEEP),
    "mlp_only": Recipe({"mlp": NVFP4_BITS}, passes=1),
    # Both choose formats by the divergence of the answers, a forward for each group and format; their default budgets.
    "sensitivity": Recipe(dict.fromkeys(_ALL, 5.5), passes=200, encode=SWEEP),
    "auto_mixed": Recipe(dict.fromkeys(_ALL, 4.8), passes=200),
    # Student, its gradients, two moments and master weights in fp32, and the frozen teacher; 4 epochs, back is twice forth.
    "qad": Recipe(_ALL, passes=16, bytes_a_weight=18.0),
}


@dataclass(frozen=True)
class Rates:
    """flop_s: of a large bf16 matmul. disk: bytes read a second. encode: bytes of bf16 rounded to NVFP4 a second.
    cpu_flop_s: of a float32 matmul on the CPU."""

    flop_s: float
    disk: float
    encode: float
    memory: float
    cpu_flop_s: float
    said: str


# Matmul measured on a GB10 (spec/gemm.md); disk by the founder's box's NVMe class; the codec as on two x86 cores.
SPARK = Rates(
    91e12, 3e9, 12e9, 119e9, 5e11,
    "DGX Spark: 91 bf16 TFLOP/s measured; 119 GB free, disk 3 GB/s, codec 12 GB/s and CPU 0.5 TFLOP/s assumed",
)  # fmt: skip
FORWARD_SHARE = 0.35  # of the matmul rate that a whole forward reaches
BASE_BYTES = 0.4e9  # Python, torch, the mapped shard that is being read
BATCH_TOKENS = 4096
HIDDEN_COPIES = 3  # a layer's input, its output, and what is gathered from it


@dataclass(frozen=True)
class Plan:
    strategy: str
    model: str
    weights: int
    size_bytes: int
    bits_per_weight: float
    read_bytes: int
    peak_bytes: int
    walks: bool
    seconds: Mapping[str, float]
    rates: Rates

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.rates.memory

    def lines(self) -> list[str]:
        parts = " + ".join(f"{name} {_time(s)}" for name, s in self.seconds.items() if s >= 0.5)
        how = "a layer at a time" if self.walks else "the whole model in memory"
        fits = (
            "fits"
            if self.fits
            else "DOES NOT FIT: choose a strategy that goes a layer at a time (direct, gptq, manners)"
        )
        return [
            f"{self.strategy} on {self.model}: {self.weights / 1e9:.2f} B weights, {2 * self.weights / 1e9:.1f} GB in bf16",
            f"  result  {_bytes(self.size_bytes)}, {self.bits_per_weight:.2f} bits a weight; decode on a GB10 at most "
            f"{GB10_READ / self.read_bytes:,.0f} tok/s",
            f"  memory  about {_bytes(self.peak_bytes)} ({how}) of {_bytes(self.rates.memory)}: {fits}",
            f"  time    about {_time(sum(self.seconds.values()))}" + (f" ({parts})" if parts else ""),
            f"  rates   {self.rates.said}",
        ]


def plan(
    model: str | os.PathLike, strategy: str, samples: int = 512, tokens: int = 600, rates: Rates | None = None
) -> Plan:
    """The plan for a model folder, or for "9b" and "27b" by their published shapes.

    samples, tokens: of calibration text, conversations and tokens in each. rates: default as measured here.
    """
    if strategy not in RECIPES:
        raise UsageError(f"no plan for the strategy {strategy!r}", f"there is one for: {', '.join(RECIPES)}")
    recipe = RECIPES[strategy]
    counts, layers, hidden, wide = by_name(str(model)) if str(model) in SHAPES else by_folder(Path(model))
    rates = rates or (SPARK if str(model) in SHAPES else measure(Path(model)))
    size = sum(n * recipe.bits.get(part, BF16_BITS) / 8 for part, n in counts.items())
    weights = sum(counts.values())
    body = weights - counts.get("embedding", 0)
    read = size - counts.get("embedding", 0) * 2
    text = samples * tokens if recipe.passes else 0
    if recipe.walks:
        layer = 4 * (body - counts.get("head", 0)) / max(1, layers)
        peak = BASE_BYTES + (layer + HIDDEN_COPIES * text * hidden * 2 if recipe.passes else 0)
        peak += 2 * 4 * wide**2 if strategy == "gptq" else 0
    else:
        # A batch's logits in float32; the vocabulary is what the head's (or the tied embedding's) rows are.
        logits = 4 * min(text, BATCH_TOKENS) * max(counts["head"], counts["embedding"]) / hidden
        peak = recipe.bytes_a_weight * weights + logits + BASE_BYTES
    rounded = sum(n for part, n in counts.items() if recipe.bits.get(part, BF16_BITS) < BF16_BITS)
    seconds = {
        "read": 2 * weights / rates.disk,
        "text": recipe.passes * 2 * body * text / (rates.flop_s * FORWARD_SHARE),
        "encode": recipe.encode * 2 * rounded / rates.encode,
        "columns": 2 * rounded * hidden * recipe.columns / (rates.cpu_flop_s * FORWARD_SHARE),
        "write": size / rates.disk,
    }
    named = f"Qwen3.5-{str(model).upper()}" if str(model) in SHAPES else Path(model).name
    return Plan(strategy, named, weights, round(size), 8 * size / weights, round(read), round(peak), recipe.walks, seconds,
                rates)  # fmt: skip


def large(model: Path) -> bool:
    """Whether a plan is worth a second before starting: a gigabyte of weights or more."""
    return sum(f.stat().st_size for f in model.glob("*.safetensors")) >= 1e9


def part_of(name: str) -> str:
    """Which part of the model a tensor belongs to."""
    if "embed_tokens" in name:
        return "embedding"
    if "lm_head" in name:
        return "head"
    if ".mlp." in name and "mtp." not in name:
        return "mlp"
    if ".self_attn." in name and "_proj" in name and "mtp." not in name:
        return "attention"
    if ".linear_attn." in name and any(p in name for p in ("in_proj_qkv", "in_proj_z", "out_proj")):
        return "deltanet"
    return "rest"


def by_folder(folder: Path) -> tuple[dict[str, int], int, int, int]:
    """Weights by part, layers, hidden size, largest row: from the headers and the config."""
    from annie_quant.checkpoint.shards import ModelFolder

    shards = ModelFolder(folder)
    counts = dict.fromkeys(PARTS, 0)
    for name in shards:
        counts[part_of(name)] += shards.info(name).elements
    config = shards.config.get("text_config") or shards.config
    return counts, config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]


def by_name(name: str) -> tuple[dict[str, int], int, int, int]:
    """The same for a published shape: three of four layers are DeltaNet."""
    hidden, ffn, layers, heads, kv, size, keys, values, vocabulary = SHAPES[name]
    full = layers // 4
    attention = hidden * size * (2 * heads + 2 * kv + heads)  # q is doubled for its gate
    delta = hidden * 128 * (2 * keys + 3 * values)  # q and k, then v, z and the output
    small = hidden * 2 * values + 4 * 128 * (2 * keys + values)
    counts = {
        "mlp": 3 * hidden * ffn * layers,
        "attention": attention * full,
        "deltanet": delta * (layers - full),
        "rest": small * (layers - full) + hidden * (2 * layers + 1),
        "head": hidden * vocabulary,
        "embedding": hidden * vocabulary,
    }
    return counts, layers, hidden, ffn


def measure(folder: Path) -> Rates:
    """This machine's rates, in about a second: a matmul, the codec, the model's own disk, the memory that is free."""
    import psutil

    cpu, device = _matmul("cpu"), _device()
    flop_s = cpu if device == "cpu" else _matmul(device)
    disk, encode, free = _disk(folder), _encode(), _free(device, psutil.virtual_memory().available)
    said = (
        f"measured here on {device}: matmul {flop_s / 1e12:,.2f} TFLOP/s, codec {encode / 1e9:,.1f} GB/s, "
        f"disk {disk / 1e9:,.1f} GB/s"
    )
    return Rates(flop_s, disk, encode, free, cpu, said)


def _free(device: str, host: float) -> float:
    if device == "cpu":
        return host
    import torch

    # Where GPU and CPU share one memory (a Spark) the driver's figure leaves out what the page cache would give back.
    return max(float(torch.cuda.mem_get_info()[0]), host if torch.cuda.get_device_properties(0).is_integrated else 0.0)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _matmul(device: str) -> float:
    """Operations a second: bf16 on a GPU, float32 on a CPU."""
    import torch

    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)

    def once() -> None:
        _ = a @ a
        if device == "cuda":
            torch.cuda.synchronize()

    return 2 * size**3 / best(once)


def _encode() -> float:
    import ml_dtypes
    import numpy as np

    from annie_quant import nvfp4

    w = np.random.default_rng(0).standard_normal((2048, 4096), np.float32).astype(ml_dtypes.bfloat16)
    return w.nbytes / best(lambda: nvfp4.pack(w))


def _disk(folder: Path) -> float:
    """Bytes a second off the model's largest file, past the page cache where the system lets us."""
    file = max(folder.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    size = min(file.stat().st_size, 256 << 20)
    handle = os.open(file, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, size, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        at = 0
        while at < size and (read := len(os.pread(handle, 8 << 20, at))):
            at += read
        return at / max(time.perf_counter() - start, 1e-9)
    finally:
        os.close(handle)


def best(work: Any, times: int = 3) -> float:
    """Seconds of the fastest of a few runs."""
    found = math.inf
    for _ in range(times):
        start = time.perf_counter()
        work()
        found = min(found, time.perf_counter() - start)
    return found


def _bytes(n: float) -> str:
    return f"{n / 1e9:,.1f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def table(strategies: Sequence[str] = tuple(RECIPES)) -> list[str]:
    """Markdown: every strategy on a 9B and a 27B, on a Spark."""
    lines = [
        "| strategy | model | GB | bits a weight | decode ceiling, tok/s | peak memory, GB | time |",
        "|---|---|---|---|---|---|---|",
    ]
    for strategy in strategies:
        for model in SHAPES:
            p = plan(model, strategy, rates=SPARK)
            peak = f"{p.peak_bytes / 1e9:.1f}" + ("" if p.fits else " (does not fit)")
            lines.append(
                f"| {strategy} | {model.upper()} | {p.size_bytes / 1e9:.2f} | {p.bits_per_weight:.2f} | "
                f"{GB10_READ / p.read_bytes:.0f} | {peak} | {_time(sum(p.seconds.values()))} |"
            )
    return lines
