"""Plan the tensors of linears that are quantized here, in ModelOpt's layout. Nothing is packed before it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from annie_quant import nvfp4
from annie_quant.checkpoint.writer import Planned, planned

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST_E4M3 = 448.0
LARGEST_NVFP4 = 6 * LARGEST_E4M3


def nvfp4_tensors(
    module: str,
    shape: tuple[int, int],
    pack: Callable[[], Iterator[nvfp4.Tensor]],
    tensor_scale: Callable[[], np.float32],
    group: int = 16,
    input_scale: np.float32 | None = None,
    source_bytes: int | None = None,
) -> list[Planned]:
    """Plan an NVFP4 linear: weight, weight_scale, weight_scale_2, and input_scale where it is given.

    shape: [out, in] of the weight.
    pack: yields the packed rows in order, in one or more pieces.
    tensor_scale: returns the multiplier of the whole tensor.
    source_bytes: bytes that are read for the weight, for progress.
    """
    rows, columns = shape
    scales_source = None if source_bytes is None else 0  # read together with the weight
    block_scales: list[np.ndarray] = []

    def codes() -> Iterator[np.ndarray]:
        block_scales.clear()
        for packed in pack():
            block_scales.append(packed.block_scale)
            yield packed.codes

    def scales() -> Iterator[np.ndarray]:
        # The codes come first in the file and leave the scales here, unless they are in an earlier shard.
        if not block_scales:
            for _ in codes():
                pass
        yield from block_scales
        block_scales.clear()

    return [
        Planned(f"{module}.weight", "U8", (rows, columns // 2), codes, source_bytes),
        Planned(f"{module}.weight_scale", "F8_E4M3", (rows, columns // group), scales, scales_source),
        Planned(f"{module}.weight_scale_2", "F32", (), lambda: np.array(tensor_scale(), np.float32)),
        *input_scale_tensors(module, input_scale),
    ]


def fp8_tensors(
    module: str,
    shape: tuple[int, int],
    weight: Callable[[], np.ndarray],
    scale: Callable[[], np.float32],
    input_scale: np.float32 | None = None,
) -> list[Planned]:
    """Plan an FP8 linear: weight, weight_scale, and input_scale where it is given.

    weight: returns the array [out, in].  scale: returns its multiplier.
    """
    return [
        Planned(f"{module}.weight", "F8_E4M3", shape, lambda: fp8_codes(weight(), scale())),
        Planned(f"{module}.weight_scale", "F32", (), lambda: np.array(scale(), np.float32)),
        *input_scale_tensors(module, input_scale),
    ]


def input_scale_tensors(module: str, input_scale: np.float32 | None) -> list[Planned]:
    """Plan the input scale of a linear, or nothing for None."""
    return [] if input_scale is None else [planned(f"{module}.input_scale", np.array(input_scale, np.float32))]


def fp8_scale(amax: float) -> np.float32:
    """Return the multiplier of an FP8 tensor whose largest magnitude is `amax`."""
    return np.float32(amax) / np.float32(LARGEST_E4M3) if amax > 0 else np.float32(1)


def fp8_codes(weight: np.ndarray, scale: np.float32) -> np.ndarray:
    """Return the E4M3 codes of a weight under a multiplier, as ModelOpt rounds an FP8 linear's weight."""
    return np.clip(weight.astype(np.float32) / scale, -LARGEST_E4M3, LARGEST_E4M3).astype(E4M3)
