"""What servers send for a chat completion: the forms of tool calls, thinking, whole messages, errors, cut characters."""

# ruff: noqa: E501  (one form per line)

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from randomised import examples
from stream_server import DONE, RawServer, event, stream

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

import annie_quant as aq  # noqa: E402
from annie_quant.stream.calls import CallAssembler  # noqa: E402


def record_of(*pieces: bytes) -> dict:
    with RawServer(stream(list(pieces))) as server:
        return aq.stream.run([aq.stream.Request(server.url, json={}, timeout_s=5)]).records()[0]


def data(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


# ---- tool calls

A = {"item": "a"}
B = {"shelf": 3}
A_TEXT = '{"item": "a"}'
B_TEXT = '{"shelf": 3}'


def piece(arguments: object = None, name: str | None = None, **more) -> dict:
    function = {"name": name, "arguments": arguments}
    return {**more, "function": {k: v for k, v in function.items() if v is not None}}


def calls_of(*chunks: dict | list[dict]) -> list[tuple]:
    calls = CallAssembler()
    for chunk in chunks:
        calls.add(chunk if isinstance(chunk, list) else [chunk])
    return [(call.id, call.name, json.loads(call.arguments or "null")) for call in calls.result()]


F = "f"
G = "g"
FORMS = {
    "reused index, ids once (vLLM, LMDeploy)": (
        [piece("", F, index=0, id="x"), piece('{"item": ', index=0), piece('"a"}', index=0),
         piece("", G, index=0, id="y"), piece(B_TEXT, index=0)],
        [("x", F, A), ("y", G, B)],
    ),
    "reused index, later ids empty (vLLM)": (
        [piece("", F, index=0, id="x"), piece(A_TEXT, index=0, id=""), piece("", F, index=0, id="y"), piece(A_TEXT, index=0, id="")],
        [("x", F, A), ("y", F, A)],
    ),
    "a new id in each fragment (vLLM before 0.10)": (
        [piece("", F, index=0, id="x"), piece('{"item": ', index=0, id="x2"), piece('"a"}', index=0, id="x3"),
         piece(B_TEXT, G, index=1, id="y")],
        [("x", F, A), ("y", G, B)],
    ),
    "reused index, no ids, one name twice": (
        [piece("", F, index=0), piece(A_TEXT, index=0), piece("", F, index=0), piece(A_TEXT, index=0)],
        [(None, F, A), (None, F, A)],
    ),
    "one id for all calls, own indices": (
        [piece(A_TEXT, F, index=0, id="call"), piece(A_TEXT, F, index=1, id="call")],
        [("call", F, A), ("call", F, A)],
    ),
    "one id for all calls, own indices, in pieces": (
        [piece("", F, index=0, id="call"), piece("", F, index=1, id="call"), piece(A_TEXT, index=0, id="call"),
         piece(A_TEXT, index=1, id="call")],
        [("call", F, A), ("call", F, A)],
    ),
    "one id and one index for all calls": (
        [piece(A_TEXT, F, index=0, id="0"), piece(B_TEXT, G, index=0, id="0")],
        [("0", F, A), ("0", G, B)],
    ),
    "an index that counts fragments, ids": (
        [piece("", F, index=0, id="x"), piece(A_TEXT, index=1, id="x"), piece("", G, index=2, id="y"), piece(B_TEXT, index=3, id="y")],
        [("x", F, A), ("y", G, B)],
    ),
    "an index that counts fragments, ids once": (
        [piece("", F, index=0, id="x"), piece('{"item": ', index=1), piece('"a"}', index=2), piece(B_TEXT, G, index=3, id="y")],
        [("x", F, A), ("y", G, B)],
    ),
    "whole calls in one list (Gemini, Mistral)": (
        [[piece(A_TEXT, F, id=""), piece(A_TEXT, F, id="")]],
        [(None, F, A), (None, F, A)],
    ),
    "whole calls with index 0 (Gemini, Ollama)": (
        [[piece(A_TEXT, F, index=0, id=""), piece(A_TEXT, F, index=0, id="")], piece(B_TEXT, G, index=0, id="")],
        [(None, F, A), (None, F, A), (None, G, B)],
    ),
    "arguments as objects (Ollama, Mistral)": ([piece(A, F), piece(B, G)], [(None, F, A), (None, G, B)]),
    "calls told apart by their position": (
        [[piece('{"item": ', F), piece('{"item": ', F)], [piece('"a"}'), piece('"a"}')]],
        [(None, F, A), (None, F, A)],
    ),
    "the name in each fragment": (
        [piece("", F, index=0, id="x"), piece('{"item": ', F, index=0, id="x"), piece('"a"}', F, index=0, id="x"), piece("", F, index=0, id="x")],
        [("x", F, A)],
    ),
    "the name in each fragment, no id": (
        [piece("", F, index=0), piece('{"item": ', F, index=0), piece('"a"}', F, index=0), piece("", F, index=0)],
        [(None, F, A)],
    ),
    "a name in pieces": ([piece(name="read_", index=0, id="x"), piece(name="item", index=0), piece(A_TEXT, index=0)], [("x", "read_item", A)]),
    "the id comes late": ([piece("", F), piece('{"item": ', id="x"), piece('"a"}')], [("x", F, A)]),
    "the name comes late": ([piece("", index=0, id="x"), piece(A_TEXT, F, index=0)], [("x", F, A)]),
    "all arguments until now in each fragment": (
        [piece("", F, index=0, id="x"), piece('{"item"', F, index=0, id="x"), piece(A_TEXT, F, index=0, id="x")],
        [("x", F, A)],
    ),
    "the whole call again at the end": ([piece(A_TEXT, F, index=0, id="x"), piece(A_TEXT, F, index=0, id="x")], [("x", F, A)]),
    "indices as text": ([piece(B_TEXT, G, index="1"), piece(A_TEXT, F, index="0")], [(None, F, A), (None, G, B)]),
    "indices from 1, interleaved": (
        [piece("", F, index=1, id="x"), piece("", G, index=2, id="y"), piece(A_TEXT, index=1), piece(B_TEXT, index=2)],
        [("x", F, A), ("y", G, B)],
    ),
    "calls without arguments": ([piece("", F, index=0), piece("", F, index=1), piece("", G, index=2)], [(None, F, None), (None, F, None), (None, G, None)]),
    "without an object `function`": ([{"index": 0, "name": F, "arguments": A_TEXT}], [(None, F, A)]),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_parallel_calls(form: str) -> None:
    fragments, expected = FORMS[form]
    assert calls_of(*fragments) == expected


# A server's rule: the fields of a call's first fragment and of the later ones, and whether fragments of several calls may alternate.
RULES = {
    "index": (lambda n: {"index": n, "id": f"c{n}"}, lambda n: {"index": n}, True),
    "index and id": (lambda n: {"index": n, "id": f"c{n}"}, lambda n: {"index": n, "id": f"c{n}"}, True),
    "index, new ids": (lambda n: {"index": n, "id": f"c{n}"}, lambda n: {"index": n, "id": f"r{n}"}, True),
    "index, no ids": (lambda n: {"index": n}, lambda n: {"index": n, "id": ""}, True),
    "id": (lambda n: {"id": f"c{n}"}, lambda n: {"id": f"c{n}"}, True),
    "id, index 0": (lambda n: {"id": f"c{n}", "index": 0}, lambda n: {"id": f"c{n}", "index": 0}, True),
    "id once, index 0": (lambda n: {"id": f"c{n}", "index": 0}, lambda n: {"index": 0}, False),
    "id once": (lambda n: {"id": f"c{n}"}, lambda n: {}, False),
    "index 0": (lambda n: {"index": 0}, lambda n: {"index": 0}, False),
    "nothing": (lambda n: {}, lambda n: {}, False),
}  # fmt: skip
ARGUMENTS = st.dictionaries(
    st.sampled_from(["a", "b{", '"', "é"]), st.none() | st.text(max_size=3), max_size=2
)


@settings(max_examples=examples(600), deadline=None)
@given(
    st.sampled_from(sorted(RULES)),
    st.lists(st.tuples(st.sampled_from("fg"), ARGUMENTS), min_size=1, max_size=4),
    st.data(),
)
def test_any_order_that_a_rule_allows_gives_the_same_calls(
    rule: str, calls: list, draw: st.DataObject
) -> None:
    first, later, may_alternate = RULES[rule]
    queues = []
    for n, (name, arguments) in enumerate(calls):
        text = json.dumps(arguments)
        cuts = sorted(draw.draw(st.sets(st.integers(1, len(text) - 1), max_size=3)))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        start = (
            [piece("", name, **first(n))]
            if draw.draw(st.booleans())
            else [piece(pieces.pop(0), name, **first(n))]
        )
        queues.append(start + [piece(part, **later(n)) for part in pieces])
    order = [n for n, queue in enumerate(queues) for _ in queue]
    if may_alternate:
        order = draw.draw(st.permutations(order))
        begun = list(dict.fromkeys(order))
        if "index" not in first(0) or rule == "id, index 0":
            calls = [calls[n] for n in begun]  # only an index tells their order
    fragments = [queues[n].pop(0) for n in order]
    assert [(name, arguments) for _, name, arguments in calls_of(*fragments)] == [
        tuple(call) for call in calls
    ]


def test_too_many_calls_are_a_fault() -> None:
    record = record_of(
        event({"tool_calls": [piece("{}", F, id=str(i)) for i in range(1001)]}), DONE
    )
    assert record["cause"] == "malformed" and "more than 1000 tool calls" in record["error"]


def test_a_name_in_a_million_fragments_is_a_fault_and_takes_no_time() -> None:
    calls = CallAssembler()
    with pytest.raises(ValueError, match="too many fragments"):
        for _ in range(1_000_000):
            calls.add([piece("}" * 50, F, index=0)])


# ---- whole messages, thinking


MESSAGE = {"role": "assistant", "content": "Good day", "tool_calls": [piece(A_TEXT, F, id="x")]}


def chunk_of(finish: str | None = None, **choice) -> bytes:
    return data({"choices": [{"index": 0, "finish_reason": finish, **choice}]})


@pytest.mark.parametrize(
    "pieces",
    [
        [chunk_of("tool_calls", message=MESSAGE)],
        [chunk_of("tool_calls", message=MESSAGE, delta={})],
        [event({"content": "Good day"}), event({"tool_calls": MESSAGE["tool_calls"]}), chunk_of("tool_calls", message=MESSAGE)],
        [chunk_of(message={"content": "Good"}), chunk_of(message={"content": " day"}), event({"tool_calls": MESSAGE["tool_calls"][0]}, "tool_calls")],
    ],
    ids=["message", "and an empty delta", "after the deltas", "messages as pieces"],
)  # fmt: skip
def test_a_message_in_place_of_a_delta(pieces: list[bytes]) -> None:
    record = record_of(*pieces, DONE)
    assert (record["error"], record["text"]) == (None, "Good day")
    assert record["tool_calls"] == [{"id": "x", "name": F, "arguments": A_TEXT}]


def test_a_message_that_contradicts_its_deltas_is_a_fault() -> None:
    record = record_of(
        event({"content": "Bad"}), chunk_of("stop", message={"content": "Good day"}), DONE
    )
    assert record["cause"] == "malformed"


@pytest.mark.parametrize("reason", ["tool_calls", "function_call"])
def test_a_reason_without_its_call_is_no_answer(reason: str) -> None:
    record = record_of(event({"role": "assistant"}), event({}, reason), DONE)
    assert record["cause"] == "no_events" and f"{reason!r} and has no call" in record["error"]


THINKING = {
    "Magistral": [{"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}]}],
    "thinking as text": [{"content": [{"type": "thinking", "thinking": "H"}, {"type": "thinking", "thinking": "m."}]}],
    "a part alone": [{"content": {"type": "reasoning", "text": "Hm."}}],
    "a part that is a thought": [{"content": [{"type": "text", "thought": True, "text": "Hm."}]}],
    "OpenRouter": [{"reasoning_details": [{"type": "reasoning.text", "text": "H"}]}, {"reasoning_details": [{"type": "reasoning.summary", "summary": "m."}]}],
    "OpenRouter, twice": [{"reasoning": "Hm.", "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]}],
    "vLLM, twice": [{"reasoning": "Hm.", "reasoning_content": "Hm."}],
    "Ollama": [{"thinking": "Hm."}],
    "Gemini": [{"content": "Hm.", "extra_content": {"google": {"thought": True}}}],
    "empty next to details": [{"reasoning": "", "reasoning_content": None, "reasoning_details": [{"text": "Hm."}]}],
}  # fmt: skip


@pytest.mark.parametrize("form", THINKING)
def test_each_form_of_thinking(form: str) -> None:
    deltas = THINKING[form]
    record = record_of(
        *map(event, deltas),
        event({"content": [{"type": "text", "text": "Good"}, " day"]}),
        event({}, "stop"),
        DONE,
    )
    assert (record["reasoning"], record["text"], record["error"], record["warnings"]) == (
        "Hm.",
        "Good day",
        None,
        [],
    )
    # Both may arrive in one read, which has one stamp.
    assert record["first_reasoning_ms"] <= record["first_content_ms"]
    assert record["token_events"] == len(deltas) + 1


def test_what_is_not_read_is_named() -> None:
    record = record_of(
        event({"content": [{"type": "image_url", "image_url": {}}], "monologue": "Hm."}),
        event({"content": "x"}, "stop"),
        DONE,
    )
    assert record["text"] == "x" and record["reasoning"] == ""
    assert record["warnings"] == [
        "not read: a content part of type 'image_url'",
        "not read: the field 'monologue'",
    ]


# ---- errors, and streams of other APIs

GONE = {"code": 502, "message": "gone"}
ERRORS = {
    "next to choices": data(
        {
            "error": GONE,
            "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}],
        }
    ),
    "next to choices without a reason": data(
        {"error": "gone", "choices": [{"index": 0, "delta": {}}]}
    ),
    "in a choice": chunk_of("error", delta={}, error=GONE),
    "in a choice that ends well": chunk_of("stop", delta={}, error=GONE),
    "alone": data({"error": GONE}),
    "as a list": data([{"error": GONE}]),
    "detail": data({"detail": "gone"}),
    "a named event": b'event: error\ndata: {"message": "gone"}\n\n',
    "a named event that is not JSON": b"event: error\ndata: gone\n\n",
    "a field": b'error: {"code": 500, "message": "gone"}\n\n',
    "a field with text": b"error: gone\n\n",
    "a field with an error inside": b'error: {"error": {"message": "gone"}}\n\n',
    "bare JSON": b'{"error": {"message": "gone"}}\n\n',
    "bare JSON on several lines": b'{\n "error": {\n  "message": "gone"\n }\n}\n\n',
    "bare JSON as a list": b'[{"error": {"message": "gone"}}]\n\n',
    "bare JSON without an end": b'{"error": {"message": "gone"}}',
    "data without an end": b'data: {"error": {"message": "gone"}}',
    "Anthropic's": data(
        {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}
    ),
}


@pytest.mark.parametrize("form", ERRORS)
@pytest.mark.parametrize("done", [b"", DONE])
def test_each_form_of_an_error(form: str, done: bytes) -> None:
    if done and not ERRORS[form].endswith(b"\n\n"):
        return
    record = record_of(event({"content": "The"}), ERRORS[form], done)
    assert (record["cause"], record["text"]) == ("server_error", "The")
    assert record["error"] == "error in the stream: gone"


def test_a_damaged_line_is_a_fault_and_an_unknown_field_a_warning() -> None:
    stop = event({}, "stop")
    damaged = record_of(event({"content": "a"}), b"x" + event({"content": "b"}), stop, DONE)
    assert damaged["cause"] == "malformed" and "an event is damaged" in damaged["error"]
    unknown = record_of(event({"content": "a"}), b"trace: 7\n\n", stop, DONE)
    assert (unknown["error"], unknown["text"]) == (None, "a")
    assert "1 lines were received that are no event" in unknown["warnings"][0]


@pytest.mark.parametrize("value", [None, "", {}, False, []])
def test_an_error_that_is_empty_is_none(value: object) -> None:
    record = record_of(
        data(
            {
                "error": value,
                "choices": [{"delta": {"content": "x"}, "finish_reason": "stop", "error": value}],
            }
        ),
        DONE,
    )
    assert (record["error"], record["text"]) == (None, "x")


def test_the_reason_error_alone_is_an_error() -> None:
    assert record_of(event({"content": "The"}), event({}, "error"), DONE)["cause"] == "server_error"
    assert "no data" in record_of(event({"content": "x"}), b"event: error\n\n", DONE)[
        "error"
    ].replace("without data", "no data")


OTHER_APIS = {
    "Messages API": [data({"type": "message_start", "message": {"content": []}}), data({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hi"}})],
    "Responses API": [data({"type": "response.created"}), data({"type": "response.output_text.delta", "delta": "Hi"})],
    "Ollama": [data({"message": {"role": "assistant", "content": "Hi"}, "done": False}), data({"message": {"content": ""}, "done": True})],
}  # fmt: skip


@pytest.mark.parametrize("api", OTHER_APIS)
def test_a_stream_of_another_api_is_an_error_in_words(api: str) -> None:
    record = record_of(*OTHER_APIS[api])
    assert (
        record["text"] == ""
        and api in record["error"]
        and "/v1/chat/completions" in record["error"]
    )


# ---- characters that are cut

FOX = "🦊"


def raw(content: bytes, finish: bytes = b"null") -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":%b}]}\n\n' % (
        content,
        finish,
    )


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b"a\\ud83e", b"\\udd8ab"], f"a{FOX}b"),
        ([b"a" + FOX.encode()[:1], FOX.encode()[1:3], FOX.encode()[3:] + b"b"], f"a{FOX}b"),
        ([b"a\\ud83e", b"b"], "a\ufffdb"),
        ([b"a\\udd8a", b"b"], "a\ufffdb"),
        ([b"a" + FOX.encode()[:2], b"b"], "a\ufffdb"),
        ([b"caf\xc3", b"\xa9"], "café"),
    ],
)
def test_a_character_that_is_cut_by_an_event(pieces: list[bytes], text: str) -> None:
    record = record_of(*map(raw, pieces), raw(b"", b'"stop"'), DONE)
    assert (record["error"], record["text"]) == (None, text)
    assert json.loads(json.dumps(record)) == record


def test_cut_characters_in_other_fields() -> None:
    call = b'data: {"model":"m\\ud83e","choices":[{"delta":{"reasoning":"\\ud83e","tool_calls":[{"index":0,"id":"\\ud83e","function":{"name":"f","arguments":"{\\"q\\":\\"\\ud83e"}}]}}]}\n\n'
    rest = b'data: {"choices":[{"delta":{"reasoning":"\\udd8a","tool_calls":[{"index":0,"function":{"arguments":"\\udd8a\\"}"}}]}}]}\n\n'
    record = record_of(call, rest, event({}, "tool_calls"), DONE)
    assert record["error"] is None and record["reasoning"] == FOX and record["model"] == "m\ufffd"
    assert record["tool_calls"] == [
        {
            "id": "\ufffd",
            "name": "f",
            "arguments": json.dumps({"q": FOX}, ensure_ascii=False, separators=(",", ":")),
        }
    ]
