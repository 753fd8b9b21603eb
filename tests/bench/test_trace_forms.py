"""Traces of OpenTelemetry: what is sent, and when, is what they have."""

from __future__ import annotations

import json

import pytest
from otlp import export, span, value, write_lengths

pytest.importorskip("annie_quant._stream", reason="the streaming client is not built here")

from annie_quant.bench import traces
from annie_quant.bench.plan import OPEN_LOOP_REQUESTS, planned_visits
from annie_quant.core.errors import UsageError
from annie_quant.data import otel
from annie_quant.data.logs import read_logs
from annie_quant.documents import BackendSettings, BenchConfig, Load


def message(role, *parts):
    return {"role": role, "parts": [*parts]}


def text(content):
    return {"type": "text", "content": content}


# The conversation in the conventions' example, as three calls of which the last one has no answer.
WEATHER = [
    message("user", text("Weather in Paris?")),
    message("assistant", {"type": "tool_call", "id": "call_V", "name": "get_weather", "arguments": {"location": "Paris"}}),
    message("tool", {"type": "tool_call_response", "id": "call_V", "response": {"sky": "rainy", "°F": 57}}),
    message("assistant", {"type": "reasoning", "content": "hm"}, text("It rains.")),
    message("user", text("Thanks. My key is sk-proj-abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGH.")),
]  # fmt: skip
TOOLS = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}
]
START = 1_780_000_000
CALLS = [
    span(START + s, operation__name="chat", input__messages=WEATHER[:n], system_instructions=[text("Be Annie.")],
         tool__definitions=TOOLS, request__max_tokens=50, usage__input_tokens=9, **more)
    for s, n, more in (
        (0, 1, {"output__messages": WEATHER[1:2]}), (1.5, 3, {"output__messages": WEATHER[3:4]}), (4, 5, {}),
    )
]  # fmt: skip
OTHERS = [
    span(
        START, operation__name="execute_tool", tool__name="get_weather", input__messages=WEATHER[:1]
    ),
    span(START, operation__name="invoke_agent", input__messages=WEATHER, usage__input_tokens=90),
    {"name": "GET /", "startTimeUnixNano": "1"},
]


def write(path, *documents, indent=None):
    path.write_text("\n".join(json.dumps(d, indent=indent) for d in documents))
    return path


def test_a_trace_arrives_in_order_where_it_is_sent_in_groups(tmp_path):
    calls = [(0.1 * i, 64, 1) for i in range(4 * OPEN_LOOP_REQUESTS)]
    workload = traces.trace(write_lengths(tmp_path / "t.jsonl", calls), 1000)
    config = BenchConfig(backends=[BackendSettings(name="a")], loads=[Load(0, None, 1.0)], runs=1)
    visits = planned_visits(["a"], [workload], config)
    assert [case.id for visit in visits for case, _ in visit.cases] == [
        c.id for c in workload.cases
    ]


# ---- OpenTelemetry


def test_calls_are_sent_with_their_history_at_their_times(tmp_path):
    workload = traces.trace(write(tmp_path / "spans.json", export(*OTHERS, *CALLS), indent=1), 10)
    assert [c.arrival_s for c in workload.cases] == [0, 1.5, 4] and [
        c.max_tokens for c in workload.cases
    ] == [50] * 3
    first, second, third = ([*c.messages] for c in workload.cases)
    assert first == [
        {"role": "system", "content": "Be Annie."},
        {"role": "user", "content": "Weather in Paris?"},
    ]
    assert [m["role"] for m in second] == ["system", "user", "assistant", "tool"]
    assert json.loads(second[2]["tool_calls"][0]["function"]["arguments"]) == {"location": "Paris"}
    assert json.loads(second[3]["content"]) == {"sky": "rainy", "°F": 57}
    assert [m["role"] for m in third] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert third[4]["content"] == "It rains." and "sk-proj" not in json.dumps(third)
    assert [c.expect for c in workload.cases] == [
        {"logged": {"calls": ["get_weather"]}},
        {"logged": {"calls": []}},
        {},
    ]
    assert workload.cases[0].tools[0]["function"]["name"] == "get_weather"


def test_messages_as_json_text_and_on_events_are_the_same(tmp_path):
    as_text = [json.loads(json.dumps(c)) for c in CALLS]
    for one in as_text:
        for pair in one["attributes"]:
            if "messages" in pair["key"]:
                pair["value"] = value(json.dumps(otel._value(pair["value"], 32)))
    on_events = [
        {**c, "attributes": c["attributes"][:1], "events": [{"name": "details", **c}]}
        for c in CALLS
    ]
    entries = [{**c, "timeUnixNano": c["startTimeUnixNano"]} for c in CALLS]
    logged = {"resourceLogs": [{"scopeLogs": [{"logRecords": entries}]}]}
    expected = [c.messages for c in read_logs([write(tmp_path / "a.jsonl", export(*CALLS))])]
    for document in (export(*as_text), export(*on_events), logged):
        found = [*read_logs([write(tmp_path / "b.jsonl", document)])]
        assert [c.messages for c in found] == expected and {c.format for c in found} == {
            "OpenTelemetry"
        }


def test_spans_without_content_are_requests_of_their_lengths(tmp_path):
    vllm = [
        span(
            START + s,
            usage__prompt_tokens=p,
            usage__completion_tokens=a,
            request__max_tokens=500,
            request__id="x",
        )
        for s, p, a in ((3.5, 900, 40), (0, 600, 7))
    ]
    workload = traces.trace(write(tmp_path / "spans.jsonl", export(vllm[0]), export(vllm[1])), 10)
    assert [(c.arrival_s, c.prompt_tokens, c.max_tokens) for c in workload.cases] == [
        (0, 600, 7),
        (3.5, 900, 40),
    ]
    with pytest.raises(
        UsageError,
        match=r"no conversation to replay: 2 rows \(a span without gen_ai.input.messages",
    ):
        traces.replay([tmp_path / "spans.jsonl"], 10)


def test_content_that_was_cut_and_images_are_named(tmp_path):
    cut = span(START, input__messages='[{"role": "user", "parts": [{"type": "te')
    image = span(
        START,
        input__messages=[message("user", {"type": "blob", "modality": "image", "content": ""})],
    )
    with pytest.raises(UsageError) as error:
        traces.replay([write(tmp_path / "x.jsonl", export(cut, image))], 10)
    assert "a span without gen_ai.input.messages, or one that was cut" in error.value.message
    assert "an image or another file" in error.value.message and "\n" not in error.value.message


# ---- errors


def test_a_line_that_is_not_json_is_named(tmp_path):
    path = write_lengths(tmp_path / "t.jsonl", [(0, 64, 1)])
    path.write_text(path.read_text() + "{oops")
    with pytest.raises(UsageError, match=r"t\.jsonl: not JSON"):
        traces.trace(path, 10)
    with pytest.raises(UsageError, match="does not exist"):
        traces.trace(tmp_path / "none.json", 10)
