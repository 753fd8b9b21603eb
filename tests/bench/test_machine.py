"""The machine's state as a gate: a planted slowdown is marked and measured again, a quiet machine is not.

The probe's times are given by the tests; tests/perf/bench_rules.py has the rule's error rates, machine_gate.py there a real load.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from bench_cases import ask, folder_of, row
from bench_cases import workload as build
from fake_server import FakeServer, words

pytest.importorskip("annie_quant._stream", reason="the streaming client is not built here")

from annie_quant import bench, documents
from annie_quant.bench import machine
from annie_quant.bench.run_folder import read_records, valid_records
from annie_quant.documents import MachineSpan, MachineState
from annie_quant.gemm import arrays


def series(values, every_s=2.0, **more):
    return [
        machine.Sample(
            time_unix_s=1000 + i * every_s, probe="p", probe_ms=float(v), took_s=0.01, **more
        )
        for i, v in enumerate(values)
    ]


def quiet(rng, n):
    """Logarithms of n samples: noise of 1.5 %, and one in fifty half as long again, because another process took the core."""
    return rng.normal(0, 0.015, n) + np.log(1.5) * (rng.random(n) < 0.02)


def covered_s(spans, start, end):
    return sum(max(0.0, min(s.end_unix_s, end) - max(s.start_unix_s, start)) for s in spans)


@pytest.mark.parametrize("seed", range(6))
def test_two_quiet_hours_have_no_mark(seed):
    assert machine.unsteady(series(np.exp(quiet(np.random.default_rng(seed), 3600)))) == []


@pytest.mark.parametrize("seed", range(6))
def test_a_slowdown_of_15_percent_for_20_seconds_is_marked(seed):
    rng = np.random.default_rng(seed)
    values = np.exp(quiet(rng, 1800))
    start = int(rng.integers(50, 1700))
    values[start : start + 10] *= 1.15
    spans = machine.unsteady(series(values))
    assert len(spans) == 1 and "the probe took 1" in spans[0].cause and "longer" in spans[0].cause
    begin = 1000 + 2 * start
    assert covered_s(spans, begin, begin + 20) >= 18
    assert spans[0].end_unix_s - spans[0].start_unix_s <= 20 + 2 * 2 * machine.WINDOW, (
        "not much more is marked"
    )


def test_a_fallen_clock_and_a_new_limit_are_marked_and_the_usual_limit_is_not():
    samples = series(np.ones(100), clock_mhz=2400.0, throttle="software power cap")
    assert machine.unsteady(samples) == []
    for sample in samples[40:52]:
        sample.clock_mhz = 1800.0
    samples[80].throttle = "hardware thermal slowdown"
    lower, limited = machine.unsteady(samples)
    assert lower.cause == "the clock was 25% lower" and covered_s([lower], 1080, 1104) == 24
    assert limited.cause == "the driver reported hardware thermal slowdown"
    assert (limited.start_unix_s, limited.end_unix_s) == (1158.0, 1162.0)


def test_overlapping_changes_count_once():
    spans = [
        MachineSpan(start_unix_s=a, end_unix_s=b, cause=c)
        for a, b, c in ((0, 20, "x"), (5, 10, "y"), (15, 30, "x"))
    ]
    (found,) = machine.findings(
        MachineState(probe="p", samples=99, probe_ms=1, spans=spans, marked=7), 60, ["a"]
    )
    assert "for 30 s of the run (x; y): 7 requests" in found.message


def test_a_short_run_and_single_slow_samples_say_nothing():
    assert machine.unsteady(series([1.0] * 10 + [2.0] * 10)) == []
    values = np.ones(200)
    values[::20] = 3.0
    assert machine.unsteady(series(values)) == []


def test_the_real_probe_is_sampled_at_most_every_two_seconds(monkeypatch, tmp_path):
    monitor = machine.Monitor(tmp_path)
    now = iter(
        [100.0, 100.1, 101.0, 102.2, 102.3]
    )  # start and end of a sample, too early, start and end of the next
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(machine, "machine_state", lambda: (None, None, None))
    for _ in range(3):
        monitor.sample()
    monitor.log.close()
    first, second = machine.read_samples(tmp_path)
    assert (
        first.probe == "NVFP4 product 2048 x 4096 on the processor"
        and first.took_s == pytest.approx(0.1)
    )
    assert 0 < first.probe_ms < 1000 and second.time_unix_s >= first.time_unix_s
    again = machine.Monitor(tmp_path, restart=True)
    again.log.close()
    assert again.samples == [] == machine.read_samples(tmp_path)


# ---- a run


PROMPTS = build(
    "talk", [{"id": str(i), "messages": ask(f"Say {i}")} for i in range(12)], gates=["non_empty"]
)


class Planted:
    """A probe whose time is given by the number of the sample; the clock of the run is not changed."""

    def __init__(self, times):
        self.times, self.name = times, "planted"

    def time_ms(self):
        return next(self.times)


def measure(monkeypatch, tmp_path, times, runs=5, **options):
    monkeypatch.setattr(machine, "EVERY_S", 0.0)
    monkeypatch.setattr(machine, "new_probe", lambda on_gpu: Planted(times))
    monkeypatch.setattr(machine, "machine_state", lambda: (None, None, None))
    with FakeServer(lambda body: words("It is Tokyo of course.")) as server:
        sides = [bench.Backend("a", server.url)]
        done = bench.run(
            sides, [PROMPTS], tmp_path, warmup=0, runs=runs, with_memory=False, **options
        )
        asked = sum("Say" in body["messages"][-1]["content"] for body in server.bodies)
    return done, asked, {f.code: f for f in done.aggregates.confounds}


def slow_for(first, last):
    return (1.15 if first <= i < last else 1.0 for i in itertools.count())


def test_marked_requests_are_measured_again(monkeypatch, tmp_path):
    done, asked, findings = measure(monkeypatch, tmp_path, slow_for(30, 42))
    every, valid = (read_records(tmp_path / "records.jsonl", every=flag) for flag in (True, False))
    marked = [r for r in every if r.load.invalid]
    assert 12 <= len(marked) <= 12 + 2 * machine.WINDOW and asked == 60 + len(marked)
    assert all("the probe took 15% longer" in r.load.invalid for r in marked)
    assert (
        not [r for r in valid if r.load.invalid]
        and done.requests == 60 == done.aggregates.served["a"].requests
    )
    assert {r.id for r in marked} <= {r.id for r in valid}
    state = done.aggregates.machine
    assert (state.marked, state.left, state.probe) == (len(marked), 0, "planted")
    assert (
        f"{len(marked)} requests are marked invalid and were measured again"
        in findings["machine_unsteady"].message
    )
    assert bench.aggregate(tmp_path).machine == state, "the same from the files"
    assert done.aggregates.served["a"].left_out_of_timings == 0


def test_a_quiet_run_measures_nothing_again(monkeypatch, tmp_path):
    done, asked, findings = measure(monkeypatch, tmp_path, itertools.cycle([1.0, 1.01, 0.99, 1.02]))
    assert asked == 60 and not {"machine_unsteady", "machine_unsettled"} & findings.keys()
    assert done.aggregates.machine.spans == [] and done.aggregates.machine.samples >= 60


def test_a_machine_that_never_settles_is_reported_and_bounded(monkeypatch, tmp_path):
    flips = (1.4 if i % 30 >= 18 else 1.0 for i in itertools.count())
    done, asked, findings = measure(monkeypatch, tmp_path, flips)
    assert 60 < asked <= 60 * (1 + machine.PASSES)
    assert "machine_unsettled" in findings and findings["machine_unsettled"].severity == "fault"
    left = [r for r in read_records(tmp_path / "records.jsonl") if r.load.invalid]
    assert done.aggregates.machine.left == len(left) > 0
    assert done.aggregates.served["a"].left_out_of_timings >= len(left)
    assert done.aggregates.served["a"].gates["non_empty"].n == 12, (
        "answers count although their times do not"
    )


def test_a_machine_that_stays_slower_is_measured_in_one_state(monkeypatch, tmp_path):
    done, _, findings = measure(
        monkeypatch, tmp_path, (1.0 if i < 25 else 1.4 for i in itertools.count())
    )
    valid = [
        r for r in read_records(tmp_path / "records.jsonl") if not r.warmup and r.workload == "talk"
    ]
    since = min(s.time_unix_s for s in machine.read_samples(tmp_path) if s.probe_ms > 1)
    assert done.aggregates.machine.left == 0 and all(
        r.timings.started_unix_s >= since for r in valid
    )
    assert "machine_unsettled" not in findings


def test_a_killed_run_measures_its_marked_requests_again_when_it_is_resumed(monkeypatch, tmp_path):
    _, first, _ = measure(monkeypatch, tmp_path, itertools.repeat(1.0))
    samples = machine.read_samples(tmp_path)
    for sample in samples[30:42]:
        sample.probe_ms = 1.15
    (tmp_path / machine.SAMPLES_FILE).write_bytes(
        b"".join(documents.encode(s) + b"\n" for s in samples)
    )
    done, again, findings = measure(monkeypatch, tmp_path, itertools.repeat(1.0))
    assert (
        first == 60
        and 12 <= again == done.aggregates.machine.marked < 40
        and "machine_unsteady" in findings
    )


def test_the_last_record_of_a_request_counts():
    one, two, other = row("a", 10.0), row("a", 20.0), row("a", 30.0, case="d")
    assert valid_records([one, other, two]) == [other, two]


# ---- a GPU, by a module that computes nothing


class FakeGemm:
    """The compiled module on a machine with one GPU. ms: time of a product, may raise; launches: in the graph being captured."""

    CudaError = RuntimeError

    def __init__(self, ms):
        self.ms, self.launches, self.freed, self.sizes = ms, None, [], {}

    def __getattr__(self, name):
        assert name in (
            "fill",
            "copy",
            "stream_sync",
            "stream_free",
            "free",
            "use_device",
            "pointer_device",
        ), name
        return lambda *args: 0

    def device_count(self):
        return 1

    def limits(self):
        return 132, 232448, 9, True, False  # sms, smem_bytes, major, wgmma, native_fp4

    def malloc(self, size):
        address = 1 << 20 | sum(self.sizes.values())
        self.sizes[address] = -(-size // 256) * 256
        return address

    def packed_bytes(self, n, k):
        return n * k * 9 // 16

    def repack(self, codes, scales, packed, n, k, fault, stream):
        assert (n, k) == machine.GPU_SHAPE and {codes, scales, packed} <= self.sizes.keys()

    def plan(self, m, n, k, path):
        return "skinny", (16, 1, 1, 2)

    def plan_needs(self, *args):
        return 0, 4096

    def stream_new(self):
        return 77

    def stream_after(self, *streams):
        raise AssertionError("a capture may not wait for another stream")

    def capture_begin(self, stream):
        assert stream == 77 and self.launches is None
        self.launches = []

    def w4a16(self, *args):
        assert args[-1] == 77
        self.launches.append(args)

    def capture_end(self, stream):
        graph, self.launches = len(self.launches), None
        return graph

    def graph_time(self, graph, stream):
        return graph * self.ms()

    def graph_free(self, graph):
        self.freed.append(graph)


def fake_gpu(monkeypatch, ms):
    module = FakeGemm(ms)
    monkeypatch.setattr(arrays, "load", lambda name: module)
    monkeypatch.setattr(machine, "GPU_SHAPE", (64, 256))
    return module


def test_the_gpus_probe_is_a_graph_that_lasts_longer_than_a_slice_of_time(monkeypatch):
    module = fake_gpu(monkeypatch, lambda: 0.03)
    probe = machine.new_probe(True)
    assert probe.name == "NVFP4 product 64 x 256 on the GPU" and probe.time_ms() == pytest.approx(
        0.03
    )
    assert probe._graph == 333 and module.freed == [1], "10 ms of products of 0.03 ms"
    assert "on the processor" in machine.new_probe(False).name


def test_without_a_gpu_or_with_a_broken_one_the_processor_is_probed(monkeypatch):
    module = fake_gpu(monkeypatch, lambda: 0.03)
    module.device_count = lambda: 0
    assert "on the processor" in machine.new_probe(True).name
    module.device_count = lambda: 1
    module.malloc = lambda size: (_ for _ in ()).throw(RuntimeError("out of memory"))
    assert "on the processor" in machine.new_probe(True).name


def test_a_gpu_that_is_slowed_marks_its_minutes_with_clocks_and_limits(monkeypatch, tmp_path):
    slow = iter([False] * 40 + [True] * 12 + [False] * 1000)
    now = {"slow": False}

    def state():
        now["slow"] = next(slow)
        return (1200.0, 84.0, "software thermal slowdown") if now["slow"] else (1980.0, 60.0, None)

    module = fake_gpu(monkeypatch, lambda: 0.036 if now["slow"] else 0.03)
    monkeypatch.setattr(machine, "EVERY_S", 0.0)
    monkeypatch.setattr(machine, "machine_state", state)
    with FakeServer(lambda body: words("It is Tokyo of course.")) as server:
        done = bench.run(
            [bench.Backend("a", server.url)],
            [PROMPTS],
            tmp_path,
            warmup=0,
            runs=5,
            with_memory=False,
        )
    found = done.aggregates.machine
    assert found.probe == "NVFP4 product 64 x 256 on the GPU" and found.left == 0 < found.marked
    assert {s.cause for s in found.spans} == {
        "the probe took 20% longer", "the clock was 39% lower", "the driver reported software thermal slowdown"
    }  # fmt: skip
    limited = [s for s in machine.read_samples(tmp_path) if s.throttle]
    assert (
        len(limited) == 12
        and {s.clock_mhz for s in limited} == {1200.0}
        and {s.temperature_c for s in limited} == {84.0}
    )
    assert module.launches is None


def test_a_gpu_that_fails_meanwhile_does_not_end_the_run(monkeypatch, tmp_path):
    calls = itertools.count()

    def ms():
        if next(calls) > 200:
            raise RuntimeError("an illegal memory access was encountered")
        return 0.03

    fake_gpu(monkeypatch, ms)
    monkeypatch.setattr(machine, "EVERY_S", 0.0)
    monkeypatch.setattr(machine, "machine_state", lambda: (None, None, None))
    with FakeServer(lambda body: words("It is Tokyo of course.")) as server:
        done = bench.run(
            [bench.Backend("a", server.url)],
            [PROMPTS],
            tmp_path,
            warmup=0,
            runs=5,
            with_memory=False,
        )
    probed = [s.probe.rpartition(" ")[2] for s in machine.read_samples(tmp_path)]
    assert probed == sorted(probed) and set(probed) == {"GPU", "processor"} and done.requests == 60
    assert done.aggregates.machine.marked == 0, "another probe is not another state"


# ---- a GPU that is slow all the time


def recorded(rates_gb_s, gpu="NVIDIA GB10", clock_mhz=2400.0):
    """Return recorded samples, two seconds apart; a rate of None is a probe of the processor."""
    samples = []
    for i, rate in enumerate(rates_gb_s):
        sample = machine.Sample(time_unix_s=1000.0 + 2 * i, probe="p", probe_ms=1.0)
        sample.clock_mhz = clock_mhz
        if rate is not None:
            sample.gpu = gpu
            sample.read_bytes_s = rate * 1e9
        samples.append(sample)
    return samples


def slow_findings(samples, sides="a"):
    """Return the findings of a run whose requests go to these sides in turn, one after each sample."""
    records = []
    for i, (sample, side) in enumerate(zip(samples, itertools.cycle(sides), strict=False)):
        record = row(side, 10.0, case=str(i))
        record.timings.started_unix_s = sample.time_unix_s + 0.1
        records.append(record)
    state = machine.summarize(samples, records)
    return state, machine.findings(state, len(records), sorted(set(sides)))


@pytest.mark.parametrize(
    ("samples", "parts"),
    [
        (recorded([220] * 40), []),
        (recorded([70] * 40), ["at the start", "at the end", "before requests to a"]),
        (recorded([220] * 40, clock_mhz=890.0), ["at the start", "at the end", "before requests to a"]),
        (recorded([70] * 5 + [220] * 35), ["at the start"]),
        (recorded([220] * 35 + [70] * 5), ["at the end"]),
        (recorded([220] * 20 + [70] + [220] * 19), []),
        (recorded([220, 70, 220]), []),
        (recorded([70]), ["at the start", "at the end", "before requests to a"]),
        (recorded([1800] * 9, gpu="NVIDIA H200", clock_mhz=890.0), ["at the start", "at the end", "before requests to a"]),
        (recorded([3600] * 9, gpu="NVIDIA H200", clock_mhz=890.0), []),
    ],
    ids=["healthy", "slow", "stuck clock", "before", "after", "one sample", "one of three", "short", "H200", "healthy H200"],
)  # fmt: skip
def test_a_slow_gpu_is_a_confound(samples, parts):
    state, findings = slow_findings(samples)
    assert state.slow_parts == parts
    assert [f.code for f in findings] == (["machine_slow"] if parts else [])
    assert all(f.severity == "confound" and f.backends == ["a"] for f in findings)


def test_the_confound_names_rates_and_what_to_do():
    _, (found,) = slow_findings(recorded([70] * 40, clock_mhz=2190.0))
    assert "NVIDIA GB10 reads 70 GB/s at 2190 MHz, 232 are healthy" in found.message
    assert "power it off" in found.message


def test_a_gpu_that_is_slow_for_one_side_is_a_confound():
    state, (found,) = slow_findings(recorded([220, 70] * 20 + [220, 220]), sides="ab")
    assert state.slow_parts == ["before requests to b"]
    assert found.backends == ["a", "b"] and "reads 70 GB/s" in found.message


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        (recorded([None] * 40, clock_mhz=800.0), "not checked: no GPU was probed"),
        (recorded([1] * 40, gpu="NVIDIA T4"), "not checked: healthy values of NVIDIA T4"),
        (recorded([1] * 40, gpu=""), "not checked: healthy values of this GPU"),
    ],
    ids=["no GPU", "another GPU", "no name"],
)
def test_without_a_healthy_value_the_speed_is_not_checked(samples, why):
    state, findings = slow_findings(samples)
    assert why in state.gpu_speed and findings == []


@pytest.mark.parametrize(("ms", "is_slow"), [(0.03, True), (1e-5, False)])
def test_a_run_on_a_slow_gpu_has_the_confound(monkeypatch, tmp_path, ms, is_slow):
    """The product of 64 x 256 reads 9,216 bytes: 0.3 GB/s, or 922 GB/s."""
    fake_gpu(monkeypatch, lambda: ms)
    monkeypatch.setattr(machine, "gpu_name", lambda: "NVIDIA GB10")
    monkeypatch.setattr(machine, "machine_state", lambda: (None, None, None))
    with FakeServer(lambda body: words("It is Tokyo of course.")) as server:
        sides = [bench.Backend("a", server.url)]
        done = bench.run(sides, [PROMPTS], tmp_path, warmup=0, runs=1, with_memory=False)
    codes = {f.code for f in done.aggregates.confounds}
    assert ("machine_slow" in codes) == is_slow
    assert bench.aggregate(tmp_path).machine == done.aggregates.machine, "the same from the files"


def test_the_gpu_of_this_machine_is_not_probed_for_a_server_elsewhere():
    assert (
        bench.Backend("a", "http://127.0.0.1:8000").is_local
        and not bench.Backend("a", "http://10.0.0.7:8000").is_local
    )


# ---- machines


def state(values):
    return machine.summarize(series(values), [])


def test_two_machines_are_compared_by_the_probe(tmp_path):
    rng = np.random.default_rng(0)
    usual, same, slow = (np.exp(rng.normal(shift, 0.02, 300)) for shift in (0, 0, 0.1))
    assert machine.unequal(state(usual), state(same)) == ""
    text = machine.unequal(state(usual), state(slow))
    assert text.startswith("the machines are not equal: the probe takes 1.1") and "(+10." in text
    for name, values in (("before", usual), ("after", slow)):
        folder_of(tmp_path / name, 1.0)
        stored = documents.read_bench(tmp_path / name)
        stored.aggregates.machine = state(values)
        documents.write(tmp_path / name / "bench.json", stored)
    assert bench.regression(tmp_path / "before", tmp_path / "after").machine.startswith(
        "the machines are not equal"
    )
    assert bench.regression(tmp_path / "before", tmp_path / "before").machine == ""
    for unknown in (None, MachineState(probe="x", samples=1, probe_ms=1)):
        assert machine.unequal(unknown, state(usual)) == ""


def test_a_noisy_machine_hides_larger_changes():
    _, limit = machine._medians(np.random.default_rng(0).normal(0, 0.01, 300))
    assert np.expm1(limit) == pytest.approx(machine.MIN_CHANGE, abs=1e-9)
    _, limit = machine._medians(np.random.default_rng(0).normal(0, 0.2, 300))
    assert np.expm1(limit) > 0.3
