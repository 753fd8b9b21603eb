"""Traces of WEKA's form and of OpenTelemetry: what is sent, and when, is what they have."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from command_line import CliRunner
from fake_server import FakeServer, words

pytest.importorskip("annie_quant._stream", reason="the streaming client is not built here")

from annie_quant import bench
from annie_quant.bench import traces
from annie_quant.bench.backend import CONNECT_S
from annie_quant.bench.plan import OPEN_LOOP_REQUESTS, planned_visits
from annie_quant.bench.run_folder import read_records
from annie_quant.cli import app as cli
from annie_quant.core.errors import UsageError
from annie_quant.data import otel
from annie_quant.data.logs import read_logs
from annie_quant.documents import BackendSettings, BenchConfig, Load


def call(t, prompt, answer, blocks, **more):
    return {
        "t": t,
        "type": "n",
        "model": "m",
        "in": prompt,
        "out": answer,
        "hash_ids": blocks,
        **more,
    }


# As traces/trace_0026.json of callanjfox/kv-cache-tester has it, with shorter prompts and a subagent.
SESSION = {
    "id": "trace_0026",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 64,
    "system_tokens": 64,
    "requests": [
        call(0.0, 300, 22, [1, 2, 3, 4], api_time=0.5, think_time=0.0, stop="end_turn"),
        call(2.0, 450, 9, [1, 2, 3, 4, 5, 6, 7], api_time=0.5, think_time=0.7, input_types=["tool_result"]),
        {
            "t": 2.5, "type": "subagent", "agent_id": "agent_001", "subagent_type": "Explore", "duration_ms": 600,
            "status": "completed", "models": ["m"],
            "requests": [call(0.0, 130, 3, [1, 2]), call(0.25, 200, 4, [1, 2, 20])],
        },
        call(900.0, 470, 5, [1, 2, 3, 4, 5, 6, 30], api_time=1.0, ttft=0.2),
    ],
}  # fmt: skip


def value(x):
    """Return a Python value as OTLP's AnyValue."""
    if isinstance(x, dict):
        return {"kvlistValue": {"values": [{"key": k, "value": value(v)} for k, v in x.items()]}}
    if isinstance(x, list):
        return {"arrayValue": {"values": [value(v) for v in x]}}
    kinds = {bool: "boolValue", int: "intValue", float: "doubleValue", str: "stringValue"}
    return {kinds[type(x)]: str(x) if type(x) is int else x}


def span(time_s, **attributes):
    named = {f"gen_ai.{name.replace('__', '.')}": x for name, x in attributes.items()}
    pairs = [{"key": k, "value": value(x)} for k, x in named.items()]
    return {
        "name": "chat m",
        "kind": 3,
        "startTimeUnixNano": str(int(time_s * 10**9)),
        "attributes": pairs,
    }


def export(*spans):
    return {
        "resourceSpans": [
            {"resource": {"attributes": []}, "scopeSpans": [{"scope": {}, "spans": [*spans]}]}
        ]
    }


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


# ---- WEKA


@pytest.mark.parametrize("indent", [None, 1])
def test_an_agents_requests_have_their_lengths_times_and_prefixes(tmp_path, indent):
    workload = traces.trace(write(tmp_path / "t.json", SESSION, indent=indent), 10)
    assert [c.prompt_tokens for c in workload.cases] == [300, 450, 130, 200, 470]
    assert [c.max_tokens for c in workload.cases] == [22, 9, 3, 4, 5]
    assert [c.arrival_s for c in workload.cases] == [0, 2, 2.5, 2.75, 62.75], (
        "the wait of 897 s is one of 60"
    )
    prompts = [workload.messages(c)[0]["content"].split("\n\n") for c in workload.cases]
    assert [len(" ".join(p).split()) / 0.75 for p in prompts] == pytest.approx(
        [300, 450, 130, 200, 470], abs=2
    )
    alike = [
        sum(x == y for x, y in zip(a, b, strict=False)) for a, b in itertools.pairwise(prompts)
    ]
    assert alike == [4, 2, 2, 2], (
        "the blocks that the ids share; a session's agents have them in common"
    )


def test_times_of_a_subagent_since_the_sessions_start(tmp_path):
    absolute = json.loads(json.dumps(SESSION))
    for request in absolute["requests"][2]["requests"]:
        request["t"] += 2.5
    both = [traces.trace(write(tmp_path / "t.json", s), 10) for s in (SESSION, absolute)]
    assert [c.arrival_s for c in both[0].cases] == [c.arrival_s for c in both[1].cases]


def test_sessions_follow_each_other_and_share_text_only_in_a_global_scope(tmp_path):
    for scope, shared in (("local", False), ("global", True)):
        folder = tmp_path / scope
        folder.mkdir()
        for name in ("a", "b"):
            requests = [call(t, 64, 1, [1]) for t in (5, 7)]
            write(
                folder / f"{name}.json", {"id": name, "hash_id_scope": scope, "requests": requests}
            )
        cases = traces.trace(folder, 3).cases
        assert [c.arrival_s for c in cases] == [0, 2, 62] and (
            cases[0].blocks == cases[2].blocks
        ) is shared


def test_each_request_of_a_replayed_agent_waits_after_the_answer_before_it(tmp_path):
    workload = traces.replay([write(tmp_path / "t.jsonl", SESSION)], 10)
    agent, subagent = workload.cases
    assert [[s.wait_s for s in c.steps] for c in (agent, subagent)] == [[0, 0.7, 60], [0, 0.25]]
    short = dataclasses.replace(workload, cases=(subagent,))
    with FakeServer(lambda body: words("It is Tokyo.", first_s=0.3)) as server:
        bench.run(
            [bench.Backend("a", server.url)],
            [short],
            tmp_path / "run",
            warmup=1,
            runs=1,
            with_memory=False,
        )
        warm, *sent = server.bodies[-3:]
    rows = [
        r
        for r in read_records(tmp_path / "run/records.jsonl")
        if not r.warmup and r.workload == "replay"
    ]
    assert [r.turn for r in rows] == [0, 1] and [r.load.arrival_s for r in rows] == [None, 0.25]
    ended = rows[0].timings.started_unix_s + rows[0].timings.e2e_ms / 1e3
    assert 0.25 <= rows[1].timings.started_unix_s - ended < 0.25 + CONNECT_S, "the wait alone"
    assert [b["max_tokens"] for b in sent] == [3, 4] and all(b["ignore_eos"] for b in sent)
    texts = [b["messages"][0]["content"].split("\n\n") for b in (warm, *sent)]
    assert texts[1][:3] == texts[2][:3] and len(texts[2]) == 5 and len(sent[1]["messages"]) == 1
    assert texts[0][0] != texts[1][0], "warm-ups do not fill the prefix cache"


def test_a_trace_arrives_in_order_where_it_is_sent_in_groups(tmp_path):
    rows = [
        {"timestamp": 100 * i, "input_length": 64, "output_length": 1}
        for i in range(4 * OPEN_LOOP_REQUESTS)
    ]
    workload = traces.trace(write(tmp_path / "t.jsonl", *rows), 1000)
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
        UsageError, match=r"no conversation to replay: 2 × a span without gen_ai.input.messages"
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


def test_the_command_replays_an_agent_resumes_and_reports(tmp_path):
    short = {**SESSION, "requests": SESSION["requests"][:3]}
    path, run = write(tmp_path / "t.json", short), tmp_path / "run"
    with FakeServer(lambda body: words("It is Tokyo.")) as server:
        command = ["bench", "--backend-a", "a", server.url, "--replay", str(path), "--trace", str(path), "--trace-speed", "10",
                   "--runs", "1", "--warmup", "0", "--noise-share", "0", "--output", str(run)]  # fmt: skip
        first = CliRunner().invoke(cli, command)
        sent = len(server.bodies)
        again = CliRunner().invoke(cli, command)
    assert first.exit_code == again.exit_code == 0, first.output
    assert sent == len(server.bodies) == 2 + 4 + 4, (
        "two questions of the client, the trace, the replay; nothing twice"
    )
    cases = {
        w["name"]: w["cases"] for w in json.loads((run / "inputs.json").read_text())["workloads"]
    }
    assert [len(c["steps"]) for c in cases["replay"]] == [2, 2] and cases["trace"][1][
        "block_tokens"
    ] == 64
    assert "replay" in (run / "report.html").read_text()


# ---- errors


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"in": 0}, r"Expected `int` >= 1 - at `\$.requests\[0\].in`"),
        ({"t": -1}, r"requests\[0\].t"),
        ({"think_time": 1e12}, "think_time"),
        ({"hash_ids": [None]}, "hash_ids"),
        ({"type": "x"}, "type"),
    ],
)
def test_a_broken_request_of_an_agent_is_named(tmp_path, change, reason):
    broken = {**SESSION, "requests": [{**SESSION["requests"][0], **change}]}
    path = write(tmp_path / "t.jsonl", SESSION, broken)
    for read in (lambda: traces.trace(path, 10), lambda: traces.replay([path], 10)):
        with pytest.raises(UsageError, match=f"t.jsonl, line 2: .*{reason}") as error:
            read()
        assert "\n" not in error.value.message


def test_another_form_in_a_later_line_and_a_line_that_is_not_json_are_named(tmp_path):
    path = tmp_path / "t.jsonl"
    for line, reason in (('{"messages": []}', "line 2: .*id"), ("{oops", "line 2: not JSON")):
        path.write_text(json.dumps(SESSION) + "\n" + line)
        with pytest.raises(UsageError, match=reason):
            traces.trace(path, 10)
    with pytest.raises(UsageError, match="does not exist"):
        traces.trace(tmp_path / "none.json", 10)
