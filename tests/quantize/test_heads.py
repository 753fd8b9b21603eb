"""Quantized heads, tied ones too, and FP8 with a scale per row next to NVFP4: export, audit, both dialects, loading, GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import ml_dtypes
import numpy as np
import pytest
from dense_models import make
from llama_cpp_answers import complete
from paths import TINY_ANNIE

import annie_quant as aq
from annie_quant import checkpoint
from annie_quant.checkpoint.gguf.reader import open_gguf
from annie_quant.checkpoint.linears import HEAD, weight_name
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import bytes_per_token
from annie_quant.models.formats import FP8_CHANNEL, W4A16
from annie_quant.quantize.formats import choose, expected_bytes
from annie_quant.quantize.plan import QuantizationPlan, export
from annie_quant.quantize.runner import copy_companions

torch = pytest.importorskip(
    "torch", reason="models are loaded with torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="models are transformers' own: pip install annie-quant[quantize]"
)
from annie_quant.offline.loading import load  # noqa: E402

MODELS = ("annie", "qwen2-tied")
HEADS = (W4A16, FP8_CHANNEL)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "annie": TINY_ANNIE,
        "qwen2-tied": make(tmp_path_factory.mktemp("heads") / "qwen2", "qwen2-tied"),
    }


@pytest.fixture(scope="module")
def made(
    sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Path]:
    """Attention in FP8, the MLP in W4A16, and the head in each format."""
    home, folders = tmp_path_factory.mktemp("made"), {}
    for model, source in sources.items():
        folder = ModelFolder(source)
        for head in HEADS:
            formats = {n: FP8_CHANNEL if "attn" in n else W4A16 for n in choose(folder, ())} | {
                HEAD: head
            }
            out = home / f"{model}-{head}"
            out.mkdir()
            export(folder, out, QuantizationPlan.of(formats, scale="sweep"))
            copy_companions(source, out)
            stored = sum(ModelFolder(out).info(n).size_bytes for n in ModelFolder(out))
            assert stored == expected_bytes(folder, formats)
            folders[model, head] = out
    return folders


def logits(folder: Path | str) -> torch.Tensor:
    with torch.inference_mode():
        return load(folder, dtype=torch.float32)(torch.arange(4, 44)[None]).logits[0]


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("model", MODELS)
def test_a_quantized_head_and_fp8_pass_the_audit_and_load_in_both_dialects(
    sources: dict[str, Path],
    made: dict[tuple[str, str], Path],
    tmp_path: Path,
    model: str,
    head: str,
) -> None:
    source, out = sources[model], made[model, head]
    audit = checkpoint.audit(out, source=source)
    assert audit.ok, audit.findings
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is False, "a tied head became a tensor of its own"
    expected, ours = logits(source), logits(out)
    assert 0.001 < error(ours, expected) < 0.2
    converted = checkpoint.convert(out, "compressed-tensors", tmp_path / "ct")
    audit = checkpoint.audit(converted.path, source=source)
    assert audit.ok, audit.findings
    # A reciprocal moves a few FP8 activations, and processors differ in which: up to .002 on some and .0071 on others.
    assert error(logits(converted.path), ours) < 0.02
    back = checkpoint.convert(converted.path, "modelopt", tmp_path / "back")
    here, there = ModelFolder(out), ModelFolder(back.path)
    codes = [n for n in here if here.info(n).dtype in ("U8", "F8_E4M3")]
    assert codes and all(here.tensor(n).tobytes() == there.tensor(n).tobytes() for n in codes)
    plain = checkpoint.convert(out, "bf16", tmp_path / "plain")
    assert error(logits(plain.path), expected) < 0.2


@pytest.mark.parametrize("model", MODELS)
def test_the_embedding_stays_and_a_token_reads_the_head_instead(
    sources: dict[str, Path], made: dict[tuple[str, str], Path], model: str
) -> None:
    source, out = ModelFolder(sources[model]), ModelFolder(made[model, W4A16])
    (embedding,) = [n for n in source if n.endswith("embed_tokens.weight")]
    assert out.tensor(embedding).tobytes() == source.tensor(embedding).tobytes()
    original = source.info(weight_name(source, HEAD))
    head = sum(out.info(n).size_bytes for n in out if n.startswith("lm_head."))
    assert head == original.elements * 9 // 16 + 4
    body = sum(
        out.info(n).size_bytes for n in out if n != embedding and not n.startswith("lm_head.")
    )
    assert bytes_per_token(out) == body + head


def test_a_row_of_fp8_has_its_own_scale(
    sources: dict[str, Path], made: dict[tuple[str, str], Path]
) -> None:
    """amax / 448 per row, and the nearest E4M3 value by NumPy's own cast."""
    source, out = ModelFolder(sources["qwen2-tied"]), ModelFolder(made["qwen2-tied", FP8_CHANNEL])
    for module in ("model.layers.1.self_attn.q_proj", HEAD):
        weight = source.tensor(weight_name(source, module)).astype(np.float32)
        scale = np.abs(weight).max(1) / np.float32(448)
        np.testing.assert_array_equal(out.tensor(f"{module}.weight_scale"), scale)
        codes = (weight / scale[:, None]).astype(ml_dtypes.float8_e4m3fn)
        assert (
            out.tensor(f"{module}.weight").view(np.uint8) == codes.view(np.uint8)
        ).mean() > 0.9999
    algorithms = json.loads((out.path / "hf_quant_config.json").read_text())["quantization"][
        "quantized_layers"
    ]
    assert algorithms[HEAD] == {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}


def test_all_linears_and_the_head_in_one_format_name_the_head(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    """vLLM's head is not a Linear, so a target "Linear" alone would leave it out."""
    folder = ModelFolder(sources["annie"])
    out = tmp_path / "one"
    out.mkdir()
    export(folder, out, QuantizationPlan.of(dict.fromkeys([*choose(folder, ()), HEAD], W4A16)))
    copy_companions(sources["annie"], out)
    assert checkpoint.audit(out, source=sources["annie"]).ok
    ct = Path(checkpoint.convert(out, "compressed-tensors", tmp_path / "ct").path)
    assert checkpoint.audit(ct, source=sources["annie"]).ok
    (group,) = json.loads((ct / "config.json").read_text())["quantization_config"][
        "config_groups"
    ].values()
    assert group["targets"] == ["Linear", HEAD]


@pytest.mark.parametrize("head", HEADS)
def test_llama_cpp_computes_the_head_and_fp8_as_q8_0(
    sources: dict[str, Path], made: dict[tuple[str, str], Path], tmp_path: Path, head: str
) -> None:
    out = made["annie", head]
    result = checkpoint.convert(out, "gguf", tmp_path / "model.gguf")
    types = {name: tensor.tensor_type.name for name, tensor in open_gguf(Path(result.path)).items()}
    assert types["output.weight"] == ("NVFP4" if head == W4A16 else "Q8_0")
    assert types["blk.3.attn_q.weight"] == "Q8_0" and types["blk.3.ffn_up.weight"] == "NVFP4"
    assert any("Q8_0, which rounds them once more" in line for line in result.loss)
    ids = list(range(4, 44))
    with aq.serve.start(result.path) as server:
        (first,) = complete(server.url, ids, 1, timeout_s=60, n_probs=20)[
            "completion_probabilities"
        ]
    ours, plain = (torch.log_softmax(logits(f)[-1], -1) for f in (out, sources["annie"]))
    apart = [
        [abs(float(side[p["id"]]) - p["logprob"]) for p in first["top_logprobs"]]
        for side in (ours, plain)
    ]
    assert median(apart[0]) < 0.4, (
        "a head without its tensor scale would be thousands of times too large"
    )
