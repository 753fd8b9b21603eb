"""Other APIs than chat completions: what is sent, and the same records from the real llama.cpp server and from Ollama's stream."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from bench_cases import MEMORY, TALK, ask
from bench_cases import workload as build
from fake_server import FakeServer

pytest.importorskip("annie_quant._stream", reason="the streaming client is not built here")

import annie_quant
from annie_quant import bench
from annie_quant.bench import endpoints
from annie_quant.bench.run_folder import read_records
from annie_quant.core.errors import UsageError

MODEL = Path(annie_quant.__file__).parent / "assets" / "tiny-annie"
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "search_memory", "arguments": '{"query": "robot"}'},
}
NO_ID = {"type": "function", "function": {"name": "search_memory", "arguments": "{broken"}}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You are Annie."},
        {"role": "user", "content": "What of my robot?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, NO_ID]},
        {"role": "tool", "tool_call_id": "c1", "name": "search_memory", "content": "It walks."},
        {
            "role": "tool",
            "tool_call_id": "call_2_1",
            "name": "search_memory",
            "content": "Nothing.",
        },
        {"role": "assistant", "content": "It walks."},
        {"role": "user", "content": "Thanks."},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "search_memory", "parameters": {"type": "object"}},
        }
    ],
    "tool_choice": "auto",
    "max_tokens": 50,
    "temperature": 0.0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"enable_thinking": False},
    "cache_prompt": False,
}


def test_messages_have_blocks_and_results_of_one_turn_are_one_message():
    body = endpoints.request_body("messages", CHAT)
    assert (
        body["system"] == "You are Annie." and body["max_tokens"] == 50 and body["stream"] is True
    )
    assert [m["role"] for m in body["messages"]] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    calls, results = body["messages"][1]["content"], body["messages"][2]["content"]
    assert [(b["type"], b["input"]) for b in calls] == [
        ("tool_use", {"query": "robot"}),
        ("tool_use", {}),
    ]
    assert [b["tool_use_id"] for b in results] == [b["id"] for b in calls]
    assert body["tools"] == [{"name": "search_memory", "input_schema": {"type": "object"}}]
    assert body["thinking"] == {"type": "disabled"}
    assert body["cache_prompt"] is False and "stream_options" not in body


def test_results_without_ids_answer_the_calls_in_their_order():
    chat = CHAT | {
        "messages": [{k: v for k, v in m.items() if k != "tool_call_id"} for m in CHAT["messages"]]
    }
    blocks = endpoints.request_body("messages", chat)["messages"][2]["content"]
    assert [b["tool_use_id"] for b in blocks] == ["c1", "call_2_1"]
    items = endpoints.request_body("responses", chat)["input"]
    assert [i["call_id"] for i in items[1:5]] == ["c1", "call_2_1", "c1", "call_2_1"]


def test_responses_have_items():
    body = endpoints.request_body("responses", CHAT)
    assert [i.get("role", i["type"]) for i in body["input"]] == [
        "user", "function_call", "function_call", "function_call_output", "function_call_output", "assistant", "user",
    ]  # fmt: skip
    assert [i["call_id"] for i in body["input"][1:5]] == ["c1", "call_2_1", "c1", "call_2_1"]
    assert (
        body["instructions"] == "You are Annie."
        and body["max_output_tokens"] == 50
        and "max_tokens" not in body
    )
    assert body["tools"][0]["name"] == "search_memory" and body["tools"][0]["type"] == "function"


def test_ollama_has_options_and_arguments_as_objects():
    body = endpoints.request_body("ollama", CHAT)
    assert body["options"] == {"temperature": 0.0, "num_predict": 50} and body["think"] is False
    assert body["messages"][2]["tool_calls"][0] == {
        "function": {"name": "search_memory", "arguments": {"query": "robot"}}
    }
    assert body["messages"][3]["tool_name"] == "search_memory" and "max_tokens" not in body
    assert CHAT["messages"][2]["tool_calls"][0] is CALL, "the conversation itself is not changed"


def test_completions_are_text_and_refuse_tools(tmp_path):
    body = endpoints.request_body("completions", CHAT)
    assert body["prompt"].startswith("You are Annie.\nUser: What of my robot?") and body[
        "prompt"
    ].endswith("Assistant:")
    assert (
        "messages" not in body
        and "tools" not in body
        and body["stream_options"] == {"include_usage": True}
    )
    side = bench.Backend("a", "http://127.0.0.1:9", endpoint="completions")
    with pytest.raises(UsageError, match="cannot offer tools, and tool_memory has some"):
        bench.run([side], [MEMORY], tmp_path)
    with pytest.raises(UsageError, match="unknown endpoint 'x'"):
        bench.Backend("a", "http://127.0.0.1:9", endpoint="x")


FACTS = build(
    "factual",
    [{"id": f"f{i}", "messages": ask(f"What is the capital of {c}?"), "expect": {"contains": [w]}}
     for i, (c, w) in enumerate((("Japan", "Tokyo"), ("France", "Paris"), ("Italy", "Rome")))],
    gates=["non_empty", "factual"],
)  # fmt: skip


@pytest.mark.line
def test_the_real_llama_cpp_gives_the_same_records_through_each_api(tmp_path):
    pytest.importorskip("xllamacpp", reason="the serve extra is not installed")
    if not (MODEL / "model.safetensors").exists():
        pytest.skip("the embedded model's weights are not in this checkout")
    from annie_quant import checkpoint
    from annie_quant.ops import serving

    checkpoint.convert(MODEL, to="gguf", output=tmp_path / "tiny.gguf", type="Q8_0")
    server = serving.start(
        tmp_path / "tiny.gguf", runtime="llama.cpp", log=tmp_path / "server.log", threads=1
    )
    try:
        sides = [
            bench.Backend(api, server.url, endpoint=api)
            for api in ("chat", "messages", "responses")
        ]
        bench.run(
            sides, [FACTS, TALK, MEMORY], tmp_path / "run", warmup=0, runs=1, with_memory=False
        )
        plain = [bench.Backend("completions", server.url, endpoint="completions")]
        bench.run(plain, [FACTS], tmp_path / "plain", warmup=0, runs=1, with_memory=False)
    finally:
        server.stop()
    rows = [r for r in read_records(tmp_path / "run/records.jsonl") if not r.warmup]
    assert len(rows) == 3 * (3 + 5 + 1) and not [r.answer.error for r in rows if r.answer.error]
    assert {r.load.endpoint for r in rows} == {"chat", "messages", "responses"}
    chat = {(r.workload, r.case, r.turn): r for r in rows if r.backend == "chat"}
    for r in rows:
        same = chat[r.workload, r.case, r.turn]
        # Greedy, one server: the same text, and the same counts, through each API.
        assert r.answer.text == same.answer.text and [c["name"] for c in r.answer.tool_calls] == [
            c["name"] for c in same.answer.tool_calls
        ]
        assert (
            r.tokens.completion_tokens == same.tokens.completion_tokens
            and not r.tokens.tokens_estimated
        )
        assert (
            r.tokens.cached_tokens is not None
            and r.timings.done_ms is not None
            and r.answer.finish_reason == same.answer.finish_reason
        )
        assert not r.answer.reasoning, "thinking is off in each API"
        assert (
            (r.timings.first_content_ms or r.timings.first_tool_ms)
            <= r.timings.last_token_ms
            <= r.timings.e2e_ms
        )
        if r.workload == "factual":
            assert r.tokens.prompt_tokens == same.tokens.prompt_tokens
    texts = [r for r in read_records(tmp_path / "plain/records.jsonl") if not r.warmup]
    assert len(texts) == 3 and all(
        r.answer.error is None and r.tokens.completion_tokens and r.load.endpoint == "completions"
        for r in texts
    )


class Ollama(FakeServer):
    """Answers /api/chat as Ollama's documentation has it."""

    def __init__(self):
        super().__init__(answer=None, style="ollama", model="m")

    def _add_routes(self, app):
        app.router.add_post("/api/chat", self._chat)
        app.router.add_get("/v1/models", self._models)

    async def _chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        reply = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await reply.prepare(request)
        if body.get("tools"):
            call = {"function": {"name": "search_memory", "arguments": {"query": "robot project"}}}
            pieces = [
                {
                    "message": {"role": "assistant", "content": "", "tool_calls": [call]},
                    "done": False,
                }
            ]
        else:
            words = ("It", " is", " Tokyo", ".")
            pieces = [
                {"message": {"role": "assistant", "content": w}, "done": False} for w in words
            ]
        for piece in pieces:
            await reply.write(json.dumps({"model": "m", **piece}).encode() + b"\n")
            await asyncio.sleep(0.005)
        end = {
            "model": "m",
            "message": {"role": "assistant", "content": ""},
            "done": True,
            "done_reason": "stop",
        }
        end |= {
            "prompt_eval_count": 12,
            "eval_count": len(pieces) + 1,
            "prompt_eval_duration": 10**6,
            "eval_duration": 10**7,
        }
        await reply.write(json.dumps(end).encode() + b"\n")
        await reply.write_eof()
        return reply


def test_ollamas_native_stream_is_measured(tmp_path):
    with Ollama() as server:
        side = bench.Backend("ollama", server.url, endpoint="ollama")
        done = bench.run([side], [FACTS, MEMORY], tmp_path, warmup=0, runs=1, with_memory=False)
        assert (
            server.bodies[-1]["model"] == "m" and server.bodies[-1]["options"]["num_predict"] == 50
        )
    rows = [
        r
        for r in read_records(tmp_path / "records.jsonl")
        if not r.warmup and r.workload != "smoke"
    ]
    assert len(rows) == 4 and not [r.answer.error for r in rows if r.answer.error]
    fact = next(r for r in rows if r.workload == "factual")
    assert (
        fact.answer.text == "It is Tokyo."
        and fact.tokens.completion_tokens == 5
        and fact.tokens.prompt_tokens == 12
        and len(fact.timings.itl_ms) == 3
    )
    assert (
        fact.timings.server_timings["predicted_ms"] == 10.0
        and fact.timings.first_content_ms < fact.timings.last_token_ms <= fact.timings.done_ms
    )
    assert done.aggregates.served["ollama"].gates["tool_call"].passes == 1
