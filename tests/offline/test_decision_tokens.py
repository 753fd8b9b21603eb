"""Planted answers: the characters and tokens that decide about a call, its function, its arguments and the end."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import TINY_ANNIE

pytest.importorskip(
    "transformers", reason="the tokenizer is transformers': pip install annie-quant[quantize]"
)

from annie_quant.models.call_forms import CallForm
from annie_quant.offline.divergence import FIELDS, TokenLabels, kl_summary
from annie_quant.offline.prompts import Template, covers, deciding_characters

# "^" stands in front of every character that decides.
PLANTED: list[tuple[CallForm, str]] = [
    ("hermes", "^It rains."),
    (
        "hermes",
        '^<tool_call>\n{"name": "^g^o", "arguments": {"^city": ^"^Paris, x", "^n": ^12, "^l": ^["a", {"b": 1}]^}}\n^</tool_call>',
    ),
    (
        "hermes",
        '^Fine. ^<tool_call>{"arguments": {^}, "name": "^f"}^</tool_call>\n^<tool_call>{"name": "^g"}^</tool_call>',
    ),
    (
        "hermes",
        '^<tool_call>\n{"name": "^f", "arguments": {"^q": ^"^say \\"no\\" }"^}}\n^</tool_call>',
    ),
    ("hermes", '^<tool_call>{"name": "^f", "arguments": {"^q": ^"^cut'),
    ("hermes", '^<tool_call>\n{"name": "^c^u^t'),
    ("hermes", '^<tool_call>\n{"name": [1, "cut'),
    ("hermes", '^<tool_call>{"name": "^f", "arguments": "cut'),
    ("llama_json", '^{"name": "^c^u'),
    ("hermes", "^Hm.</think>\n\n^No."),
    (
        "qwen_xml",
        "^<tool_call>\n<function=^g^o>\n<parameter=^city>\n^Paris\n</parameter>\n<parameter=^n>\n^1\n</parameter>\n^</function>\n"
        "^</tool_call>",
    ),
    (
        "qwen_xml",
        "^Hm.\n</think>\n\n^Right. ^<tool_call>\n<function=^f>\n^</function>\n^</tool_call>",
    ),
    (
        "llama_json",
        '^{"name": "^f", "parameters": {"^q": ^"^rain"^}}; ^{"name": "^g", "parameters": {^}}',
    ),
    ("llama_json", '^<|python_tag|>^{"name": "^f", "parameters": {"^q": ^true^}}'),
    ("llama_json", '^A {"name": "f", "parameters": {}} inside of text.'),
]


def planted(marked: str) -> tuple[str, set[int]]:
    text, points = "", set()
    for character in marked:
        if character == "^":
            points.add(len(text))
        else:
            text += character
    return text, points


@pytest.mark.parametrize(("form", "marked"), PLANTED)
def test_the_planted_characters_decide_and_no_others(form: CallForm, marked: str) -> None:
    text, points = planted(marked)
    assert {p for p in deciding_characters(text, form) if p < len(text)} == points


WHOLE = [text.replace("^", "") for _, text in PLANTED]


@given(
    st.sampled_from(WHOLE),
    st.integers(0, 100),
    st.text('"\\{}[]:,', max_size=3),
    st.sampled_from(["hermes", "qwen_xml", "llama_json"]),
)
def test_a_call_that_is_cut_or_broken_anywhere_has_the_points_before_its_fault(
    text: str, at: int, inserted: str, form: CallForm
) -> None:
    for broken in (text[:at], text[:at] + inserted + text[at:]):
        points = deciding_characters(broken, form)
        assert 0 in points and all(0 <= p <= len(broken) for p in points)
    cut = deciding_characters(text[:at], "hermes") & set(range(at - 1))
    assert cut <= deciding_characters(text, "hermes") | {at} or "</think>" in text


@given(
    st.sampled_from(["hermes", "qwen_xml", "llama_json"]),
    st.lists(st.sampled_from(['{"', "name", '":', '"', " ", "arguments", "{", "}", "]", "<tool_call>", "</tool_call>", "\\", "é",
                              "<function=", ">", "<parameter=", "</think>", ";", "[", "1", ","]), max_size=30).map("".join),
)  # fmt: skip
def test_any_text_has_points_inside_of_it_and_its_first_character_is_one(
    form: CallForm, text: str
) -> None:
    points = deciding_characters(text, form)
    assert 0 in points and all(0 <= p <= len(text) for p in points)


@given(
    st.text(max_size=40),
    st.sets(st.integers(0, 39)),
    st.lists(st.integers(1, 5), min_size=40, max_size=40),
)
def test_every_point_is_in_one_piece(text: str, points: set[int], sizes: list[int]) -> None:
    points = {p for p in points if p < len(text)}
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    starts = np.cumsum([0, *map(len, pieces)])
    expected = [any(a <= p < b for p in points) for a, b in itertools.pairwise(starts)]
    assert covers(points, pieces) == expected


def template(folder: Path, form: CallForm) -> Template:
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ):
        shutil.copyfile(TINY_ANNIE / name, folder / name)
    turns = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}"
    if form != "qwen_xml":
        marks = {"hermes": "<tool_call>{}</tool_call>", "llama_json": "<|start_header_id|>"}[form]
        (folder / "chat_template.jinja").write_text(turns + marks)
    return Template(folder)


@pytest.mark.parametrize(("form", "marked"), [p for p in PLANTED if "</think>" not in p[1]])
def test_tokens_decide_that_have_such_a_character_or_end_the_turn(
    tmp_path: Path, form: CallForm, marked: str
) -> None:
    reader = template(tmp_path, form)
    text, points = planted(marked)
    target = [*reader.ids(text), reader.end_tokens[0]]
    decides = reader.decisions(target, thinking=False)
    at, covered = 0, set()
    for token, decided in zip(target[:-1], decides, strict=False):
        length = len(reader.tokenizer.decode([token]))
        own = {p for p in points if at <= p < at + length}
        assert decided == bool(own), reader.tokenizer.decode([token])
        covered |= own
        at += length
    assert covered == points and decides[-1]


def test_the_summary_has_the_figures_of_deciding_tokens_alone() -> None:
    fields = np.zeros((6, len(FIELDS)))
    fields[:, FIELDS.index("kl")] = [0.5, 0.1, 0.3, 0.1, 0.1, 0.1]
    fields[:, FIELDS.index("same_top")] = [0, 0, 1, 1, 1, 1]
    categories, classes = np.array(["a"] * 3 + ["b"] * 3), np.array([0, 0, 1, 0, 0, 0])
    decides = np.array([True, False, True, False, False, False])
    summary = kl_summary(fields, TokenLabels(categories, classes, decides))
    assert summary.decisions is not None
    assert (summary.decisions.n_tokens, summary.decisions.flips) == (2, 1)
    assert summary.decisions.mean == pytest.approx(0.4) and summary.mean == pytest.approx(0.2)
    none = TokenLabels(categories, classes, np.zeros(6, dtype=bool))
    assert kl_summary(fields, none).decisions is None
