"""Tool calls in raw text: what a chat template of each form writes is read back; other forms and faulty calls stay text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from randomised import examples

from annie_quant import judge
from annie_quant.models.server_parsers import form_of

jinja2 = pytest.importorskip(
    "jinja2", reason="the templates are Jinja's: pip install annie-quant[quantize]"
)

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
# How the templates of Qwen3.5, of Qwen3 and of Llama 3 write the calls of an assistant's message.
TEMPLATES = {
    "qwen_xml": (
        "{% for c in calls %}<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}"
        "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>\n{% endfor %}"
    ),
    "hermes": (
        '{% for c in calls %}<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n'
        "</tool_call>\n{% endfor %}"
    ),
    "llama_json": (
        '<|python_tag|>{% for c in calls %}{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
        "{% if not loop.last %}; {% endif %}{% endfor %}<|eot_id|>"
    ),
}
FORMS = sorted(TEMPLATES)
CALLS = [
    {"name": "search", "arguments": {"query": "red {shoes}; size 9"}},
    {"name": "search", "arguments": {"query": "ü"}},
]


def written(form: str, calls: list[dict]) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATES[form]).render(calls=calls)


def read(text: str, form: str, tools: list | None = None) -> judge.Answer:
    return judge.parse_raw(text, False, [TOOL] if tools is None else tools, form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 2])
def test_what_a_template_writes_is_read_back(form: str, count: int) -> None:
    answer = read(written(form, CALLS[:count]), form)
    assert [(c["name"], json.loads(c["arguments"])) for c in answer.tool_calls] == [
        (c["name"], c["arguments"]) for c in CALLS[:count]
    ]
    assert not answer.text and len({c["id"] for c in answer.tool_calls}) == count
    assert answer.finish_reason == ("tool_calls" if form == "llama_json" else None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_a_call_in_another_form_is_text_as_it_is_for_the_servers_parser(
    form: str, other: str
) -> None:
    answer = read(written(other, CALLS[:1]), form)
    assert bool(answer.tool_calls) == (form == other) and bool(answer.text) == (form != other)


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_a_template(form: str) -> None:
    assert form_of("<|start_header_id|>" + TEMPLATES[form]) == form
    assert form_of("{{ messages }}") == ""


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "search", "arguments": {"query": "red"}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "search"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "search", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "search", "arguments": {}}'),
        ("hermes", "<tool_call>" + '{"a":' * 20_000 + "}</tool_call>"),
        ("llama_json", 'Sure: {"name": "search", "parameters": {}}'),
        ("llama_json", '{"name": "search", "parameters": {}} Done.'),
        ("llama_json", '{"city": "Tokyo"}'),
        ("llama_json", "{" * 20_000),
    ],
)
def test_a_faulty_call_stays_text(form: str, text: str) -> None:
    answer = read(text, form)
    assert not answer.tool_calls and answer.text == text.strip()


def test_json_is_an_answer_where_no_tools_are_offered() -> None:
    text = written("llama_json", CALLS[:1]).removesuffix("<|eot_id|>")
    assert not read(text, "llama_json", []).tool_calls


def test_one_faulty_call_does_not_hide_the_next() -> None:
    text = "<tool_call>{broken}</tool_call>" + written("hermes", CALLS[:1])
    answer = read(text, "hermes")
    assert len(answer.tool_calls) == 1 and answer.text == "<tool_call>{broken}</tool_call>"


NAME, HERMES, LLAMA = '{"name": "search", ', '"arguments": {}}', '"parameters": {}}'
PIECES = ["<tool_call>", "</tool_call>", "<|python_tag|>", NAME, HERMES, LLAMA, ";", "{", "}", "x"]


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.sampled_from(FORMS))
def test_any_text_is_read_and_no_call_is_invented(text: str, form: str) -> None:
    answer = read(text, form)
    assert len(answer.tool_calls) <= text.count('"name"') and all(
        json.loads(c["arguments"]) == {} for c in answer.tool_calls
    )
