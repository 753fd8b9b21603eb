"""Our kernel where SGLang runs Marlin: a replacement of its class of linears, and an emulated operator on the CPU."""

from __future__ import annotations

import logging
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import emulated_gemm  # noqa: E402

from annie_quant.errors import EnvironmentFault  # noqa: E402
from annie_quant.gemm import arrays, oracle, torch_op  # noqa: E402
from annie_quant.serve import sglang_plugin, w4a16_layer  # noqa: E402


@pytest.fixture
def sglang(monkeypatch):
    class ModelOptFp4LinearMethod:
        """SGLang's names."""

        def __init__(self, quant_mode="w4a4", is_awq=False):
            self.quant_mode, self.quant_config = quant_mode, types.SimpleNamespace(is_awq=is_awq, group_size=16)

        def process_weights_after_loading(self, layer):
            layer.prepared_by = "SGLang"

        def apply(self, layer, x, bias=None):
            return "SGLang's product"

    quantization = types.ModuleType("sglang.srt.layers.quantization")
    quantization.modelopt_quant = types.SimpleNamespace(
        ModelOptFp4LinearMethod=ModelOptFp4LinearMethod,
        backend="marlin",
        get_fp4_gemm_runner_backend=lambda: types.SimpleNamespace(
            is_marlin=lambda: quantization.modelopt_quant.backend == "marlin"
        ),
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.layers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, quantization.__name__, quantization)
    monkeypatch.setattr(arrays, "native", lambda: "loaded")
    monkeypatch.setattr(w4a16_layer, "_checked", {})
    monkeypatch.setattr(w4a16_layer, "_logged", set())
    monkeypatch.setenv(sglang_plugin.SWITCH, "1")
    emulated_gemm.install(monkeypatch)
    return quantization.modelopt_quant


def linear_layer(n=40, k=80):
    codes, scales = oracle.random_weight(n, k, 2)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.from_numpy(codes), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(torch.from_numpy(scales).view(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale_2 = torch.nn.Parameter(torch.tensor([0.01, 0.01]), requires_grad=False)
    layer.params_dtype = torch.bfloat16
    return layer, oracle.dequantize(codes, scales, 0.01)


def test_linears_on_marlin_take_the_kernel(sglang):
    sglang_plugin.register()
    sglang_plugin.register()
    layer, weight = linear_layer()
    method = sglang.ModelOptFp4LinearMethod()
    method.process_weights_after_loading(layer)
    x, bias = torch.randn(3, 80).to(torch.bfloat16), torch.randn(40).to(torch.bfloat16)
    exact = torch.from_numpy(x.double().numpy() @ weight.T).to(torch.bfloat16)
    torch.testing.assert_close(method.apply(layer, x), exact, rtol=8e-3, atol=1e-3)
    torch.testing.assert_close(method.apply(layer, x, bias), exact + bias, rtol=8e-3, atol=2e-2)


@pytest.mark.parametrize("change", ["no switch", "another backend", "w4a16", "awq", "a wrong kernel"])
def test_everything_else_is_sglangs_own(sglang, monkeypatch, caplog, change):
    options = {"w4a16": {"quant_mode": "w4a16"}, "awq": {"is_awq": True}}.get(change, {})
    if change == "no switch":
        monkeypatch.delenv(sglang_plugin.SWITCH)
    if change == "another backend":
        sglang.backend = "flashinfer_cutlass"
    if change == "a wrong kernel":
        monkeypatch.setattr(torch_op, "prepare", lambda *args: emulated_gemm.prepare(*args, fault="nibbles"))
    sglang_plugin.register()
    layer, _ = linear_layer()
    method = sglang.ModelOptFp4LinearMethod(**options)
    with caplog.at_level(logging.WARNING, sglang_plugin.LOGGER):
        method.process_weights_after_loading(layer)
    assert layer.prepared_by == "SGLang" and method.apply(layer, torch.zeros(1, 80)) == "SGLang's product"
    assert ("wrong on this device" in caplog.text) == (change == "a wrong kernel")
    assert layer.weight.shape == (40, 40) and not hasattr(layer, "weight_global_scale")


def test_where_it_cannot_run_one_line_has_the_reason(sglang, monkeypatch, caplog):
    def not_built():
        raise EnvironmentFault("annie_quant._gemm is not built here", "")

    before = sglang.ModelOptFp4LinearMethod.apply
    with caplog.at_level(logging.WARNING, sglang_plugin.LOGGER):
        with monkeypatch.context() as m:
            m.setattr(arrays, "native", not_built)
            sglang_plugin.register()
        del sglang.ModelOptFp4LinearMethod
        sglang_plugin.register()
    assert len(caplog.messages) == 2 and "_gemm is not built" in caplog.text and "other interfaces" in caplog.text
    assert before.__name__ == "apply"
