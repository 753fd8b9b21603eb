"""The report of the vLLM plug-in: a stand-in for vLLM's loader whose model drops tensors as real ones do, and the doctor's reading.

The class names of the lines are those that the real vLLM 0.32 reported on a CPU (2026-11-27; 0.26's for the second one).
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import checkpoint_zoo as zoo
import msgspec
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from annie_quant.checkpoint import ModelFolder  # noqa: E402
from annie_quant.core.errors import AnnieError, UsageError  # noqa: E402
from annie_quant.documents import LoadedModel  # noqa: E402
from annie_quant.ops import served_model, vllm_report  # noqa: E402


class Fp4LinearMethod:
    """A quantization method with a kernel, under names like vLLM's."""

    def __init__(self) -> None:
        self.kernel = type("MarlinNvFp4LinearKernel", (), {})()


class Merged(torch.nn.Module):
    """gate and up in one parameter, with one scale for each, as vLLM's MergedColumnParallelLinear has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.quant_method = Fp4LinearMethod()


class Model(torch.nn.Module):
    drops: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = Merged()

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            part = 0 if "gate" in name else 1
            if name in self.drops:
                continue
            if name.endswith("weight"):
                self.gate_up_proj.weight.data.narrow(0, 4 * part, 4).copy_(tensor)
            else:
                self.gate_up_proj.scale.data[part] = tensor.reshape(())


WEIGHT, SCALE = torch.ones(4, 4), torch.ones(1)
STORED = {
    f"{p}_proj.{e}": t for p in ("gate", "up") for e, t in (("weight", WEIGHT), ("scale", SCALE))
}


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> type:
    """vLLM's two loader classes, with what the plug-in uses of them."""

    class BaseModelLoader:
        def load_model(self, vllm_config: Any, model: Model) -> Model:
            self.load_weights(model, None)
            return model

    class DefaultModelLoader(BaseModelLoader):
        def get_all_weights(self, model_config: object, model: Model) -> Any:
            yield from STORED.items()

        def load_weights(self, model: Model, model_config: object) -> None:
            model.load_weights(self.get_all_weights(model_config, model))

    for name, content in (
        ("vllm", {"__version__": "0.32.0"}),
        ("vllm.model_executor", {}),
        ("vllm.model_executor.model_loader", {}),
        ("vllm.model_executor.model_loader.base_loader", {"BaseModelLoader": BaseModelLoader}),
        (
            "vllm.model_executor.model_loader.default_loader",
            {"DefaultModelLoader": DefaultModelLoader},
        ),
    ):
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return DefaultModelLoader


@pytest.mark.parametrize(
    ("drops", "unread", "incomplete"),
    [
        ((), [], []),
        (("up_proj.weight",), ["up_proj.weight"], ["gate_up_proj.weight"]),
        (("gate_proj.scale",), ["gate_proj.scale"], ["gate_up_proj.scale"]),
    ],
)
def test_a_part_of_a_shared_parameter_that_is_dropped_is_reported(
    loader: type, tmp_path: Path, drops: tuple[str, ...], unread: list[str], incomplete: list[str]
) -> None:
    vllm_report.install(tmp_path / "load.jsonl")
    vllm_report.install(tmp_path / "twice.jsonl")
    model = Model()
    model.drops = drops
    config = types.SimpleNamespace(instance_id="a", parallel_config=types.SimpleNamespace(rank=1))
    loader().load_model(config, model)
    (line,) = served_model.read_report(tmp_path / "load.jsonl")
    assert not (tmp_path / "twice.jsonl").exists()
    assert (line.start, line.rank, line.model, line.vllm) == ("a", 1, "Model", "0.32.0")
    assert line.linears == {"gate_up_proj": ["Fp4LinearMethod", "MarlinNvFp4LinearKernel"]}
    assert (line.unread, line.incomplete) == (unread, incomplete)
    assert set(line.used) == set(STORED) - set(drops)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("checkpoints")
    return zoo.nvfp4(home / "nvfp4", zoo.bf16(home / "bf16"))


def line(checkpoint: Path, **changes: Any) -> LoadedModel:
    names = list(ModelFolder(checkpoint))
    linears = {
        "model.layers.1.mlp.gate_up_proj": ["ModelOptLinearMethod", "AnnieNvFp4LinearKernel"],
        "model.layers.0.mlp.down_proj": ["ModelOptNvFp4LinearMethod", "MarlinNvFp4LinearKernel"],
        "lm_head": ["UnquantizedEmbeddingMethod"],
    }
    fields = {
        "used": names,
        "linears": linears,
        "unread": [],
        "incomplete": ["model.layers.1.self_attn.attn.k_scale"],
    }
    fixed = {"start": "a", "rank": 0, "model": "Qwen3_5ForCausalLM", "vllm": "0.32.0"}
    return LoadedModel(**(fixed | fields | changes))


def levels(checkpoint: Path, *loads: LoadedModel) -> list[tuple[str, str]]:
    return [(f.check, f.level) for f in served_model.check_load(checkpoint, list(loads))]


def test_a_complete_load_passes(checkpoint: Path) -> None:
    assert levels(checkpoint, line(checkpoint)) == [("tensors", "ok"), ("formats", "ok")]


def test_ranks_and_drafts_are_read_together(checkpoint: Path) -> None:
    names = list(ModelFolder(checkpoint))
    halves = [line(checkpoint, used=names[::2]), line(checkpoint, used=names[1::2], rank=1)]
    assert levels(checkpoint, *halves) == [("tensors", "ok"), ("formats", "ok")]
    assert levels(checkpoint, halves[0])[0] == ("tensors", "fault")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (
            {"incomplete": ["model.layers.1.mlp.gate_up_proj.weight_scale_2"]},
            "without all of their values",
        ),
        ({"used": ["another.model.weight"]}, "not in the checkpoint"),
        (
            {"linears": {"lm_head": ["ModelOptNvFp4LinearMethod"]}},
            "lm_head by ModelOptNvFp4LinearMethod",
        ),
        (
            {
                "linears": {
                    "model.layers.1.mlp.gate_up_proj": ["ModelOptLinearMethod", "CutlassFP8Kernel"]
                }
            },
            "by ModelOptLinear",
        ),
        (
            {"linears": {"model.layers.1.mlp.gate_up_proj": ["UnquantizedLinearMethod"]}},
            "gate_up_proj by Unquantized",
        ),
    ],
)
def test_each_fault_of_a_load_is_found(
    checkpoint: Path, changes: dict[str, Any], word: str
) -> None:
    faults = [
        f
        for f in served_model.check_load(checkpoint, [line(checkpoint, **changes)])
        if f.level == "fault"
    ]
    assert any(word in f.message for f in faults), faults


def test_only_the_newest_start_counts_and_other_files_are_one_line(
    checkpoint: Path, tmp_path: Path
) -> None:
    report = tmp_path / "load.jsonl"
    old, new = line(checkpoint), line(checkpoint, rank=3)
    new = msgspec.structs.replace(new, start="b")
    report.write_bytes(b"\n".join(map(msgspec.json.encode, (old, new))) + b"\n")
    assert [load.rank for load in served_model.read_report(report)] == [3]
    report.write_text("not JSON\n")
    with pytest.raises(AnnieError, match="line 1"):
        served_model.read_report(report)
    with pytest.raises(UsageError, match="no such file"):
        served_model.read_report(tmp_path / "none")
