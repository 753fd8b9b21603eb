"""Reports of GuideLLM, AIPerf and vLLM are read; those written from a run have the structure of the tools' own."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest
from bench_cases import config_of, folder_of, known, row
from click.testing import CliRunner
from paths import DATA

from annie_quant.bench.exchange import aiperf, guidellm, is_report, read
from annie_quant.cli import cli
from annie_quant.errors import UsageError
from annie_quant.schema import Bench

PEERS = DATA / "peer_reports"
GUIDELLM, AIPERF, VLLM = (PEERS / name for name in ("guidellm_0.8.1.json", "aiperf_0.13.0.json", "vllm_0.32.0.json"))


def test_the_peers_reports_are_read_with_their_own_figures():
    one, two, three = (read(path)[0] for path in (GUIDELLM, AIPERF, VLLM))
    metrics = json.loads(GUIDELLM.read_text())["benchmarks"][0]["metrics"]
    assert one.tool == "GuideLLM" and one.side == "scheduled" and one.requests == 20 and one.errors == 0
    assert one.ttft_ms == metrics["time_to_first_token_ms"]["successful"]["median"] and one.ttft_low < one.ttft_ms
    assert one.e2e_ms == 1e3 * metrics["request_latency"]["successful"]["median"]
    flat = json.loads(AIPERF.read_text())
    assert two.ttft_ms == flat["time_to_first_token"]["p50"] and two.itl_ms == flat["inter_chunk_latency"]["p50"]
    assert two.side == "scheduled" and two.completion_tokens == 64
    assert three.tpot_ms == json.loads(VLLM.read_text())["median_tpot_ms"] and three.completion_tokens == 64
    assert all(7.9 < r.tpot_ms < 8.8 for r in (one, two, three)), "one server, 8 ms per token"


def records():
    rng = random.Random(3)
    rows = [row("a", rng.uniform(10, 20), case=str(i), started_unix_s=1e9 + i, sent_ms=0.1) for i in range(30)]
    rows.append(row("a", 12.0, case="e", error="connection reset", started_unix_s=1e9 + 40))
    for i, record in enumerate(rows):
        record.first_event_ms, record.last_token_ms = record.first_content_ms, record.e2e_ms
        record.tpot_ms = 1.0 + i / 10
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
    ours = json.loads(json.dumps(guidellm.document(bench, records(), "a")))
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
    assert first["median"] == pytest.approx(statistics.median(r.first_content_ms for r in records() if not r.error))
    request = ours["benchmarks"][0]["requests"]["successful"][0]["info"]["timings"]
    assert request["first_token_iteration"] - request["request_start"] == pytest.approx(
        records()[0].first_content_ms / 1e3, abs=1e-6
    )


def test_what_we_write_is_read_back_as_the_same_figures(tmp_path):
    bench = Bench(config=config_of(w={}), backends={"a": known("a")})
    (tmp_path / "g.json").write_text(json.dumps(guidellm.document(bench, records(), "a")))
    from annie_quant import schema

    schema.write(tmp_path / "p.json", aiperf.summary(records()))
    (g,), (p,) = read(tmp_path / "g.json"), read(tmp_path / "p.json")
    good = [r for r in records() if not r.error]
    for one in (g, p):
        assert one.requests == 31 and one.errors == 1
        assert one.ttft_ms == pytest.approx(statistics.median(r.first_content_ms for r in good))
        assert one.tpot_ms == pytest.approx(statistics.median(r.tpot_ms for r in good))
        assert one.e2e_ms == pytest.approx(statistics.median(r.e2e_ms for r in good))
    assert p.itl_ms == pytest.approx(1.5)


def test_aiperfs_summary_has_only_names_that_aiperf_has():
    theirs = json.loads(AIPERF.read_text())
    for name, metric in aiperf.summary(records()).items():
        assert name in theirs or name == "error_request_count", name
        if name in theirs:
            assert metric.unit == theirs[name]["unit"], name


def test_compare_prints_runs_and_reports_as_one_table(tmp_path):
    runs = [folder_of(tmp_path / name, shift) for name, shift in (("one", 1.0), ("two", 1.3))]
    done = CliRunner().invoke(cli, ["compare", *map(str, runs), str(GUIDELLM), str(VLLM)])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines) and lines[0].split()[:2] == ["run", "side"]
    assert [line.split()[1] for line in lines[1:5] if not line.startswith(" ")][:2] == ["a", "a"]
    assert "GuideLLM: any token" in done.stdout
    rows = json.loads(CliRunner().invoke(cli, ["compare", *map(str, runs), "--json"]).stdout)["rows"]
    assert rows[1]["ttft_ms"] / rows[0]["ttft_ms"] == pytest.approx(1.3, abs=0.02)


def test_a_mixture_of_a_run_and_something_else_is_refused_in_one_line(tmp_path):
    run = folder_of(tmp_path / "one", 1.0)
    (tmp_path / "x.json").write_text("{}")
    assert not is_report(tmp_path / "x.json") and is_report(run)
    with pytest.raises(UsageError, match="is not a run directory or a report"):
        read(tmp_path / "x.json")


@pytest.mark.parametrize("path", [GUIDELLM, AIPERF, VLLM], ids=lambda p: p.stem)
def test_changed_reports_are_read_or_refused(path, tmp_path):
    rng = random.Random(path.name)
    text = path.read_text()
    values = ["null", '"x"', "[]", "{}", "1e999", "-1", "true", '"\\u001b[31m"', "NaN"]
    for _ in range(60):
        document = json.loads(text)
        node = document
        for _ in range(rng.randrange(1, 7)):
            keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
            if not keys:
                break
            key = rng.choice(keys)
            if rng.random() < 0.4 or not isinstance(node[key], (dict, list)):
                node[key] = json.loads(rng.choice(values), parse_constant=lambda name: math.nan)
                break
            node = node[key]
        file = tmp_path / "changed.json"
        file.write_text(json.dumps(document))
        try:
            rows = read(file)
        except UsageError:
            continue
        for one in rows:
            assert "\x1b" not in one.side + one.load
            assert all(v is None or math.isfinite(v) for v in (one.ttft_ms, one.itl_ms, one.e2e_ms))
