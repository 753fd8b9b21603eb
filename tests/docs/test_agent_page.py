"""Each command of docs/how-to/benchmark-agents.md runs; scripted servers stand at the two ports."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from command_line import CliRunner
from fake_server import FakeServer, words
from otlp import write_lengths
from paths import ROOT

pytest.importorskip("annie_quant._stream", reason="the streaming client is not built here")

from annie_quant.bench.run_folder import read_records
from annie_quant.cli import app as cli

PAGE = (ROOT / "docs/how-to/benchmark-agents.md").read_text()
COMMANDS = [line.strip() for line in PAGE.splitlines() if line.startswith("    annie-quant ")]


def answer(body):
    return words(
        "It is Tokyo of course.", cached_tokens=0, timings={"draft_n": 10, "draft_n_accepted": 6}
    )


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.rpartition("/")[2])
def test_a_command_runs(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "logs.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    write_lengths(tmp_path / "spans.jsonl", [(0, 600, 3)])
    with FakeServer(answer) as one, FakeServer(answer) as two:
        line = line.replace("http://localhost:8000", one.url).replace(
            "http://localhost:8003", two.url
        )
        arguments = [
            *shlex.split(re.sub(r" --(n|warmup) \d+", "", line))[1:],
            "--n",
            "1",
            "--warmup",
            "1",
        ]
        result = CliRunner().invoke(cli, arguments)
    assert result.exit_code in (0, 1), result.output
    assert "Traceback" not in result.output and not isinstance(result.exception, AssertionError)
    output = tmp_path / arguments[arguments.index("--output") + 1]
    rows = [
        r for r in read_records(output / "records.jsonl") if not r.warmup and r.workload != "smoke"
    ]
    assert rows and (output / "report.html").exists()
    assert not any(r.answer.error for r in rows)


def test_the_page_has_a_command_for_each_workload():
    for name in (
        "first_token",
        "depth_64k",
        "prefix_hit",
        "agent_loop",
        "text_code",
        "--replay",
        "--trace ",
    ):
        assert any(name in line for line in COMMANDS), name
