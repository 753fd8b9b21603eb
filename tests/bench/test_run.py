"""Benchmarks of scripted servers: order, request fields, records, aggregates, resuming, faults."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest
from bench_cases import FACTS, MEMORY, TALK, annie, backends, rows_of
from fake_server import FakeServer, Script, words

from annie_quant import bench
from annie_quant.core.errors import ServerError, UsageError
from annie_quant.core.progress import Silent
from annie_quant.documents import Ended


@pytest.fixture
def two():
    with FakeServer(annie) as a, FakeServer(annie) as b:
        yield a, b


def test_a_run_from_smoke_to_aggregates(two, tmp_path):
    result = bench.run(backends(*two), [FACTS, MEMORY, TALK], tmp_path, warmup=2, runs=2)
    rows = rows_of(tmp_path)
    measured = [r for r in rows if not r["warmup"]]
    # 6 + 1 single prompts and 5 turns, twice, on two sides.
    assert len(measured) == 2 * 2 * (6 + 1 + 5)
    assert len({r["id"] for r in rows}) == len(rows)
    assert [r["workload"] for r in rows[:2]] == ["smoke", "smoke"] and all(
        r["cold"] and r["warmup"] for r in rows[:2]
    )
    assert sum(r["warmup"] for r in rows) == 2 + 2 * 2 * (1 + 1 + 5)
    gates = result.aggregates.served["a"].gates
    assert (gates["factual"].passes, gates["factual"].n) == (6, 6)
    assert (gates["tool_call"].passes, gates["tool_call"].n) == (1, 1)
    assert result.aggregates.turns["b"][4].turn == 5 and result.aggregates.turns["b"][4].n == 2
    assert result.aggregates.served["a"].workloads["tool_memory"].ttft_tool_ms.p50 > 0
    assert result.aggregates.served["a"].workloads["tool_memory"].ttft_content_ms is None
    assert {c.workload for c in result.aggregates.comparisons} >= {"factual", "multi_turn", "all"}
    assert json.loads((tmp_path / "bench.json").read_text())["config"]["runs"] == 2
    assert all((tmp_path / "streams" / r["stream"]).exists() for r in rows)


def test_every_request_turns_thinking_off_and_requests_usage(two, tmp_path):
    bench.run(backends(*two), [FACTS, TALK], tmp_path, warmup=1, runs=1)
    for body in two[0].bodies:
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
        assert body["stream_options"] == {"include_usage": True} and body["stream"] is True


def test_both_sides_get_identical_prompts_interleaved(two, tmp_path):
    bench.run(backends(*two), [FACTS], tmp_path, warmup=0, runs=4)
    assert sorted(json.dumps(b["messages"]) for b in two[0].bodies) == sorted(
        json.dumps(b["messages"]) for b in two[1].bodies
    )
    order = [r["backend"] for r in rows_of(tmp_path) if not r["warmup"]]
    blocks = ["".join(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert set(blocks) == {"abba", "baab"}


def test_a_conversation_contains_the_servers_own_answers(two, tmp_path):
    bench.run(backends(*two), [TALK], tmp_path, warmup=0, runs=1)
    last = max(two[0].bodies, key=lambda b: len(b["messages"]))["messages"]
    assert [m["content"] for m in last] == [
        "You are Annie.",
        "one",
        "You wrote one.",
        "two",
        "You wrote two.",
        "three",
        "You wrote three.",
        "four",
        "You wrote four.",
        "five",
    ]


def test_resume_sends_only_what_is_left(two, tmp_path):
    bench.run(backends(*two), [FACTS, TALK], tmp_path, warmup=1, runs=2)
    whole = {r["id"]: r["text"] for r in rows_of(tmp_path) if not r["warmup"]}
    lines = (tmp_path / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_text("".join(lines[:15]) + lines[15][:40])
    before = len(two[0].bodies) + len(two[1].bodies)
    bench.run(backends(*two), [FACTS, TALK], tmp_path, warmup=1, runs=2)
    sent = len(two[0].bodies) + len(two[1].bodies) - before
    rows = rows_of(tmp_path)
    assert {r["id"]: r["text"] for r in rows if not r["warmup"]} == whole
    assert len({r["id"] for r in rows}) == len(rows)
    assert sent == len(rows) - 15
    bench.run(backends(*two), [FACTS, TALK], tmp_path, warmup=1, runs=2)
    assert len(rows_of(tmp_path)) == len(rows)


def test_resume_refuses_other_settings(two, tmp_path):
    bench.run(backends(*two), [FACTS], tmp_path, warmup=0, runs=1)
    with pytest.raises(UsageError, match="other settings") as caught:
        bench.run(backends(*two), [FACTS], tmp_path, warmup=0, runs=2)
    with pytest.raises(UsageError, match="backends"):
        other = [
            bench.Backend("a", two[0].url, meta={"source": "other weights"}),
            bench.Backend("b", two[1].url),
        ]
        bench.run(other, [FACTS], tmp_path, warmup=0, runs=1)
    bench.run(backends(*two), [FACTS], tmp_path, warmup=0, runs=2, resume=False)
    assert sum(not r["warmup"] for r in rows_of(tmp_path)) == 24
    advice = shlex.split(caught.value.hint.partition("again: ")[2])
    assert advice[:2] == ["rm", "-r"]
    subprocess.run(advice, check=True)
    bench.run(backends(*two), [FACTS], tmp_path, warmup=0, runs=1)
    assert sum(not r["warmup"] for r in rows_of(tmp_path)) == 12


def test_records_survive_a_server_that_stops(tmp_path):
    with FakeServer(annie) as a, FakeServer(annie) as b:
        answered = []

        def dying(body):
            answered.append(1)
            if len(answered) == 6:
                import threading

                threading.Thread(target=a.stop).start()
                return Script(content=["x"] * 50, gap_s=0.2)
            return annie(body)

        a.answer = dying
        with pytest.raises(ServerError, match="'a'"):
            bench.run(backends(a, b), [FACTS], tmp_path, warmup=1, runs=2)
    rows = rows_of(tmp_path)
    assert len([r for r in rows if r["backend"] == "a"]) == 5
    assert not any(r["error"] for r in rows)
    with FakeServer(annie) as a, FakeServer(annie) as b:
        bench.run(backends(a, b), [FACTS], tmp_path, warmup=1, runs=2)
    assert sum(not r["warmup"] for r in rows_of(tmp_path)) == 24


def test_a_missing_server_is_a_one_line_error(tmp_path):
    with pytest.raises(ServerError, match=r"no server answers at http://127\.0\.0\.1:9"):
        bench.run([bench.Backend("a", "http://127.0.0.1:9")], [FACTS], tmp_path)


def test_a_run_that_measured_nothing_can_be_repeated_with_other_settings(two, tmp_path):
    with pytest.raises(ServerError, match="no server answers"):
        bench.run(
            [bench.Backend("a", "http://127.0.0.1:9", meta={"source": "x"})],
            [FACTS],
            tmp_path,
            warmup=0,
        )
    bench.run(
        [bench.Backend("a", two[0].url, meta={"source": "y"})], [FACTS], tmp_path, warmup=0, runs=1
    )
    assert sum(not r["warmup"] for r in rows_of(tmp_path)) == 6


def test_failed_requests_are_failures_and_not_crashes(two, tmp_path):
    two[0].answer = lambda body: (
        Script(status=400, error="auto tool choice requires --tool-call-parser")
        if body.get("tools")
        else annie(body)
    )
    result = bench.run(backends(*two), [FACTS, MEMORY], tmp_path, warmup=0, runs=1)
    gates = result.aggregates.served["a"].gates
    assert gates["tool_call"].passes == 0 and gates["tool_call"].n == 1
    assert any(f.code == "tool_parser_missing" for f in result.aggregates.confounds)
    assert result.aggregates.served["a"].errors == 1


def test_concurrent_requests_are_sent_together(two, tmp_path):
    two[0].answer = lambda body: words("Tokyo it is", first_s=0.1)
    bench.run(backends(*two), [FACTS], tmp_path, warmup=0, runs=1, concurrency=[1, 3])
    assert two[0].most_in_flight == 3
    rows = [r for r in rows_of(tmp_path) if not r["warmup"]]
    assert len(rows) == 24 and {r["concurrency"] for r in rows} == {1, 3}


def test_records_survive_an_interrupt(two, tmp_path):
    class Interrupting(Silent):
        def update(self, done, total=None, text=""):
            if done == 7:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(backends(*two), [FACTS], tmp_path, warmup=0, runs=2, progress=Interrupting())
    assert sum(not r["warmup"] for r in rows_of(tmp_path)) == 7
    bench.run(backends(*two), [FACTS], tmp_path, warmup=0, runs=2)
    assert sum(not r["warmup"] for r in rows_of(tmp_path)) == 24


def test_measured_requests_use_an_open_connection(two, tmp_path):
    bench.run(backends(*two), [FACTS], tmp_path, warmup=0, runs=1, concurrency=2)
    assert not any(r["new_connection"] for r in rows_of(tmp_path) if not r["warmup"])


def test_a_time_budget_ends_a_run_that_can_be_resumed(two, tmp_path):
    for server in two:
        server.answer = lambda body: words("It is Tokyo.", first_s=0.3)
    # The first request comes some time after the start, on a busy machine more than a second.
    short = bench.run(backends(*two), [FACTS], tmp_path, warmup=0, runs=2, budget_s=4)
    assert 0 < short.requests < 24 and short.ended.unasked == 24 - short.requests
    assert any("the same command continues" in caveat for caveat in short.verdict.caveats)
    for server in two:
        server.answer = lambda body: words("It is Tokyo.")
    whole = bench.run(backends(*two), [FACTS], tmp_path, warmup=0, runs=2)
    assert whole.requests == 24 and whole.ended == Ended(unasked=0, prefix_cache="warm")


def test_a_prefix_cache_that_cannot_be_disabled_is_reported(tmp_path):
    with FakeServer(annie, style="vllm") as a, FakeServer(annie, style="llama.cpp") as b:
        pair = [bench.Backend("a", a.url, meta={"runtime": "sglang"}), bench.Backend("b", b.url)]
        result = bench.run(pair, [FACTS], tmp_path, warmup=0, runs=1, prefix_cache="off")
        assert all(body["cache_prompt"] is False for body in b.bodies if "Capital" in str(body))
    findings = [f for f in result.aggregates.confounds if f.code == "prefix_cache"]
    assert [f.backends for f in findings] == [["a"]] and findings[0].severity == "confound"


def test_each_request_to_vllm_has_its_own_legal_salt(tmp_path):
    """vLLM 0.32 answers HTTP 400 to a salt with "@", "/", a backslash or NUL, or of more than 128 characters."""
    with FakeServer(annie, style="vllm") as server:
        bench.run(
            [bench.Backend("a", server.url)],
            [FACTS],
            tmp_path,
            warmup=0,
            runs=1,
            prefix_cache="off",
        )
        salts = [body["cache_salt"] for body in server.bodies if "Capital" in str(body)]
    assert len({*salts}) == len(salts) > 1 and all(
        salt.isalnum() and len(salt) <= 128 for salt in salts
    )
