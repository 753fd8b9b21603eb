"""W4A4 on a CPU compared with vLLM's documented emulation of NVFP4 linears, implemented here from its description.

vLLM, nvfp4_emulation_utils.py (run_nvfp4_emulations): activations in blocks of 16 get the scale
e4m3(clamp(amax_of_block / 6 * g, ±448)) with g the inverse of the input's tensor scale; each value is multiplied by the
inverse of (scale / g), clamped to ±6 and rounded to E2M1, ties to even; it is dequantized as value * (scale / g); weights
as value * (scale * weight_scale_2); the product is a matrix product in the activations' dtype.
"""

import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)
ml_dtypes = pytest.importorskip("ml_dtypes")
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")

from annie_quant import nvfp4  # noqa: E402
from annie_quant.offline.linears import NVFP4Linear  # noqa: E402

NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def to_e2m1(x: np.ndarray) -> np.ndarray:
    """vLLM's cast_to_fp4: thresholds between neighbours, ties to the even code."""
    a, sign = np.abs(x), np.sign(x)
    value = np.select(
        [a <= 0.25, (a > 0.25) & (a < 0.75), (a >= 0.75) & (a <= 1.25), (a > 1.25) & (a < 1.75), (a >= 1.75) & (a <= 2.5),
         (a > 2.5) & (a < 3.5), (a >= 3.5) & (a <= 5), a > 5], list(NUMBERS))  # fmt: skip
    return (value * sign).astype(np.float32)


def emulated(
    x: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    scale_2: np.float32,
    input_scale: np.float32,
) -> np.ndarray:
    """float64 product of the two dequantized sides, [M, N]."""
    g = np.float32(1) / input_scale
    blocks = x.astype(np.float32).reshape(len(x), -1, 16)
    ideal = np.abs(blocks).max(-1, keepdims=True) * np.float32(1 / 6) * g
    block_scale = np.clip(ideal, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    step = block_scale * (np.float32(1) / g)
    with np.errstate(divide="ignore"):
        inverse = np.where(step == 0, np.float32(0), np.float32(1) / step)
    a = to_e2m1(np.clip(blocks * inverse, -6, 6)) * step
    signed = np.concatenate([NUMBERS, -NUMBERS])
    w = np.stack([signed[codes & 15], signed[codes >> 4]], -1).reshape(len(codes), -1)
    w = w.reshape(len(codes), -1, 16) * (scale.astype(np.float32) * scale_2)[..., None]
    return a.reshape(len(x), -1).astype(np.float64) @ w.reshape(len(codes), -1).astype(np.float64).T


@pytest.mark.parametrize("kind", ["gaussian", "outliers", "wide", "bf16 ties"])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_w4a4_is_the_documented_emulation(kind: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    n, k = 96, 256
    weights = nvfp4.pack((rng.standard_normal((n, k)) * 0.05).astype(np.float32))
    x = rng.standard_normal((rows, k)).astype(np.float32)
    if kind == "outliers":
        x[rng.random(x.shape) < 0.01] *= 60
    elif kind == "wide":
        x *= (10.0 ** rng.integers(-2, 2, (rows, k // 16)).repeat(16, 1)).astype(np.float32)
    elif kind == "bf16 ties":
        x = (rng.integers(-24, 25, x.shape) * 0.25).astype(np.float32)
    input_scale = np.float32(2.0**-9 if kind == "bf16 ties" else np.abs(x).max() / 2688)
    layer = NVFP4Linear(k, n, dtype=torch.float32)
    layer.load_state_dict({
        "weight": torch.from_numpy(weights.codes), "weight_scale_2": torch.tensor(float(weights.tensor_scale)),
        "weight_scale": torch.from_numpy(weights.block_scale.view(np.uint8)).view(torch.float8_e4m3fn),
        "input_scale": torch.tensor(float(input_scale))})  # fmt: skip
    actual = layer(torch.from_numpy(x)).detach().numpy()
    expected = emulated(x, weights.codes, weights.block_scale, weights.tensor_scale, input_scale)
    # One of them divides by a reciprocal, so values next to a midpoint may take the neighbouring code. Exact ties do not.
    bound = 1e-5 if kind == "bf16 ties" else 2e-3
    assert np.linalg.norm(actual - expected) <= bound * np.linalg.norm(expected)
    close = np.abs(actual - expected) <= 1e-5 * np.abs(expected).max()
    assert close.mean() > 0.98
    layer.set_numerics("w4a16")
    unrounded = layer(torch.from_numpy(x)).detach().numpy()
    assert np.linalg.norm(unrounded - expected) > 0.02 * np.linalg.norm(expected), (
        "the rounding must change the result"
    )
