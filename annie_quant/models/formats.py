"""The formats of a linear: how its weight is stored, and how a server rounds its inputs. A format is registered here once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

LARGEST_E4M3 = 448.0
LARGEST_NVFP4 = 6 * LARGEST_E4M3
GROUP = 16  # columns per block scale of NVFP4
E2M1_BITS = (2, 1)  # exponent and mantissa bits of a number, as ModelOpt writes its format


@dataclass(frozen=True)
class Format:
    """The format of a linear.

    name: in plans, documents and messages.
    modelopt: ModelOpt's quant_algo; "" for 16 bits.
    codes: the numbers of the weight: E2M1 ("nvfp4", two codes per byte), E4M3 ("fp8") or "bf16".
    bits: per weight, block scales included.
    inputs: how a server rounds the inputs: under a calibrated scale, under a scale per token, or not.
    scales: of the weight besides block scales: one per tensor, one per row, or none.
    """

    name: str
    modelopt: str
    codes: Literal["nvfp4", "fp8", "bf16"]
    bits: float
    inputs: Literal["calibrated", "per token", "unrounded"] = "unrounded"
    scales: Literal["tensor", "row", "none"] = "tensor"

    def __str__(self) -> str:
        return self.name

    @property
    def in_four_bits(self) -> bool:
        return self.codes == "nvfp4"

    @property
    def calibrated(self) -> bool:
        """Return whether a linear in this format has an input scale."""
        return self.inputs == "calibrated"

    @property
    def largest(self) -> float:
        """Return the largest magnitude of the codes with their block scales: a tensor's multiplier is amax / largest."""
        return LARGEST_NVFP4 if self.in_four_bits else LARGEST_E4M3

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the size of the tensors of one linear. shape: [out, in] of its weight."""
        float32_scales = {"tensor": 1, "row": shape[0], "none": 0}[self.scales]
        return int(math.prod(shape) * self.bits / 8) + 4 * (float32_scales + self.calibrated)


NVFP4 = Format("nvfp4", "NVFP4", "nvfp4", bits=4.5, inputs="calibrated")  # W4A4
W4A16 = Format("w4a16", "W4A16_NVFP4", "nvfp4", bits=4.5)
FP8 = Format("fp8", "FP8", "fp8", bits=8.0, inputs="calibrated")
FP8_CHANNEL = Format(
    "fp8_channel", "FP8_PER_CHANNEL_PER_TOKEN", "fp8", bits=8.0, inputs="per token", scales="row"
)
BF16 = Format("bf16", "", "bf16", bits=16.0, scales="none")
# Formats of quantized linears, in the order in which settings and messages list them.
QUANTIZED = (NVFP4, W4A16, FP8, FP8_CHANNEL)
# Other names of formats in settings that are read. Weights in FP8 blocks have activation scales per token and block of columns.
FP8_BLOCK = "FP8_BLOCK"
NVFP4_AWQ = "NVFP4_AWQ"
MIXED = "MIXED_PRECISION"
KNOWN_ALGORITHMS = (
    "NVFP4",
    "W4A16_NVFP4",
    NVFP4_AWQ,
    "FP8",
    FP8_CHANNEL.modelopt,
    FP8_BLOCK,
    MIXED,
)
