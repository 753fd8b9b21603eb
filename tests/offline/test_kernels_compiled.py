"""The GPU kernels' operator in a whole transformers model under torch.compile and with a static cache; emulated on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "modelopt", reason="ModelOpt makes the checkpoints: pip install annie-quant[quantize]"
)

import emulated_gemm  # noqa: E402
from runtime_models import export_nvfp4, save_reference  # noqa: E402

from annie_quant import runtime  # noqa: E402
from annie_quant.offline import linears  # noqa: E402
from annie_quant.offline.linears import nvfp4_linears  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reference = save_reference(tmp_path_factory.mktemp("reference"), layers=2)
    return export_nvfp4(reference, tmp_path_factory.mktemp("naive"))


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch):
    emulated_gemm.install(monkeypatch)
    monkeypatch.setattr(linears, "can_use_kernels", lambda layer: layer.group == 16)
    model = runtime.load(folder, "w4a16", dtype=torch.bfloat16)
    for linear in nvfp4_linears(model).values():
        linear.prepare()
        assert linear.prepared is not None
    return model


def test_every_linear_is_one_call_of_the_operator_in_one_graph(model) -> None:
    calls: list[str] = []

    def backend(graph, inputs):
        calls.extend(str(n.target) for n in graph.graph.nodes if "nvfp4_linear" in str(n.target))
        return graph.forward

    ids = torch.randint(0, 1000, (2, 12), generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    with torch.inference_mode():
        expected = model(ids).logits
        compiled = torch.compile(model, backend=backend, fullgraph=True)(ids).logits
    assert torch.equal(compiled, expected)
    assert len(calls) == len(nvfp4_linears(model))


def test_generation_with_a_static_cache_gives_the_tokens_of_a_growing_one(model) -> None:
    ids = torch.randint(0, 1000, (1, 9), generator=torch.Generator().manual_seed(2))
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "return_dict_in_generate": False,
    }
    with torch.inference_mode():
        growing = model.generate(ids, **options)
        static = model.generate(ids, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(static, growing)
