"""Llama, Qwen3 and an unknown architecture: strategies and the audit use each family's own norms and inputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from paths import CALIBRATION, TINY_ANNIE

from annie_quant import checkpoint, quantize
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data.rows import read_conversations

torch = pytest.importorskip("torch", reason="the models are made with torch: pip install annie-quant[quantize]")
transformers = pytest.importorskip("transformers", reason="the models are transformers' own")
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
CLASSES = {"llama": "LlamaConfig", "qwen3": "Qwen3Config", "mistral": "MistralConfig"}


def make(folder: Path, model_type: str) -> Path:
    """Write a small random model with tiny-annie's tokenizer; activations lean on a few channels, as AWQ needs it."""
    tiny = json.loads((TINY_ANNIE / "config.json").read_text())
    config = getattr(transformers, CLASSES[model_type])(**SIZES, vocab_size=tiny["vocab_size"])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter[::16] = 6.0
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY_ANNIE / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("sources")
    return {kind: make(home / kind, kind) for kind in CLASSES}


def dequantized(folder: Path) -> dict[str, np.ndarray]:
    model = ModelFolder(folder)
    return {n: x.dequantize(model) for n, x in checkpoint.linears(model).items()}


@pytest.mark.parametrize("kind", CLASSES)
def test_direct_quantizes_and_the_audit_is_clean(sources: dict[str, Path], tmp_path: Path, kind: str) -> None:
    quantize.run("direct", sources[kind], tmp_path / "out")
    audit = checkpoint.audit(tmp_path / "out", source=sources[kind])
    assert audit.ok, audit.findings
    assert len(dequantized(tmp_path / "out")) == 2 * 7
    written = any(line.startswith("llama.cpp: after `annie-quant convert --to gguf`") for line in audit.summary.loads)
    assert written == (kind == "qwen3")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("strategy", ["awq_lite", "gptq", "manners"])
def test_calibrating_strategies_know_the_family(
    sources: dict[str, Path], tmp_path: Path, kind: str, strategy: str
) -> None:
    quantize.run(strategy, sources[kind], tmp_path / "out", calib_data=CALIBRATION, calib_samples=4)
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
            packed = nvfp4.pack((plain.tensor(f"{module}.weight").astype(np.float32) * s).astype(np.float32), 0.001)
            tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"] = packed.codes, packed.block_scale
            tensors[f"{module}.weight_scale_2"] = np.array(packed.tensor_scale, np.float32)
        w = plain.tensor(norm).astype(np.float64)
        tensors[norm] = (w / s if right else (1 + w) / s - 1).astype(ml_dtypes.bfloat16)
        target = shutil.copytree(tmp_path / "out", tmp_path / f"right-{right}")
        checkpoint.write(target, [checkpoint.planned(n, t) for n, t in tensors.items()])
        findings = [(f.code, f.tensor) for f in checkpoint.audit(target, source=sources["llama"]).findings]
        assert findings == ([] if right else [("fold_mismatch", norm)])


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_layers_compute_what_the_whole_model_does(sources: dict[str, Path], kind: str) -> None:
    from annie_quant.quantize import calibration_samples
    from annie_quant.quantize.layerwise import DecoderLayers

    samples = calibration_samples.samples_of_rows(sources[kind], read_conversations(CALIBRATION)[:2])[:3]
    layers = DecoderLayers(ModelFolder(sources[kind]), [calibration_samples.padded(samples)])
    for layer in layers:
        layer.advance()
    model = transformers.AutoModelForCausalLM.from_pretrained(sources[kind], dtype=torch.float32).eval()
    with torch.inference_mode():
        ours = model.model.norm(layers.states[0])
        for i, sample in enumerate(samples):
            alone = model.model(torch.tensor([sample.ids])).last_hidden_state[0]
            assert (ours[i, : len(sample.ids)] - alone).abs().max() < 1e-3
