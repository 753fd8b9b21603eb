"""Loads with several requests in flight."""

from __future__ import annotations

import numpy as np
import pytest
from bench_cases import FACTS, backends, row, rows_of
from fake_server import FakeServer, words

from annie_quant import bench
from annie_quant.bench.aggregates import labelled
from annie_quant.bench.plan import ALONE
from annie_quant.core.errors import UsageError
from annie_quant.documents import Load


@pytest.fixture
def two():
    with (
        FakeServer(lambda body: words("It is Tokyo.")) as a,
        FakeServer(lambda body: words("It is Tokyo.")) as b,
    ):
        yield a, b


def test_loads_have_labels_and_are_restored_from_records():
    rows = [
        row("a", concurrency=1),
        row("a", concurrency=8),
        row("a", concurrency=0, rate_per_s=2.5),
    ]
    assert list(labelled(rows)) == ["w", "w@2.5/s", "w@8"]
    assert [r.load.alone for r in rows] == [True, False, False] and rows[0].load.level == ALONE
    for wrong in ((0, None), (1, 0.0), (1, float("inf"))):
        with pytest.raises(UsageError):
            Load(*wrong)


def test_an_open_loop_does_not_wait_for_answers(two, tmp_path):
    for server in two:
        server.answer = lambda body: words("It is Tokyo.", first_s=0.3)
    result = bench.run(
        backends(*two), [FACTS], tmp_path, warmup=0, runs=1, concurrency=[], rates=[40.0]
    )
    rows = [r for r in rows_of(tmp_path) if not r["warmup"]]
    assert {r["rate_per_s"] for r in rows} == {40.0} and len(rows) == 12
    assert min(two[0].most_in_flight, two[1].most_in_flight) > 1, (
        "a closed loop would have one in flight"
    )
    assert list(result.aggregates.served["a"].workloads) == ["factual@40/s"]
    # The same gaps on both sides: arrivals depend on the prompts, not on the backend.
    starts = {
        name: sorted((r["case"], r["arrival_s"]) for r in rows if r["backend"] == name)
        for name in "ab"
    }
    assert [c for c, _ in starts["a"]] == [c for c, _ in starts["b"]]
    assert np.allclose([t for _, t in starts["a"]], [t for _, t in starts["b"]])
