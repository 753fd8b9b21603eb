"""Weights and activations for which faulty kernels and codecs round differently."""

import ml_dtypes
import numpy as np

from annie_quant.gemm import oracle


def adversarial(dtype):
    """Return near-ties, exact ties, wide ranges, zeros, negative zeros, subnormals, empty and sparse blocks."""
    rng = np.random.default_rng(3)
    mid = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    ties = (
        rng.choice(mid, (64, 256))
        * rng.choice([-1, 1], (64, 256))
        * 2.0 ** rng.integers(-6, 4, (64, 1))
    )
    near = (ties * (1 + rng.integers(-2, 3, ties.shape) * 2.0**-8)).astype(np.float32)
    wide = np.exp2(rng.uniform(-30, 8, (64, 256))) * rng.choice([-1, 0, 1], (64, 256))
    sparse = np.where(rng.random((64, 256)) < 0.03, rng.standard_normal((64, 256)), -0.0)
    normal = rng.standard_normal((64, 256))
    return np.concatenate([ties, near, wide, sparse, normal]).astype(dtype)


def underflowing(dtype):
    """Return numbers that are so small for the tensor's scale that a quotient underflows to zero, and its sign with it."""
    x = np.full((8, 64), -1e-7, np.float32)
    x[:, ::3] = -6e-8  # subnormal in float16
    if np.dtype(dtype).itemsize != 2 or np.dtype(dtype) == ml_dtypes.bfloat16:
        x = x * np.float32(1e-30)
        x[3, 5] = -1e-45
    x[0, 0] = 6e4
    x[:, 7] = -0.0
    return x.astype(dtype)


def encode(x, ts):
    """ModelOpt's encoding and its dynamic fake quantization in NumPy float32, one operation per line."""
    f8 = ml_dtypes.float8_e4m3fn
    b = x.astype(np.float32).reshape(x.shape[0], -1, 16)
    amax = np.abs(b).max(-1, keepdims=True)
    t = amax / (np.float32(6) * ts)
    s = np.clip(np.where(t == 0, np.float32(1), t), np.float32(2**-9), np.float32(448)).astype(f8)
    step = s.astype(np.float32) * ts
    limits, strict = (
        np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32),
        [1, 0, 1, 0, 1, 0, 1],
    )

    def index(a):
        return sum((a > lim) if s else (a >= lim) for lim, s in zip(limits, strict, strict=True))

    q = b / step
    idx = index(np.abs(q))
    nibble = (idx | np.where(q < 0, 8, 0)).astype(np.uint8).reshape(x.shape)
    table = oracle.MAGNITUDES.astype(np.float32)
    value = np.where(q < 0, -table[idx], table[idx]) * step
    q = (np.minimum(t, np.float32(448)).astype(f8)).astype(np.float32) * ts
    q = np.where(q >= np.float32(1e-5), q, np.float32(1))
    fake = table[index(np.abs(b) / q)] * q
    fake = np.where(
        b >= 0, fake, np.float32(0) - fake
    )  # ModelOpt's op: a value that rounds to zero gives +0.0
    codes = nibble[:, ::2] | nibble[:, 1::2] << 4
    return codes, s.view(np.uint8)[..., 0], value.reshape(x.shape), fake.reshape(x.shape)


def ue4m3(scales):
    """Return unsigned E4M3 bytes as float64, as the mma instruction reads them: the sign bit is ignored."""
    return np.abs(oracle.e4m3(scales))


def grouped_products(x, weights, chosen, top_k):
    """Return, per pair of a token and its expert, (row @ weight.T, |row| @ |weight|.T) in float64 [pairs, N].

    x: [tokens, K].  weights: [experts, N, K].  chosen: the expert of each pair; pair p has row p // top_k of x.
    """
    rows = [
        oracle.linear(x[p // top_k : p // top_k + 1], weights[e])
        for p, e in enumerate(np.ravel(chosen))
    ]
    return tuple(np.concatenate(part) for part in zip(*rows, strict=True))
