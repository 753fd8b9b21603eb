"""Attention as vLLM computes it on a CPU with AMX, against a loop over queries in numpy."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)
ml_dtypes = pytest.importorskip("ml_dtypes")

from annie_quant.offline import engine  # noqa: E402


@pytest.mark.parametrize("masked", [False, True])
def test_weights_are_rounded_before_the_sum_divides(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "QUERIES", 4)  # several blocks of queries
    rng = np.random.default_rng(5)
    batch, heads, steps, length, size = 2, 6, 9, 14, 8
    q, k, v = (
        rng.standard_normal((batch, h, n, size)).astype(np.float32)
        for h, n in ((heads, steps), (2, length), (2, length))
    )
    visible = np.tril(np.ones((steps, length), bool), length - steps)[None].repeat(batch, 0)
    if masked:
        visible[1, :, 3:5] = False
    expected, unrounded = np.zeros((2, batch, steps, heads, size))
    for b, h, i in np.ndindex(batch, heads, steps):
        scores = (k[b, h // 3].astype(float) @ q[b, h, i]) * 0.25
        weights = np.where(visible[b, i], np.exp(scores - scores[visible[b, i]].max()), 0)
        rounded = weights.astype(np.float32).astype(ml_dtypes.bfloat16).astype(float)
        expected[b, i, h] = rounded @ v[b, h // 3] / weights.sum()
        unrounded[b, i, h] = weights @ v[b, h // 3] / weights.sum()
    mask = torch.from_numpy(visible)[:, None] if masked else None
    own = engine.amx_attention(*map(torch.from_numpy, (q, k, v)), mask, 0.25).numpy()
    assert np.abs(own - expected).max() < 1e-5 < np.abs(unrounded - expected).max()
