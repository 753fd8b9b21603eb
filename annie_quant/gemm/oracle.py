"""The CPU oracle: NVFP4 products in float64 from the same bytes, and the error bound of a correct kernel.

Written from the format definition alone (tables and NumPy). It shares no code with the kernels or the C codec.

Bounds. W4A16 multiplies e2m1*e4m3 (exact in bf16) by bf16 or fp16 activations. Each product is exact in fp32, so the
only errors are K - 1 additions in fp32 (in any order: relative 2^-24 of the partial sums, and tensor cores may
truncate: 2^-23), the tensor scale (2^-24) and the rounding to the output type: |kernel - oracle| <= (K + 8) 2^-23 S +
ulp, S = sum |x||w|. Tensor cores align the addends of a group to the largest one before adding; the same bound covers
that. W4A4: each 16-column term is exact, K/16 additions.
"""

from __future__ import annotations

import numpy as np

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
GROUP = 16


def e2m1(codes: np.ndarray) -> np.ndarray:
    """Return float64 [..., 2 n] of packed codes uint8 [..., n]; the low nibble is the even column."""
    codes = np.asarray(codes)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return np.where(nibbles & 8, -1.0, 1.0) * MAGNITUDES[nibbles & 7]


def e4m3(scales: np.ndarray) -> np.ndarray:
    """Return E4M3FN bytes (uint8 or float8_e4m3fn) as float64; 0x7F and 0xFF are NaN."""
    b = np.ascontiguousarray(scales).view(np.uint8).astype(np.int64)
    e, m = b >> 3 & 15, b & 7
    value = np.where(e > 0, (8 + m) * 2.0 ** (e - 10), m * 2.0**-9)
    value = np.where((e == 15) & (m == 7), np.nan, value)
    return np.where(b & 128, -value, value)


def dequantize(codes: np.ndarray, block_scale: np.ndarray, tensor_scale: float = 1.0) -> np.ndarray:
    """Return e2m1 * e4m3 * tensor_scale as float64 [N, K], which is exact."""
    return e2m1(codes) * np.repeat(e4m3(block_scale), GROUP, axis=-1) * float(np.float32(tensor_scale))


def linear(x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (x @ weight.T, |x| @ |weight|.T) in float64."""
    x = np.asarray(x).astype(np.float64)
    return x @ weight.T, np.abs(x) @ np.abs(weight).T


def _ulp(value: np.ndarray, dtype: str) -> np.ndarray:
    """Return one unit in the last place of `dtype` at |value|: half for rounding, half for a sum across a tie."""
    bits, lowest = {"float32": (23, -149), "float16": (10, -24), "bfloat16": (7, -133)}[dtype]
    exponent = np.frexp(np.maximum(np.abs(value), 2.0**-200))[1] - 1
    return 2.0 ** np.maximum(exponent - bits, lowest)


def bound(exact: np.ndarray, magnitude: np.ndarray, additions: int, dtype: str) -> np.ndarray:
    """Return the largest |kernel - exact| per element that fp32 accumulation of exact products allows."""
    error = (additions + 8) * 2.0**-23 * magnitude
    return error + _ulp(np.abs(exact) + error, dtype)


def worst(result: np.ndarray, exact: np.ndarray, limit: np.ndarray) -> float:
    """Return max |result - exact| / limit. Above 1 the result is wrong; NaN counts as infinite."""
    ratio = np.abs(np.asarray(result).astype(np.float64) - exact) / np.maximum(limit, 2.0**-300)
    return float(np.where(np.isnan(ratio), np.inf, ratio).max(initial=0.0))


def random_weight(n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return (codes uint8 [n, k/2], scales uint8 [n, k/16]) with all codes and a wide range of scales."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, k // 2), dtype=np.uint8), rng.integers(0x20, 0x50, (n, k // GROUP), dtype=np.uint8)
