"""ModelOpt's quantized forwards on a CPU through our fake quantizer."""

import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)
pytest.importorskip("modelopt", reason="pip install annie-quant[quantize]")
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")

import modelopt_backend  # noqa: E402
from runtime_models import save_reference  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from annie_quant import runtime  # noqa: E402


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference(tmp_path_factory.mktemp("reference"))


def ids() -> "torch.Tensor":
    return torch.randint(0, 1000, (2, 32), generator=torch.Generator().manual_seed(0))


def quantized(reference: Path, config: str):
    import modelopt.torch.quantization as mtq

    modelopt_backend.register()
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mtq.quantize(
            model, modelopt_backend.with_backend(getattr(mtq, config)), lambda m: m(ids())
        )


def test_simulated_linears_equal_those_of_modelopts_export(reference: Path, tmp_path: Path) -> None:
    from modelopt.torch.export import export_hf_checkpoint

    model = quantized(reference, "NVFP4_DEFAULT_CFG")
    # q/k/v, gate/up and qkv/z share one amax once exported; these three have their own before and after.
    names = [
        n
        for n, _ in model.named_modules()
        if n.endswith(("down_proj", "o_proj", "linear_attn.out_proj"))
    ]
    torch.manual_seed(0)
    inputs = {n: torch.randn(6, model.get_submodule(n).in_features) for n in names}
    with torch.inference_mode():
        simulated = {n: model.get_submodule(n)(x) for n, x in inputs.items()}
    modelopt_backend.release(model)
    export_hf_checkpoint(model, export_dir=tmp_path)
    loaded = runtime.load(tmp_path, "w4a4", cache="float32", dtype=torch.float32)
    assert len(names) == 8
    for name, x in inputs.items():
        with torch.inference_mode():
            torch.testing.assert_close(
                loaded.get_submodule(name)(x), simulated[name], atol=1e-5, rtol=1e-4
            )


def test_gradients_pass_straight_through(reference: Path) -> None:
    model = quantized(reference, "NVFP4_MLP_ONLY_CFG")
    model(ids()).logits.square().mean().backward()
    gradient = model.model.layers[0].mlp.down_proj.weight.grad
    assert gradient is not None and gradient.isfinite().all() and gradient.abs().sum() > 0
