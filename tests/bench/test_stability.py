"""Noise floor, drift and throttling, and differences that grow with depth: planted effects are named, equal sides are not."""

from __future__ import annotations

import random
import types

import numpy as np
import pytest
from bench_cases import config_of, known, row
from hypothesis import given
from hypothesis import strategies as st

from annie_quant import documents, report
from annie_quant.bench import findings, stability
from annie_quant.bench.aggregates import aggregate_records
from annie_quant.bench.plan import planned_visits
from annie_quant.core import host
from annie_quant.documents import BenchConfig


def records(backend, seed, factor=lambda second: 1.0, prompts=40, repeats=5, spread=0.03, **more):
    """Repeats of each prompt in random order, 5 s apart: 1,000 s. factor(second) multiplies the times; more: other fields."""
    rng = random.Random(f"{seed}/{backend}")
    order = [p for p in range(prompts) for _ in range(repeats)]
    rng.shuffle(order)
    rows = []
    for i, prompt in enumerate(order):
        second = 5.0 * i
        time = (10 + prompt / 4) * rng.lognormvariate(0, spread) * factor(second)
        fields = {key: value(second) if callable(value) else value for key, value in more.items()}
        rows.append(
            row(
                backend, 4 * time, case=str(prompt), repeat=i, tpot_ms=time, started_unix_s=1e9 + second, **fields
            )
        )  # fmt: skip
    return rows


def codes(rows, *backends):
    aggregates = aggregate_records(
        rows, config_of(w={"temperature": 0}), {name: known(name) for name in backends}
    )
    return {c.code: c for c in aggregates.confounds}


def throttles(second):
    return 1.12 if second >= 600 else 1.0


def test_a_server_that_throttles_after_ten_minutes_is_named_with_its_clock():
    state = {
        "clock_mhz": lambda s: 2418.0 if s < 600 else 1900.0,
        "temperature_c": lambda s: 60 + min(s, 600) / 25,
    }
    rows = records("a", 1, **state) + records("b", 1, throttles, **state)
    findings = codes(rows, "a", "b")
    message = findings["throttled"].message
    assert findings["throttled"].backends == ["b"] and findings["throttled"].severity == "fault"
    minutes = float(message.split("became slower ")[1].split(" minutes")[0])
    assert abs(minutes - 10) < 0.5
    assert "the clock fell from 2418 to 1900 MHz" in message and "the temperature rose" in message
    assert "+1" in message.split("(p")[0], "about 12 %"
    assert "drift" not in findings


def test_a_slower_server_whose_clock_is_steady_drifts_and_does_not_throttle():
    steady = {"clock_mhz": lambda s: 2400.0 + s % 3}
    findings = codes(records("a", 2, **steady) + records("b", 2, throttles, **steady), "a", "b")
    assert "throttled" not in findings and findings["drift"].backends == ["b"]
    assert "clocks and temperature did not change with it" in findings["drift"].message


def test_the_driver_names_the_limit():
    limit = {"throttle": lambda s: "software thermal slowdown" if s >= 600 else None}
    findings = codes(records("b", 3, throttles, **limit), "b")
    assert "the driver reports software thermal slowdown in" in findings["throttled"].message


@pytest.mark.parametrize(
    "name", ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"]
)
def test_the_state_is_that_of_the_hottest_gpu(monkeypatch, name):
    heat, reasons = {"cool": 40, "hot": 83}, {"cool": 0x01, "hot": 0x24}
    nvml = types.SimpleNamespace(
        NVMLError=ZeroDivisionError,
        nvmlDeviceGetClockInfo=lambda device, kind: 1900 // kind,
        nvmlDeviceGetTemperature=lambda device, sensor: heat[device],
        **{name: reasons.__getitem__},
    )
    monkeypatch.setattr(host, "nvml_devices", lambda: (nvml, list(heat)))
    assert host.machine_state() == (1900.0, 83.0, "software power cap, software thermal slowdown")
    nvml.nvmlDeviceGetClockInfo = lambda device, kind: 1 // 0
    assert host.machine_state() == (None, 83.0, "software power cap, software thermal slowdown")


def test_equal_sides_have_no_finding_and_stay_below_the_noise():
    alarms = above = compared = 0
    for seed in range(3):
        rows = records("a", seed) + records("b", seed)
        alarms += bool(codes(rows, "a", "b").keys() & {"drift", "throttled", "slower_at_depth"})
        aggregates = aggregate_records(
            rows, config_of(w={"temperature": 0}), {n: known(n) for n in "ab"}
        )
        for comparison in aggregates.comparisons:
            if comparison.metric == "tpot_ms":
                compared += 1
                above += abs(comparison.median_difference) > comparison.noise
    assert alarms <= 1 and compared == 3 and above <= 1


def test_a_difference_has_its_noise_in_the_report(tmp_path):
    rows = records("a", 5) + records("b", 5, lambda second: 1.2)
    identities, config = {n: known(n) for n in "ab"}, config_of(w={"temperature": 0})
    aggregates = aggregate_records(rows, config, identities)
    comparison = next(c for c in aggregates.comparisons if c.metric == "tpot_ms")
    assert 0 < comparison.noise < comparison.median_difference / 3
    floor = next(f for f in aggregates.noise["a"] if f.metric == "tpot_ms")
    assert floor.n_repeated == 40 and floor.low < 0 < floor.high
    (tmp_path / "records.jsonl").write_bytes(
        b"".join(documents.encode_record(r) + b"\n" for r in rows)
    )
    documents.write(
        tmp_path / "bench.json",
        documents.Bench(config=config, backends=identities, aggregates=aggregates),
    )
    report.build(tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert (
        "## Noise and drift" in page
        and "± " in page.split("## Paired comparisons")[1].split("##")[0]
    )
    assert "Noise and drift" in (tmp_path / "report.html").read_text()


def test_without_repeats_the_plan_measures_a_tenth_again():
    from bench_cases import ask, workload

    many = workload("many", [{"id": f"c{i}", "messages": ask(f"{i}?")} for i in range(40)])
    visits = planned_visits(["a", "b"], [many], BenchConfig(runs=1, noise_share=0.1))
    assert len(visits) == 2 * (40 + 4)
    assert sorted(v.cases[0][1] for v in visits) == [0] * 80 + [1] * 8
    for settings in ({"runs": 1, "noise_share": 0.0}, {"runs": 2, "noise_share": 0.1}):
        assert (
            len(planned_visits(["a", "b"], [many], BenchConfig(**settings)))
            == 80 * settings["runs"]
        )
    once = [r for r in records("a", 6) if r.repeat % 40 == 0][:30]
    assert stability.noise_floors(once[:5], {"w": once[:5]}, 0) == [], "nothing was measured twice"


@pytest.mark.parametrize(
    ("shallow", "deep", "text"), [(1.0, 1.05, "slower only at depth"), (1.05, 1.15, "relative to")]
)
def test_a_server_slower_at_depth_is_named(shallow, deep, text):
    rows = []
    for tokens, factor in ((100, shallow), (16_500, deep)):
        for backend, size in (("a", 1.0), ("b", factor)):
            some = records(backend, tokens, lambda s, size=size: size, prompts=10, spread=0.02)
            for record in some:
                record.workload, record.tokens.usage = f"depth_{tokens}", {"prompt_tokens": tokens}
            rows += some
    findings = codes(rows, "a", "b")["slower_at_depth"]
    assert (
        findings.backends == ["b"] and text in findings.message and "16k tokens" in findings.message
    )


def test_a_constant_difference_is_not_one_of_depth():
    rows = []
    for tokens in (100, 16_500):
        for backend, size in (("a", 1.0), ("b", 1.1)):
            some = records(backend, tokens, lambda s, size=size: size, prompts=10, spread=0.02)
            for record in some:
                record.workload, record.tokens.usage = f"depth_{tokens}", {"prompt_tokens": tokens}
            rows += some
    rows_of_depth = stability.compare_depths(rows, ["a", "b"])
    assert rows_of_depth and findings.depth_findings(rows_of_depth) == []


def test_too_few_requests_are_not_tested():
    assert stability.find_drifts(records("a", 1, prompts=5), ["a"]) == []
    assert stability.change_point(np.zeros(31), np.zeros(31, dtype=int)) is None


@pytest.mark.parametrize("noise", ["normal", "skewed"])
def test_runs_with_two_loads_one_after_the_other(noise):
    """A step exactly between two loads, whose prompts share no group, is no drift and no fault."""
    generator = np.random.default_rng(62)
    for _ in range(60):
        rows, second = [], 0.0
        for concurrency, factor in ((1, 1.0), (8, 3.0)):
            order = np.tile(np.arange(24), 5)
            generator.shuffle(order)
            for prompt in order:
                size = generator.exponential() if noise == "skewed" else generator.normal()
                time = float((10 + prompt / 4) * factor * np.exp(0.03 * size))
                second += time / 10
                rows.append(
                    row("a", 4 * time, case=str(prompt), tpot_ms=time, concurrency=concurrency, started_unix_s=second)
                )  # fmt: skip
        for drift in stability.find_drifts(rows, ["a"]):
            assert -1 < drift.low <= drift.high and np.isfinite(drift.shift)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=24), st.integers(0, 2**32 - 1))
def test_any_order_of_groups_has_a_finite_shift_or_none(labels, seed):
    """Each bin has values of one group, so that a group can end or begin at any split."""
    groups = np.unique(np.repeat(labels, 4), return_inverse=True)[1]
    deviation = np.random.default_rng(seed).exponential(size=len(groups))
    split = stability.change_point(deviation, groups, seed)
    if split is not None:
        at, p = split
        before, after = set(groups[:at].tolist()), set(groups[at:].tolist())
        assert before & after and 0 < p <= 1
        assert np.isfinite(stability._shift(deviation, groups, at, seed)).all()


def test_a_drift_within_one_of_two_loads_is_found():
    rows = records("a", 8, lambda second: 1.2 if second >= 500 else 1.0)
    for record in records("a", 9, lambda second: 4.0):
        record.load.concurrency = 8
        record.timings.started_unix_s += 5 * len(rows)
        rows.append(record)
    drift = next(d for d in stability.find_drifts(rows, ["a"]) if d.metric == "tpot_ms")
    assert drift.significant and abs(drift.shift - 0.2) < 0.03 and abs(drift.after_s - 500) < 60
