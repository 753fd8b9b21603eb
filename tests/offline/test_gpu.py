"""W4A4 on a GPU against ModelOpt's own simulation there, its Triton kernels included, on tiny-annie.

ModelOpt's Triton kernel divides approximately, its export (and our codec) exactly. Weights exactly between two codes
are common (weight, amax and block scale have few significant bits), and there ModelOpt's simulation has other codes than
ModelOpt's checkpoint. Everything else is equal bit for bit, so logits are equal to the last bit with equal weights
(tests/perf/runtime.md has the figures).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from paths import TINY_ANNIE

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")

import modelopt_backend  # noqa: E402
from nvfp4_cases import MIDPOINTS  # noqa: E402
from runtime_models import simulated  # noqa: E402

from annie_quant import runtime  # noqa: E402
from annie_quant.offline import codec  # noqa: E402
from annie_quant.offline.linears import nvfp4_linears  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="ModelOpt's Triton kernels need a CUDA GPU"
    ),
]
DEVICE, LAST_BITS = "cuda", 2.0**-21  # relative; four last bits of a float32


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """theirs: logits of ModelOpt's simulation; inputs, rounded, weights: of each of its linears, in order; exact: its
    logits with our backend instead of its kernel; loaded: its export, loaded by us."""
    pytest.importorskip("triton", reason="ModelOpt's simulation of NVFP4 on a GPU needs triton")
    pytest.importorskip(
        "modelopt", reason="ModelOpt makes the checkpoints: pip install annie-quant[quantize]"
    )
    from modelopt.torch.export import export_hf_checkpoint

    folder = tmp_path_factory.mktemp("export")
    ids = torch.randint(0, 1000, (8, 128), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    run = SimpleNamespace(ids=ids, inputs={}, rounded={}, weights={}, plain={})
    with torch.inference_mode():
        model, linears = simulated(TINY_ANNIE, ids)

        def record(name: str):
            def hook(module, args, _):
                run.inputs[name], run.rounded[name] = (
                    args[0].clone(),
                    module.input_quantizer(args[0]),
                )
                run.weights[name] = module.weight_quantizer(module.weight)
                run.plain[name] = module.weight.clone()

            return hook

        hooks = [m.register_forward_hook(record(n)) for n, m in linears.items()]
        run.theirs = model(ids).logits.clone()
        for hook in hooks:
            hook.remove()
        modelopt_backend.register()
        quantizers = [q for m in linears.values() for q in (m.input_quantizer, m.weight_quantizer)]
        for quantizer in quantizers:
            quantizer.backend = modelopt_backend.NAME
        run.exact = model(ids).logits.clone()
        modelopt_backend.release(model)
        export_hf_checkpoint(model, export_dir=folder)
        run.loaded = runtime.load(
            folder, "w4a4", cache="float32", dtype=torch.float32, device=DEVICE
        )
    assert nvfp4_linears(run.loaded).keys() == run.inputs.keys()
    return run


def assert_at_ties(x: torch.Tensor, moved: torch.Tensor, tensor_scale: float, name: str) -> None:
    """Each value that was rounded differently, or its block's scale, is in the middle between two codes."""
    at = moved.reshape(-1, 16).nonzero()
    blocks = x.reshape(-1, 16)[at[:, 0]].double().abs()
    ideal = blocks.amax(1) / 6 / tensor_scale
    e4m3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().to(x.device)
    step = ideal.float().to(torch.float8_e4m3fn).double() * tensor_scale
    quotient = blocks.gather(1, at[:, 1:])[:, 0] / step
    middles = torch.tensor(MIDPOINTS, device=x.device, dtype=torch.float64)
    element = (quotient.unsqueeze(1) / middles - 1).abs().amin(1)
    scale = ((e4m3[1:] + e4m3[:-1]) / 2 / ideal.unsqueeze(1) - 1).abs().amin(1)
    assert (torch.minimum(element, scale) <= LAST_BITS).all(), name


@torch.inference_mode()
def test_activations_are_rounded_as_by_its_kernel(both: SimpleNamespace) -> None:
    differing = total = 0
    for name, linear in nvfp4_linears(both.loaded).items():
        scale = linear.scalars().input_scale
        moved = codec.fake_quant(both.inputs[name], scale) != both.rounded[name]
        assert_at_ties(both.inputs[name], moved, scale, name)
        differing, total = differing + int(moved.sum()), total + moved.numel()
    assert total > 10_000_000 and differing <= 1e-6 * total


@torch.inference_mode()
def test_weights_of_its_export_differ_from_its_simulation_at_exact_ties_alone(
    both: SimpleNamespace,
) -> None:
    differing = total = 0
    for name, linear in nvfp4_linears(both.loaded).items():
        moved = linear.dense != both.weights[name]
        assert_at_ties(both.plain[name], moved, linear.scalars().tensor_scale, name)
        differing, total = differing + int(moved.sum()), total + moved.numel()
    assert total > 5_000_000 and differing <= 1e-3 * total


@torch.inference_mode()
def test_logits_are_its_own_to_the_last_bit_where_its_kernel_divides_exactly(
    both: SimpleNamespace,
) -> None:
    assert torch.equal(both.loaded(both.ids).logits, both.exact)


@torch.inference_mode()
def test_logits_are_its_own_to_the_last_bit_with_its_weights(both: SimpleNamespace) -> None:
    linears = nvfp4_linears(both.loaded)
    before = {name: linear.dense for name, linear in linears.items()}
    try:
        for name, linear in linears.items():
            linear.dense = both.weights[name]
        assert torch.equal(both.loaded(both.ids).logits, both.theirs)
    finally:
        for name, linear in linears.items():
            linear.dense = before[name]
