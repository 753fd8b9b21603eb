"""Cost of the benchmark itself: CPU time of its process at 32 streams of 50 tokens per second, and memory at 256 streams.

    python tests/perf/bench_overhead.py cpu       targets: 3 % of one core
    python tests/perf/bench_overhead.py memory    256 streams with prompts of 16,384 tokens; target: 200 MB at the peak

The scripted server is a separate process. CPU seconds are of the client's process, aggregates and exports included; "measuring" is
without them. Memory is the kernel's high-water mark of resident memory (VmHWM); "before" is after all imports.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2])]

STREAMS, TOKENS, GAP_S, ROUNDS = 32, 250, 0.02, 4
MANY, DEEP_TOKENS, ANSWER_TOKENS = 256, 16384, 100


def serve(pipe, tokens: int, gap_s: float) -> None:
    from fake_server import FakeServer, words

    text = " ".join(f"word{i}" for i in range(tokens))
    with FakeServer(lambda body: words(text, gap_s=gap_s)) as server:
        pipe.send(server.url)
        pipe.recv()


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_mb(field: str) -> float:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", text)[1]) / 1024


def started(tokens: int, gap_s: float):
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, tokens, gap_s))
    child.start()
    return ours.recv(), ours, child


def cases_of(count: int) -> list[dict]:
    return [{"id": str(i), "messages": [{"role": "user", "content": f"{i}"}]} for i in range(count)]


def measure_cpu() -> None:
    from annie_quant import bench
    from annie_quant.judge.library import build_workload

    url, pipe, child = started(TOKENS, GAP_S)
    gates = ["non_empty", "no_markdown"]
    workload = build_workload(
        {"name": "w", "max_tokens": TOKENS, "gates": gates, "cases": cases_of(ROUNDS * STREAMS)}
    )
    warm = build_workload({"name": "warm", "max_tokens": 9, "gates": [], "cases": cases_of(1)})
    stamps: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        bench.run([bench.Backend("a", url)], [warm], Path(folder) / "warm", warmup=0, runs=1)
        before, start = cpu_s(), time.monotonic()
        result = bench.run(
            [bench.Backend("a", url)], [workload], Path(folder) / "run", warmup=0, runs=1, concurrency=STREAMS,
            watch=lambda record: stamps.append((cpu_s(), time.monotonic())),
        )  # fmt: skip
        wall, cpu = time.monotonic() - start, cpu_s() - before
    pipe.send(None)
    child.join()
    in_run = (stamps[-1][0] - before, stamps[-1][1] - start)
    itl = result.aggregates.served["a"].workloads[f"w@{STREAMS}"].itl_ms
    print(
        f"{result.requests} requests of {TOKENS} tokens, {STREAMS} at a time: measuring {in_run[1]:.1f} s, "
        f"{in_run[0]:.2f} s CPU, {in_run[0] / in_run[1]:.1%} of a core; with aggregates and exports {wall:.1f} s, "
        f"{cpu:.2f} s CPU, {cpu / wall:.1%}; {in_run[0] / (result.requests * TOKENS) * STREAMS / GAP_S:.1%} at "
        f"{STREAMS / GAP_S:,.0f} events per second; ITL p50 {itl.p50:.1f} ms, p99 {itl.p99:.1f} ms"
    )


def measure_memory() -> None:
    from annie_quant import bench
    from annie_quant.judge.library import build_workload

    url, pipe, child = started(ANSWER_TOKENS, GAP_S)
    workload = build_workload(
        {"name": "w", "max_tokens": ANSWER_TOKENS, "gates": ["non_empty"], "cases": cases_of(MANY),
         "context": {"tokens": DEEP_TOKENS, "prefix": "miss", "words_per_token": 0.75}}
    )  # fmt: skip
    warm = build_workload({"name": "warm", "max_tokens": 9, "gates": [], "cases": cases_of(1)})
    with tempfile.TemporaryDirectory() as folder:
        bench.run([bench.Backend("a", url)], [warm], Path(folder) / "warm", warmup=0, runs=1)
        before = resident_mb("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
        highest: list[float] = []
        result = bench.run(
            [bench.Backend("a", url)], [workload], Path(folder) / "run", warmup=0, runs=1, concurrency=MANY,
            watch=lambda record: highest.append(resident_mb("VmHWM")),
        )  # fmt: skip
    pipe.send(None)
    child.join()
    prompt = result.aggregates.served["a"].workloads[f"w@{MANY}"]
    print(
        f"{result.requests} requests, {MANY} at a time, prompts of {DEEP_TOKENS} tokens: before {before:.0f} MB, peak while "
        f"measuring {highest[-1]:.0f} MB, peak with aggregates and exports {resident_mb('VmHWM'):.0f} MB; "
        f"n = {prompt.n}, errors {result.aggregates.served['a'].errors}"
    )


if __name__ == "__main__":
    kinds = {"cpu": measure_cpu, "memory": measure_memory}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", nargs="?", choices=kinds, default="cpu")
    kinds[parser.parse_args().kind]()
