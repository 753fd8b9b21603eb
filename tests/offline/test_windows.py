"""Layers with a sliding window (Gemma 3) in the offline evaluation: rows of unequal length decode as each does alone."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
transformers = pytest.importorskip("transformers", reason="the runtime needs transformers")

from dense_models import make  # noqa: E402

from annie_quant.offline import decoding  # noqa: E402
from annie_quant.offline.engine import Engine, Row  # noqa: E402

TOKENS, WINDOW = 24, 16
LENGTHS = (3, 11, 40, 41, 70)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = make(tmp_path_factory.mktemp("windows") / "model", "gemma3", gain=6.0)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def answers(model) -> list[tuple[list[int], list[int]]]:
    """Return prompts, some with a shared prefix, and transformers' own greedy answers, one row at a time."""
    generator, out = torch.Generator().manual_seed(0), []
    shared = torch.randint(10, 1000, (30,), generator=generator).tolist()
    for length in LENGTHS:
        prompt = (shared + torch.randint(10, 1000, (70,), generator=generator).tolist())[:length]
        ids = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        out.append((prompt, ids[0, length:].tolist()))
    return out


@pytest.mark.parametrize("fixed", [False, True])
def test_rows_of_unequal_length_decode_as_each_alone(model, answers, fixed: bool) -> None:
    engine = Engine(model)
    engine.fixed_buffers = fixed
    completions = decoding.generate(engine, [p for p, _ in answers], [TOKENS] * len(answers), [])
    assert [c.tokens for c in completions] == [tokens for _, tokens in answers]


def test_scores_are_those_of_a_plain_forward(model, answers) -> None:
    rows = [Row(prompt, tokens) for prompt, tokens in answers]
    for i, logits in Engine(model).scores(rows):
        ids = [*rows[i].prompt, *rows[i].target[:-1]]
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0, len(rows[i].prompt) - 1 :]
        assert (logits - expected).abs().max() < 1e-3


def test_the_window_matters_here(model, answers) -> None:
    """Without it the longest prompt has other logits, so the tests above see it."""
    prompt = torch.tensor([answers[-1][0]])
    with torch.inference_mode():
        before = model(prompt).logits
        model.config.sliding_window = 4096
        try:
            assert (model(prompt).logits - before).abs().max() > 0.1
        finally:
            model.config.sliding_window = WINDOW
