"""Gated DeltaNet's Triton kernels against a float64 recurrence step by step, and their convolution against torch's."""

from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="the rule runs on torch: pip install annie-quant[quantize]"
)


def inputs(
    steps: int, dtype: torch.dtype = torch.float64, repeat: bool = False, width: int = 8
) -> list[torch.Tensor]:
    """Return q, k, v, log decays and betas of two rows and three heads. repeat: every key is the first one."""
    rng = np.random.default_rng(steps)
    q, k, v = (torch.tensor(rng.normal(size=(2, steps, 3, width))) for _ in range(3))
    k = k[:, :1].expand_as(k) if repeat else k
    decay = torch.tensor(-rng.exponential(0.3, size=(2, steps, 3)))
    beta = torch.tensor(rng.uniform(size=(2, steps, 3)))
    return [x.contiguous().to(dtype) for x in (q, k, v, decay, beta)]


def step_by_step(q, k, v, decay, beta) -> torch.Tensor:
    """S = e^g S + beta k (v - (e^g S)^T k)^T, out = S^T q / sqrt(Dk), with q and k of length 1."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state = q.new_zeros(*q.shape[:1], q.shape[2], k.shape[-1], v.shape[-1])
    out = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None].exp()
        missing = v[:, t] - (state * k[:, t, :, :, None]).sum(-2)
        state = state + beta[:, t, :, None, None] * k[:, t, :, :, None] * missing[:, :, None]
        out.append((state * q[:, t, :, :, None]).sum(-2) / k.shape[-1] ** 0.5)
    return torch.stack(out, 1)


@pytest.fixture
def kernels():
    """The Triton functions and their device: a GPU or, with TRITON_INTERPRET=1, the CPU."""
    pytest.importorskip("triton", reason="pip install triton, then TRITON_INTERPRET=1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("without a GPU: TRITON_INTERPRET=1 python -m pytest")
    from annie_quant.quantize import triton_kernels

    return triton_kernels, device


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("steps", [1, 64, 130])
def test_kernels_give_the_outputs_of_single_steps(kernels, steps: int, repeat: bool) -> None:
    kernel, device = kernels
    exact = inputs(steps, repeat=repeat, width=16)
    rough = [x.float().to(device) for x in exact]
    got, _ = kernel.gated_delta_rule(*rough, use_qk_l2norm_in_kernel=True)
    np.testing.assert_allclose(got.cpu().numpy(), step_by_step(*exact).numpy(), atol=5e-5)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in rough]  # other strides
    assert torch.equal(kernel.gated_delta_rule(*transposed, use_qk_l2norm_in_kernel=True)[0], got)


@pytest.mark.parametrize("cut", [1, 64, 100])
def test_kernels_continue_a_state(kernels, cut: int) -> None:
    kernel, device = kernels
    exact = inputs(130, width=16)
    rough = [x.float().to(device) for x in exact]
    first = [x[:, :cut] for x in rough]
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    before, state = kernel.gated_delta_rule(*first, **options)
    second = [x[:, cut:] for x in rough]
    after, _ = kernel.gated_delta_rule(*second, initial_state=state, **options)
    outputs = torch.cat((before, after), 1).cpu().numpy()
    expected = step_by_step(*exact).numpy()
    np.testing.assert_allclose(outputs, expected, atol=5e-5)
    lost, _ = kernel.gated_delta_rule(*second, **options)
    assert np.abs(lost.cpu().numpy() - expected[:, cut:]).max() > 1e-2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 70])
def test_conv_kernels_are_torch_s(kernels, steps: int, silu: bool, bias: bool) -> None:
    kernel, device = kernels
    rng = np.random.default_rng(0)
    x, weight, shift = (
        torch.tensor(rng.normal(size=s), device=device).float()
        for s in ((2, 70, steps), (70, 4), (70,))
    )
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    shift = shift if bias else None
    expected = torch.nn.functional.conv1d(x, weight[:, None], shift, padding=3, groups=70)[
        ..., :steps
    ]
    expected = torch.nn.functional.silu(expected) if silu else expected
    got = kernel.causal_conv(x, weight, shift, "silu" if silu else None)
    np.testing.assert_allclose(got.cpu().numpy(), expected.cpu().numpy(), atol=1e-5)
