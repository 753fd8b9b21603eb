"""The learned weight's Triton functions against the module's torch operations, on a GPU or, with TRITON_INTERPRET=1, on the CPU."""

from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="weights are rounded on torch: pip install annie-quant[quantize]")
from annie_quant.quantize import column_sweep, learned_rounding  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_launch_gives_the_weight_and_its_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="pip install triton, then TRITON_INTERPRET=1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("without a GPU: TRITON_INTERPRET=1 python -m pytest")
    from annie_quant.quantize.block_kernel import FusedWeight

    generator = torch.Generator().manual_seed(0)
    source = (
        torch.randn(33, 160, generator=generator) * torch.logspace(-7, 0, 33)[:, None]
    )  # down to E4M3's least codes
    source[2, 16:32] = 0
    start = column_sweep.nearest(source.to(device), torch.full((33,), float(source.abs().max()) / 2688, device=device))
    weight = learned_rounding.LearnedWeight(start, float(source.abs().max()) / 2688, dtype=dtype).to(device)
    with torch.no_grad():
        weight.v.copy_(torch.rand(weight.v.shape, generator=generator) - 0.5)
        weight.m.copy_(torch.rand(weight.m.shape, generator=generator) + 0.5)
        weight.m[0, 0] = 1.0
    slope = torch.randn(33, 160, generator=generator).to(device, dtype)
    fused = FusedWeight.apply(weight.base, weight.v, weight.scale, weight.m, weight.tensor_scale, dtype)
    monkeypatch.setattr(learned_rounding, "has_triton", lambda: False)
    expected = weight()
    assert fused.dtype == expected.dtype == dtype
    if device == "cpu" and dtype == torch.bfloat16:  # Triton's interpreter truncates
        np.testing.assert_allclose(fused.detach().float().numpy(), expected.detach().float().numpy(), rtol=2**-7)
    else:
        assert torch.equal(fused, expected)
    parameters = [weight.v, weight.m]
    exact = torch.autograd.grad(expected, parameters, slope)
    for one, other in zip(torch.autograd.grad(fused, parameters, slope), exact, strict=True):
        np.testing.assert_allclose(
            one.cpu().numpy(), other.cpu().numpy(), rtol=1e-4, atol=1e-6 * float(other.abs().max())
        )
