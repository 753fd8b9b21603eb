"""Predict tokens per second of one stream: the only place where bytes per token become a speed.

    seconds per token = (weights + KV cache + DeltaNet states) / reachable bandwidth + layers * launch cost of a layer

Weights are those that a token reads (size.bytes_per_token). Keys and values of every earlier token are read, DeltaNet's states are
read and written. tests/perf/decode_speed.md has the errors against published and measured figures.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from annie_quant.checkpoint import dialects
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import read_struct
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import bytes_per_token
from annie_quant.core import host
from annie_quant.core.errors import UsageError
from annie_quant.documents import Device, PredictedSpeed, decode

# Bandwidth: a saturating read on a GB10 (antirez/ds4#773); 1 GiB of reads on an H200 (tests/perf/gemm.md).
# Cost of a layer: fitted to the figures in tests/perf/decode_speed.md, one number per device.
DEVICES = {
    "gb10": Device(name="NVIDIA GB10", read_bytes_s=232e9, layer_s=125e-6, source="published figures"),
    "h200": Device(name="NVIDIA H200", read_bytes_s=4.53e12, layer_s=34e-6, source="tests/perf/vllm_gpu.md"),
}
MEASURE = "annie-quant doctor --measure"


class AttentionShape(msgspec.Struct):
    """The fields of config.json that decide how much a token reads besides weights. A field that is missing counts as 0."""

    num_hidden_layers: int = 0
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_size: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0


@dataclass(frozen=True)
class TokenBytes:
    """What one decoded token reads.

    weights: bytes, of a mixture's experts the active share.
    layers: number of decoder layers.
    position: bytes of keys and values per earlier token, in layers that see all of them.
    window_position, window: the same in layers with a sliding window, and its tokens.
    state: bytes of DeltaNet's states, read and written.
    """

    weights: float
    layers: int
    position: float = 0.0
    window_position: float = 0.0
    window: int = 0
    state: float = 0.0

    def at(self, depth: int) -> float:
        """Return the bytes after `depth` earlier tokens."""
        return self.weights + self.state + depth * self.position + min(depth, self.window) * self.window_position


def token_bytes(folder: ModelFolder, weights: float | None = None) -> TokenBytes:
    """Return what a token of a model folder reads. weights: bytes instead of those of the folder's tensors."""
    shape = read_struct(AttentionShape, folder.text_config)
    types = shape.layer_types or ["full_attention"] * shape.num_hidden_layers
    heads = shape.num_key_value_heads or shape.num_attention_heads
    head_dim = shape.head_dim or shape.hidden_size // max(1, shape.num_attention_heads)
    element = 1 if dialects.config(folder).kv_cache == "FP8" else 2
    keys_values = 2 * heads * head_dim * element
    state = 4 * shape.linear_num_value_heads * shape.linear_key_head_dim * shape.linear_value_head_dim  # in float32
    return TokenBytes(
        weights=bytes_per_token(folder) if weights is None else weights,
        layers=len(types),
        position=types.count("full_attention") * keys_values,
        window_position=types.count("sliding_attention") * keys_values,
        window=shape.sliding_window or 0,
        state=2 * types.count("linear_attention") * state,
    )


def tok_s(read: TokenBytes, device: Device, depth: int = 0) -> float:
    """Return the predicted tokens per second of one stream after `depth` earlier tokens."""
    return 1 / (read.at(depth) / device.read_bytes_s + read.layers * device.layer_s)


def largest_bytes(read: TokenBytes, device: Device, tok_s: float) -> float:
    """Return how many bytes of weights a token may read to decode at `tok_s`; negative where launches alone take longer."""
    return (1 / tok_s - read.layers * device.layer_s) * device.read_bytes_s - read.state


def speed_of(read: TokenBytes, device: Device | None = None, depth: int = 0) -> PredictedSpeed:
    """Return the prediction for a model. device: by default this machine where it was measured, else a GB10."""
    device = device or default_device()
    speed = round(tok_s(read, device, depth), 2)
    return PredictedSpeed(device=device.name, read_bytes=round(read.weights), tok_s=speed, depth=depth)


def predict(folder: ModelFolder, device: Device | None = None, depth: int = 0) -> PredictedSpeed:
    """Return the prediction for a model folder; parameters as of speed_of."""
    return speed_of(token_bytes(folder), device, depth)


def predict_if_readable(folder: Path, device: Device | None = None) -> PredictedSpeed | None:
    """Return the prediction, or None for a folder that cannot be read, which the audit reports."""
    try:
        return predict(ModelFolder(folder), device)
    except ShardError:
        return None


def describe(speed: PredictedSpeed) -> str:
    """Return a prediction as one line."""
    after = f" after {speed.depth:,} tokens" if speed.depth else ""
    return f"reads {speed.read_bytes / 1e9:.3g} GB per token: about {speed.tok_s:,.3g} tok/s on {speed.device}{after}"


# ---- devices


def device_file() -> Path:
    """Return where `doctor --measure` writes this machine's device file."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "annie_quant" / "device.json"


def machine_name() -> str:
    """Return the name of this machine's first GPU, or of its CPU with the number of threads."""
    gpus = host.gpus()
    return gpus[0]["name"] if gpus else f"{host.cpu_name() or 'CPU'}, {host.cores()} threads"


def default_device() -> Device:
    """Return this machine where it was measured, else a GB10."""
    try:
        return read_device(device_file())
    except UsageError:
        return DEVICES["gb10"]


def find_device(name: str) -> Device:
    """Return the device that --device names.

    name: gb10, h200, a rate in GB/s ("273", or "273:150" with microseconds per layer), or a device file of this machine.
    Raises UsageError for another name, a rate that is not positive, and a file that is damaged or of another machine.
    """
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    rate, _, layer = name.partition(":")
    try:
        numbers = float(rate), float(layer or 0)
    except ValueError:
        return read_device(Path(name))
    if not (0 < numbers[0] < 1e6 and 0 <= numbers[1] < 1e6):
        raise UsageError(
            f"--device {name}: expected GB/s, with microseconds per layer after a colon", "--device 273:150"
        )
    return Device(name=f"{rate} GB/s", read_bytes_s=numbers[0] * 1e9, layer_s=numbers[1] * 1e-6, source="--device")


def read_device(path: Path) -> Device:
    """Return a device file of this machine."""
    if not path.is_file():
        known = ", ".join(DEVICES)
        raise UsageError(
            f"{path}: no such device file", f"{MEASURE} writes one; or --device {known}, or a rate in GB/s"
        )
    device = decode(Device, path, error=UsageError, hint=MEASURE)
    if not (0 < device.read_bytes_s < 1e15 and 0 <= device.layer_s < 1):
        raise UsageError(
            f"{path}: read_bytes_s {device.read_bytes_s:g} and layer_s {device.layer_s:g} are no rates", MEASURE
        )
    if device.name != machine_name():
        rates = f"{device.read_bytes_s / 1e9:.4g}:{device.layer_s * 1e6:.4g}"
        raise UsageError(
            f"{path} was measured on another machine: {device.name}, this is {machine_name()}",
            f"{MEASURE}, or plan for that machine with --device {rates}",
        )
    return device
