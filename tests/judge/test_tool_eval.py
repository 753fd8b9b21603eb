"""tool-eval-bench's scenarios: played by the package, one record and one check each."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from types import SimpleNamespace

import pytest
from fake_server import FakeServer, Script, words

from annie_quant import bench, judge
from annie_quant.bench.run_folder import read_records
from annie_quant.cli.bench import BenchOptions, workloads_of
from annie_quant.core.errors import EnvironmentFault, ServerError, UsageError
from annie_quant.data.workloads import resolve
from annie_quant.judge import tool_eval

pytest.importorskip("annie_quant._stream", reason="the streaming client is not built here")


def package(results):
    """A stand-in for the package: its scenarios are the keys of `results`, (status, points, failure kind) or an exception."""
    played = []

    def scenario(name):
        return SimpleNamespace(
            id=name,
            user_message=f"Do {name}",
            follow_up_messages=["And?"],
            tools_override=None,
            category=SimpleNamespace(value="A"),
        )

    async def run_benchmark(*, scenarios, base_url, **options):
        assert not options["persist"] and not options["probe_engine"], (
            "nothing is stored elsewhere, no further request is sent"
        )
        (one,) = scenarios
        played.append(one.id)
        status, points, kind = results[one.id]
        result = {
            "scenario_id": one.id, "status": status, "points": points, "summary": f"{one.id} {status}", "failure_kind": kind,
            "duration_seconds": 0.25, "turn_count": 2, "prompt_tokens": 9, "completion_tokens": 4,
        }  # fmt: skip
        return {"scores": {"scenario_results": [result]}}

    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
    modules = {
        "": SimpleNamespace(__version__="3.0.0"),
        "evals.scenarios": SimpleNamespace(ALL_SCENARIOS=[scenario(name) for name in results]),
        "domain.tools": SimpleNamespace(UNIVERSAL_TOOLS=[tool]),
        "domain.scenarios": SimpleNamespace(
            INFRASTRUCTURE_FAILURE_KINDS={"timeout", "server_error"}
        ),
        "api": SimpleNamespace(run_benchmark=run_benchmark),
    }
    return modules, played


RESULTS = {
    "TC-01": ("pass", 2, None), "TC-02": ("partial", 1, None), "TC-03": ("fail", 0, "wrong_tool"), "TC-04": ("fail", 0, "timeout"),
}  # fmt: skip


def run(tmp_path, server, **options):
    workloads = judge.load_workloads([tool_eval.NAME])
    return bench.run(
        [bench.Backend("a", server.url)],
        workloads,
        tmp_path,
        warmup=1,
        with_memory=False,
        **options,
    )


def test_each_scenario_is_one_record_with_the_packages_result(monkeypatch, tmp_path):
    modules, played = package(RESULTS)
    monkeypatch.setattr(tool_eval, "_package", modules.__getitem__)
    with FakeServer(lambda body: words("It is Tokyo of course.")) as server:
        done = run(tmp_path, server, runs=2)
        again = run(tmp_path, server, runs=2)
    assert sorted(played) == sorted(2 * list(RESULTS)), (
        "no warm-up, and a resumed run plays nothing again"
    )
    gate = done.aggregates.served["a"].gates["scenario"]
    assert (gate.passes, gate.n) == (1, 4) and again.requests == 8
    rows = {
        r.case: r for r in read_records(tmp_path / "records.jsonl") if r.workload == tool_eval.NAME
    }
    assert rows["TC-01"].answer.text == "pass, 2 points: TC-01 pass" and rows[
        "TC-01"
    ].judgement.checks == {"scenario": True}
    assert (
        rows["TC-02"].judgement.faults == {"scenario": "TC-02 partial"}
        and rows["TC-02"].answer.error is None
    )
    assert (
        rows["TC-04"].answer.error == "timeout: TC-04 fail" and rows["TC-01"].timings.e2e_ms == 250
    )
    assert [c.code for c in done.aggregates.confounds if c.code == "errors"] == ["errors"]


def test_a_server_that_went_away_ends_the_run(monkeypatch, tmp_path):
    modules, _ = package({"TC-04": RESULTS["TC-04"]})
    monkeypatch.setattr(tool_eval, "_package", modules.__getitem__)
    monkeypatch.setattr("annie_quant.bench.session.alive", lambda backend: False)
    with (
        FakeServer(lambda body: words("It is Tokyo of course.")) as server,
        pytest.raises(ServerError, match="went away"),
    ):
        run(tmp_path, server, runs=1)


def test_without_the_package_the_command_to_install_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tool_eval_bench", None)
    monkeypatch.delitem(sys.modules, "tool_eval_bench.evals.scenarios", raising=False)
    with pytest.raises(EnvironmentFault, match="not installed") as caught:
        judge.load_workloads([tool_eval.NAME])
    assert "pip install tool-eval-bench" in str(caught.value.hint)


def test_a_benchmark_has_all_scenarios_and_an_evaluation_refuses_them(monkeypatch, tmp_path):
    modules, _ = package({f"TC-{i:02d}": ("pass", 2, None) for i in range(69)})
    monkeypatch.setattr(tool_eval, "_package", modules.__getitem__)
    options = BenchOptions(
        backend_a=("a", "http://127.0.0.1:1"),
        workloads="factual,tool-eval-bench",
        n=5,
        output=tmp_path,
    )
    assert {w.name: len(w.cases) for w in workloads_of(options)} == {
        "factual": 5,
        "tool-eval-bench": 69,
    }
    pair = pytest.importorskip("annie_quant.offline.pair", reason="torch is not installed")
    job = pair.EvaluationJob(
        checkpoint=tmp_path, reference=tmp_path, workloads=judge.load_workloads([tool_eval.NAME])
    )
    with pytest.raises(UsageError, match="plays its scenarios against a server"):
        job.prompts(5)


def test_an_unknown_workloads_message_names_it():
    with pytest.raises(UsageError) as caught:
        resolve(workloads="toolevalbench")
    assert "tool-eval-bench" in str(caught.value.hint)


def guess(body):
    """Calls the offered tool that shares a word with the request, once, then answers: some scenarios pass, others do not."""
    user = [m for m in body["messages"] if m["role"] == "user"][-1]["content"]
    if any(m["role"] == "tool" for m in body["messages"]):
        return words("Done. " + user[:40])
    for tool in body.get("tools") or ():
        function = tool["function"]
        if (
            set(function["name"].split("_"))
            & {"weather", "calculator", "stock", "contacts", "email", "search"}
            & set(re.findall(r"\w+", user.lower()))
        ):
            properties = function["parameters"].get("properties", {})
            given = {
                key: user.split()[-1].strip("?.")
                for key in function["parameters"].get("required", ())
                if key in properties
            }
            return Script(tools=[(function["name"], json.dumps(given))])
    return words("I cannot do that. It is Tokyo of course.")


def test_all_scenarios_give_what_the_packages_own_runner_gives(tmp_path):
    api = pytest.importorskip(
        "tool_eval_bench.api",
        reason="tool-eval-bench is not installed (pip install tool-eval-bench)",
    )
    with FakeServer(guess) as server:
        run(tmp_path, server, runs=1)
        own = asyncio.run(
            api.run_benchmark(
                model="fake",
                base_url=server.url,
                backend="openai",
                persist=False,
                probe_engine=False,
                wire_format="openai",
            )
        )
    rows = {
        r.case: r.answer.text
        for r in read_records(tmp_path / "records.jsonl")
        if r.workload == tool_eval.NAME
    }
    results = own["scores"]["scenario_results"]
    assert rows == {
        r["scenario_id"]: f"{r['status']}, {r['points']} points: {r['summary']}" for r in results
    }
    assert len({r["status"] for r in results}) == 3, "passes, partial passes and failures"
