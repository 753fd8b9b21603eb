"""Documents about decoding speed: a machine's measured rates, and a prediction for a model."""

from __future__ import annotations

import msgspec


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that decodes (a device file of `annie-quant doctor --measure`).

    name: of its GPU, or of its CPU and the number of threads.
    read_bytes_s: bytes per second that one token's reads reach, not the data sheet's.
    layer_s: seconds of a decoder layer in which no memory is read: launches, and waiting between them.
    source: where both come from.
    """

    name: str
    read_bytes_s: float
    layer_s: float = 0.0
    source: str = ""
    schema_version: int = 2


class PredictedSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted speed of one stream. read_bytes: per token, without a KV cache.  depth: earlier tokens."""

    device: str
    read_bytes: int
    tok_s: float
    depth: int = 0
