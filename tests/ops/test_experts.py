"""A mixture's NVFP4 experts in the real llama.cpp server: its log probabilities are those of the runtime's profile."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

import annie_quant as aq
from annie_quant import quantize

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)
pytest.importorskip("xllamacpp", reason="the serve extra is not installed")
pytest.importorskip("gguf", reason="the serve extra is not installed")

import published_models  # noqa: E402
import runtime_models  # noqa: E402
from llama_cpp_answers import complete  # noqa: E402

import annie_quant.offline  # noqa: E402
from annie_quant.offline.emulation import emulate  # noqa: E402
from annie_quant.offline.profiles import find_profile  # noqa: E402

NEAR = 0.05  # difference of log probabilities; 0.15 is the limit of the answers in tests/offline/test_against_llama_cpp.py


@pytest.mark.parametrize("family", ["Qwen3.5 MoE", "Qwen3 MoE"])
def test_llama_cpp_computes_the_experts(tmp_path: Path, family: str) -> None:
    if family == "Qwen3 MoE":
        source = published_models.write("Qwen/Qwen3-30B-A3B", tmp_path / "bf16")
    else:
        source = runtime_models.save_mixture(tmp_path / "bf16")
    quantize.run("direct", source, tmp_path / "nvfp4")
    file = aq.checkpoint.convert(tmp_path / "nvfp4", "gguf", tmp_path / "nvfp4.gguf").path
    ids = torch.randint(3, 200, (4, 24), generator=torch.Generator().manual_seed(6))
    served = []
    with aq.serve.start(file) as server:
        for row in ids.tolist():
            (first,) = complete(server.url, row, 1, timeout_s=60, n_probs=20)[
                "completion_probabilities"
            ]
            served.append({p["id"]: p["logprob"] for p in first["top_logprobs"]})
    model = annie_quant.offline.load(tmp_path / "nvfp4", dtype=torch.float32)
    with torch.inference_mode(), emulate(model, find_profile("llama.cpp-cpu")):
        ours = torch.log_softmax(model(ids).logits[:, -1].float(), -1)
    plain = annie_quant.offline.load(source, dtype=torch.float32)
    with torch.inference_mode():
        unquantized = torch.log_softmax(plain(ids).logits[:, -1].float(), -1)
    apart, control = [], []
    for row, (expected, other) in enumerate(zip(ours, unquantized, strict=True)):
        apart += [abs(float(expected[i]) - p) for i, p in served[row].items()]
        control += [abs(float(other[i]) - p) for i, p in served[row].items()]
    assert len(apart) == 80
    # A router's near tie that the order of sums decides moves single tokens further.
    assert median(apart) < NEAR and max(apart) < 1, (median(apart), max(apart))
    assert median(control) > 3 * median(apart), (
        "the bf16 model's log probabilities are farther away"
    )
