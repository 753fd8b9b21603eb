"""The machine's state as a gate, on this machine: the probe's noise, two hours simulated with it, and a load that is planted.

    python tests/perf/machine_gate.py FOLDER [--quiet 300] [--seconds 150] [--load 2] [--without-requests]

Run it on an idle machine. First the probe is sampled for --quiet seconds while nothing else runs; 200 times two hours are drawn
from the deviations, with and without a slowdown of 15 % for 20 seconds. Then a scripted server is measured for --seconds, in the
middle of which --load processes copy memory for 20 seconds, or multiply matrices on the GPU where the probe runs there.
--without-requests: sample the machine alone, which needs no streaming client.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

LOAD_S, BLOCK = 20.0, 20
GPU_HOG = """import time
from annie_quant.bench.machine import GpuProbe
probe, end = GpuProbe(), time.monotonic() + {}
while time.monotonic() < end: probe.time_ms()"""
HOG = "import numpy as np, time\na = np.ones(1 << 24)\nend = time.monotonic() + {}\nwhile time.monotonic() < end: a.copy()"


def series(values, every_s=2.0):
    from annie_quant.bench.machine import Sample

    return [
        Sample(time_unix_s=i * every_s, probe="p", probe_ms=float(v), took_s=0.01)
        for i, v in enumerate(values)
    ]


def noise(seconds: float) -> np.ndarray:
    """Return the probe's times over `seconds`."""
    from annie_quant.bench.machine import new_probe

    probe, end, values = new_probe(on_gpu=True), time.monotonic() + seconds, []
    print(probe.name)
    while time.monotonic() < end:
        values.append(probe.time_ms())
        time.sleep(0.5)
    return np.array(values)


def simulate(values: np.ndarray, draws: int = 200) -> None:
    from annie_quant.bench import machine

    rng, marked, found = np.random.default_rng(0), 0, 0
    for _ in range(draws):
        starts = rng.integers(0, len(values) - BLOCK, 3600 // BLOCK)
        quiet = np.concatenate([values[start : start + BLOCK] for start in starts])
        marked += bool(machine.unsteady(series(quiet)))
        at = int(rng.integers(50, 3500))
        quiet[at : at + 10] *= 1.15
        spans = machine.unsteady(series(quiet))
        found += any(s.start_unix_s <= 2 * at + 18 and s.end_unix_s >= 2 * at for s in spans)
    print(
        f"two hours: {marked} of {draws} quiet ones marked; 15 % for 20 s found in {found} of {draws}"
    )


def plant(seconds: float, load: int, planted: list[float]) -> None:
    """Start the load in the middle of `seconds`; add its start and its end to `planted`."""
    from annie_quant.bench.machine import CpuProbe, new_probe

    hog = HOG if isinstance(new_probe(on_gpu=True), CpuProbe) else GPU_HOG
    time.sleep((seconds - LOAD_S) / 2)
    planted.append(time.time())
    for process in [
        subprocess.Popen([sys.executable, "-c", hog.format(LOAD_S)], cwd=ROOT) for _ in range(load)
    ]:
        process.wait()
    planted.append(time.time())


def sampled(folder: Path, seconds: float, load: int) -> None:
    """Sample the machine for `seconds` without a benchmark, and print what is found."""
    from annie_quant.bench import machine

    folder.mkdir(parents=True, exist_ok=True)
    monitor, end, planted = (
        machine.Monitor(folder, restart=True, on_gpu=True),
        time.monotonic() + seconds,
        [],
    )
    thread = threading.Thread(target=plant, args=(seconds, load, planted))
    thread.start()
    while time.monotonic() < end:
        monitor.sample()
        time.sleep(0.1)
    thread.join()
    report(machine.summarize(monitor.samples, []), monitor.samples, planted)


def report(state, samples, planted: list[float]) -> None:
    from annie_quant.bench import machine

    print(
        f"load from {planted[0]:.0f} to {planted[1]:.0f}; {state.probe}: {state.probe_ms:.3g} ms, {state.samples} samples"
    )
    cost = np.mean([s.took_s for s in samples]) / np.median(
        np.diff([s.time_unix_s for s in samples])
    )
    _, limit = machine._medians(np.log([s.probe_ms for s in samples]))
    print(f"cost {cost:.2%}, a change of {np.expm1(limit):.1%} would be found")
    for span in state.spans:
        print(
            f"  {span.start_unix_s - planted[0]:+.0f} to {span.end_unix_s - planted[0]:+.0f} s: {span.cause}"
        )
    for name, rows in (
        ("under the load", [s for s in samples if planted[0] <= s.time_unix_s <= planted[1]]),
        ("without it", [s for s in samples if not planted[0] <= s.time_unix_s <= planted[1]]),
    ):
        clocks = sorted({s.clock_mhz for s in rows if s.clock_mhz})
        limits = sorted({s.throttle for s in rows if s.throttle})
        values = np.round(np.percentile([s.probe_ms for s in rows], [5, 50, 95]), 4)
        print(
            f"{name}: probe {values} ms (5, 50, 95 %), clock {clocks[:1]} to {clocks[-1:]} MHz, limits {limits or 'none'}"
        )


def measured(folder: Path, seconds: float, load: int) -> None:
    from bench_cases import ask, workload
    from fake_server import FakeServer, words

    from annie_quant import bench
    from annie_quant.bench.machine import read_samples

    planted: list[float] = []
    cases = [{"id": str(i), "messages": ask(f"Say {i}")} for i in range(10)]
    prompts = workload("talk", cases, gates=["non_empty"])
    thread = threading.Thread(target=plant, args=(seconds, load, planted))
    with FakeServer(lambda body: words("It is Tokyo of course.", first_s=0.3)) as server:
        thread.start()
        done = bench.run(
            [bench.Backend("a", server.url)], [prompts], folder, warmup=0, runs=max(1, int(seconds / 4)), with_memory=False,
            resume=False,
        )  # fmt: skip
    thread.join()
    state = done.aggregates.machine
    report(state, read_samples(folder), planted)
    print(f"{state.marked} requests marked, {state.left} left invalid")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quiet", type=float, default=300)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--load", type=int, default=2)
    parser.add_argument("--without-requests", action="store_true")
    arguments = parser.parse_args()
    if arguments.quiet:
        values = noise(arguments.quiet)
        arguments.folder.mkdir(parents=True, exist_ok=True)
        np.savetxt(arguments.folder / "noise.txt", values)
        print("probe, ms (5, 50, 95, 99 %):", np.round(np.percentile(values, [5, 50, 95, 99]), 3))
        simulate(values)
    run = sampled if arguments.without_requests else measured
    run(arguments.folder / "run", arguments.seconds, arguments.load)


if __name__ == "__main__":
    main()
