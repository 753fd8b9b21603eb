"""Events that ended a whole benchmark with a traceback in 0.1: each is a record with a cause."""

from __future__ import annotations

import pytest
from stream_server import DONE, RawServer, stream

import annie_quant as aq

GOOD = b'data: {"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}]}\n\n'
CHOICE = b'data: {"choices": [{"index": 0, "delta": %b}]}\n\n'
EVENTS = {
    "nested 200,000 deep": (b"data: " + b"[" * 200_000 + b"\n\n", "not_json"),
    "nested and closed": (b"data: " + b"[" * 2000 + b"]" * 2000 + b"\n\n", "not_json"),
    "choices is a number": (b'data: {"choices": 5}\n\n', "malformed"),
    "choices is text": (b'data: {"choices": "x"}\n\n', "malformed"),
    "a choice is a number": (b'data: {"choices": [5]}\n\n', "malformed"),
    "a delta is a list": (CHOICE % b"[1]", "malformed"),
    "calls are a number": (CHOICE % b'{"tool_calls": 5}', "malformed"),
    "a call is text": (CHOICE % b'{"tool_calls": ["x"]}', "malformed"),
    "an id is an object": (CHOICE % b'{"tool_calls": [{"id": {}}]}', "malformed"),
    "a model is a list": (b'data: {"model": [1], "choices": []}\n\n', "malformed"),
    "usage is text": (b'data: {"usage": "x", "choices": []}\n\n', "malformed"),
    "an error nested deeply": (
        b'data: {"error": ' + b"[" * 2000 + b"]" * 2000 + b"}\n\n",
        "not_json",
    ),
}


@pytest.mark.parametrize("name", EVENTS)
def test_a_hostile_event_is_a_record_with_a_cause(name):
    event, cause = EVENTS[name]
    with RawServer(stream([GOOD, event, DONE])) as server:
        (record,) = aq.stream.run([aq.stream.Request(server.url, json={})]).records()
    assert record["cause"] == cause and record["error"].isprintable() and len(record["error"]) < 500
    assert record["text"] == "Hi"


def test_numbers_that_are_no_counts_are_not_counts():
    usage = b'data: {"choices": [], "usage": {"completion_tokens": %b}}\n\n'
    for number in (b"9" * 400, b"-5", b"true", b'"7"', b"[7]", b"1.5"):
        with RawServer(stream([GOOD, usage % number, DONE])) as server:
            (record,) = aq.stream.run([aq.stream.Request(server.url, json={})]).records()
        assert record["completion_tokens"] == 1 and record["tokens_estimated"], number


def test_more_calls_than_anyone_makes_end_the_decoding():
    calls = b"".join(
        CHOICE % (b'{"tool_calls": [{"index": %d, "function": {"name": "f"}}]}' % i)
        for i in range(1500)
    )
    with RawServer(stream([calls, DONE])) as server:
        (record,) = aq.stream.run([aq.stream.Request(server.url, json={})]).records()
    assert record["cause"] == "malformed" and len(record["tool_calls"]) == 1000
