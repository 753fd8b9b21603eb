"""Estimate the size of a result, and the memory and time that it takes, before anything starts.

Sizes are counted from the model's own tensors (or a published model's shapes) and the formats of a strategy. Times come
from rates: measured on this machine in a second, or those of a DGX Spark.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from annie_quant import models, nvfp4
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import CheckpointError
from annie_quant.models.family import ModelSize
from annie_quant.quantize import strategies
from annie_quant.quantize.formats import PLAIN_BITS

GB10_READ = 232e9  # bytes per second, measured (tests/perf/gemm.md)


@dataclass(frozen=True)
class Rates:
    """A machine. flop_s: operations per second of a large bf16 matmul.  cpu_flop_s: of a float32 matmul on the CPU.
    disk: bytes read per second.  encode: bytes of bf16 rounded to NVFP4 per second.  memory: free bytes.
    description: one line.
    """

    flop_s: float
    disk: float
    encode: float
    memory: float
    cpu_flop_s: float
    description: str


# The matmul was measured on a GB10 (tests/perf/gemm.md), the codec on two x86 cores; the disk is an assumption.
SPARK = Rates(
    91e12, 3e9, 12e9, 119e9, 5e11,
    "DGX Spark: 91 bf16 TFLOP/s measured; 119 GB free, disk 3 GB/s, codec 12 GB/s and CPU 0.5 TFLOP/s assumed",
)  # fmt: skip
FORWARD_SHARE = 0.35  # of the matmul rate that a whole forward pass reaches
BASE_BYTES = 0.4e9  # Python, torch, the mapped shard that is being read
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Estimate:
    """What one strategy makes of one model.

    size_bytes, bits_per_weight: of the result.  read_bytes: per decoded token.  peak_bytes: memory.
    seconds: step → duration.
    """

    strategy: str
    model: str
    weights: int
    size_bytes: int
    bits_per_weight: float
    read_bytes: int
    peak_bytes: int
    layerwise: bool
    seconds: Mapping[str, float]
    rates: Rates

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.rates.memory

    def lines(self) -> list[str]:
        """Return the estimate as text."""
        parts = " + ".join(f"{name} {_time(s)}" for name, s in self.seconds.items() if s >= 0.5)
        how = "one layer at a time" if self.layerwise else "the whole model in memory"
        smaller = ", ".join(s.name for s in strategies.by_rank() if s.cost.layerwise and s.name != self.strategy)
        fits = "fits" if self.fits else f"DOES NOT FIT: choose a strategy that loads one layer at a time ({smaller})"
        return [
            f"{self.strategy} on {self.model}: {self.weights / 1e9:.2f} B weights, {2 * self.weights / 1e9:.1f} GB in bf16",
            f"  result  {_bytes(self.size_bytes)}, {self.bits_per_weight:.2f} bits per weight; decode on a GB10 at most "
            f"{GB10_READ / self.read_bytes:,.0f} tok/s",
            f"  memory  about {_bytes(self.peak_bytes)} ({how}) of {_bytes(self.rates.memory)}: {fits}",
            f"  time    about {_time(sum(self.seconds.values()))}" + (f" ({parts})" if parts else ""),
            f"  rates   {self.rates.description}",
        ]


def estimate(
    model: str | os.PathLike,
    strategy: str,
    samples: int = 512,
    tokens: int = 600,
    rates: Rates | None = None,
    options: Mapping[str, Any] | None = None,
) -> Estimate:
    """Estimate a strategy on a model folder, or on a published model ("9b", "27b").

    samples, tokens: of calibration text, conversations and tokens per conversation.
    rates: by default measured here for a folder, those of a DGX Spark for a published model.
    options: of the strategy. Raises UsageError for one that it does not have.
    """
    part = strategies.find(strategy)
    whole = part.cost.whole_model(part.settings(options or {}))
    published = published_sizes().get(str(model))
    if not published:
        strategies.check_family(part, ModelFolder(model).config)
    size = published or size_of_folder(Path(model))
    rates = rates or (SPARK if published else measure(Path(model)))
    cost, counts = part.cost, size.counts
    size_bytes = sum(n * part.bits(kind) / 8 for kind, n in counts.items())
    weights = sum(counts.values())
    body = weights - counts.get("embedding", 0)
    text = samples * tokens if cost.passes else 0
    if cost.layerwise:
        layer = cost.bytes_per_layer_weight * (body - counts.get("head", 0)) / max(1, size.layers)
        peak = BASE_BYTES + (layer + cost.hidden_copies * text * size.hidden_size * 2 if cost.passes else 0)
        peak += cost.hessians * 4 * size.intermediate_size**2
        peak += size_bytes if cost.keeps_results else 0
        peak += min(2 * text * size.intermediate_size, cost.kept_inputs)
    else:
        # A batch's logits in float32; the vocabulary is the number of rows of the head or the tied embedding.
        logits = 4 * min(text, BATCH_TOKENS) * max(counts["head"], counts["embedding"]) / size.hidden_size
        peak = cost.bytes_per_weight * weights + logits + BASE_BYTES
    rounded = sum(n for kind, n in counts.items() if part.bits(kind) < PLAIN_BITS)
    if whole:
        peak = max(peak, BASE_BYTES + whole * rounded + 2 * (weights - rounded))
    columns = 2 * rounded * size.hidden_size if cost.column_feedback else 0
    seconds = {
        "read": 2 * weights / rates.disk,
        "text": cost.passes * 2 * body * text / (rates.flop_s * FORWARD_SHARE),
        "encode": cost.encode * 2 * rounded / rates.encode,
        "columns": columns / (rates.cpu_flop_s * FORWARD_SHARE),
        "write": size_bytes / rates.disk,
    }
    read_bytes = size_bytes - counts.get("embedding", 0) * 2
    return Estimate(part.name, size.label, weights, round(size_bytes), 8 * size_bytes / weights, round(read_bytes),
                    round(peak), cost.layerwise and not whole, seconds, rates)  # fmt: skip


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
    layers, hidden = config.get("num_hidden_layers"), config.get("hidden_size")
    if not isinstance(layers, int) or not isinstance(hidden, int) or min(layers, hidden) < 1:
        raise CheckpointError(
            f"{folder}/config.json has no num_hidden_layers and hidden_size, so nothing can be estimated",
            "quantize it without --dry-run",
        )
    width = config.get("intermediate_size") or (config.get(experts.width) if experts else None) or hidden
    return ModelSize(folder.name, counts, layers, hidden, width)


def measure(folder: Path) -> Rates:
    """Measure this machine's rates in about a second: a matmul, the codec, the model's disk, the free memory."""
    import psutil

    cpu, device = _matmul("cpu"), _device()
    flop_s = cpu if device == "cpu" else _matmul(device)
    disk, encode, free = _disk(folder), _encode(), _free(device, psutil.virtual_memory().available)
    description = (
        f"measured here on {device}: matmul {flop_s / 1e12:,.2f} TFLOP/s, codec {encode / 1e9:,.1f} GB/s, "
        f"disk {disk / 1e9:,.1f} GB/s"
    )
    return Rates(flop_s, disk, encode, free, cpu, description)


def _free(device: str, host: float) -> float:
    if device == "cpu":
        return host
    import torch

    # Where GPU and CPU share one memory (a Spark) the driver's number leaves out the page cache, which can be freed.
    return max(float(torch.cuda.mem_get_info()[0]), host if torch.cuda.get_device_properties(0).is_integrated else 0.0)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _matmul(device: str) -> float:
    """Return operations per second: bf16 on a GPU, float32 on a CPU."""
    import torch

    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)

    def once() -> None:
        _ = a @ a
        if device == "cuda":
            torch.cuda.synchronize()

    return 2 * size**3 / fastest(once)


def _encode() -> float:
    import ml_dtypes
    import numpy as np

    w = np.random.default_rng(0).standard_normal((2048, 4096), np.float32).astype(ml_dtypes.bfloat16)
    return w.nbytes / fastest(lambda: nvfp4.pack(w))


def _disk(folder: Path) -> float:
    """Return bytes per second read from the model's largest file, past the page cache where the system allows it."""
    file = max(folder.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    size = min(file.stat().st_size, 256 << 20)
    handle = os.open(file, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, size, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        position = 0
        while position < size and (read := len(os.pread(handle, 8 << 20, position))):
            position += read
        return position / max(time.perf_counter() - start, 1e-9)
    finally:
        os.close(handle)


def fastest(work: Callable[[], object], times: int = 3) -> float:
    """Return the seconds of the fastest of a few runs."""
    least = math.inf
    for _ in range(times):
        start = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - start)
    return least


def _bytes(n: float) -> str:
    return f"{n / 1e9:,.1f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
