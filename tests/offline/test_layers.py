"""Sensitivity by layer: a damaged layer stands out both ways, restoring all layers gives the reference, a killed run resumes."""

import json
import shutil
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
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")

from runtime_models import export_nvfp4, save_reference  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from annie_quant import runtime  # noqa: E402
from annie_quant.core.errors import UsageError  # noqa: E402
from annie_quant.judge import Case, Workload  # noqa: E402
from annie_quant.offline import layers as module  # noqa: E402
from annie_quant.offline.linears import nvfp4_linears  # noqa: E402

DAMAGED = "layers.2.mlp"


def workloads() -> list[Workload]:
    cases = tuple(
        Case(f"c{i}", ({"role": "user", "content": f"What is {i} and {i}?"},)) for i in range(3)
    )
    return [Workload("plain", "", None, "Be brief.", None, False, 8, 0, ("non_empty",), cases)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    reference = save_reference(tmp_path_factory.mktemp("reference"))
    naive = export_nvfp4(reference, tmp_path_factory.mktemp("naive"))
    tensors = load_file(naive / "model.safetensors")
    for part in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"model.{DAMAGED}.{part}.weight_scale_2"] *= 2.5
    save_file(tensors, naive / "model.safetensors", metadata={"format": "pt"})
    return reference, naive


@pytest.fixture(scope="module")
def measured(
    folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict, Path]:
    reference, naive = folders
    output = tmp_path_factory.mktemp("out") / "sensitivity.json"
    return runtime.sensitivity(
        naive, reference, workloads(), output=output, cache=output.parent
    ), output


def test_the_damaged_layer_stands_out_both_ways(measured) -> None:
    result, _ = measured
    alone = {k: v["mean"] for k, v in result["alone"].items()}
    restored = {k: v["mean"] for k, v in result["restored"].items()}
    assert set(alone) == set(restored) and len(alone) == 8, (
        "attention or DeltaNet, and MLP, of four layers"
    )
    assert max(alone, key=alone.get) == DAMAGED == min(restored, key=restored.get)
    assert restored[DAMAGED] < 0.7 * result["all"]["mean"]


def test_restoring_everything_is_the_reference(folders) -> None:
    reference, naive = folders
    model = runtime.load(naive, "w4a4", cache="float32", dtype=torch.float32)
    plain = runtime.load(reference, dtype=torch.float32)
    linears = nvfp4_linears(model)
    ids = torch.randint(0, 1000, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        quantized = model(ids).logits
        originals = {n: plain.get_submodule(n).weight for n in linears}
        with module.restored_linears(linears, originals):
            assert torch.equal(model(ids).logits, plain(ids).logits)
        assert torch.equal(model(ids).logits, quantized)


def test_a_finished_run_measures_nothing_again_and_a_killed_one_resumes(
    folders, measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, naive = folders
    result, output = measured
    copy = tmp_path / "sensitivity.json"
    shutil.copyfile(output, copy)
    calls = []
    plain = module.measure_divergence
    monkeypatch.setattr(module, "measure_divergence", lambda *a: calls.append(1) or plain(*a))
    again = runtime.sensitivity(naive, reference, workloads(), output=copy, cache=output.parent)
    assert again == result and not calls
    half = json.loads(copy.read_text())
    del half["restored"], half["alone"][DAMAGED]
    copy.write_text(json.dumps(half))
    assert (
        runtime.sensitivity(naive, reference, workloads(), output=copy, cache=output.parent)
        == result
    )
    assert len(calls) == 9


def test_a_model_without_nvfp4_is_refused(folders, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no NVFP4"):
        runtime.sensitivity(folders[0], folders[0], workloads(), cache=tmp_path)
