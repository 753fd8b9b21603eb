"""Chat templates render as transformers renders them, and a hostile one ends within its limits."""

# ruff: noqa: E501
from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from paths import TINY_ANNIE

from annie_quant.checkpoint import chat_template
from annie_quant.checkpoint.chat_template import ChatTemplate
from annie_quant.core.errors import CheckpointError

transformers = pytest.importorskip("transformers", reason="the quantize extra is not installed")

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "search", "arguments": {"q": "ü <b>"}}}
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 😀"}, {"role": "assistant", "content": "Yo"}],
    [{"role": "user", "content": "Find."}, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "x"}],
]  # fmt: skip
# White space rules, tojson, loop controls, the generation block, special tokens, unknown variables.
OTHER_TEMPLATES = [
    "{% for m in messages %}\n  {%- if loop.index > 2 %}{% break %}{% endif %}\n    {% if m.content %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}",
    "{{ tools | tojson(indent=2) }}{{ messages | tojson }}{{ eos_token }}{{ nothing }}{{ enable_thinking }}",
    "{% generation %}{{ messages[0].content | upper }}{% endgeneration %}!{{ documents }}{{ add_generation_prompt }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ 'a'.replace('a', 'b') }}",
]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY_ANNIE, trust_remote_code=False)


@pytest.mark.parametrize("template", [None, *OTHER_TEMPLATES])
def test_text_equals_that_of_transformers(tokenizer, template, monkeypatch):
    if template:
        monkeypatch.setattr(tokenizer, "chat_template", template)
    ours = ChatTemplate(tokenizer, "x")
    for messages in CONVERSATIONS:
        for tools in (None, [TOOL]):
            for prompt in (False, True):
                expected = tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    add_generation_prompt=prompt,
                    enable_thinking=True,
                    tokenize=False,
                )
                assert ours.render(messages, tools, prompt, enable_thinking=True) == expected


ARGUMENTS = {
    "JSON text": ('{"q": "ü <b>"}', {"q": "ü <b>"}),
    "no text": ("", {}),
    "an object": ({"q": 1}, {"q": 1}),
    "text that is not JSON": ("q=ü", {"arguments": "q=ü"}),
    "lists that are nested too deeply": ("[" * 100_000, {"arguments": "[" * 100_000}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("nested", [True, False], ids=["function", "direct"])
def test_arguments_of_calls_become_objects_and_the_message_stays_as_it_is(tokenizer, name, nested):
    """The expected text is that of the object, which transformers renders."""
    given, expected = ARGUMENTS[name]
    call = {"name": "search", "arguments": given}
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} if nested else call],
    }
    objects = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "search", "arguments": expected}}],
    }
    before = repr(message)
    text = ChatTemplate(tokenizer, "x").render([CONVERSATIONS[0][0], message])
    assert text == tokenizer.apply_chat_template([CONVERSATIONS[0][0], objects], tokenize=False)
    assert repr(message) == before


HOSTILE = {
    "an endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "endless output": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "a large text": "{{ 'x' * 3000000000 }}",
    "a large number": "{{ 9 ** (9 ** 9) }}",
    "a wide field": "{{ '%2000000000d' % 1 }}",
    "a large list": "{{ (range(99999) | list) * 99999 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "an import": "{% include '/etc/passwd' %}",
    "its own exception": "{{ raise_exception('\x1b[31mno') }}",
    "a syntax error": "{% for",
    "too much text": "{% for a in range(5000) %}{{ 'x' * 1000 }}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_line_within_the_limits(tokenizer, monkeypatch, name):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 1.5)
    monkeypatch.setattr(tokenizer, "chat_template", HOSTILE[name])
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="its chat template") as caught:
        ChatTemplate(tokenizer, "x").render(CONVERSATIONS[0])
    assert time.monotonic() - start < 30
    assert caught.value.message.isprintable()


def test_after_a_failure_other_conversations_render(tokenizer, monkeypatch):
    source = "{% if messages[0].content == 'bad' %}{{ 'x' * 3000000000 }}{% endif %}{{ messages[0].content }}"
    monkeypatch.setattr(tokenizer, "chat_template", source)
    template = ChatTemplate(tokenizer, "x")
    with pytest.raises(CheckpointError):
        template.render([{"role": "user", "content": "bad"}])
    assert template.render([{"role": "user", "content": "good"}]) == "good"


def last_pid() -> int:
    return list(chat_template._workers.values())[-1]._process.pid


def test_few_processes_are_kept_and_one_serves_all_copies_of_a_template(tokenizer, monkeypatch):
    ChatTemplate(tokenizer, "x").render(CONVERSATIONS[0])
    pid = last_pid()
    ChatTemplate(tokenizer, "y").render(CONVERSATIONS[1])
    assert last_pid() == pid
    for number in range(chat_template.MAX_WORKERS):
        monkeypatch.setattr(tokenizer, "chat_template", f"{number}")
        assert ChatTemplate(tokenizer, "x").render(CONVERSATIONS[0]) == f"{number}"
        assert len(chat_template._workers) <= chat_template.MAX_WORKERS
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_forked_child_uses_and_ends_processes_of_its_own(tokenizer):
    template = ChatTemplate(tokenizer, "x")
    text, pid = template.render(CONVERSATIONS[0]), last_pid()
    child = os.fork()
    if not child:
        same = template.render(CONVERSATIONS[0]) == text and last_pid() != pid
        chat_template._workers.clear()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert template.render(CONVERSATIONS[0]) == text and last_pid() == pid


def test_processes_end_with_this_one():
    program = """
import sys
from annie_quant.checkpoint import chat_template
print(chat_template._worker_of("x")._process.pid)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
