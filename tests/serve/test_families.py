"""GGUF files of the dense families, answered by the real llama.cpp server as transformers answers the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import annie_quant as aq

torch = pytest.importorskip("torch", reason="the models are made with torch: pip install annie-quant[quantize]")
transformers = pytest.importorskip("transformers", reason="the models are transformers' own")
pytest.importorskip("xllamacpp", reason="the serve extra is not installed")
pytest.importorskip("gguf", reason="the serve extra is not installed")

from dense_models import KNOWN, make  # noqa: E402
from llama_cpp_answers import complete  # noqa: E402

TOKENS, NEAR = 8, 0.05  # per answer; difference of logits below which either token is right
TEXTS = ["Hello there, how are you today?", "x" * 40 + " 12345", "One two three four five six seven eight. " * 4]


def answers(folder: Path, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Return transformers' greedy tokens in float32, and by how much each one is the best."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    with torch.inference_mode():
        for prompt in prompts:
            ids, margins = list(prompt), []
            for _ in range(TOKENS):
                best = model(torch.tensor([ids])).logits[0, -1].topk(2)
                margins.append(float(best.values[0] - best.values[1]))
                ids.append(int(best.indices[0]))
            out.append((ids[len(prompt) :], margins))
    return out


@pytest.mark.parametrize("kind", KNOWN)
def test_llama_cpp_answers_as_transformers(tmp_path: Path, kind: str) -> None:
    folder = make(tmp_path / "model", kind, gain=6.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    expected = answers(folder, prompts)
    assert len({tuple(tokens) for tokens, _ in expected}) == len(TEXTS), "answers that are all the same show nothing"
    file = aq.checkpoint.convert(folder, "gguf", tmp_path / "model.gguf", type="F16").path
    equal = 0
    with aq.serve.start(file) as server:
        for prompt, (tokens, margins) in zip(prompts, expected, strict=True):
            served = complete(server.url, prompt, TOKENS, timeout_s=60, ignore_eos=True)["tokens"]
            first = next((i for i, (a, b) in enumerate(zip(served, tokens, strict=False)) if a != b), TOKENS)
            equal += first
            assert first == TOKENS or margins[first] < NEAR, (first, served, tokens, margins)
    assert equal >= TOKENS * len(TEXTS) // 2


@pytest.mark.parametrize("kind", ["llama-bias", "qwen2-tied"])
def test_a_gguf_file_is_compared_and_read_back_exactly(tmp_path: Path, kind: str) -> None:
    """Rows of queries and keys change their order on the way, and their biases with them."""
    folder = make(tmp_path / "model", kind)
    aq.quantize.run("direct", folder, tmp_path / "nvfp4")
    for name, source in (("nvfp4", tmp_path / "nvfp4"), ("plain", folder)):
        file = aq.checkpoint.convert(source, "gguf", tmp_path / f"{name}.gguf").path
        back = aq.checkpoint.convert(file, "modelopt", tmp_path / f"{name}-back", like=source).path
        one, other = aq.checkpoint.ModelFolder(source), aq.checkpoint.ModelFolder(back)
        assert {n: one.tensor(n).tobytes() for n in one} == {n: other.tensor(n).tobytes() for n in other}
    compared = aq.checkpoint.compare(folder, {"file": tmp_path / "plain.gguf"})
    assert len(compared.rows) >= 2 * 7 + 1 and all(row.rel_l2 == 0 for row in compared.rows)
