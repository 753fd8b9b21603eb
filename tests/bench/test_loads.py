"""Loads with several requests in flight, and stopping early."""

from __future__ import annotations

import numpy as np
import pytest
from bench_cases import FACTS, ask, backends, row, rows_of, workload
from fake_server import FakeServer, words

from annie_quant import bench, judge
from annie_quant.bench import plan as planning
from annie_quant.bench.aggregates import labelled
from annie_quant.bench.plan import ALONE
from annie_quant.bench.run_folder import read_records
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import Silent
from annie_quant.documents import EarlyStop, Load, PairedGate, Roles
from annie_quant.judge import decision
from annie_quant.judge.gates import Threshold


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


def test_looks_are_planned_in_whole_blocks():
    assert planning.looks(100, 4) == [20, 40, 60, 80]
    assert planning.looks(3, 4) == []
    assert all(mark % 4 == 0 for mark in planning.looks(101, 4))


@pytest.mark.parametrize("rate", [0.6, 0.8])
def test_repeated_looks_decide_a_rate_wrongly_in_at_most_5_percent_of_runs(rate):
    """The true rate is exactly at the threshold, so any decision is wrong."""
    rng = np.random.default_rng(7)
    answers = rng.random((2000, 200)) < rate
    marks = [40, 80, 120, 160, 200]
    counts = np.cumsum(answers, axis=1)[:, [m - 1 for m in marks]]
    threshold = Threshold("rate", least_n=10, rate=rate)
    known: dict[tuple[int, int], bool] = {}

    def decided(passes, n):
        if (passes, n) not in known:
            known[passes, n] = planning._gate_decided(passes, n, threshold)
        return known[passes, n]

    wrong = sum(any(decided(int(k), m) for k, m in zip(row, marks, strict=True)) for row in counts)
    assert wrong / 2000 <= 0.05
    planned = planning.LEVEL
    try:
        planning.LEVEL = 0.05  # without the correction, the rate of wrong decisions is larger
        known.clear()
        uncorrected = sum(
            any(decided(int(k), m) for k, m in zip(row, marks, strict=True)) for row in counts
        )
    finally:
        planning.LEVEL = planned
    assert uncorrected / 2000 > 0.05


def judged(rng, n, lost, won):
    """Records of two backends; the first is the second's reference."""
    change = rng.choice(3, n, p=[lost, won, 1 - lost - won])
    passes = {"bf16": change != 1, "nvfp4": change != 0}
    return [
        row(name, case=str(i), checks={"tool_call": bool(passes[name][i])})
        for i in range(n)
        for name in passes
    ]


ROLES = Roles(candidate="nvfp4", reference="bf16")


def gates_open(records):
    return [
        line
        for line in planning.open_questions(records, ["bf16", "nvfp4"], {"w"}, ROLES)
        if "tool_call" in line
    ]


@pytest.mark.parametrize(
    ("lost", "won", "decided"), [(0.0, 0.0, True), (0.25, 0.0, True), (0.1, 0.1, False)]
)
def test_a_look_compares_with_the_reference(lost, won, decided):
    """bf16's own gates are no question, and neither is whether a rate is above a threshold that bf16 misses itself."""
    records = judged(np.random.default_rng(1), 200, lost, won)
    for record in records:
        record.timings.first_content_ms = record.timings.tpot_ms = None
    assert bool(gates_open(records)) != decided
    few = judged(np.random.default_rng(1), 100, 0.0, 0.0)
    assert gates_open(few) == ["nvfp4: tool_call (lost 0 and won 0 of 100)"]


def test_looks_and_the_end_together_lose_without_a_difference_in_at_most_5_percent_of_runs():
    """Four early looks at LEVEL and the end at 5 %, with 10 % of the answers changing each way."""
    rng, n, alarms = np.random.default_rng(3), 240, 0
    known: dict[tuple[int, int, int, bool], str] = {}

    def verdict(lost, won, n, early):
        if (lost, won, n, early) not in known:
            pairs = {"tool_call": PairedGate(n, lost, won)}
            judge.judge_members({"served": pairs})
            open_ = early and not decision.decided_at(
                "tool_call", pairs["tool_call"], planning.LEVEL
            )
            known[lost, won, n, early] = "open" if open_ else pairs["tool_call"].verdict
        return known[lost, won, n, early]

    for _ in range(1000):
        change = rng.random(n)
        lost, won = np.cumsum(change < 0.1), np.cumsum(change > 0.9)
        marks = [
            (k * n // planning.LOOKS, k < planning.LOOKS) for k in range(1, planning.LOOKS + 1)
        ]
        ended = (verdict(int(lost[m - 1]), int(won[m - 1]), m, early) for m, early in marks)
        alarms += next(v for v in ended if v != "open") == "loses"
    assert alarms / 1000 <= 0.05


def test_a_run_stops_when_everything_is_decided(tmp_path):
    many = workload(
        "greeting", [{"id": f"g{i}", "messages": ask(f"Hello {i}")} for i in range(200)]
    )
    quick = FakeServer(lambda body: words("Hello to you my friend.", gap_s=0.001))
    slow = FakeServer(lambda body: words("Hello to you my friend.", first_s=0.01, gap_s=0.004))
    with quick as a, slow as b:
        result = bench.run(
            backends(a, b), [many], tmp_path, warmup=0, runs=1, stop_early=True, with_memory=False
        )
        assert result.ended.stopped == EarlyStop(look=4, looks=4, level=pytest.approx(0.0025))
        assert result.requests == 320 and result.ended.unasked == 80
        assert any("stopped early at look 4 of 5" in caveat for caveat in result.verdict.caveats)
        sent = len(a.bodies)
        again = bench.run(
            backends(a, b), [many], tmp_path, warmup=0, runs=1, stop_early=True, with_memory=False
        )
        assert again.requests == 320 and len(a.bodies) == sent, "a decided run sends nothing more"


def test_open_questions_are_named(tmp_path):
    few = workload("greeting", [{"id": f"g{i}", "messages": ask(f"Hello {i}")} for i in range(10)])
    with FakeServer(lambda body: words("Hello you.")) as a:
        result = bench.run(
            [bench.Backend("a", a.url)], [few], tmp_path, warmup=0, runs=1, stop_early=True
        )
    assert result.ended.stopped is None and result.requests == 10
    rows = [r for r in read_records(tmp_path / "records.jsonl") if not r.warmup]
    assert sorted(planning.open_questions(rows, ["a"], {"greeting"})) == [
        "a: no_markdown (10 of 10)",
        "a: non_empty (10 of 10)",
        "a: thinking_leak (10 of 10)",
    ]


def test_resuming_adds_no_look(two, tmp_path, monkeypatch):
    """A run that was stopped between two looks continues to the next planned look."""
    many = workload("greeting", [{"id": f"g{i}", "messages": ask(f"Hello {i}")} for i in range(20)])

    class Interrupting(Silent):
        def update(self, done, total=None, text=""):
            if done == 14:
                raise KeyboardInterrupt

    options = {"warmup": 0, "runs": 1, "stop_early": True, "with_memory": False}
    with pytest.raises(KeyboardInterrupt):
        bench.run(backends(*two), [many], tmp_path, progress=Interrupting(), **options)
    monkeypatch.setattr(planning, "open_questions", lambda *_: [])
    result = bench.run(backends(*two), [many], tmp_path, **options)
    assert planning.looks(40, 4) == [8, 16, 24, 32]
    assert result.requests == 16 and result.ended.stopped.look == 2
