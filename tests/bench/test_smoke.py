"""The smoke question comes first: a server whose answer has no words ends the run, with that as its line."""

from __future__ import annotations

import json

import pytest
from bench_cases import FACTS, annie, rows_of
from command_line import CliRunner
from fake_server import FakeServer, Script, words

from annie_quant import bench
from annie_quant.cli import app as cli
from annie_quant.core.errors import ServerError, UsageError


def run(tmp_path, answer, **settings):
    with FakeServer(answer) as server:
        settings = {"warmup": 0, "runs": 1, "with_memory": False} | settings
        return bench.run([bench.Backend("a", server.url)], [FACTS], tmp_path, **settings)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (words("GGGGGGGGGGGGGGGGGGGGGGGG"), "GGGG"),
        (words("the the the the the the the the the the the the"), "fails the smoke question"),
        (
            words(".isantts E_OVER\\n S copr; '...CSiscoslmogn不辞 продать / '^当 /M刘邦opIS"),
            "smoke",
        ),
        (words(""), "no text was received"),
        (Script(status=500, error="out of memory"), "HTTP 500: out of memory"),
        (Script(status=302, error="moved"), "HTTP 302"),
    ],
)
def test_an_answer_without_words_ends_the_run_before_anything_is_measured(tmp_path, answer, line):
    with pytest.raises(ServerError, match="fails the smoke question") as raised:
        run(tmp_path, lambda body: answer)
    assert line in str(raised.value) and "doctor --server" in str(raised.value.hint)
    assert [row["workload"] for row in rows_of(tmp_path)] == ["smoke"]


@pytest.mark.parametrize(
    "answer",
    [
        words("It is Paris."),
        words("**Tokyo**"),
        words("<think>Japan.</think> Tokyo."),
        Script(reasoning=["hm "] * 9, finish="length"),
        Script(completion_tokens=100, finish="length"),
    ],
)
def test_an_answer_with_other_faults_is_a_finding(tmp_path, answer):
    smoke = "What is the capital of Japan?"
    done = run(
        tmp_path, lambda body: answer if body["messages"][-1]["content"] == smoke else annie(body)
    )
    assert "smoke" in {finding.code for finding in done.aggregates.confounds}
    assert done.requests == len(FACTS.cases)


def test_a_run_continues_once_the_server_is_right(tmp_path):
    with pytest.raises(ServerError):
        run(tmp_path, lambda body: words("G" * 40))
    done = run(tmp_path, annie)
    assert done.requests == len(FACTS.cases)
    assert "smoke" not in {finding.code for finding in done.aggregates.confounds}


@pytest.mark.parametrize(
    "url", ["http://localhost:abc", "http://localhost:99999", "http://localhost:0", "http://[::1"]
)
@pytest.mark.parametrize("more", [[], ["--budget-s", "5"], ["--aa"]])
def test_a_url_without_a_valid_port_is_one_line(tmp_path, url, more):
    done = CliRunner().invoke(
        cli, ["bench", "--backend-a", "x", url, *more, "--output", str(tmp_path)]
    )
    assert isinstance(done.exception, UsageError) and "backend 'x'" in str(done.exception)


@pytest.mark.parametrize("name", ["budget_s", "timeout_s"])
@pytest.mark.parametrize("seconds", [-1, 0, float("nan"), float("inf")])
def test_a_time_that_measures_nothing_is_refused(tmp_path, name, seconds):
    with pytest.raises(UsageError, match=f"{name} must be a number of seconds above 0"):
        run(tmp_path, annie, **{name: seconds})
    assert not (tmp_path / "records.jsonl").exists()


def test_the_command_reports_the_smoke_question(tmp_path):
    cases = [{"id": "a", "messages": [{"role": "user", "content": "Hi"}]}]
    file = {"name": "w", "max_tokens": 9, "gates": [], "cases": cases}
    (tmp_path / "w.json").write_text(json.dumps(file))
    with FakeServer(lambda body: words("G" * 40)) as server:
        done = CliRunner().invoke(
            cli,
            ["bench", "--backend-a", "a", server.url, "--workloads", str(tmp_path / "w.json"), "--output", str(tmp_path / "run")],
        )  # fmt: skip
    assert isinstance(done.exception, ServerError)
    assert "fails the smoke question" in str(done.exception)
