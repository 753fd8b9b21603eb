"""One recorded exchange as a line: whatever bytes a client and a server send, a valid line without the key, or one reason."""

from __future__ import annotations

import json
import random
import re

import pytest
from planted_secrets import KEY

from annie_quant.core.secrets import Redactor
from annie_quant.data.conversations import Unusable
from annie_quant.data.logs import read_logs
from annie_quant.data.masking import Scanner
from annie_quant.data.recorded_chat import CopiedExchange, decompressed, line_of

REQUEST = {
    "model": "m",
    "messages": [
        {"role": "system", "content": f"Be brief. {KEY}"},
        {"role": "user", "content": [{"type": "text", "text": f"Light {KEY} ä"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": {KEY: {}}}},
        }
    ],
}
MESSAGE = {"role": "assistant", "content": f"On. {KEY}", "reasoning": "hm"}
BODY = {"choices": [{"message": MESSAGE, "finish_reason": "stop"}]}
CHUNKS = [
    {"choices": [{"index": 0, "delta": {"content": KEY[:9]}}]},
    {"choices": [{"index": 0, "delta": {"content": KEY[9:]}}]},
    {
        "choices": [
            {
                "index": 0,
                "delta": {
                    "tool_calls": [
                        {"index": 0, "id": "x", "function": {"name": "f", "arguments": "{}"}}
                    ]
                },
            }
        ]
    },
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
]
STREAM = (
    b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in CHUNKS) + b"data: [DONE]\n\n"
)
PIECES = [
    b"null",
    b"[]",
    b"{}",
    b'"',
    b"}",
    b"\n\n",
    b"data: ",
    b"\xff",
    b"1e999",
    b"NaN",
    b'"\\ud800"',
    b"[" * 2000,
    b"\0",
    b"-1",
]


def line(request, answer, is_stream):
    exchange = CopiedExchange(
        request, answer, is_stream, "", "2026-11-22T10:00:00", Redactor([KEY.encode()])
    )
    return line_of(exchange, Scanner(True, ("Bob",)))


def mutated(rng, data):
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((0, 1, 3, 40)))
        data = data[:start] + rng.choice([*PIECES, data[:20], b""]) + data[end:]
    return data


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_whole_exchange_is_a_line_that_init_reads(tmp_path, is_stream):
    result = line(
        json.dumps(REQUEST).encode(), STREAM if is_stream else json.dumps(BODY).encode(), is_stream
    )
    assert (
        result.has_answer
        and not result.fault
        and KEY.encode() not in result.data
        and KEY[:12].encode() not in result.data
    )
    (tmp_path / "r.jsonl").write_bytes(result.data + b"\n")
    (conversation,) = read_logs([tmp_path / "r.jsonl"])
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert (
        conversation.calls == (["f", "f"] if is_stream else ["f"])
        and conversation.thinking is not is_stream
    )


SPREAD = {
    "reasoning, then content": {"reasoning_content": f"it is {KEY[:12]}", "content": f"{KEY[12:]} as before"},
    "content, then reasoning": {"content": f"{KEY[:20]}", "reasoning_content": f"{KEY[20:]} ok"},
    "one character, then the rest": {"reasoning_content": KEY[0], "content": KEY[1:]},
    "content, then arguments": {"content": KEY[:9], "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": KEY[9:]})}}]},
    "arguments, then content": {"content": KEY[15:], "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": KEY[:15]})}}]},
    "property name": {"content": "x", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({KEY: {KEY: 1}})}}]},
}  # fmt: skip


@pytest.mark.parametrize("choice", ["auto", "none"])
@pytest.mark.parametrize("name", ["tools", "functions"])
def test_tools_are_recorded_unless_the_request_forbids_calls(name, choice):
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    offered = tool if name == "tools" else tool["function"]
    messages = [{"role": "user", "content": "Find it."}]
    request = json.dumps({"messages": messages, name: [offered], "tool_choice": choice})
    exchange = CopiedExchange(request.encode(), None, False, "", "2026", Redactor([]))
    row = json.loads(line_of(exchange, Scanner()).data)
    assert row.get("tools") == ([tool] if choice == "auto" else None)


def reduced(text: str) -> str:
    """Return what a reader would join: without punctuation of JSON and names of fields."""
    for word in (
        "reasoning_content",
        "content",
        "tool_calls",
        "arguments",
        "function",
        "name",
        "role",
        "assistant",
    ):
        text = text.replace(word, "")
    return re.sub(r"[^A-Za-z0-9_-]|\\n", "", text).lower()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("form", SPREAD)
def test_a_key_in_several_texts_is_masked(form, is_stream):
    message = SPREAD[form]
    answer = json.dumps(
        {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    ).encode()
    if is_stream:
        deltas = [
            {k: v if k != "tool_calls" else [{"index": 0, **v[0]}]} for k, v in message.items()
        ]
        pieces = [{"choices": [{"index": 0, "delta": d}]} for d in deltas]
        pieces.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        answer = (
            b"".join(b"data: %b\n\n" % json.dumps(p).encode() for p in pieces) + b"data: [DONE]\n\n"
        )
    result = line(json.dumps(REQUEST).encode(), answer, is_stream)
    assert result.has_answer
    stored = reduced(result.data.decode())
    plain = re.sub("[^a-z0-9_-]", "", KEY.lower())
    # no half of the key is left, and no 8 characters of it (a shorter part does not identify it)
    assert [i for i in range(len(plain) - 7) if plain[i : i + 8] in stored] == []


def test_mutated_bytes_are_a_line_without_the_key_or_one_reason(tmp_path):
    rng, reasons, lines = random.Random(20261122), set(), 0
    request, bodies = json.dumps(REQUEST).encode(), {False: json.dumps(BODY).encode(), True: STREAM}
    for _ in range(600):
        is_stream = rng.random() < 0.5
        ours = mutated(rng, request) if rng.random() < 0.5 else request
        try:
            result = line(ours, mutated(rng, bodies[is_stream]), is_stream)
        except Unusable as reason:
            reasons.add(str(reason))
            continue
        lines += 1
        assert KEY.encode() not in result.data and b"\n" not in result.data
        (tmp_path / "r.jsonl").write_bytes(result.data + b"\n")
        assert len(list(read_logs([tmp_path / "r.jsonl"]))) == 1
    assert lines > 100 and len(reasons) > 3


def test_a_small_body_that_unpacks_to_a_large_one_is_refused():
    import gzip

    packed = gzip.compress(b"0" * (40 << 20))
    assert len(packed) < 100_000
    with pytest.raises(Unusable, match="more than 16 MB"):
        decompressed(packed, "gzip")
