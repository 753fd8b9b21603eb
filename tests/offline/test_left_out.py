"""What an evaluation leaves out, or computes although servers refuse it, is a note."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from paths import TINY_ANNIE

pytest.importorskip("torch", reason="evaluation runs in torch: pip install annie-quant[quantize]")
pytest.importorskip("transformers", reason="answers are found with the model's tokenizer")
from annie_quant.data.logs import Problems
from annie_quant.offline.evaluation import length_notes
from annie_quant.offline.prompts import Template, conversation_answers


def answered(tokens: int) -> SimpleNamespace:
    return SimpleNamespace(request=SimpleNamespace(prompt=(1,) * tokens))


def test_prompts_beyond_the_model_s_context_are_a_note() -> None:
    assert length_notes(TINY_ANNIE, [answered(4096), answered(10)]) == []  # type: ignore[list-item]
    (note,) = length_notes(TINY_ANNIE, [answered(5000), answered(10), answered(4097)])  # type: ignore[list-item]
    assert note.startswith("2 prompts are longer than the model's context of 4,096 tokens")
    assert "5,000" in note


def test_conversations_without_an_answer_are_counted_by_reason() -> None:
    question = {"role": "user", "content": "Hi"}
    rows = [{"messages": [question]}] * 2
    rows.append({"messages": [question, {"role": "assistant", "content": "Hello."}]})
    left_out = Problems()
    assert len(conversation_answers(Template(TINY_ANNIE), rows, left_out)) == 1
    (line,) = left_out.lines()
    assert line.startswith("2 rows (it has no assistant message")
