"""Reports of GuideLLM and AIPerf that are written from a run have the structure of the tools' own."""

from __future__ import annotations

import json
import random
import statistics

import pytest
from bench_cases import config_of, known, row
from paths import DATA

from annie_quant.bench.exports import aiperf, guidellm
from annie_quant.documents import Bench

PEERS = DATA / "peer_reports"
GUIDELLM, AIPERF = (PEERS / name for name in ("guidellm_0.8.1.json", "aiperf_0.13.0.json"))


def records():
    rng = random.Random(3)
    rows = [
        row("a", rng.uniform(10, 20), case=str(i), started_unix_s=1e9 + i, sent_ms=0.1)
        for i in range(30)
    ]
    rows.append(row("a", 12.0, case="e", error="connection reset", started_unix_s=1e9 + 40))
    for i, record in enumerate(rows):
        record.timings.first_event_ms, record.timings.last_token_ms = (
            record.timings.first_content_ms,
            record.timings.e2e_ms,
        )
        record.timings.tpot_ms = 1.0 + i / 10
    return rows


def leaves(document, path=()):
    if isinstance(document, dict):
        for key, value in document.items():
            yield from leaves(value, (*path, key))
    elif isinstance(document, list):
        for value in document[:1]:
            yield from leaves(value, (*path, 0))
    else:
        yield path, document


def test_a_report_for_guidellm_has_the_structure_of_its_own():
    bench = Bench(config=config_of(w={}), backends={"a": known("a", url="http://127.0.0.1:1")})
    ours = json.loads(json.dumps(guidellm(bench, records(), "a")))
    theirs = dict(leaves(json.loads(GUIDELLM.read_text())))
    nested = {path[:n] for path in theirs for n in range(1, len(path))}
    free = ("requests", "environment", "labels", "data", "constraints", "errored", "benchmarks")
    for path, value in leaves(ours):
        if "errored" in path or any(part in free for part in path[-3:]):
            continue
        assert path in theirs or path in nested or value is None, path
        if path in theirs and value is not None and theirs[path] is not None:
            assert isinstance(value, (int, float, type(theirs[path]))), path
    metrics = set(json.loads(GUIDELLM.read_text())["benchmarks"][0]["metrics"])
    optional = {"request_dispatch_delay", "request_scheduled_latency", "turn_predecessor_delay", "turn_scheduling_delay",
                "root_dispatch_delay"}  # fmt: skip
    assert metrics - set(ours["benchmarks"][0]["metrics"]) <= optional
    first = ours["benchmarks"][0]["metrics"]["time_to_first_token_ms"]["successful"]
    assert first["count"] == 30
    assert first["median"] == pytest.approx(
        statistics.median(r.timings.first_content_ms for r in records() if not r.answer.error)
    )
    request = ours["benchmarks"][0]["requests"]["successful"][0]["info"]["timings"]
    assert request["first_token_iteration"] - request["request_start"] == pytest.approx(
        records()[0].timings.first_content_ms / 1e3, abs=1e-6
    )


def test_aiperfs_summary_has_only_names_that_aiperf_has():
    theirs = json.loads(AIPERF.read_text())
    for name, metric in aiperf(records()).items():
        assert name in theirs or name == "error_request_count", name
        if name in theirs:
            assert metric["unit"] == theirs[name]["unit"], name


def test_the_medians_are_those_of_the_records():
    bench = Bench(config=config_of(w={}), backends={"a": known("a")})
    good = [r for r in records() if not r.answer.error]
    theirs = guidellm(bench, records(), "a")["benchmarks"][0]["metrics"]
    assert theirs["request_totals"]["total"] == 31 and theirs["request_totals"]["errored"] == 1
    ours = aiperf(records())
    assert ours["request_count"]["avg"] == 30 and ours["error_request_count"]["avg"] == 1
    for guide, perf, expected, unit in (
        (
            "time_to_first_token_ms",
            "time_to_first_token",
            [r.timings.first_content_ms for r in good],
            1.0,
        ),
        ("inter_token_latency_ms", "inter_token_latency", [r.timings.tpot_ms for r in good], 1.0),
        ("request_latency", "request_latency", [r.timings.e2e_ms for r in good], 1e-3),
    ):
        median = statistics.median(expected)
        assert theirs[guide]["successful"]["median"] == pytest.approx(median * unit)
        assert ours[perf]["p50"] == pytest.approx(median)
    assert ours["inter_chunk_latency"]["p50"] == pytest.approx(1.5)
