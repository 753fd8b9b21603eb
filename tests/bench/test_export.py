"""Exports equal the records, and have the keys that other tools read."""

from __future__ import annotations

import json
import statistics

import numpy as np
import pytest
from bench_cases import FACTS, MEMORY, TALK, annie
from fake_server import FakeServer

from annie_quant import bench, documents
from annie_quant.core.errors import UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("run")
    with FakeServer(annie) as a, FakeServer(annie, style="vllm") as b:
        bench.run(
            [bench.Backend("nvfp4", a.url), bench.Backend("q4", b.url)],
            [FACTS, MEMORY, TALK],
            where,
            warmup=1,
            runs=3,
        )
    return where


@pytest.fixture(scope="module")
def records(folder):
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [r for r in rows if not r["warmup"]]


def test_vllms_flat_keys(folder, records):
    flat = json.loads((folder / "exports" / "vllm_nvfp4.json").read_text())
    own = [r for r in records if r["backend"] == "nvfp4"]
    assert flat["completed"] == len(own) and flat["failed"] == 0
    assert flat["total_output_tokens"] == sum(r["usage"]["completion_tokens"] for r in own)
    gaps = [gap for r in own for gap in r["itl_ms"]]
    assert flat["mean_itl_ms"] == pytest.approx(statistics.fmean(gaps))
    assert flat["median_ttft_ms"] == pytest.approx(
        statistics.median(r["first_content_ms"] for r in own if r["first_content_ms"] is not None)
    )
    assert flat["output_throughput"] == pytest.approx(
        flat["total_output_tokens"] / sum(r["e2e_ms"] for r in own) * 1e3
    )
    # The columns of vLLM's table of serving results.
    assert set(flat) >= {
        "model_id",
        "completed",
        "max_concurrency",
        "request_throughput",
        "output_throughput",
        "total_token_throughput",
        "total_input_tokens",
        "total_output_tokens",
        *(
            f"{figure}_{what}_ms"
            for figure in ("mean", "median", "p99", "std")
            for what in ("ttft", "tpot", "itl")
        ),
    }


def test_the_original_plans_results(folder, records):
    document = json.loads((folder / "exports" / "original_plan.json").read_text())
    assert document["quality_gates"]["nvfp4"]["factual"] == "6/6"
    assert (
        document["methodology"]["warmup_runs"] == 1
        and document["methodology"]["measured_runs"] == 3
    )
    tests = document["results"]["q4"]
    assert {"factual", "tool_memory", "multi_turn_1", "multi_turn_5"} <= set(tests)
    assert len(tests["multi_turn_5"]["runs"]) == 3 and tests["tool_memory"]["runs"][0][
        "tool_calls"
    ] == ["search_memory"]
    times = [
        r["first_content_ms"]
        for r in records
        if r["backend"] == "q4" and r["workload"] == "multi_turn" and r["turn"] == 4
    ]
    assert tests["multi_turn_5"]["ttft_ms_p50"] == pytest.approx(statistics.median(times))


def test_aggregates_can_be_computed_again_from_the_folder(folder):
    assert bench.aggregate(folder) == documents.read_bench(folder).aggregates


def test_no_secret_is_stored(tmp_path):
    with FakeServer(annie) as server:
        url = server.url.replace("http://", "http://user:hunter2@")
        side = bench.Backend(
            "a",
            server.url,
            headers={"Authorization": "Bearer hunter2"},
            meta={"api_key": "hunter2"},
        )
        with pytest.raises(UsageError, match="user, password or query") as caught:
            bench.Backend("a", url)
        assert "hunter2" not in str(caught.value)
        bench.run([side], [FACTS], tmp_path, warmup=0, runs=1)
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"hunter2" not in file.read_bytes()
        if file.suffix == ".npz":
            with np.load(file) as held:
                assert all(b"hunter2" not in held[name].tobytes() for name in held.files)
