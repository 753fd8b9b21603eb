"""Our kernel instead of vLLM's Marlin, without a GPU: a replacement of vLLM's registry and an emulated operator on the CPU.

The real vLLM runs it on a GPU by tests/perf/serve_9b.py and kernel_answers.py.
"""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import emulated_gemm  # noqa: E402

from annie_quant.core.errors import EnvironmentFault  # noqa: E402
from annie_quant.gemm import arrays, oracle, torch_op  # noqa: E402
from annie_quant.ops import vllm_cuda, vllm_layers, vllm_plugin  # noqa: E402


class Marlin:
    """vLLM's kernel class as far as ours uses it."""

    def __init__(self, config=None):
        self.config = config

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    def process_weights_after_loading(self, layer):
        layer.workspace = "Marlin's"

    def apply_weights(self, layer, x, bias=None):
        return "Marlin's product"


Marlin.__name__ = Marlin.__qualname__ = vllm_cuda.MARLIN


class Cutlass(Marlin):
    pass


class VllmConfig:
    def __init__(self, model="m"):
        self.model = model

    def compute_hash(self):
        return f"hash of {self.model}"


@pytest.fixture
def vllm(monkeypatch):
    """The names of vLLM that the plug-in uses, on a CUDA platform, and a _gemm that loads."""
    linear = types.ModuleType("vllm.model_executor.kernels.linear")
    linear._POSSIBLE_NVFP4_KERNELS = {"cuda": [Cutlass, Marlin], "cpu": []}
    linear._LINEAR_BACKEND_KERNEL_MAP = {"marlin": {Marlin}}
    linear.MarlinNvFp4LinearKernel = Marlin
    modelopt = types.ModuleType("vllm.model_executor.layers.quantization.modelopt")
    modelopt.MarlinNvFp4LinearKernel = Marlin
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(
        is_cpu=lambda: False, is_cuda=lambda: True, has_device_capability=lambda least: least <= 90
    )
    platforms.PlatformEnum = types.SimpleNamespace(CPU="cpu", CUDA="cuda")
    config = types.ModuleType("vllm.config")
    config.VllmConfig = type("VllmConfig", (VllmConfig,), {"compute_hash": VllmConfig.compute_hash})
    kernels = types.ModuleType("vllm.model_executor.kernels")
    kernels.linear = linear
    quantization = types.ModuleType("vllm.model_executor.layers.quantization")
    quantization.modelopt = modelopt
    for module in (linear, modelopt, platforms, config, kernels, quantization):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(arrays, "native", lambda: "loaded")
    monkeypatch.setenv(vllm_cuda.SWITCH, "1")
    return types.SimpleNamespace(
        linear=linear, modelopt=modelopt, platform=platforms.current_platform, config=config
    )


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(vllm_cuda, "_on_marlin", {})
    monkeypatch.setattr(vllm_layers, "_checked", {})
    monkeypatch.setattr(vllm_layers, "_logged", set())


@pytest.fixture
def emulated(monkeypatch):
    emulated_gemm.install(monkeypatch)


def linear_layer(n=48, k=96, seed=0, dtype=torch.bfloat16, prefix="model.layers.0.mlp.down_proj"):
    """Return a module as ModelOpt's method leaves it, and its weight in float64."""
    codes, scales = oracle.random_weight(n, k, seed)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.from_numpy(codes), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(
        torch.from_numpy(scales).view(torch.float8_e4m3fn), requires_grad=False
    )
    layer.weight_global_scale = torch.nn.Parameter(torch.tensor(0.0173), requires_grad=False)
    layer.output_size_per_partition, layer.input_size_per_partition = n, k
    layer.params_dtype, layer.prefix = dtype, prefix
    return layer, oracle.dequantize(codes, scales, 0.0173)


def test_it_stands_before_marlin_everywhere(vllm):
    vllm_plugin.register()
    vllm_plugin.register()
    table = vllm.linear._POSSIBLE_NVFP4_KERNELS["cuda"]
    assert [k.__name__ for k in table] == ["Cutlass", vllm_cuda.NAME, vllm_cuda.MARLIN]
    ours = table[1]
    assert issubclass(ours, Marlin)
    assert vllm.linear.MarlinNvFp4LinearKernel is ours, "weight-only checkpoints in other formats"
    assert vllm.modelopt.MarlinNvFp4LinearKernel is ours, "where a W4A16 checkpoint pins Marlin"
    assert vllm.linear._LINEAR_BACKEND_KERNEL_MAP["marlin"] == {Marlin, ours}


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_switch_vllm_is_unchanged(vllm, monkeypatch, value):
    monkeypatch.delenv(vllm_cuda.SWITCH) if value is None else monkeypatch.setenv(
        vllm_cuda.SWITCH, value
    )
    vllm_plugin.register()
    assert vllm.linear._POSSIBLE_NVFP4_KERNELS["cuda"] == [Cutlass, Marlin]
    assert vllm.modelopt.MarlinNvFp4LinearKernel is Marlin
    assert vllm.config.VllmConfig().compute_hash() == "hash of m"


def test_where_it_cannot_run_one_line_has_the_reason_and_vllm_is_unchanged(
    vllm, monkeypatch, caplog
):
    def not_built():
        raise EnvironmentFault("annie_quant._gemm is not built here", "install CUDA 13's toolkit")

    cases = [
        (lambda m: m.setattr(arrays, "native", not_built), "_gemm is not built"),
        (
            lambda m: m.setattr(vllm.platform, "has_device_capability", lambda least: False),
            "compute capability 9.0",
        ),
        (lambda m: m.delattr(vllm.linear, "_POSSIBLE_NVFP4_KERNELS"), "other interfaces"),
        (lambda m: m.delattr(vllm.linear, "_LINEAR_BACKEND_KERNEL_MAP"), "other interfaces"),
    ]
    for change, reason in cases:
        caplog.clear()
        with monkeypatch.context() as m, caplog.at_level(logging.INFO, "vllm.annie_quant"):
            change(m)
            vllm_plugin.register()
            vllm_plugin.register()
        assert len(caplog.messages) == 1 and reason in caplog.messages[0], caplog.messages
        assert vllm.modelopt.MarlinNvFp4LinearKernel is Marlin
        assert vllm.linear._POSSIBLE_NVFP4_KERNELS["cuda"] == [Cutlass, Marlin]
        assert vllm.config.VllmConfig().compute_hash() == "hash of m"


@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [(48, 96, torch.bfloat16), (61, 16, torch.float16), (33, 144, torch.bfloat16)],
)
def test_a_layer_of_any_size_is_multiplied_with_its_bias(emulated, n, k, dtype):
    kernel = vllm_cuda.kernel(Marlin)()
    layer, weight = linear_layer(n, k, dtype=dtype)
    kernel.process_weights_after_loading(layer)
    assert (
        not hasattr(layer, "weight_scale")
        and layer.weight.dtype == torch.uint8
        and not hasattr(layer, "workspace")
    )
    assert layer.weight.device == layer.annie_scale.device, (
        "vLLM's LoRA asks the weight for its device"
    )
    x = torch.randn(2, 3, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(n).to(dtype)
    exact = torch.from_numpy(x.double().numpy() @ weight.T)
    torch.testing.assert_close(
        kernel.apply_weights(layer, x), exact.to(dtype), rtol=8e-3, atol=1e-3
    )
    torch.testing.assert_close(
        kernel.apply_weights(layer, x, bias), exact.to(dtype) + bias, rtol=8e-3, atol=2e-2
    )


@pytest.mark.parametrize("fault", ["nibbles", "scales"])
def test_a_wrong_kernel_is_found_at_load_and_the_layer_stays_on_marlin(
    emulated, monkeypatch, caplog, fault
):
    """The self-check's negative control: the faults that a tolerance on the norm would hide."""
    right = emulated_gemm.prepare
    monkeypatch.setattr(torch_op, "prepare", lambda *args: right(*args, fault=fault))
    kernel = vllm_cuda.kernel(Marlin)()
    with caplog.at_level(logging.INFO, "vllm.annie_quant"):
        for i in range(3):
            layer, _ = linear_layer(seed=i, prefix=f"model.layers.{i}.mlp.down_proj")
            before = layer.weight
            kernel.process_weights_after_loading(layer)
            assert layer.weight is before and layer.workspace == "Marlin's"
            assert kernel.apply_weights(layer, torch.zeros(1, 96)) == "Marlin's product"
    assert len(caplog.messages) == 1 and "wrong on this device" in caplog.messages[0]


def test_layers_that_it_cannot_take_stay_on_marlin_and_the_others_do_not(emulated, caplog):
    kernel = vllm_cuda.kernel(Marlin)()
    good, _ = linear_layer(prefix="good")
    bad, _ = linear_layer(prefix="bad")
    bad.weight_scale.data.view(torch.uint8)[5, 2] = 0x7F
    wide, _ = linear_layer(dtype=torch.float32, prefix="wide")
    with caplog.at_level(logging.WARNING, "vllm.annie_quant"):
        for layer in (good, bad, wide):
            kernel.process_weights_after_loading(layer)
    assert (good.annie_scale is None, bad.annie_scale is None, wide.annie_scale is None) == (
        False,
        True,
        True,
    )
    assert "bad: ValueError: block_scale is NaN or negative at row 5, block 2" in caplog.text
    assert "wide: activations are torch.float32" in caplog.text


def test_merged_linears_and_shards_are_products_of_their_parts(emulated):
    """vLLM gives one scale for a merged linear, and a rank's rows or columns for a tensor-parallel one."""
    kernel = vllm_cuda.kernel(Marlin)()
    whole, weight = linear_layer(64, 128)
    codes, scales = whole.weight.data, whole.weight_scale.data
    x = torch.randn(5, 128).to(torch.bfloat16)

    def part(rows, columns):
        layer, _ = linear_layer()
        layer.weight = torch.nn.Parameter(
            codes[rows, columns.start // 2 : columns.stop // 2].contiguous(), requires_grad=False
        )
        layer.weight_scale = torch.nn.Parameter(
            scales[rows, columns.start // 16 : columns.stop // 16].contiguous(), requires_grad=False
        )
        layer.output_size_per_partition = layer.weight.shape[0]
        kernel.process_weights_after_loading(layer)
        return kernel.apply_weights(layer, x[:, columns]).float()

    kernel.process_weights_after_loading(whole)
    y = kernel.apply_weights(whole, x).float()
    by_columns = torch.cat(
        [part(slice(0, 40), slice(0, 128)), part(slice(40, 64), slice(0, 128))], 1
    )
    assert (by_columns == y).all()
    by_rows = part(slice(0, 64), slice(0, 48)) + part(slice(0, 64), slice(48, 128))
    exact = x.double().numpy() @ weight.T
    np.testing.assert_allclose(by_rows.numpy(), exact, rtol=0.02, atol=0.02 * np.abs(exact).max())


def test_the_compile_cache_has_its_own_key(vllm, emulated):
    config = vllm.config.VllmConfig
    plain = config().compute_hash()
    vllm_plugin.register()
    vllm_cuda.extend_compile_key(config, lambda: "a second call changes nothing")
    ours = config().compute_hash()
    assert ours != plain and ours == config().compute_hash() and len(ours) == vllm_cuda.KEY_LENGTH
    assert config("another model").compute_hash() != ours
    layer, _ = linear_layer(dtype=torch.float32)
    vllm.modelopt.MarlinNvFp4LinearKernel().process_weights_after_loading(layer)
    assert config().compute_hash() not in (plain, ours), "a layer on Marlin is another graph"


def test_the_key_changes_with_the_code(vllm, monkeypatch, tmp_path):
    before = vllm_cuda.compile_key()
    other = tmp_path / "vllm_cuda.py"
    other.write_bytes(Path(vllm_cuda.__file__).read_bytes() + b"#")
    monkeypatch.setattr(vllm_cuda, "__file__", str(other))
    assert vllm_cuda.compile_key() != before


def test_torch_compile_sees_one_opaque_call_and_layers_of_a_shape_share_it(emulated):
    kernel = vllm_cuda.kernel(Marlin)()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    layers = []
    for seed in (1, 2):
        layer, weight = linear_layer(seed=seed)
        kernel.process_weights_after_loading(layer)
        layer.annie_scale *= seed  # layers have different tensor scales
        layers.append((layer, weight * seed))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda layer, x: kernel.apply_weights(layer, x),
        backend=backend,
        fullgraph=True,
        dynamic=True,
    )
    x = torch.randn(7, 96).to(torch.bfloat16)
    for layer, weight in layers:
        exact = torch.from_numpy(x.double().numpy() @ weight.T).to(torch.bfloat16)
        torch.testing.assert_close(compiled(layer, x), exact, rtol=8e-3, atol=1e-3)
    calls = [
        n
        for g in graphs
        for n in g.graph.nodes
        if n.op == "call_function" and "nvfp4_linear" in str(n.target)
    ]
    assert len(calls) == len(graphs)
    assert all(not isinstance(a, float) for n in calls for a in n.args), (
        "a tensor scale in a graph would be another layer's"
    )


def test_the_oracle_passes_a_right_kernel_and_finds_each_fault(emulated):
    codes, scales = oracle.random_weight(72, 160, 3)
    codes, scales = torch.from_numpy(codes), torch.from_numpy(scales).view(torch.float8_e4m3fn)
    for dtype in (torch.bfloat16, torch.float16):
        right = emulated_gemm.prepare(codes, scales, 0.01)
        assert oracle.worst_error(right, codes, scales, 0.01, dtype) <= 1
        for fault in ("nibbles", "scales"):
            wrong = emulated_gemm.prepare(codes, scales, 0.01, fault=fault)
            assert oracle.worst_error(wrong, codes, scales, 0.01, dtype) > 10
        assert oracle.worst_error(right, codes, scales, 0.0102, dtype) > 1, "another tensor scale"
