"""The vLLM plug-in's arithmetic, and its registration with a replacement of vLLM's table.

The real vLLM is tested by tests/integration/vllm_cpu.py, whose figures are in tests/perf/vllm_cpu.md.
"""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from annie_quant import nvfp4  # noqa: E402
from annie_quant.ops import vllm_plugin  # noqa: E402

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def weights(n, k, seed=0):
    rng = np.random.default_rng(seed)
    return nvfp4.pack((rng.standard_normal((n, k)) * 0.05).astype(np.float32))


def as_torch(packed):
    codes = torch.from_numpy(packed.codes)
    scales = torch.from_numpy(packed.block_scale.view(np.uint8)).view(torch.float8_e4m3fn)
    return codes, scales, float(packed.tensor_scale)


def exact(packed, x):
    """Return x W^T in float64 from the format's definition."""
    codes = packed.codes
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(codes.shape[0], -1)
    values = E2M1[nibbles & 7] * np.where(nibbles & 8, -1, 1)
    scale = packed.block_scale.astype(np.float32) * packed.tensor_scale
    return x.astype(np.float64) @ (values * np.repeat(scale.astype(np.float64), 16, axis=1)).T


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
def test_weight_only(rows):
    packed = weights(48, 96)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows))
    got = vllm_plugin.multiply(x, *as_torch(packed), input_scale=0.0)
    np.testing.assert_allclose(got.numpy(), exact(packed, x.numpy()), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rows", [2, 20])
def test_activations_are_rounded_under_the_input_scale(rows):
    """Each block of 16: an E4M3 scale from its largest value with the input scale, nearest E2M1, ties to even."""
    import ml_dtypes

    packed = weights(32, 64, seed=3)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))
    input_scale = np.float32(float(x.abs().max()) / (6 * 448))
    blocks = x.numpy().reshape(rows, -1, 16).astype(np.float64)
    expected = np.abs(blocks).max(-1) / (6 * float(input_scale))
    step = np.minimum(expected, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * float(
        input_scale
    )
    ratio = np.abs(blocks) / step[..., None]
    rounded = np.sign(blocks) * E2M1[np.abs(ratio[..., None] - E2M1).argmin(-1)] * step[..., None]
    got = vllm_plugin.multiply(x, *as_torch(packed), input_scale=float(input_scale))
    np.testing.assert_allclose(
        got.numpy(), exact(packed, rounded.reshape(rows, 64)), rtol=2e-4, atol=2e-5
    )
    alone = vllm_plugin.multiply(x, *as_torch(packed), input_scale=0.0)
    assert not torch.allclose(got, alone, rtol=1e-3), "rounding must show"


@pytest.mark.parametrize("input_scale", [0.0, 0.0013])
def test_bfloat16_products_are_exact_and_do_not_depend_on_the_batch(input_scale):
    """CUTLASS and Marlin multiply exact values and round each sum once; a row's result is that of the row alone."""
    from annie_quant.offline import codec

    packed = weights(64, 256, seed=5)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    operands = codec.fake_quant_eager(x.float(), input_scale, 16) if input_scale else x.float()
    expected = torch.from_numpy(exact(packed, operands.numpy())).to(torch.bfloat16)
    got = vllm_plugin.multiply(x, *as_torch(packed), input_scale=input_scale)
    assert (
        got == expected
    ).float().mean() > 0.999  # a float32 sum next to a midpoint may take the other neighbour
    alone = torch.cat(
        [vllm_plugin.multiply(row[None], *as_torch(packed), input_scale=input_scale) for row in x]
    )
    assert (got == alone).float().mean() > 0.999


def test_shapes_and_bfloat16_are_preserved():
    packed = weights(16, 32)
    x = torch.randn(2, 5, 32).to(torch.bfloat16)
    got = vllm_plugin.multiply(x, *as_torch(packed), input_scale=0.0)
    assert got.shape == (2, 5, 16) and got.dtype == torch.bfloat16


@pytest.fixture
def vllm(monkeypatch):
    """Only the names that the plug-in uses."""
    cpu = types.SimpleNamespace(is_cpu=lambda: True, is_cuda=lambda: False)
    linear = types.ModuleType("vllm.model_executor.kernels.linear")
    linear._POSSIBLE_NVFP4_KERNELS = {"cuda": ["theirs"]}
    linear._LINEAR_BACKEND_KERNEL_MAP = {"marlin": {"Marlin"}}
    linear.MarlinNvFp4LinearKernel = "Marlin"
    base = types.ModuleType("vllm.model_executor.kernels.linear.nvfp4.base")
    base.NvFp4LinearKernel = type("NvFp4LinearKernel", (), {})
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform, platforms.PlatformEnum = cpu, types.SimpleNamespace(CPU="cpu")
    kernels = types.ModuleType("vllm.model_executor.kernels")
    kernels.linear = linear
    for module in (linear, base, platforms, kernels):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.kernels.linear.nvfp4"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return types.SimpleNamespace(linear=linear, platform=cpu)


def test_a_cpu_gets_both_kernels_once(vllm):
    vllm_plugin.register()
    vllm_plugin.register()
    table = vllm.linear._POSSIBLE_NVFP4_KERNELS
    assert [k.__name__ for k in table["cpu"]] == [
        "AnnieNvFp4LinearKernel",
        "AnnieNvFp4W4A16LinearKernel",
    ]
    assert table["cuda"] == ["theirs"] and vllm.linear.MarlinNvFp4LinearKernel is table["cpu"][1]
    # --linear-backend marlin takes the kernel without 4-bit activations, not the table's first one.
    assert vllm.linear._LINEAR_BACKEND_KERNEL_MAP["marlin"] == {"Marlin", table["cpu"][1]}


def test_gpus_are_not_changed(vllm):
    vllm.platform.is_cpu = lambda: False
    vllm_plugin.register()
    assert (
        vllm.linear._POSSIBLE_NVFP4_KERNELS == {"cuda": ["theirs"]}
        and vllm.linear.MarlinNvFp4LinearKernel == "Marlin"
    )


def test_a_layer_uses_the_kernel(vllm):
    packed = weights(16, 32)
    codes, scales, tensor_scale = as_torch(packed)
    layer = types.SimpleNamespace(
        weight=codes,
        weight_scale=scales,
        weight_global_scale=torch.tensor(tensor_scale),
        input_global_scale=torch.tensor(0.001),
    )
    x, bias = torch.randn(3, 32), torch.randn(16)
    for kernel, input_scale in zip(
        vllm_plugin.kernels(), (float(torch.tensor(0.001)), 0.0), strict=True
    ):
        assert kernel.is_supported() == (True, None) and kernel.can_implement(None) == (True, None)
        one = kernel()
        one.process_weights_after_loading(layer)
        expected = vllm_plugin.multiply(x, codes, scales, tensor_scale, input_scale) + bias
        torch.testing.assert_close(one.apply_weights(layer, x, bias), expected)
