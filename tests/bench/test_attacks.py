"""Candidates that answer fluently and wrongly, through the command line: exit code 1, and the sentence names the gate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_cases import TOOLS, ask
from command_line import CliRunner, Result
from fake_server import FakeServer, Script, words

from annie_quant.cli import app as cli
from annie_quant.judge.gates import NAMED_REFERENCE_GATES

N = 60
Answer = Callable[[dict], Script]
CITIES = ("Lisbon", "Nairobi", "Osaka", "Quito", "Tallinn", "Wellington")
LABELLED = {
    "name": "notes",
    "tools": TOOLS,
    "gates": ["tool_call", "tool_arguments", "non_empty"],
    "cases": [
        {
            "id": f"n{i}",
            "messages": ask(f"Find the note about {CITIES[i % 6]} number {i}"),
            "expect": {"tool": "search_memory", "arguments": {"query": f"number {i}"}},
        }
        for i in range(N)
    ],
}
UNLABELLED = {
    "name": "talk",
    "gates": ["non_empty", "no_markdown", "thinking_leak", *NAMED_REFERENCE_GATES],
    "cases": [
        {"id": f"t{i}", "messages": ask(f"Describe {CITIES[i % 6]} number {i}")} for i in range(N)
    ],
}
UNLABELLED_TOOLS = UNLABELLED | {"name": "logged", "tools": TOOLS, "cases": LABELLED["cases"]}
UNLABELLED_TOOLS["cases"] = [
    {k: v for k, v in case.items() if k != "expect"} for case in LABELLED["cases"]
]


def subject(body: dict) -> str:
    return " ".join(body["messages"][-1]["content"].split()[-3:])


def right(body: dict) -> Script:
    """The reference: the right call, or a sentence about what was asked for."""
    if body.get("tools"):
        return Script(tools=[("search_memory", json.dumps({"query": subject(body)}))])
    return words(
        f"You asked about {subject(body)}, which is a city that is visited for its harbour and old streets."
    )


def cut(body: dict) -> Script:
    text = "".join(right(body).content)[:25]
    return words(text, finish="")


def fixed(body: dict) -> Script:
    return words("That is a wonderful question and I am glad that you have asked it of me.")


def constant(body: dict) -> Script:
    """It begins as the reference's answers do, and shares words with all of them."""
    return words(
        "You asked about something, which is a city that is visited for its harbour and old streets."
    )


def blorp(body: dict) -> Script:
    return words("Blorp.")


def xyzzy(body: dict) -> Script:
    return Script(tools=[("search_memory", '{"query": "xyzzy"}')])


def bench(
    folder: Path, workload: dict[str, Any], candidate: Answer, *options: str
) -> tuple[Result, dict[str, Any]]:
    path = folder / "workload.json"
    path.write_text(json.dumps({"max_tokens": 50, "system": "You are Annie."} | workload))
    with FakeServer(candidate) as a, FakeServer(right) as b:
        sides = [
            "--backend-a",
            "quantized",
            a.url,
            "--backend-b",
            "bf16",
            b.url,
            "--reference",
            "bf16",
        ]
        run = [
            "--runs",
            "1",
            "--warmup",
            "0",
            "--n",
            "0",
            "--concurrency",
            "60",
            "--workloads",
            str(path),
            "--output",
            str(folder / "run"),
            "--json",
        ]
        done = CliRunner().invoke(cli, ["bench", *sides, *run, *options])
    return done, json.loads(done.stdout)


def test_a_right_candidate_keeps(tmp_path: Path) -> None:
    for workload in (LABELLED, UNLABELLED, UNLABELLED_TOOLS):
        folder = tmp_path / workload["name"]
        folder.mkdir()
        done, verdict = bench(folder, workload, right)
        assert (done.exit_code, verdict["outcome"]) == (0, "keeps"), workload["name"]


@pytest.mark.parametrize(
    ("workload", "candidate", "gate"),
    [
        pytest.param(LABELLED, xyzzy, "tool arguments", id="labelled-xyzzy"),
        pytest.param(UNLABELLED_TOOLS, xyzzy, "arguments as bf16", id="unlabelled-xyzzy"),
        pytest.param(UNLABELLED, cut, "words as bf16", id="cut"),
        pytest.param(UNLABELLED, blorp, "words as bf16", id="blorp"),
        pytest.param(
            UNLABELLED_TOOLS, fixed, "tool or none as bf16", id="constant-instead-of-calls"
        ),
    ],
)
def test_a_wrong_candidate_loses(
    tmp_path: Path, workload: dict[str, Any], candidate: Answer, gate: str
) -> None:
    done, verdict = bench(tmp_path, workload, candidate)
    assert (done.exit_code, verdict["outcome"]) == (1, "loses")
    assert gate in " ".join([verdict["sentence"], *verdict["reasons"]])
    assert "loses" in verdict["sentence"] and not verdict["passed"]


@pytest.mark.parametrize("candidate", [fixed, constant])
def test_one_answer_to_all_questions_does_not_keep(tmp_path: Path, candidate: Answer) -> None:
    """Each answer has words of the reference's, its length, its language and an end."""
    done, verdict = bench(tmp_path, UNLABELLED, candidate)
    assert (done.exit_code, verdict["outcome"]) == (1, "undecided")
    assert "constant answers" in verdict["sentence"] and any(
        "one answer to 60 of 60" in c for c in verdict["caveats"]
    )
