"""Llama, Qwen2, Qwen3 and an unknown architecture: strategies and the audit use each family's own norms, biases and inputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from dense_models import CLASSES, KNOWN, SIZES, make
from paths import CALIBRATION

from annie_quant import checkpoint, quantize
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.data.rows import read_conversations

torch = pytest.importorskip(
    "torch", reason="the models are made with torch: pip install annie-quant[quantize]"
)
transformers = pytest.importorskip("transformers", reason="the models are transformers' own")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("sources")
    return {kind: make(home / kind, kind) for kind in CLASSES}


def dequantized(folder: Path) -> dict[str, np.ndarray]:
    model = ModelFolder(folder)
    return {n: x.dequantize(model) for n, x in checkpoint.linears(model).items()}


@pytest.mark.parametrize("kind", CLASSES)
def test_direct_quantizes_and_the_audit_is_clean(
    sources: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    quantize.run("direct", sources[kind], tmp_path / "out")
    audit = checkpoint.audit(tmp_path / "out", source=sources[kind])
    assert audit.ok, audit.findings
    assert (
        len(dequantized(tmp_path / "out"))
        == 7 * ModelFolder(sources[kind]).config["num_hidden_layers"]
    )
    written = any(
        line.startswith("llama.cpp: after `annie-quant convert --to gguf`")
        for line in audit.summary.loads
    )
    assert written == (kind in KNOWN)


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("strategy", ["awq_lite", "gptq", "w4a16_mixed"])
def test_calibrating_strategies_know_the_family(
    sources: dict[str, Path], tmp_path: Path, kind: str, strategy: str
) -> None:
    quantize.run(strategy, sources[kind], tmp_path / "out", calib_data=CALIBRATION, calib_samples=1)
    audit = checkpoint.audit(tmp_path / "out", source=sources[kind])
    assert audit.ok, audit.findings
    if strategy == "awq_lite":
        source, result = ModelFolder(sources[kind]), ModelFolder(tmp_path / "out")
        name = "model.layers.0.input_layernorm.weight"
        assert source.tensor(name).tobytes() != result.tensor(name).tobytes(), (
            "a fold that changes nothing proves nothing"
        )


def test_a_plain_norm_is_folded_as_w_over_s(sources: dict[str, Path], tmp_path: Path) -> None:
    """What is wrong for Qwen3.5's norms is right for Llama's, and the other way round."""
    quantize.run("direct", sources["llama"], tmp_path / "out")
    s = np.random.default_rng(0).uniform(0.5, 2.0, SIZES["hidden_size"])
    plain, folder = ModelFolder(sources["llama"]), ModelFolder(tmp_path / "out")
    norm = "model.layers.1.post_attention_layernorm.weight"
    from annie_quant import nvfp4

    for right in (True, False):
        tensors = {n: folder.tensor(n).copy() for n in folder}
        for module in (f"model.layers.1.mlp.{k}_proj" for k in ("gate", "up")):
            packed = nvfp4.pack(
                (plain.tensor(f"{module}.weight").astype(np.float32) * s).astype(np.float32), 0.001
            )
            tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"] = (
                packed.codes,
                packed.block_scale,
            )
            tensors[f"{module}.weight_scale_2"] = np.array(packed.tensor_scale, np.float32)
        w = plain.tensor(norm).astype(np.float64)
        tensors[norm] = (w / s if right else (1 + w) / s - 1).astype(ml_dtypes.bfloat16)
        target = shutil.copytree(tmp_path / "out", tmp_path / f"right-{right}")
        checkpoint.write(target, [checkpoint.planned(n, t) for n, t in tensors.items()])
        findings = [
            (f.code, f.tensor) for f in checkpoint.audit(target, source=sources["llama"]).findings
        ]
        assert findings == ([] if right else [("fold_mismatch", norm)])


@pytest.mark.parametrize("kind", ["qwen2-tied", "gemma3"])
@pytest.mark.parametrize("strategy", ["naive", "mlp_only", "best"])
def test_the_other_strategies_know_biases_and_tied_heads(
    sources: dict[str, Path], tmp_path: Path, kind: str, strategy: str
) -> None:
    source = sources[kind]
    quantize.run(strategy, source, tmp_path / "out", calib_data=CALIBRATION, calib_samples=1)
    audit = checkpoint.audit(tmp_path / "out", source=source)
    assert audit.ok, audit.findings
    layers = ModelFolder(source).config["num_hidden_layers"]
    assert len(dequantized(tmp_path / "out")) == layers * (3 if strategy == "mlp_only" else 7)
    plain, result = ModelFolder(source), ModelFolder(tmp_path / "out")
    biases = [name for name in plain if name.endswith(".bias")]
    assert len(biases) == (2 * 3 if kind == "qwen2-tied" else 0)
    assert all(plain.tensor(n).tobytes() == result.tensor(n).tobytes() for n in biases)


@pytest.mark.parametrize(
    ("kind", "tensors"), [("qwen2", 2 * (7 * 3 + 3 + 2) + 3), ("gemma3", 6 * (7 * 3 + 6) + 2)]
)
def test_direct_and_naive_write_the_same_weights(
    sources: dict[str, Path], tmp_path: Path, kind: str, tensors: int
) -> None:
    """Same rule, same scales that q, k and v share; tests/quantize/test_max_calibration.py compares naive with ModelOpt."""
    for strategy in ("naive", "direct"):
        quantize.run(
            strategy, sources[kind], tmp_path / strategy, calib_data=CALIBRATION, calib_samples=2
        )
    naive, direct = ModelFolder(tmp_path / "naive"), ModelFolder(tmp_path / "direct")
    names = [name for name in naive if not name.endswith("input_scale")]
    assert len(names) == tensors
    assert all(naive.tensor(n).tobytes() == direct.tensor(n).tobytes() for n in names)


@pytest.mark.parametrize("strategy", ["gptq", "awq_lite", "best"])
def test_an_unknown_family_is_refused_before_anything_is_loaded(
    sources: dict[str, Path], tmp_path: Path, strategy: str
) -> None:
    folder = shutil.copytree(sources["mistral"], tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(
        CheckpointError, match=f"'mistral' is not a known family, and --strategy {strategy}"
    ) as refused:
        quantize.run(strategy, folder, tmp_path / "out", calib_data=CALIBRATION, calib_samples=2)
    hint = refused.value.hint
    assert "naive, direct" in hint and "audit, compare, eval" in hint and "qwen2" in hint
    assert "gptq" not in hint and "\n" not in hint


@pytest.mark.parametrize("strategy", ["gptq", "naive"])
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention_bias": False}, "self_attn.*_proj.bias"),
        ({"intermediate_size": 320}, "mlp.gate_proj.weight|size"),
    ],
)
def test_a_config_that_contradicts_its_tensors_is_one_line(
    sources: dict[str, Path],
    tmp_path: Path,
    strategy: str,
    changes: dict[str, object],
    problem: str,
) -> None:
    """transformers leaves a bias out, or fills a matrix with random numbers, and continues."""
    folder = shutil.copytree(sources["llama-bias"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=problem) as refused:
        quantize.run(strategy, folder, tmp_path / "out", calib_data=CALIBRATION, calib_samples=2)
    assert "\n" not in str(refused.value)


def test_a_fold_into_rows_divides_their_biases() -> None:
    from annie_quant import models
    from annie_quant.models.dense import ATTENTION_OUTPUT
    from annie_quant.quantize import folding

    torch.manual_seed(0)
    weights = {
        "self_attn.v_proj.weight": torch.randn(8, 4),
        "self_attn.v_proj.bias": torch.randn(8),
        "self_attn.o_proj.weight": torch.randn(4, 8),
    }
    x, s = torch.randn(3, 4), torch.rand(8) + 0.5

    def outputs() -> torch.Tensor:
        values = x @ weights["self_attn.v_proj.weight"].T + weights["self_attn.v_proj.bias"]
        return values @ weights["self_attn.o_proj.weight"].T

    before = outputs()
    folding.fold_scale(
        weights, models.family_of({"model_type": "qwen2"}), ATTENTION_OUTPUT, s, None
    )
    assert torch.allclose(outputs(), before, atol=1e-5)


@pytest.mark.parametrize("kind", KNOWN)
def test_the_layers_compute_what_the_whole_model_does(sources: dict[str, Path], kind: str) -> None:
    from calibration_texts import padded

    from annie_quant.quantize.calibration_text import samples_of_rows
    from annie_quant.quantize.layerwise import DecoderLayers

    samples = samples_of_rows(sources[kind], read_conversations(CALIBRATION)[:2])[:3]
    layers = DecoderLayers(ModelFolder(sources[kind]), [padded(samples)])
    for layer in layers:
        layer.advance()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        sources[kind], dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        ours = model.model.norm(layers.states[0])
        for i, sample in enumerate(samples):
            alone = model.model(torch.tensor([sample.ids])).last_hidden_state[0]
            assert (ours[i, : len(sample.ids)] - alone).abs().max() < 1e-3
