"""Logs as conversations that are replayed, and traces whose requests arrive when they did."""

from __future__ import annotations

import json
import time

import pytest
from bench_cases import rows_of
from fake_server import FakeServer, Script, words
from otlp import write_lengths

pytest.importorskip("annie_quant._stream", reason="the streaming client is not built here")

from annie_quant import bench
from annie_quant.bench import traces
from annie_quant.bench.plan import arrival_times
from annie_quant.bench.run_folder import read_records
from annie_quant.core.errors import UsageError
from annie_quant.documents import Load

CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "robot"}'}}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
CHAT = [
    {"role": "system", "content": "You are Annie."},
    {"role": "user", "content": "What of my robot?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "It walks."},
    {"role": "assistant", "content": "Your robot walks."},
    {
        "role": "user",
        "content": "Thanks. My key is sk-proj-abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGH.",
    },
    {"role": "assistant", "content": "You are welcome."},
]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def log(path, chats=(CHAT,)):
    return lines(path, [{"messages": chat, "tools": [TOOL]} for chat in chats])


def one_side(url):
    return [bench.Backend("a", url)]


def measured(folder):
    return [
        r for r in read_records(folder / "records.jsonl") if not r.warmup and r.workload != "smoke"
    ]


def test_a_conversation_is_replayed_with_its_results(tmp_path):
    workload = traces.replay([log(tmp_path / "log.jsonl")], n=10)
    (case,) = workload.cases
    assert [t if isinstance(t, str) else [r["content"] for r in t["results"]] for t in case.turns] == [
        "What of my robot?", ["It walks."], case.turns[2],
    ]  # fmt: skip
    assert "sk-proj" not in case.turns[2], "secrets are masked"
    assert case.expect["turns"] == [
        {"logged": {"calls": ["find"]}},
        {"logged": {"calls": []}},
        {"logged": {"calls": []}},
    ]

    def calling(body):
        last = body["messages"][-1]
        return (
            Script(tools=[("find", '{"q": "robot"}')])
            if "robot" in last["content"]
            else words("It is Tokyo.")
        )

    with FakeServer(calling) as server:
        bench.run(
            one_side(server.url), [workload], tmp_path / "run", warmup=0, runs=1, with_memory=False
        )
        bodies = server.bodies
    roles = [m["role"] for m in bodies[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert (
        bodies[-1]["messages"][3]["content"] == "It walks."
        and bodies[-1]["tools"][0]["function"]["name"] == "find"
    )
    rows = measured(tmp_path / "run")
    assert [r.turn for r in rows] == [0, 1, 2] and rows[0].judgement.checks["logged_tool"] is True
    assert "sk-proj" not in (tmp_path / "run" / "inputs.json").read_text()


def test_sharegpt_is_replayed(tmp_path):
    path = tmp_path / "sharegpt.json"
    turns = [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
        {"from": "human", "value": "Bye"},
    ]
    path.write_text(
        json.dumps([{"id": "x", "conversations": turns}, {"id": "y", "conversations": turns[:2]}])
    )
    assert [c.turns for c in traces.replay([path], n=10).cases] == [("Hi", "Bye"), ("Hi",)]
    assert len(traces.replay([path], n=1).cases) == 1
    with pytest.raises(UsageError, match=r"no requests with times.*no time"):
        traces.trace(path, 10)


def test_a_deep_conversation_is_not_left_out(tmp_path):
    chat = [*CHAT[:1], {"role": "user", "content": "notes " * 20_000}, CHAT[-1]]
    assert (
        len(traces.replay([log(tmp_path / "log.jsonl", [chat])], n=10).cases[0].turns[0]) == 120_000
    )


def test_messages_that_are_not_in_the_usual_order():
    user, answer = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "r"}
    for messages, expected in (
        ([user, user, answer], [("u\n\nu", [])]),
        ([answer, result, user], [("u", None)]),
        (
            [user, call, result, result, user, answer],
            [("u", ["find"]), (["r", "r"], None), ("u", [])],
        ),
        ([user, answer, call, result], [("u", ["find"]), (["r"], None)]),
    ):
        turns = traces.turns_of(messages)
        assert [
            ([r["content"] for r in t.results] or t.content, t.calls) for t in turns
        ] == expected


def test_arrivals_are_those_of_the_trace_scaled(tmp_path):
    calls = [(1 + 0.4 * i, 60, 4) for i in range(5)]
    workload = traces.trace(write_lengths(tmp_path / "trace.jsonl", calls), 10)
    assert arrival_times(Load(0, None, 2.0), [], workload.cases) == pytest.approx(
        [0, 0.2, 0.4, 0.6, 0.8]
    )
    with (
        FakeServer(lambda body: words("It is Tokyo.")) as a,
        FakeServer(lambda body: words("It is Tokyo.")) as b,
    ):
        sides = [bench.Backend("a", a.url), bench.Backend("b", b.url)]
        begun = time.monotonic()
        bench.run(
            sides,
            [workload],
            tmp_path / "run",
            warmup=0,
            runs=1,
            with_memory=False,
            trace_speeds=[2.0, 4.0],
        )
        assert time.monotonic() - begun > 2 * (0.8 + 0.4), (
            "both sides wait for the trace's arrivals"
        )
        assert {body["max_tokens"] for body in a.bodies[-3:]} == {4} and a.bodies[-1][
            "ignore_eos"
        ] is True
    rows = measured(tmp_path / "run")
    assert {r.load.level.label for r in rows} == {"@trace-x2", "@trace-x4"} and not any(
        r.load.alone for r in rows
    )
    assert len(rows) == 20
    for side in "ab":
        own = sorted(
            (r for r in rows if r.backend == side and r.load.trace_speed == 2), key=lambda r: r.case
        )
        assert [r.load.arrival_s for r in own] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
        starts = [r.timings.started_s - own[0].timings.started_s for r in own]
        assert starts == pytest.approx([0, 0.2, 0.4, 0.6, 0.8], abs=0.15)
    prompts = {(r.backend, r.case, r.load.trace_speed): r.request_sha256 for r in rows}
    assert all(prompts["a", c, s] == prompts["b", c, s] for _, c, s in prompts)


def test_a_log_with_times_is_a_trace(tmp_path):
    records = [
        {"time": f"2026-11-22T10:00:0{s}Z", "messages": CHAT[:n], "tools": [TOOL]}
        for s, n in ((4, 7), (1, 3), (2, 2))
    ]
    workload = traces.trace(lines(tmp_path / "log.jsonl", records), 10)
    assert [c.arrival_s for c in workload.cases] == [0.0, 1.0, 3.0]
    assert [c.messages[-1]["role"] for c in workload.cases] == ["user", "user", "user"]
    assert (
        workload.cases[0].expect == {"logged": {"calls": ["find"]}}
        and workload.cases[1].expect == {}
    )
    assert "sk-proj" not in json.dumps([c.messages for c in workload.cases])


def test_the_command_takes_both(tmp_path):
    from command_line import CliRunner

    from annie_quant.cli import app as cli

    log(tmp_path / "log.jsonl")
    write_lengths(tmp_path / "trace.jsonl", [(0.1 * i, 60, 4) for i in range(3)])
    with FakeServer(lambda body: words("It is Tokyo.")) as server:
        result = CliRunner().invoke(
            cli,
            [
                "bench",
                "--backend-a",
                "a",
                server.url,
                "--replay",
                str(tmp_path / "log.jsonl"),
                "--trace",
                str(tmp_path / "trace.jsonl"),
                "--trace-speed",
                "2",
                "--runs",
                "1",
                "--warmup",
                "0",
                "--output",
                str(tmp_path / "run"),
            ],
        )
    assert result.exit_code in (0, 1), result.output
    workloads = {r["workload"] for r in rows_of(tmp_path / "run")}
    assert workloads == {"smoke", "replay", "trace"}
