"""best in torch: both streams, same seed same bytes, and a kill between layers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import runtime_models

from annie_quant import checkpoint, nvfp4, quantize
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.data.rows import read_conversations

torch = pytest.importorskip(
    "torch", reason="calibration runs on torch: pip install annie-quant[quantize]"
)
from calibration_texts import make_batches  # noqa: E402

from annie_quant.quantize import calibration_samples, calibration_text  # noqa: E402

pytest.importorskip(
    "transformers", reason="models are loaded with transformers: pip install annie-quant[quantize]"
)
from annie_quant.quantize import rounding  # noqa: E402
from annie_quant.quantize.gptq import Hessian  # noqa: E402
from annie_quant.quantize.layerwise import DecoderLayers  # noqa: E402
from annie_quant.quantize.rounding import RoundingTask, StreamRounder  # noqa: E402
from annie_quant.quantize.strategy import Method  # noqa: E402

LAYERS = 4


@pytest.fixture(scope="module", autouse=True)
def on_a_gpu() -> Iterator[None]:
    """Layers are rounded by StreamRounder, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "device_kind", lambda: "cuda")
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runtime_models.save_with_conversations(tmp_path_factory.mktemp("best"))


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """A checkpoint of a run without interruption."""
    return run(home, "whole")


def run(home: Path, name: str, model: str = "model", **options) -> Path:
    settings = {
        "calib_data": home / "calib.jsonl",
        "calib_samples": 2,
        "activations": 4,
        **options,
    }
    quantize.run("best", home / model, home / name, **settings)
    return home / name


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_the_result_is_plain_nvfp4_and_passes_the_audit(home: Path, whole: Path) -> None:
    for folder in (whole, run(home, "weights-only", activations=16)):
        audit = checkpoint.audit(folder, source=home / "model")
        assert audit.ok, [f.message for f in audit.findings]
        quantized = {n for n in ModelFolder(folder) if n.endswith("weight_scale_2")}
        assert len(quantized) == 3 * 6 + 7


def test_the_same_seed_gives_the_same_bytes(home: Path, whole: Path) -> None:
    assert contents(run(home, "again")) == contents(whole)


@pytest.mark.parametrize(
    "layer", [1, LAYERS - 1]
)  # in the middle, and with nothing left but the export
def test_a_run_that_dies_after_a_layer_continues_with_the_same_bytes(
    home: Path, whole: Path, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends between two layers without any clean-up of ours; the next run reads what is on the disk."""
    saved, rounded = rounding.LayerResult.save, []

    def save(self: rounding.LayerResult, path: Path) -> None:
        saved(self, path)
        rounded.append(path.name)
        if len(rounded) == layer + 1:
            (path.with_name(f".{path.name}.part")).write_bytes(
                b"torn"
            )  # of a writer that was killed
            raise KeyboardInterrupt

    monkeypatch.setattr(rounding.LayerResult, "save", save)
    with pytest.raises(KeyboardInterrupt):
        run(home, f"killed{layer}")
    assert not (home / f"killed{layer}").exists()
    calls: list[str] = []
    monkeypatch.setattr(
        rounding.LayerResult,
        "save",
        lambda self, path: (calls.append(path.name), saved(self, path)),
    )
    after = contents(run(home, f"killed{layer}"))
    assert len(calls) == LAYERS - layer - 1, "finished layers are not rounded again"
    assert after == contents(whole)
    assert not (home / f".killed{layer}.work").exists()


def test_other_settings_do_not_continue_an_interrupted_run(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, calls = rounding.LayerResult.save, []

    def save(self: rounding.LayerResult, path: Path) -> None:
        saved(self, path)
        calls.append(path.name)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(rounding.LayerResult, "save", save)
    with pytest.raises(KeyboardInterrupt):
        run(home, "other")
    run(home, "other", damping=0.1)
    assert len(calls) == 2 + LAYERS


def test_both_streams_are_the_models(home: Path) -> None:
    """One stream is the source's hidden states; the other one is that of the rounded weights, with no input rounded."""
    folder = ModelFolder(home / "model")
    samples = calibration_text.samples_of_rows(
        home / "model", read_conversations(home / "calib.jsonl", 4)
    )
    model = DecoderLayers(folder, make_batches(samples, 1024))
    chosen = [
        n.removesuffix(".weight")
        for n in folder
        if "_proj.weight" in n and folder.info(n).shape[0] > 8
    ]
    method = Method()
    source, packed = list(model.states), {}
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32).eval()
    ids = [torch.from_numpy(batch.ids) for batch in model.batches]
    with torch.inference_mode():
        expected = [whole.model(i, output_hidden_states=True).hidden_states for i in ids]
        for layer in model:
            result = StreamRounder(
                layer, RoundingTask(chosen, torch.tensor([0.1, 1, 1, 1, 1]), method), source
            ).round()
            packed |= {f"{layer.name}.{name}": tensor for name, tensor in result.packed.items()}
            for state, hidden in zip(source, expected, strict=True):
                state = whole.model.norm(state) if layer.last else state
                assert (state - hidden[layer.index + 1]).abs().max() < 1e-3
        for name, tensor in packed.items():
            weight = whole.get_parameter(f"{name}.weight")
            weight.data = torch.from_numpy(nvfp4.unpack(tensor, "float32"))
        for rounded, i, hidden, batch in zip(
            model.states, ids, expected, model.batches, strict=True
        ):
            last = whole.model(i, output_hidden_states=True).hidden_states[LAYERS - 1]
            real = torch.from_numpy(batch.kinds != calibration_samples.PADDING)
            assert (
                (rounded - last)[real].abs().max()
                < 1e-3
                < (rounded - hidden[LAYERS - 1])[real].abs().max()
            )


def test_inputs_that_hold_nan_are_reported_and_the_linear_is_rounded(
    home: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(home / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][5] = 0
    weights["model.layers.2.post_attention_layernorm.weight"][3] = torch.inf
    save_file(weights, tmp_path / "model/model.safetensors", {"format": "pt"})
    options = {"calib_data": home / "calib.jsonl", "calib_samples": 4}
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError):
        # Nothing after an infinite norm can be calibrated; the export refuses to guess an input scale.
        quantize.run("best", tmp_path / "model", tmp_path / "out", activations=4, **options)
    assert "model.layers.1.mlp.down_proj" not in caplog.text, (
        "one input that is always 0 is no reason for a warning"
    )
    assert "model.layers.2.mlp.gate_proj, model.layers.2.mlp.up_proj: " in caplog.text
    assert "calibration inputs hold NaN or inf; rounded without error correction" in caplog.text
    for settings in (
        options,
        {**options, "activations": 4, "calib_samples": 10},
    ):
        with pytest.raises(
            CheckpointError, match="probabilities of the calibration answers are not finite"
        ):
            quantize.run("best", tmp_path / "model", tmp_path / "out", **settings)


def test_a_mixture_is_rounded_with_its_experts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime_models.save_mixture(home / "mixture", experts=6, unused=2)
    lines: list[str] = []
    solved: list[list[str]] = []
    round_group = StreamRounder.round_group

    def counted(
        self: StreamRounder, group: list[str], hessian: Hessian, tops: dict[str, float]
    ) -> Iterator[object]:
        if hessian.tokens:
            solved.append(list(group))
        return round_group(self, group, hessian, tops)

    monkeypatch.setattr(StreamRounder, "round_group", counted)
    out = run(home, "mixture-out", "mixture", report=lines.append, calib_samples=2)
    audit = checkpoint.audit(out, source=home / "mixture")
    assert audit.ok, [f.message for f in audit.findings]
    assert any("expert coverage" in line and "saw none" in line for line in lines)
    of_experts = [
        {name.partition(".experts.")[2].partition(".")[0] for name in names} for names in solved
    ]
    assert all(len(numbers) == 1 for numbers in of_experts), "the linears of one expert at a time"
    assert {n for numbers in of_experts for n in numbers} == {"", "0", "1", "3", "4", "5"}, (
        "expert 2 saw no token"
    )
    (line,) = [line for line in lines if line.startswith("expert coverage")]
    assert "of 24 experts" in line and all(f"layers.{i}.mlp.experts.2" in line for i in range(3))
    assert any(
        line.startswith("rounding: layer 4 of 4, ") and line.endswith(" s left") for line in lines
    )


def test_the_experts_of_a_layer_have_one_line_where_their_warnings_are_alike() -> None:
    warnings = [
        f"model.layers.3.mlp.experts.{i}.up_proj: {9 - i} of 64 inputs are always 0"
        for i in range(5)
    ]
    other, plain = (
        "model.layers.3.mlp.experts.7.up_proj: NaN",
        "model.layers.3.mlp.shared_expert.up_proj: 2 of 64 inputs",
    )
    lines = rounding.one_per_layer([plain, *warnings, other, plain.replace("2", "1")])
    assert lines == [
        plain,
        f"{warnings[0]} (4 more of this layer's experts: alike)",
        other,
        plain.replace("2", "1"),
    ]
