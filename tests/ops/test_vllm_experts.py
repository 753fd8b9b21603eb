"""Our kernel instead of vLLM's Marlin for a mixture's experts, without a GPU: replacements of vLLM's modules, an emulated operator.

The real vLLM runs it on a GPU by tests/perf/serve_9b.py --shape 35b-a3b.
"""

from __future__ import annotations

import logging
import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import emulated_gemm  # noqa: E402
from expert_tiles import align  # noqa: E402

from annie_quant.gemm import arrays, grouped, oracle, torch_op  # noqa: E402
from annie_quant.ops import vllm_cuda, vllm_layers  # noqa: E402

EXPERTS, TOP_K, HIDDEN, WIDTH = 6, 3, 64, 48
TILE = 16


class MarlinExperts:
    """vLLM's class for experts as far as ours uses it."""

    def __init__(self, g1_alphas=None, g2_alphas=None):
        self.g1_alphas, self.g2_alphas = g1_alphas, g2_alphas

    def process_weights_after_loading(self, layer):
        pass

    def moe_problem_size(self, a1, w1, w2, topk_ids):
        return "Marlin's size"

    def apply(self, **arguments):
        return "Marlin's product"

    def activation(self, activation, output, input):
        gate, up = input.float().chunk(2, -1)
        output.copy_(torch.nn.functional.silu(gate) * up)


def moe_align_block_size(
    ids, block, experts, expert_map=None, pad_sorted_ids=False, ignore_invalid_experts=False
):
    """As vLLM's: experts that are elsewhere are left out, and what is beyond `padded` has no meaning."""
    assert pad_sorted_ids, "else sorted_pairs can end inside the last tile"
    assert expert_map is None or ignore_invalid_experts
    flat, order, tiles = ids.flatten().tolist(), [], []
    for expert in range(experts):
        here = expert if expert_map is None else int(expert_map[expert])
        mine = [] if here < 0 else [pair for pair, e in enumerate(flat) if e == expert]
        for start in range(0, len(mine), block):
            part = mine[start : start + block]
            order += part + [len(flat)] * (block - len(part))
            tiles.append(here)
    most = -(-(len(flat) + experts * (block - 1)) // block)
    sorted_pairs, tile_experts = torch.full((most * block,), len(flat)), torch.full((most,), 12345)
    sorted_pairs[: len(order)], tile_experts[: len(tiles)] = (
        torch.tensor(order),
        torch.tensor(tiles),
    )
    return sorted_pairs.int(), tile_experts.int(), torch.tensor([len(order)], dtype=torch.int32)


def moe_fused_mul_sum(inputs, topk_weights, outputs, topk_ids, expert_map):
    if expert_map is not None:
        there = expert_map[topk_ids.long()] >= 0
        inputs = torch.where(
            there[..., None], inputs, 0.0
        )  # rows of other ranks' experts are not initialised
    outputs.copy_((inputs.float() * topk_weights[..., None]).sum(1))
    return outputs


def convert(nvfp4_backend, layer, **tensors):
    return "Marlin's format"


@pytest.fixture
def vllm(monkeypatch):
    """The modules that the plug-in uses, with the emulated operator."""
    emulated_gemm.install(monkeypatch)
    monkeypatch.setattr(arrays, "native", lambda: "loaded")
    monkeypatch.setattr(grouped, "plan_tokens", lambda *shape: TILE)
    base = "vllm.model_executor.layers"
    modules = {
        name: types.ModuleType(f"{base}.{name}")
        for name in ("fused_moe.experts.marlin_moe", "fused_moe.oracle", "fused_moe.oracle.nvfp4", "quantization.modelopt",
                     "fused_moe.moe_align_block_size", "fused_moe.moe_fused_mul_sum")
    }  # fmt: skip
    for module in modules.values():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in (
        "vllm",
        "vllm.model_executor",
        base,
        f"{base}.fused_moe",
        f"{base}.fused_moe.experts",
    ):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    marlin = type("MarlinExperts", (MarlinExperts,), {})
    modules["fused_moe.experts.marlin_moe"].MarlinExperts = marlin
    nvfp4 = modules["fused_moe.oracle"].nvfp4 = modules["fused_moe.oracle.nvfp4"]
    nvfp4.backend_to_kernel_cls = lambda backend: (
        [marlin] if backend == "MARLIN" else [f"class of {backend}"]
    )
    nvfp4.convert_to_nvfp4_moe_kernel_format = convert
    modules["quantization.modelopt"].convert_to_nvfp4_moe_kernel_format = convert
    modules["fused_moe.moe_align_block_size"].moe_align_block_size = moe_align_block_size
    modules["fused_moe.moe_fused_mul_sum"].moe_fused_mul_sum = moe_fused_mul_sum
    for module, name in ((vllm_layers, "on_marlin"), (vllm_layers, "_checked")):
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(vllm_layers, "_logged", set())
    return types.SimpleNamespace(
        nvfp4=nvfp4, modelopt=modules["quantization.modelopt"], marlin=marlin
    )


def mixture(
    ours, width=WIDTH, dtype=torch.bfloat16, name="model.layers.0.mlp.experts", experts=EXPERTS
):
    """Return a layer and its tensors as vLLM hands them over, and its weights in float64."""
    parallel = types.SimpleNamespace(enable_eplb=False)
    layer = types.SimpleNamespace(
        quant_method=types.SimpleNamespace(experts_cls=ours), layer_name=name, params_dtype=dtype, top_k=TOP_K,
        moe_config=types.SimpleNamespace(is_lora_enabled=False, moe_parallel_config=parallel),
        activation=types.SimpleNamespace(name="SILU"), swiglu_limit=None, apply_router_weight_on_input=False,
    )  # fmt: skip
    tensors, exact = {"a13_scale": None, "a2_scale": None, "is_act_and_mul": True}, []
    for part, n, k in (("w13", 2 * width, HIDDEN), ("w2", HIDDEN, width)):
        of_experts = [oracle.random_weight(n, k, seed) for seed in range(experts)]
        factors = [0.002 * (1 + e) for e in range(experts)]
        codes, scales = (torch.from_numpy(np.stack(x)) for x in zip(*of_experts, strict=True))
        tensors |= {part: torch.nn.Parameter(codes, requires_grad=False), f"{part}_scale": scales.view(torch.float8_e4m3fn),
                    f"{part}_scale_2": torch.tensor(factors)}  # fmt: skip
        exact.append(
            [
                torch.from_numpy(oracle.dequantize(*w, f))
                for w, f in zip(of_experts, factors, strict=True)
            ]
        )
    return layer, tensors, exact


def load(vllm, layer, tensors):
    """Convert a layer as ModelOpt's method does, and return the instance that computes it with both weights."""
    ours = layer.quant_method.experts_cls
    new = vllm.modelopt.convert_to_nvfp4_moe_kernel_format(
        nvfp4_backend="MARLIN", layer=layer, **tensors
    )
    if new == "Marlin's format":
        instance, w13, w2 = ours(), tensors["w13"], tensors["w2"]
    else:
        w13, _, alphas1, a13, w2, _, alphas2, a2 = new
        assert a13 is None and a2 is None
        instance = ours(alphas1, alphas2)
    instance.process_weights_after_loading(layer)
    return instance, w13, w2


def run(
    instance, w13, w2, tokens, width=WIDTH, expert_map=None, experts=EXPERTS, dtype=torch.bfloat16
):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    weights = torch.rand(tokens, TOP_K, generator=generator)
    chosen = torch.rand(tokens, experts, generator=generator).topk(TOP_K).indices.int()
    _, m, n, k, top_k = instance.moe_problem_size(x, w13, w2, chosen)
    assert (m, n, k, top_k) == (tokens, width, HIDDEN, TOP_K)
    pairs = m * top_k
    common = torch.full(
        (max(pairs * max(n, k), m * k),), float("nan"), dtype=dtype
    )  # vLLM's output shares it
    output = common[: m * k].view(m, k)
    instance.apply(
        output=output, hidden_states=x, w1=w13, w2=w2, topk_weights=weights, topk_ids=chosen, activation="silu",
        global_num_experts=experts, expert_map=expert_map, a1q_scale=None, a2_scale=None,
        workspace13=common.view(-1)[: pairs * max(n, k)].view(pairs, -1),
        workspace2=torch.full((pairs * max(2 * n, k),), float("nan"), dtype=dtype),
        expert_tokens_meta=None, apply_router_weight_on_input=False,
    )  # fmt: skip
    return x, weights, chosen, output


def expected(x, weights, chosen, exact, expert_map=None):
    """Return the weighted sums in float64, with the roundings that a bf16 server has between the products."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (of_token, experts) in enumerate(zip(weights, chosen, strict=True)):
        for weight, expert in zip(of_token, experts, strict=True):
            here = int(expert) if expert_map is None else int(expert_map[expert])
            if here >= 0:
                gate, up = (exact[0][here] @ x[token].double()).to(x.dtype).double().chunk(2)
                inner = (torch.nn.functional.silu(gate) * up).to(x.dtype).double()
                out[token] += weight.double() * (exact[1][here] @ inner).to(x.dtype).double()
    return out


def apart(y, right):
    return float((y.double() - right).norm() / right.norm())


@pytest.fixture
def ours(vllm):
    vllm_layers.install(vllm_cuda.LOGGER)
    return vllm.nvfp4.backend_to_kernel_cls("MARLIN")[0]


def test_it_stands_where_vllm_takes_marlin_and_nowhere_else(vllm, ours):
    assert ours.__name__ == vllm_layers.EXPERTS_NAME and issubclass(ours, vllm.marlin)
    changed = vllm.nvfp4.convert_to_nvfp4_moe_kernel_format
    assert vllm.modelopt.convert_to_nvfp4_moe_kernel_format is changed is not convert
    vllm_layers.install(vllm_cuda.LOGGER)
    assert vllm.nvfp4.convert_to_nvfp4_moe_kernel_format is changed, "a second call changes nothing"
    assert vllm.nvfp4.backend_to_kernel_cls("CUTLASS") == ["class of CUTLASS"]
    layer, tensors, _ = mixture("class of CUTLASS")
    assert changed(nvfp4_backend="CUTLASS", layer=layer, **tensors) == "Marlin's format", (
        "vLLM's own conversion"
    )


@pytest.mark.parametrize(("width", "dtype"), [(WIDTH, torch.bfloat16), (128, torch.float16)])
def test_a_mixture_is_computed_with_the_routers_weights(vllm, ours, caplog, width, dtype):
    """width 128: rows of the experts follow each other in blocks of 256, and are repacked as one weight."""
    layer, tensors, exact = mixture(ours, width, dtype)
    with caplog.at_level(logging.INFO, vllm_cuda.LOGGER):
        instance, w13, w2 = load(vllm, layer, tensors)
    assert (
        len(caplog.messages) == 1
        and "NVFP4 experts run on this package's W4A16 kernel" in caplog.messages[0]
    )
    assert (w13.dtype, w13.dim(), len(w13)) == (torch.uint8, 2, EXPERTS)
    for tokens in (1, 7, 40):
        x, weights, chosen, y = run(instance, w13, w2, tokens, width, dtype=dtype)
        limit = 0.004 if dtype == torch.bfloat16 else 0.001
        assert apart(y, expected(x, weights, chosen, exact)) < limit
        # Negative controls: another expert, the router's weights left out, gate and up swapped.
        swapped = [torch.cat(w.chunk(2)[::-1]) for w in exact[0]]
        for wrong in (
            (x, weights, (chosen + 1) % EXPERTS, exact),
            (x, torch.ones_like(weights), chosen, exact),
            (x, weights, chosen, [swapped, exact[1]]),
        ):
            assert apart(y, expected(*wrong)) > 0.1


def test_a_model_that_adds_the_experts_outputs_itself_is_refused(vllm, ours):
    """vLLM 0.33 gives the hook after the weights are repacked; Marlin would call it and leave the sum to it."""
    instance, w13, w2 = load(vllm, *mixture(ours)[:2])
    instance.post_gemm2_hook = lambda unfinalized, output: None
    with pytest.raises(NotImplementedError, match="start vLLM without ANNIE_QUANT_VLLM_EXPERTS"):
        run(instance, w13, w2, 3)


def test_experts_of_other_ranks_and_shards_of_experts(vllm, ours):
    """Expert parallelism: a map of experts. Tensor parallelism: rows of gate and up, columns of down, and a sum over ranks."""
    expert_map = torch.tensor([-1, 0, -1, 1, 2, -1], dtype=torch.int32)
    layer, tensors, exact = mixture(ours, experts=3)
    instance, w13, w2 = load(vllm, layer, tensors)
    x, weights, chosen, y = run(instance, w13, w2, 9, expert_map=expert_map)
    assert apart(y, expected(x, weights, chosen, exact, expert_map)) < 0.004

    layer, tensors, exact = mixture(ours, 96)
    parts = []
    for rank in range(2):
        rows = slice(48 * rank, 48 * rank + 48)
        shard = dict(tensors)
        for name in ("w13", "w13_scale"):
            shard[name] = torch.cat(
                [half[:, rows] for half in tensors[name].data.chunk(2, 1)], 1
            ).contiguous()
        shard["w2"] = tensors["w2"].data[:, :, 24 * rank : 24 * rank + 24].contiguous()
        shard["w2_scale"] = tensors["w2_scale"][:, :, 3 * rank : 3 * rank + 3].contiguous()
        instance, w13, w2 = load(vllm, mixture(ours)[0], shard)
        x, weights, chosen, y = run(instance, w13, w2, 9)
        parts.append(y.clone())
    assert apart(sum(parts), expected(x, weights, chosen, exact)) < 0.006
    assert apart(parts[0], expected(x, weights, chosen, exact)) > 0.1


def test_layers_that_it_cannot_take_stay_on_marlin_with_one_line_per_reason(vllm, ours, caplog):
    cases = {
        "LoRA is enabled": lambda layer, tensors: setattr(layer.moe_config, "is_lora_enabled", True),
        "EPLB": lambda layer, tensors: setattr(layer.moe_config.moe_parallel_config, "enable_eplb", True),
        "not SiLU times up": lambda layer, tensors: setattr(layer.activation, "name", "GELU"),
        "weights are applied to the input": lambda layer, _: setattr(layer, "apply_router_weight_on_input", True),
        "activations are torch.float32": lambda layer, _: setattr(layer, "params_dtype", torch.float32),
        "block_scale is NaN": lambda _, tensors: tensors["w2_scale"].view(torch.uint8)[2, 5].fill_(0x7F),
        "not a positive number": lambda _, tensors: tensors["w13_scale_2"][1].fill_(0),
    }  # fmt: skip
    for number, (reason, change) in enumerate(cases.items()):
        caplog.clear()
        with caplog.at_level(logging.INFO, vllm_cuda.LOGGER):
            for again in range(2):
                layer, tensors, _ = mixture(ours, name=f"layer {number} {again}")
                change(layer, tensors)
                instance, w13, _ = load(vllm, layer, tensors)
                assert (
                    w13 is tensors["w13"]
                    and instance.apply(hidden_states=None) == "Marlin's product"
                )
                assert instance.moe_problem_size(None, None, None, None) == "Marlin's size"
        assert len(caplog.messages) == 1 and reason in caplog.messages[0], (reason, caplog.messages)
    layer, tensors, _ = mixture(ours, name="layer 0 0")
    load(vllm, layer, tensors)
    assert "layer 0 0" not in vllm_layers.on_marlin and "layer 0 1" in vllm_layers.on_marlin
    assert "layer 0 1" in vllm_cuda.compile_key()


@pytest.mark.parametrize("fault", ["nibbles", "scales", "experts", "alignment"])
def test_a_wrong_kernel_is_found_at_load_and_the_experts_stay_on_marlin(
    vllm, ours, monkeypatch, caplog, fault
):
    """The self-check's negative controls. "alignment": the server's own, which is part of what is checked."""
    if fault in ("nibbles", "scales"):
        monkeypatch.setattr(torch_op, "prepare", lambda *a: emulated_gemm.prepare(*a, fault=fault))
    right = grouped.prepare_experts
    if fault == "experts":
        monkeypatch.setattr(
            grouped,
            "prepare_experts",
            lambda *a: right(*a)._replace(packed=right(*a).packed.roll(1, 0)),
        )
    if fault == "alignment":
        module = sys.modules["vllm.model_executor.layers.fused_moe.moe_align_block_size"]

        def short(*arguments, **options):
            pairs, experts, padded = moe_align_block_size(*arguments, **options)
            return pairs, experts, padded - TILE

        module.moe_align_block_size = short
    with caplog.at_level(logging.INFO, vllm_cuda.LOGGER):
        for i in range(2):
            layer, tensors, _ = mixture(ours, name=f"model.layers.{i}.mlp.experts")
            instance, w13, _ = load(vllm, layer, tensors)
            assert w13 is tensors["w13"] and instance.apply() == "Marlin's product"
    assert len(caplog.messages) == 1 and "wrong on this device" in caplog.messages[0]


def test_ours_is_before_humming_where_vllm_prefers_humming_to_marlin(vllm):
    """vLLM 0.32 and 0.33 on Hopper; older ones have no such function."""
    vllm_layers.install(vllm_cuda.LOGGER)
    assert not hasattr(vllm.nvfp4, "prioritize_humming")
    vllm.nvfp4.prioritize_humming = lambda backends: sorted(backends)
    vllm_layers.install(vllm_cuda.LOGGER)
    assert vllm.nvfp4.prioritize_humming(["MARLIN", "HUMMING"]) == ["MARLIN", "HUMMING"]


def test_a_vllm_with_other_names_keeps_its_own_experts(vllm, monkeypatch, caplog):
    monkeypatch.setattr(vllm_cuda, "missing", lambda: "")
    monkeypatch.setattr(vllm_cuda, "_replace_marlin", lambda: None)
    monkeypatch.setenv(vllm_cuda.SWITCH, "1")
    vllm_cuda.register()
    assert not hasattr(vllm.nvfp4.backend_to_kernel_cls, "annie_quant"), (
        "experts need another switch"
    )
    monkeypatch.setenv(vllm_cuda.EXPERTS_SWITCH, "1")
    del vllm.nvfp4.convert_to_nvfp4_moe_kernel_format
    classes = vllm.nvfp4.backend_to_kernel_cls
    with caplog.at_level(logging.INFO, vllm_cuda.LOGGER):
        vllm_cuda.register()
    assert len(caplog.messages) == 1 and "NVFP4 experts stay" in caplog.messages[0]
    assert vllm.nvfp4.backend_to_kernel_cls is classes


def test_the_check_bounds_what_sums_in_float32_allow(vllm):
    """Above 1 for another tensor scale by 2 %, which is far below what a wrong block would give."""
    _, tensors, _ = mixture(None)
    parts = tensors["w13"].data, tensors["w13_scale"], tensors["w13_scale_2"]
    weights = grouped.prepare_experts(*parts)

    def worst(factor):
        return oracle.worst_experts_error(
            weights,
            *parts[:2],
            parts[2] * factor,
            torch.bfloat16,
            TOP_K,
            lambda c, t: align(c, EXPERTS, t),
        )

    assert worst(1.0) <= 1 < worst(1.02)
