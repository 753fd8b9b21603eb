"""The formats that a linear can be stored in, and what they cost."""

from __future__ import annotations

NVFP4, W4A16, FP8 = "nvfp4", "w4a16", "fp8"  # W4A16: NVFP4 weights, 16-bit activations
ALGORITHM = {NVFP4: "NVFP4", W4A16: "W4A16_NVFP4", FP8: "FP8"}  # ModelOpt's names
QUANTIZED_INPUTS = (NVFP4, FP8)
GROUP = 16  # columns per block scale
# Bits per weight, block scales included; the scalars of a linear are counted separately.
BITS = {NVFP4: 4.5, W4A16: 4.5, FP8: 8.0}
PLAIN_BITS = 16.0
SCALARS_BYTES = {NVFP4: 8, W4A16: 4, FP8: 8}


def quantized_bytes(elements: int, kind: str) -> int:
    """Return the size of one linear's tensors in a format."""
    return int(elements * BITS[kind] / 8) + SCALARS_BYTES[kind]
