"""Cost of the benchmark itself: CPU time of its process while it receives 32 streams of 50 tokens per second.

    python tests/perf/bench_overhead.py        the target is 5 % of one core

The scripted server is a separate process; its aiohttp uses the other core.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2])]

STREAMS, TOKENS, GAP_S = 32, 250, 0.02


def serve(pipe) -> None:
    from fake_server import FakeServer, words

    text = " ".join(f"word{i}" for i in range(TOKENS))
    with FakeServer(lambda body: words(text, gap_s=GAP_S)) as server:
        pipe.send(server.url)
        pipe.recv()


def main() -> None:
    from annie_quant import bench
    from annie_quant.judge.library import build_workload

    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    child.start()
    url = ours.recv()
    cases = [{"id": str(i), "messages": [{"role": "user", "content": f"{i}"}]} for i in range(2 * STREAMS)]
    workload = build_workload(
        {"name": "w", "max_tokens": TOKENS, "gates": ["non_empty", "no_markdown"], "cases": cases}
    )
    warm = build_workload({"name": "warm", "max_tokens": 9, "gates": [], "cases": cases[:1]})
    with tempfile.TemporaryDirectory() as folder:
        bench.run([bench.Backend("a", url)], [warm], Path(folder) / "warm", warmup=0, runs=1)
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        result = bench.run(
            [bench.Backend("a", url)], [workload], Path(folder) / "run", warmup=0, runs=1, concurrency=STREAMS
        )
        wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF)
    ours.send(None)
    child.join()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    itl = result.aggregates.served["a"].workloads[f"w@{STREAMS}"].itl_ms
    print(
        f"{result.requests} requests of {TOKENS} tokens, {STREAMS} at a time: {wall:.1f} s, {cpu:.2f} s CPU, "
        f"{cpu / wall:.1%} of a core; ITL p50 {itl.p50:.1f} ms, p99 {itl.p99:.1f} ms"
    )


if __name__ == "__main__":
    main()
