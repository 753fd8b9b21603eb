"""Effects planted in a server are named by the report of a run against it."""

from __future__ import annotations

import itertools

import pytest
from bench_cases import ask, workload
from fake_server import FakeServer, Script

from annie_quant import bench, report

CODES = {"slower_at_depth", "drift", "throttled"}
LONG = "word " * 3000
ANSWER = "It is Tokyo, as you know, my friend."
PROMPTS = workload(
    "mixed",
    [{"id": f"s{i}", "messages": ask(f"{i}?")} for i in range(8)]
    + [{"id": f"l{i}", "messages": ask(f"{i} {LONG}")} for i in range(8)],
    gates=["non_empty"],
)


def model(gap_s):
    """A model of eight tokens; gap_s(number of the request, deep) between two."""
    count = itertools.count()

    def answer(body):
        deep = len(body["messages"][-1]["content"]) > 1000
        return Script(
            content=[f"{word} " for word in ANSWER.split()],
            gap_s=gap_s(next(count), deep),
            first_s=0.002,
        )

    return answer


def run(tmp_path, gap_s):
    with FakeServer(model(lambda n, deep: 0.006)) as a, FakeServer(model(gap_s)) as b:
        done = bench.run(
            [bench.Backend("a", a.url), bench.Backend("b", b.url)],
            [PROMPTS],
            tmp_path,
            warmup=0,
            runs=4,
        )
    report.build(tmp_path)
    return {c.code: c for c in done.aggregates.confounds if c.code in CODES}, (
        tmp_path / "report.md"
    ).read_text()


@pytest.mark.parametrize(
    ("code", "gap_s", "text"),
    [
        ("slower_at_depth", lambda n, deep: 0.015 if deep else 0.006, "b is slower"),
        ("drift", lambda n, deep: 0.03 if n > 33 else 0.006, "b became slower"),
    ],
)
def test_a_planted_effect_is_named_by_the_report(tmp_path, code, gap_s, text):
    findings, page = run(tmp_path, gap_s)
    names = (
        findings.keys() if code != "drift" else {c.replace("throttled", "drift") for c in findings}
    )
    assert code in names, findings
    assert text in page.replace("\\", "")
