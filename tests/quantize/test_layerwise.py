"""Calibration text and the walk through a model layer by layer: the whole model's own numbers, padding unseen."""

from __future__ import annotations

import numpy as np
import pytest
from paths import CALIBRATION, TINY_ANNIE

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data.rows import read_conversations
from annie_quant.quantize import calibration_samples
from annie_quant.quantize.input_stats import gather
from annie_quant.quantize.layerwise import Walk

torch = pytest.importorskip("torch", reason="the walk runs in torch: pip install annie-quant[quantize]")


@pytest.fixture(scope="module")
def conversations() -> list[calibration_samples.Text]:
    return calibration_samples.of_rows(TINY_ANNIE, read_conversations(CALIBRATION))[::4][:7]


def whole_model() -> object:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY_ANNIE, dtype=torch.float32).eval()


def test_marks_name_what_is_predicted(conversations: list[calibration_samples.Text]) -> None:
    from annie_quant.evaluate.prompts import Template

    template = Template(TINY_ANNIE)
    for text in conversations:
        assert len(text.ids) == len(text.marks)
        assert text.ids[: len(text.prompt)] == text.prompt and text.ids[len(text.prompt) :] == text.answer[:-1]
        assert text.marks[-1] == calibration_samples.END_OF_TURN and text.answer[-1] in template.end_tokens
        first = len(text.prompt) - 1  # the prompt's last token predicts the answer's first
        assert (
            set(text.marks[:first]) == {calibration_samples.PROMPT}
            and calibration_samples.PROMPT not in text.marks[first:]
        )
    calls = [t for t in conversations if calibration_samples.TOOL_MARKUP in t.marks]
    assert calls and all("<tool_call>" in template.tokenizer.decode(t.answer) for t in calls)


def test_batches_hold_every_text_once(conversations: list[calibration_samples.Text]) -> None:
    made = calibration_samples.batches(conversations, tokens=600)
    assert len(made) > 1
    rows = [tuple(i[m != calibration_samples.PADDING]) for b in made for i, m in zip(b.ids, b.marks, strict=True)]
    assert sorted(rows) == sorted(t.ids for t in conversations)


def test_the_walk_ends_where_the_whole_model_does(conversations: list[calibration_samples.Text]) -> None:
    batch = calibration_samples.padded(conversations[:4])
    walk = Walk(ModelFolder(TINY_ANNIE), [batch], lambda line: None)
    for layer in walk:
        layer.advance()
    model = whole_model()
    with torch.inference_mode():
        ours = model.model.norm(walk.states[0])
        for i, text in enumerate(conversations[:4]):
            alone = model.model(torch.tensor([text.ids])).last_hidden_state[0]
            assert (ours[i, : len(text.ids)] - alone).abs().max() < 1e-3


def inputs_of(linear: object, model: object, conversations: list[calibration_samples.Text]) -> list[np.ndarray]:
    seen: list[np.ndarray] = []
    handle = linear.register_forward_pre_hook(lambda module, args: seen.append(args[0][0].detach().numpy()))  # type: ignore[attr-defined]
    with torch.inference_mode():
        for text in conversations:
            model.model(torch.tensor([text.ids]))  # type: ignore[attr-defined]
    handle.remove()
    return seen


def test_moments_are_those_of_a_plain_forward(conversations: list[calibration_samples.Text]) -> None:
    found = gather(ModelFolder(TINY_ANNIE), conversations, calibration_samples.RESPONSE, lambda line: None)
    model = whole_model()
    for name in (
        "model.layers.2.mlp.down_proj",
        "model.layers.3.self_attn.k_proj",
        "model.layers.4.linear_attn.out_proj",
    ):
        seen = inputs_of(model.get_submodule(name), model, conversations)
        squares = [x[np.array(t.marks) > 0].astype(np.float64) ** 2 for x, t in zip(seen, conversations, strict=True)]
        assert found.amax[name] == pytest.approx(max(np.abs(x).max() for x in seen), rel=1e-4)
        np.testing.assert_allclose(found.second[name], np.concatenate(squares).mean(0), rtol=1e-3, atol=1e-6)
