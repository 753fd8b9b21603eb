"""The noise floor: equal sides stay below it, and the report prints it next to each difference."""

from __future__ import annotations

import random
import types

import pytest
from bench_cases import config_of, known, row

from annie_quant import documents, report
from annie_quant.bench import noise
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


def test_equal_sides_stay_below_the_noise():
    above = 0
    compared = 0
    for seed in range(3):
        rows = records("a", seed) + records("b", seed)
        aggregates = aggregate_records(
            rows, config_of(w={"temperature": 0}), {n: known(n) for n in "ab"}
        )
        for comparison in aggregates.comparisons:
            if comparison.metric == "tpot_ms":
                compared += 1
                above += abs(comparison.median_difference) > comparison.noise
    assert compared == 3 and above <= 1


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
    assert "## Noise" in page and "± " in page.split("## Paired comparisons")[1].split("##")[0]
    assert "<h3>Noise</h3>" in (tmp_path / "report.html").read_text()


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
    assert noise.noise_floors(once[:5], {"w": once[:5]}, 0) == [], "nothing was measured twice"
