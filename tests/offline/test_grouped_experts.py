"""A mixture's experts by the grouped kernel in the transformers runtime: emulated on a CPU, against the experts one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch: pip install annie-quant[quantize]")
pytest.importorskip("transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]")

import emulated_gemm  # noqa: E402
from runtime_models import save_mixture  # noqa: E402

from annie_quant import quantize, runtime  # noqa: E402
from annie_quant.gemm import grouped  # noqa: E402
from annie_quant.offline import experts, nvfp4_linear  # noqa: E402
from annie_quant.offline.experts import SingleExperts  # noqa: E402
from annie_quant.offline.nvfp4_linear import NVFP4Linear  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("mixture")
    quantize.run("direct", save_mixture(home / "bf16"), home / "direct")
    return home / "direct"


@pytest.fixture
def layer(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a layer's experts of a loaded checkpoint, w4a16, with a count of launches."""
    emulated_gemm.install(monkeypatch)
    model = runtime.load(folder, "w4a16", dtype=torch.bfloat16)
    experts = next(m for m in model.modules() if isinstance(m, SingleExperts))
    monkeypatch.setattr(nvfp4_linear, "can_use_kernels", lambda linear: linear.group == 16)
    monkeypatch.setattr(grouped, "plan_tokens", lambda *shape: 16)
    return experts


def inputs(layer: SingleExperts, tokens: int, top_k: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, layer.get_submodule("0.gate_proj").in_features, generator=generator).bfloat16()
    chosen = torch.rand(tokens, layer.count, generator=generator).topk(top_k).indices
    return x, chosen, torch.rand(tokens, top_k, generator=generator)


def one_by_one(layer: SingleExperts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the same layer's output with weights dequantized in float32 and bf16 between the products, summed in float32."""
    out = torch.zeros(x.shape)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gate, up, down = (
                layer.get_submodule(f"{expert}.{name}_proj").rows(0, None, torch.float32)
                for name in ("gate", "up", "down")
            )
            act = layer.get_submodule("0").act_fn
            inner = act((gate @ x[token].float()).bfloat16()) * (up @ x[token].float()).bfloat16()
            out[token] += weight * (down @ inner.float()).bfloat16().float()
    return out


def apart(y: torch.Tensor, right: torch.Tensor) -> float:
    return float((y.float() - right.float()).norm() / right.float().norm())


@pytest.mark.parametrize("tokens", [1, 5, 33])
@torch.inference_mode()
def test_one_launch_per_matrix_gives_what_the_experts_give_one_by_one(layer, monkeypatch, tokens: int) -> None:
    x, chosen, weights = inputs(layer, tokens)
    launches = []
    right = emulated_gemm.experts_product

    def product(*arguments):
        launches.append(arguments[1].shape[0])
        return right(*arguments)

    monkeypatch.setattr(torch.ops.annie_quant, "nvfp4_experts", product)
    y = layer(x, chosen, weights)
    assert launches == [layer.count] * 3 and y.dtype == torch.bfloat16
    expected = one_by_one(layer, x, chosen, weights)
    assert apart(y, expected) < 0.004
    # Negative controls: other experts, equal weights, and the loop over experts, which adds in bf16.
    assert apart(y, one_by_one(layer, x, (chosen + 1) % layer.count, weights)) > 0.1
    assert apart(y, one_by_one(layer, x, chosen, torch.ones_like(weights))) > 0.1
    monkeypatch.setattr(nvfp4_linear, "can_use_kernels", lambda linear: False)
    assert apart(layer(x, chosen, weights), expected) < 0.01
    assert len(launches) == 3


def test_the_experts_run_one_by_one_where_the_kernel_would_compute_something_else(layer, monkeypatch) -> None:
    x, chosen, weights = inputs(layer, 3)

    def uses_kernel(x=x) -> bool:
        return layer.find_kernel(x) is not None

    assert uses_kernel()
    assert not uses_kernel(x.float()) and not uses_kernel(x[:0]) and not uses_kernel(x.clone().requires_grad_())
    with torch.no_grad():
        assert uses_kernel(x.clone().requires_grad_())
    last: NVFP4Linear = layer.get_submodule(f"{layer.count - 1}.down_proj")
    for name, value, plain in (("numerics", "w4a4", "w4a16"), ("parts", 2, 1), ("permutation", torch.arange(4), None)):
        setattr(last, name, value)
        assert not uses_kernel(), name
        setattr(last, name, plain)
        assert uses_kernel(), name
    last.set_numerics("vllm-marlin")
    assert uses_kernel()
    last.set_cache("bf16")
    assert not uses_kernel()
    last.set_cache("packed")
    observed = []
    handle = last.register_forward_hook(lambda module, inputs, output: observed.append(len(output)))
    with torch.inference_mode():
        layer(x, torch.full_like(chosen, layer.count - 1), weights)
    assert observed, "an observer sees the tokens of its expert"
    handle.remove()
    assert uses_kernel()


@torch.inference_mode()
def test_the_settings_of_all_linears_are_read_once_until_something_changes(layer, monkeypatch) -> None:
    x, chosen, weights = inputs(layer, 2)
    read = []
    is_changed = experts.is_changed
    monkeypatch.setattr(experts, "is_changed", lambda linear: read.append(linear) or is_changed(linear))
    first = layer(x, chosen, weights)
    every = 3 * layer.count
    assert len(read) == every
    assert torch.equal(layer(x, chosen, weights), first) and len(read) == every, "the second step reads nothing"
    assert layer.find_kernel(x.float()) is None, "the input is looked at in each step"
    last = layer.get_submodule(f"{layer.count - 1}.down_proj")
    for change in (
        lambda: last.set_numerics("vllm-marlin"),
        lambda: last.set_cache("packed"),
        lambda: last.register_forward_hook(lambda *arguments: None).remove(),
        lambda: last.register_forward_pre_hook(lambda *arguments: None).remove(),
        lambda: setattr(layer.get_submodule("0"), "up_proj", layer.get_submodule("0.up_proj")),
        lambda: layer.add_module("0", layer.get_submodule("0")),
    ):
        read.clear()
        change()
        assert layer.find_kernel(x) is not None and len(read) == every, "a change"
        assert layer.find_kernel(x) is not None and len(read) == every, "once"
    last.numerics = "w4a4"
    assert layer.find_kernel(x) is None and layer.find_kernel(x) is None


@torch.inference_mode()
def test_another_weight_is_repacked_again(layer) -> None:
    x, chosen, weights = inputs(layer, 4)
    first = layer(x, chosen, weights)
    assert layer.grouped is not None and layer.grouped.prepared is not None
    layer.to(torch.bfloat16)
    assert layer.grouped is None, "moved or changed tensors"
    assert torch.equal(layer(x, chosen, weights), first)
    for expert in map(str, range(layer.count)):
        single = layer.get_submodule(expert)
        single.gate_proj, single.up_proj = single.up_proj, single.gate_proj
    assert not torch.equal(layer(x, chosen, weights), first), "replaced linears"
    assert apart(layer(x, chosen, weights), one_by_one(layer, x, chosen, weights)) < 0.004
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer.get_submodule("1.gate_proj"), "bias", torch.nn.Parameter(torch.zeros(1)))
        layer.grouped = None
        assert layer.find_kernel(x) is None


@torch.inference_mode()
def test_a_whole_model_is_as_near_to_float32_as_with_its_experts_one_by_one(folder: Path, layer, monkeypatch) -> None:
    """bf16 between the layers moves the logits of this random model by several percent, in either way."""
    ids = torch.randint(0, 1000, (1, 8), generator=torch.Generator().manual_seed(1))
    expected = runtime.load(folder, "w4a16", dtype=torch.float32)(ids).logits
    model = runtime.load(folder, "w4a16", dtype=torch.bfloat16)
    by_kernel = apart(model(ids).logits, expected)
    layers = [m for m in model.modules() if isinstance(m, SingleExperts)]
    assert layers and all(m.grouped is not None and m.grouped.prepared is not None for m in layers)
    monkeypatch.setattr(nvfp4_linear, "can_use_kernels", lambda linear: False)
    assert by_kernel < 1.5 * apart(model(ids).logits, expected)
