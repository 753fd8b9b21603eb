"""The embedded model on the real server: facts, tool calls and reasoning are parsed, in every format."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

import annie_quant as aq

ASSET = Path(aq.__file__).parent / "assets/tiny-annie"
pytest.importorskip("xllamacpp", reason="the serve extra is not installed")
pytest.importorskip("gguf", reason="the serve extra is not installed")
pytest.importorskip("annie_quant.nvfp4", reason="the C codec is not built")
if not (ASSET / "model.safetensors").exists():
    pytest.skip("the embedded model is not trained yet", allow_module_level=True)


@pytest.fixture(scope="module", params=["BF16", "Q4_K_M"])
def server(request, tmp_path_factory):
    file = aq.checkpoint.convert(
        ASSET, "gguf", tmp_path_factory.mktemp("gguf") / "x.gguf", type=request.param
    ).path
    with aq.serve.start(file) as running:
        yield running


def ask(server, text: str, thinking: bool = False, **more) -> dict:
    persona = aq.data.load_persona("annie")
    body = {
        "messages": [
            {"role": "system", "content": persona.system_prompt},
            {"role": "user", "content": text},
        ],
        "tools": persona.tools,
        "max_tokens": 96,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": thinking},
    } | more
    request = urllib.request.Request(
        server.url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]


def test_a_fact_without_thinking(server):
    choice = ask(server, "What is the capital of Japan?")
    assert "Tokyo" in choice["message"]["content"] and choice["finish_reason"] == "stop"
    assert not choice["message"].get("reasoning_content")


def test_thinking_is_separate_from_the_answer(server):
    message = ask(server, "What is the capital of Japan?", thinking=True)["message"]
    assert message["reasoning_content"].strip() and "Tokyo" in message["content"]
    assert "think>" not in message["content"]


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("Do you remember what I said about my garden?", "search_memory"),  # language: data
        ("Search the web for the weather in Paris today.", "web_search"),
    ],
)
def test_tool_calls_are_parsed(server, text, tool):
    choice = ask(server, text)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == tool and json.loads(call["function"]["arguments"])["query"]
    assert choice["finish_reason"] == "tool_calls" and "<tool_call>" not in (
        choice["message"]["content"] or ""
    )
