"""Memory growth, pages of metrics, and a run of a set duration."""

from __future__ import annotations

import itertools
import json
import random
import types

import pytest
from bench_cases import annie
from command_line import CliRunner
from fake_server import FakeServer

from annie_quant import documents
from annie_quant.bench import backend, findings, memory
from annie_quant.cli import app as cli
from annie_quant.documents import BenchConfig, MemoryFigures

MB = 1 << 20


def trace(per_hour, seconds=3600, seed=0, start=2000 * MB):
    """Samples of a server that fills 500 MB in its first ten minutes, with noise and single peaks."""
    rng = random.Random(seed)
    rows = []
    for second in range(0, seconds, 5):
        filled = 500 * MB * min(1.0, second / 600)
        peak = 300 * MB if rng.random() < 0.05 else 0
        rows.append(
            (1e9 + second, start + filled + per_hour * second / 3600 + rng.gauss(0, 4 * MB) + peak)
        )
    return rows


def test_a_leak_is_found_and_a_filling_cache_is_not():
    leak = memory.growth(trace(120 * MB))
    assert (
        leak.grows
        and leak.low < 120 * MB < leak.high
        and leak.bytes_per_hour == pytest.approx(120 * MB, rel=0.2)
    )
    alarms = sum(memory.growth(trace(0, seed=seed)).grows for seed in range(8))
    assert alarms == 0
    message = findings.growth_findings({"b": leak})[0].message
    assert message.startswith("b: its memory grows by 1") and "MB per hour" in message
    assert memory.growth(trace(0)[:10]) is None and memory.growth([]) is None


def test_a_long_trace_is_evenly_spaced_over_the_whole_run(monkeypatch):
    second = 0.0
    monkeypatch.setattr(memory, "sample", lambda pid: MemoryFigures(process_rss_bytes=1))
    monkeypatch.setattr(memory, "time", types.SimpleNamespace(time=lambda: second))
    monkeypatch.setattr(memory, "MAX_TRACE", 64)
    peak = memory.PeakMemory(1)
    for _ in range(10_000):
        second += 1
        peak._sample()
    times = [at for at, _ in peak.trace]
    assert 32 <= len(times) <= 64
    assert len({b - a for a, b in itertools.pairwise(times)}) == 1, (
        "older samples are as dense as later ones"
    )


PAGE = """# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b, {x}\\"y"} 3.0
vllm:generation_tokens_total{engine="0"} %s
vllm:ttft_seconds_bucket{le="0.1"} 5
http_requests_total 7 1795360217883
broken{ 5
nan_value NaN
"""


def test_broken_pages_of_metrics_are_no_error():
    rng = random.Random(1)
    page = (
        PAGE % "12"
        + "vllm:spec_decode_num_draft_tokens_total 5\nvllm:spec_decode_num_accepted_tokens_total NaN\n"
    )
    assert backend.draft_counters(page) is None, "a counter without a finite value is none"
    assert backend.draft_counters(page.replace("NaN", "4")) == backend.Counters(5, 4, 12)
    for _ in range(300):
        assert (
            backend.draft_counters("".join(rng.choice('abc{}"\\=,:# 1.e+\n') for _ in range(60)))
            is None
        )


def test_a_sustained_run_lasts_its_time_and_has_a_memory_trace(tmp_path):
    with FakeServer(annie) as server:
        words = ["bench", "--backend-a", "a", server.url, "--workloads", "factual", "--n", "3", "--sustain-s", "4",
                 "--warmup", "0", "--output", str(tmp_path / "run"), "--json"]  # fmt: skip
        done = CliRunner().invoke(cli, words)
    assert done.exit_code in (0, 1), done.output
    document = documents.read_bench(tmp_path / "run")
    assert document.config.sustained and document.requests > 10
    assert not [c for c in document.aggregates.confounds if c.code == "unfinished"]
    assert memory.read_traces(tmp_path / "run")["a"], "the server is this process"


def test_a_run_of_the_earlier_settings_resumes():
    assert BenchConfig().differences(BenchConfig(noise_share=0.1, sustained=True)) == []
    assert json.loads(documents.encode(BenchConfig()))["noise_share"] == 0.0
