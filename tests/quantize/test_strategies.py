"""The strategies on a small Qwen3.5: what is quantized and what is not, and atomic outputs."""

import json
from pathlib import Path

import checkpoint_zoo as zoo
import ml_dtypes
import numpy as np
import pytest
from paths import TINY_ANNIE

from annie_quant import checkpoint, nvfp4, quantize
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError, UsageError


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from annie_quant import data

    path = tmp_path_factory.mktemp("calib") / "c.jsonl"
    data.generate("annie", teacher="offline", n=20, output=path, seed=1)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, calibration: Path) -> dict[str, Path]:
    pytest.importorskip(
        "transformers", reason="naive and mlp_only calibrate: pip install annie-quant[quantize]"
    )
    root = tmp_path_factory.mktemp("models")
    for strategy in ("naive", "mlp_only", "direct"):
        quantize.run(strategy, TINY_ANNIE, root / strategy, calib_data=calibration, calib_samples=4)
    return {s: root / s for s in ("naive", "mlp_only", "direct")}


def quantized(folder: Path) -> set[str]:
    model = ModelFolder(folder)
    return {
        n.removesuffix(".weight")
        for n in model
        if n.endswith(".weight") and model.info(n).dtype == "U8"
    }


def linears() -> set[str]:
    source = ModelFolder(TINY_ANNIE)
    two = {
        n.removesuffix(".weight")
        for n in source
        if n.endswith(".weight") and len(source.info(n).shape) == 2
    }
    return {n for n in two if not n.endswith(("embed_tokens", "lm_head", "in_proj_a", "in_proj_b"))}


def test_naive_and_direct_quantize_every_linear_but_the_head(models: dict[str, Path]) -> None:
    assert quantized(models["naive"]) == linears()
    assert quantized(models["direct"]) == linears()


def test_mlp_only_does_not_change_attention_and_deltanet(models: dict[str, Path]) -> None:
    assert quantized(models["mlp_only"]) == {n for n in linears() if ".mlp." in n}
    source, result = ModelFolder(TINY_ANNIE), ModelFolder(models["mlp_only"])
    for name in source:
        if ".self_attn." in name or ".linear_attn." in name:
            assert source.tensor(name).tobytes() == result.tensor(name).tobytes(), name


@pytest.mark.parametrize("strategy", ["naive", "mlp_only", "direct"])
def test_every_output_passes_the_audit(models: dict[str, Path], strategy: str) -> None:
    audit = checkpoint.audit(models[strategy], source=TINY_ANNIE)
    assert audit.ok, [f.message for f in audit.findings]


def test_direct_and_naive_write_the_same_weights(models: dict[str, Path]) -> None:
    """Same rule, same shared scales, byte for byte; test_max_calibration.py compares naive with ModelOpt."""
    ours, theirs = ModelFolder(models["direct"]), ModelFolder(models["naive"])
    for module in sorted(linears()):
        for tensor in ("weight", "weight_scale", "weight_scale_2"):
            a, b = ours.tensor(f"{module}.{tensor}"), theirs.tensor(f"{module}.{tensor}")
            assert a.tobytes() == b.tobytes(), f"{module}.{tensor}"


def test_a_multimodal_source_keeps_its_form_and_gets_the_same_bytes(
    tmp_path: Path, models: dict[str, Path], calibration: Path
) -> None:
    """Published Qwen3.5 checkpoints are multimodal."""
    source, plain = tmp_path / "vl", ModelFolder(TINY_ANNIE)
    tensors, config = zoo.read(TINY_ANNIE), dict(plain.config)
    zoo.multimodal(tensors, config)
    tensors["model.visual.merger.linear_fc1.weight"] = np.ones((64, 64), ml_dtypes.bfloat16)
    zoo.save(source, tensors, config)
    quantize.run("naive", source, tmp_path / "naive", calib_data=calibration, calib_samples=4)
    audit = checkpoint.audit(tmp_path / "naive", source=source)
    assert audit.ok, [f.message for f in audit.findings]
    ours, theirs = ModelFolder(tmp_path / "naive"), ModelFolder(models["naive"])
    assert ours.config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert np.all(ours.tensor("model.visual.merger.linear_fc1.weight") == 1)
    for name in theirs:
        deeper = (
            name.replace("model.", "model.language_model.", 1)
            if name.startswith("model.")
            else name
        )
        assert ours.tensor(deeper).tobytes() == theirs.tensor(name).tobytes(), name


def test_direct_is_weight_only(models: dict[str, Path]) -> None:
    config = json.loads((models["direct"] / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "W4A16_NVFP4"
    assert not [n for n in ModelFolder(models["direct"]) if n.endswith("input_scale")]


@pytest.mark.parametrize("scale", ["four_over_six", "sweep"])
def test_searched_scales_come_closer_to_the_weights(
    tmp_path: Path, models: dict[str, Path], scale: str
) -> None:
    quantize.run("direct", TINY_ANNIE, tmp_path / scale, scale=scale)
    source = ModelFolder(TINY_ANNIE)

    def error(folder: Path) -> float:
        model, total = ModelFolder(folder), 0.0
        for module in linears():
            shape = source.info(f"{module}.weight").shape
            packed = nvfp4.Tensor(
                model.tensor(f"{module}.weight"),
                model.tensor(f"{module}.weight_scale"),
                model.scalar(f"{module}.weight_scale_2"),
                shape,
                16,
            )
            difference = nvfp4.unpack(packed, dtype="float32") - source.tensor(
                f"{module}.weight"
            ).astype(np.float32)
            total += float((difference.astype(np.float64) ** 2).sum())
        return total

    assert error(tmp_path / scale) < 0.95 * error(models["direct"])


def test_excluded_layers_stay(tmp_path: Path) -> None:
    quantize.run("direct", TINY_ANNIE, tmp_path / "out", exclude="linear_attn,layers.0")
    assert quantized(tmp_path / "out") == {
        n for n in linears() if ".linear_attn." not in n and ".layers.0." not in n
    }


@pytest.mark.parametrize(("model_type", "named"), [("qwen3_5_text", False), ("gpt2", True)])
def test_a_model_type_that_is_not_known_is_named(
    tmp_path: Path, model_type: str, named: bool
) -> None:
    source = zoo.bf16(tmp_path / "m", model_type=model_type)
    notes = quantize.run("direct", source, tmp_path / "out").notes
    assert (
        any(repr(model_type) in note and "annie-quant eval" in note for note in notes)
        == named
        == bool(notes)
    )


def test_a_pattern_that_matches_nothing_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"layers\.99"):
        quantize.run("direct", TINY_ANNIE, tmp_path / "out", exclude="layers.99")
    assert list(tmp_path.iterdir()) == []


def test_a_quantized_source_is_refused(tmp_path: Path, models: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="naive is quantized already"):
        quantize.run("direct", models["naive"], tmp_path / "out")


def test_a_damaged_source_is_named_by_tensor(tmp_path: Path) -> None:
    import shutil

    from safetensors.numpy import load_file, save_file

    bad = tmp_path / "bad"
    shutil.copytree(TINY_ANNIE, bad)
    tensors = load_file(bad / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = ml_dtypes.bfloat16(np.nan)
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight: holds NaN"):
        quantize.run("direct", bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_scale_rule_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        quantize.run("direct", TINY_ANNIE, tmp_path / "out", scale="best")
    assert "four_over_six" in refused.value.hint and not (tmp_path / "out").exists()
