"""Predict how many tokens per second one stream decodes on a GPU, and measure a GPU for that (a device file).

    seconds per token = (weights + KV cache + DeltaNet states) / reachable bandwidth
                        + layers * launch cost of a layer

Weights are those that a token reads (size.bytes_per_token). Keys and values of every earlier token
are read, DeltaNet's states are read and written. A server's attention with one sequence does not
reach that bandwidth: where its time was measured (Device.attention_s), that replaces the bytes'. No
token takes less than the host's part of a step (step_s). tests/perf/decode_speed.md has the errors
against published and measured figures.

`annie-quant doctor --measure` measures bandwidth and the cost of launches by our W4A16 kernel with
one token and a copy, in CUDA graphs as servers launch them. Weights rotate, so that they come from
memory. A server on a processor has no prediction: `annie-quant bench` measures it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from annie_quant.checkpoint import dialects
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import read_struct
from annie_quant.checkpoint.prefill_rates import fastest_call_s, measure_prefill
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import AttentionShape, Caches, bytes_per_token, caches_of
from annie_quant.core import host
from annie_quant.core.errors import EnvironmentFault, UsageError, need
from annie_quant.core.progress import SILENT, Progress
from annie_quant.documents import Device, PredictedSpeed, decode, write

# Bandwidth: a saturating read on a GB10 (antirez/ds4#773); 1 GiB of reads on an H200
# (tests/perf/gemm.md). The rest is fitted to the figures in tests/perf/decode_speed.md: a cost of a
# layer per device; attention and host to vLLM's on an H200.
DEVICES = {
    "gb10": Device(
        name="NVIDIA GB10", read_bytes_s=232e9, layer_s=125e-6, source="published figures"
    ),
    "h200": Device(
        name="NVIDIA H200",
        read_bytes_s=4.53e12,
        layer_s=34e-6,
        attention_s=(2.8e-9, 1.63e-11),
        step_s=1.48e-3,
        source="tests/perf/decode_speed.md",
    ),
}
MEASURE = "annie-quant doctor --measure"
# Of the read rate; faults that were reported are at 0.3 (products) and 0.67 (steps).
MIN_HEALTHY_SHARE = 0.5
MIN_GB10_CLOCK_MHZ = 1200  # under load; 2,160 to 2,400 are usual, and 850 to 890 were reported


@dataclass(frozen=True)
class TokenBytes:
    """What one decoded token reads.

    weights: bytes, of a mixture's experts the active share.
    layers: number of decoder layers.
    """

    weights: float
    layers: int
    caches: Caches = field(default_factory=Caches)

    def at(self, depth: int) -> float:
        """Return the bytes after `depth` earlier tokens. DeltaNet's states are read and written."""
        return self.weights + 2 * self.caches.state + self.caches.at(depth)


def token_bytes(folder: ModelFolder, weights: float | None = None) -> TokenBytes:
    """Return what a token of a model folder reads.

    weights: bytes instead of those of the folder's tensors.
    """
    shape = read_struct(AttentionShape, folder.text_config)
    if weights is None:
        weights = bytes_per_token(folder)
    element_bytes = 1 if dialects.config(folder).kv_cache == "FP8" else 2
    return TokenBytes(weights, len(shape.types), caches_of(shape, element_bytes))


def tok_s(read: TokenBytes, device: Device, depth: int = 0) -> float:
    """Return the predicted tokens per second of one stream after `depth` earlier tokens."""
    seconds = read.at(depth) / device.read_bytes_s + read.layers * device.layer_s
    if device.attention_s:
        fixed_s, element_s = device.attention_s
        attention_layers, head_size = read.caches.attention
        seconds += depth * attention_layers * (fixed_s + element_s * head_size)
        seconds -= depth * read.caches.position / device.read_bytes_s
    return 1 / max(seconds, device.step_s)


def largest_bytes(read: TokenBytes, device: Device, tok_s: float) -> float:
    """Return how many bytes of weights a token may read to decode at `tok_s`.

    Negative where launches or the host take longer.
    """
    if tok_s * device.step_s > 1:
        return -math.inf
    reading_s = 1 / tok_s - read.layers * device.layer_s
    return reading_s * device.read_bytes_s - 2 * read.caches.state


def speed_of(read: TokenBytes, device: Device | None = None) -> PredictedSpeed:
    """Return the prediction for a model.

    device: by default this machine's GPU where it was measured, else a GB10.
    """
    device = device or default_device()
    speed = round(tok_s(read, device), 2)
    return PredictedSpeed(device=device.name, read_bytes=round(read.weights), tok_s=speed)


def predict(folder: ModelFolder, device: Device | None = None) -> PredictedSpeed:
    """Return the prediction for a model folder; device: see speed_of."""
    return speed_of(token_bytes(folder), device)


def predict_if_readable(folder: Path, device: Device | None = None) -> PredictedSpeed | None:
    """Return the prediction, or None for a folder that cannot be read, which the audit reports."""
    try:
        return predict(ModelFolder(folder), device)
    except ShardError:
        return None


def describe(speed: PredictedSpeed) -> str:
    """Return a prediction as one line."""
    read_gb = speed.read_bytes / 1e9
    return f"reads {read_gb:.3g} GB per token: about {speed.tok_s:,.3g} tok/s on {speed.device}"


# ---- devices


def device_file() -> Path:
    """Return where `doctor --measure` writes this machine's device file."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "annie_quant" / "device.json"


def gpu_name() -> str | None:
    """Return the name of this machine's first GPU, or None."""
    gpus = host.gpus()
    return gpus[0]["name"] if gpus else None


def healthy_device(gpu: str) -> Device | None:
    """Return the healthy values of a GPU by its name; None where they are not known."""
    return next((device for device in DEVICES.values() if device.name in gpu), None)


def is_unhealthy(healthy: Device, read_bytes_s: float, clock_mhz: float | None) -> bool:
    """Return whether a GPU is slow by what a fixed product reads, or by its clock.

    A GB10 may stay in a slow state until its power is removed, which no driver reports (tonyd2wild/
    DeepSeek-V4.1-Flash-vLLM-DGX-Spark#1: 94 ms per step instead of 63).
    """
    has_stuck_clock = healthy is DEVICES["gb10"] and 0 < (clock_mhz or 0) < MIN_GB10_CLOCK_MHZ
    return read_bytes_s < MIN_HEALTHY_SHARE * healthy.read_bytes_s or has_stuck_clock


def default_device() -> Device:
    """Return this machine's GPU where it was measured, else a GB10."""
    try:
        return read_device(device_file())
    except UsageError:
        return DEVICES["gb10"]


def find_device(name: str) -> Device:
    """Return the device that --device names.

    name: gb10, h200, a rate in GB/s ("273", or "273:150" with microseconds per layer), or a device
        file of this machine.

    Raises UsageError for another name, a rate that is not positive, and a file that is damaged or
    of another machine.
    """
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    rate, _, layer = name.partition(":")
    try:
        gigabytes_s = float(rate)
        layer_us = float(layer or 0)
    except ValueError:
        return read_device(Path(name))
    if not (0 < gigabytes_s < 1e6 and 0 <= layer_us < 1e6):
        message = f"--device {name}: expected GB/s, with microseconds per layer after a colon"
        raise UsageError(message, "--device 273:150")
    return Device(
        name=f"{rate} GB/s",
        read_bytes_s=gigabytes_s * 1e9,
        layer_s=layer_us * 1e-6,
        source="--device",
    )


def read_device(path: Path) -> Device:
    """Return a device file of this machine."""
    if not path.is_file():
        hint = f"{MEASURE} writes one; or --device {', '.join(DEVICES)}, or a rate in GB/s"
        raise UsageError(f"{path}: no such device file", hint)
    device = decode(Device, path, error=UsageError, hint=MEASURE)
    times = (device.layer_s, device.step_s, *(device.attention_s or ()))
    if not (0 < device.read_bytes_s < 1e15 and all(0 <= t < 1 for t in times)):
        message = f"{path}: read_bytes_s {device.read_bytes_s:g} and seconds {times} are no rates"
        raise UsageError(message, MEASURE)
    if not all(0 < rate < 1e6 for rate in device.prefill_tflop_s.values()):
        message = f"{path}: prefill_tflop_s {device.prefill_tflop_s} are no rates"
        raise UsageError(message, MEASURE)
    gpu = gpu_name()
    if device.name != gpu:
        rates = f"{device.read_bytes_s / 1e9:.4g}:{device.layer_s * 1e6:.4g}"
        message = f"{path} was measured on another machine: {device.name}, this is {gpu or 'one without a GPU'}"
        raise UsageError(message, f"{MEASURE}, or plan for that machine with --device {rates}")
    return device


# ---- rates of this machine

SHAPE = (16384, 8192)  # 75 MB in NVFP4
COPIES = 8
TINY = (256, 256)
# Kernels of a decoder layer: two norms, four to six products, rotary embedding, cache, attention,
# gates (assumed).
LAUNCHES = 16


def measure_device(path: Path | None = None, progress: Progress = SILENT) -> Device:
    """Measure this machine's GPU and write its device file.

    path: by default where predictions look for it.
    """
    name = gpu_name()
    if name is None:
        message = (
            "there is no GPU here, so neither bandwidth nor rates of prompts can be measured; "
            "a processor's speed is not predicted but measured"
        )
        raise EnvironmentFault(message, "annie-quant bench")
    progress.message(f"measuring {name}")
    read, copied, launch = measure_gpu()
    progress.message("measuring the products of prompts")
    prefill, missing = measure_prefill()
    products = ", ".join(f"{kernel} {rate:.4g}" for kernel, rate in prefill.items())
    not_measured = "".join(f"; {kernel} not measured: {why}" for kernel, why in missing.items())
    today = time.strftime("%Y-%m-%d")
    source = (
        f"doctor --measure, {today}: product {read / 1e9:.4g} GB/s, copy {copied / 1e9:.4g} GB/s, "
        f"launch {launch * 1e6:.3g} us x {LAUNCHES}; prompts {products or 'none'} TFLOP/s{not_measured}"
    )
    known_devices = {device.name: device for device in DEVICES.values()}
    device = msgspec.structs.replace(
        known_devices.get(name) or Device(name=name, read_bytes_s=0),
        read_bytes_s=max(read, copied),
        layer_s=LAUNCHES * launch,
        prefill_tflop_s=prefill,
        source=source,
    )
    path = path or device_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, device)
    return device


def measure_gpu() -> tuple[float, float, float]:
    """Return three measurements, all in CUDA graphs.

    Bytes per second of products, bytes per second of copies (read and written), and the seconds of
    a small product.
    """
    torch = need("torch", "quantize")
    from annie_quant.gemm.oracle import random_weight
    from annie_quant.gemm.torch_op import prepare, product

    def on_gpu(shape: tuple[int, int], seed: int) -> Callable[[], object]:
        codes, scales = (torch.from_numpy(a).cuda() for a in random_weight(*shape, seed))
        packed = prepare(codes, scales.view(torch.float8_e4m3fn), 0.01)
        x = torch.ones(1, shape[1], dtype=torch.bfloat16, device="cuda")
        return lambda: product(x, packed.packed, packed.tensor_scale, packed.n)

    def seconds(calls: list[Callable[[], object]]) -> float:
        """Return the seconds of one of the calls."""
        graph = torch.cuda.CUDAGraph()
        for call in calls:
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return fastest_call_s(graph.replay, torch.cuda.synchronize) / len(calls)

    read = SHAPE[0] * SHAPE[1] * 9 / 16 / seconds([on_gpu(SHAPE, i) for i in range(COPIES)])
    source, target = (torch.zeros(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    copied = 2 * source.nbytes / seconds([partial(target.copy_, source)])
    return read, copied, seconds([on_gpu(TINY, 0)] * (20 * LAUNCHES))
