"""NVFP4 experts for vLLM on a CPU: the arithmetic, and the classes with replacements of vLLM's modules.

In the real vLLM: tests/perf/vllm_answers.py with a checkpoint of tiny-moe.
"""

from __future__ import annotations

import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from annie_quant.gemm import oracle  # noqa: E402
from annie_quant.ops import vllm_layers, vllm_plugin  # noqa: E402

EXPERTS, TOP_K, HIDDEN, WIDTH = 5, 2, 64, 32
BASE = "vllm.model_executor.layers"


def mixture():
    """Return (codes, block scales, tensor scales) of gate and up, and of down, and the weights in float32."""
    parts, exact = [], []
    for n, k in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        ones = [oracle.random_weight(n, k, seed) for seed in range(EXPERTS)]
        factors = [0.004 * (1 + e) for e in range(EXPERTS)]
        codes = torch.stack([torch.from_numpy(c) for c, _ in ones])
        scales = torch.stack([torch.from_numpy(s) for _, s in ones]).view(torch.float8_e4m3fn)
        parts.append((codes, scales, torch.tensor(factors)))
        exact.append(
            [
                torch.from_numpy(oracle.dequantize(*w, f)).float()
                for w, f in zip(ones, factors, strict=True)
            ]
        )
    return parts, exact


def route(tokens):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    weights = torch.rand(tokens, TOP_K, generator=generator)
    return x, weights, torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices.int()


def expected(x, weights, chosen, exact, input_scales=None):
    """Return the weighted sums, token by token. input_scales: of both products; the activations are then rounded to NVFP4."""
    from annie_quant.offline import codec

    def rounded(row, of, e):
        return (
            row.float()
            if input_scales is None
            else codec.fake_quant_eager(row[None].float(), of[e].item(), 16)[0]
        )

    first, second = input_scales or (None, None)
    out = torch.zeros(x.shape)
    for token in range(len(x)):
        for weight, e in zip(weights[token], chosen[token].tolist(), strict=True):
            if e < 0:
                continue
            gate, up = (exact[0][e] @ rounded(x[token], first, e)).bfloat16().chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            out[token] += weight * (exact[1][e] @ rounded(inner, second, e)).bfloat16().float()
    return out.bfloat16()


def compute(x, weights, chosen, parts, input_scales):
    out = torch.full_like(x, float("nan"))
    vllm_plugin.compute(
        out, x, weights, chosen, *parts[0], input_scales[0], *parts[1], input_scales[1]
    )
    return out


def apart(y, right):
    return float((y.float() - right.float()).norm() / right.float().norm())


@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_experts_with_and_without_rounded_activations(tokens):
    parts, exact = mixture()
    x, weights, chosen = route(tokens)
    none = (torch.zeros(EXPERTS),) * 2
    y = compute(x, weights, chosen, parts, none)
    assert apart(y, expected(x, weights, chosen, exact)) < 0.003
    assert apart(y, expected(x, weights, (chosen + 1) % EXPERTS, exact)) > 0.1, (
        "negative control: other experts"
    )
    scales = (torch.linspace(0.001, 0.002, EXPERTS), torch.linspace(0.05, 0.1, EXPERTS))
    y = compute(x, weights, chosen, parts, scales)
    assert apart(y, expected(x, weights, chosen, exact, scales)) < 0.01
    assert apart(y, expected(x, weights, chosen, exact)) > 0.03, "rounding must show"
    absent = torch.where(chosen == 2, -1, chosen)
    y = compute(x, weights, absent, parts, none)
    assert (
        torch.nan_to_num(y - expected(x, weights, absent, exact), nan=9.0).abs().max()
        < 0.05 * y.abs().max() + 1e-6
    )


@pytest.fixture
def vllm(monkeypatch):
    modules = {}
    for name in ("fused_moe.modular_kernel", "fused_moe.topk_weight_and_reduce", "quantization.utils.quant_utils",
                 "fused_moe.experts.marlin_moe", "fused_moe.oracle", "fused_moe.oracle.nvfp4"):  # fmt: skip
        modules[name] = types.ModuleType(f"{BASE}.{name}")
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: True)
    packages = ("vllm", "vllm.model_executor", BASE, f"{BASE}.fused_moe", f"{BASE}.fused_moe.experts",
                f"{BASE}.quantization", f"{BASE}.quantization.utils")  # fmt: skip
    for module in (*modules.values(), platforms, *map(types.ModuleType, packages)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    kernel = modules["fused_moe.modular_kernel"]
    sys.modules[f"{BASE}.fused_moe"].modular_kernel = kernel
    kernel.FusedMoEExpertsModular = type("FusedMoEExpertsModular", (), {})
    kernel.FusedMoEActivationFormat = types.SimpleNamespace(Standard="standard")
    modules["fused_moe.topk_weight_and_reduce"].TopKWeightAndReduceNoOP = lambda: "nothing"
    modules["quantization.utils.quant_utils"].kNvfp4Static = "static"
    modules["quantization.utils.quant_utils"].kNvfp4Dynamic = "dynamic"
    marlin = modules["fused_moe.experts.marlin_moe"].MarlinExperts = type("MarlinExperts", (), {})
    nvfp4 = modules["fused_moe.oracle"].nvfp4 = modules["fused_moe.oracle.nvfp4"]
    nvfp4.backend_to_kernel_cls = lambda backend: [marlin] if backend == "MARLIN" else [backend]
    nvfp4.convert_to_nvfp4_moe_kernel_format = lambda nvfp4_backend, layer, **tensors: "vLLM's"
    return nvfp4


@pytest.mark.parametrize(("key", "rounds"), [("dynamic", True), (None, False)])
def test_vllm_takes_the_class_of_the_checkpoints_scheme(vllm, key, rounds):
    vllm_plugin.install_experts()
    vllm_plugin.install_experts()
    assert vllm.backend_to_kernel_cls("CUTLASS") == ["CUTLASS"]
    classes = vllm.backend_to_kernel_cls("MARLIN")
    assert len(classes) == 2
    (ours,) = [c for c in classes if c._supports_quant_scheme("static", key)]
    assert not ours._supports_quant_scheme("another", key) and ours._supports_current_device()
    assert ours._supports_activation(types.SimpleNamespace(name="SILU"))
    assert (
        not ours._supports_activation(types.SimpleNamespace(name="RELU2_NO_MUL"))
        and not ours._supports_no_act_and_mul()
    )

    parts, exact = mixture()
    inputs = torch.linspace(0.001, 0.002, EXPERTS)
    layer = types.SimpleNamespace(
        quant_method=types.SimpleNamespace(experts_cls=ours), w2_weight=parts[1][0]
    )
    loaded = vllm_layers.Converted(
        *parts[0], torch.stack([inputs, inputs], 1), *parts[1], inputs
    )._asdict()
    convert = vllm.convert_to_nvfp4_moe_kernel_format
    new = convert(nvfp4_backend="MARLIN", layer=layer, is_act_and_mul=True, **loaded)
    assert all(a is b for a, b in zip(new, loaded.values(), strict=True)), (
        "the weights stay as they are"
    )
    other = types.SimpleNamespace(quant_method=types.SimpleNamespace(experts_cls="CUTLASS"))
    assert convert(nvfp4_backend="CUTLASS", layer=other, **loaded) == "vLLM's"

    layer.w13_input_scale, layer.w2_input_scale = new.a13_scale, new.a2_scale
    experts = ours()
    experts.w1_scale, experts.w2_scale, experts.g1_alphas, experts.g2_alphas = (
        new.w13_scale, new.w2_scale, new.w13_scale_2, new.w2_scale_2
    )  # fmt: skip
    experts.process_weights_after_loading(layer)
    x, weights, chosen = route(6)
    shapes = experts.workspace_shapes(6, 2 * WIDTH, HIDDEN, TOP_K, EXPERTS, EXPERTS, None, "silu")
    output = torch.empty(shapes[2], dtype=x.dtype)
    arguments = dict(
        hidden_states=x,
        w1=new.w13,
        w2=new.w2,
        topk_weights=weights,
        activation="silu",
        workspace13=None,
    )
    experts.apply(output=output, topk_ids=chosen, expert_map=None, **arguments)
    assert (
        apart(output, expected(x, weights, chosen, exact, (inputs, inputs) if rounds else None))
        < 0.01
    )
    # Expert parallelism: the map gives the place of an expert here, -1 for another rank's.
    elsewhere = torch.tensor([-1, 0, 1, -1, 2])
    experts.apply(output=output, topk_ids=chosen, expert_map=elsewhere, **arguments)
    places = elsewhere[chosen.long()]
    assert (
        apart(output, expected(x, weights, places, exact, (inputs, inputs) if rounds else None))
        < 0.01
    )


def test_the_operator_can_be_traced():
    parts, _ = mixture()
    x, weights, chosen = route(3)
    vllm_plugin._experts_operator()
    scales = torch.zeros(EXPERTS)
    torch.library.opcheck(
        torch.ops.annie_quant.vllm_nvfp4_experts.default,
        (torch.zeros_like(x), x, weights, chosen, *parts[0], scales, *parts[1], scales),
        test_utils="test_faketensor",  # test_schema multiplies float8 by numbers, which torch cannot
    )
