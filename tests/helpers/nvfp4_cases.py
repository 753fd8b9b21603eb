"""Weights that find faults in codecs: exact ties, near-ties, wide ranges, zeros, subnormals, sparse blocks, random bits.

Gaussian weights are not enough: a codec that multiplies by a reciprocal agrees on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def bits(a: np.ndarray) -> np.ndarray:
    """Return the bit patterns, so that -0.0 and NaN can be compared."""
    return np.ascontiguousarray(a).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize])


def adversarial(rows: int, columns: int, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Return (name, float32 [rows, columns]) of each kind."""
    rng = np.random.default_rng(seed)
    shape = (rows, columns)
    gauss = rng.standard_normal(shape).astype(np.float32)
    yield "gaussian", gauss * np.float32(0.02)
    yield "heavy tails", (rng.standard_t(2, shape) * 0.02).astype(np.float32)
    grid = np.concatenate([MIDPOINTS, VALUES, [-0.0]]).astype(np.float32)
    powers = 2.0 ** rng.integers(-12, 8, (rows, columns // 16, 1))
    ties = (
        rng.choice(grid, (rows, columns // 16, 16))
        * rng.choice([-1, 1], (rows, columns // 16, 16))
        * powers
    ).astype(np.float32)
    ties = ties.reshape(shape)
    yield "ties", ties
    yield (
        "near ties",
        np.nextafter(ties, rng.choice(np.array([-np.inf, np.inf], np.float32), shape)),
    )
    wide = np.exp(rng.uniform(-60, 20, shape)) * rng.choice([-1, 0, 1], shape)
    yield "wide", wide.astype(np.float32)
    yield "sparse", gauss * (rng.random(shape) < 0.05)
    yield "subnormal", gauss * np.float32(1e-40)
    yield "minus zero", np.full(shape, -0.0, np.float32)
    anything = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    yield "random bits", np.where(np.isfinite(anything), anything, np.float32(0))


def in_dtype(w: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return w in another dtype, with overflows set to zero."""
    with np.errstate(over="ignore", invalid="ignore"):
        x = w.astype(dtype)
    return np.where(np.isfinite(x.astype(np.float32)), x, np.zeros((), dtype)).astype(dtype)


def near_ties_of_steps(steps: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return [len(steps), 112 + pad] of midpoint * step and its neighbouring bit patterns: 1 / step is wrong there."""
    centre = (MIDPOINTS[None, :] * steps[:, None].astype(np.float32)).astype(dtype)
    around = (np.arange(-8, 8)).astype(np.int64)
    wide = bits(centre).astype(np.int64)[:, :, None] + around
    limit = {2: 0x7C00 if dtype == np.float16 else 0x7F80, 4: 0x7F800000}[dtype.itemsize] - 1
    kind = np.uint16 if dtype.itemsize == 2 else np.uint32
    return np.clip(wide, 0, limit).astype(kind).view(dtype).reshape(len(steps), -1)
