"""The figures of tests/perf/scale.md: measured rates, and estimates for 27 B, 400 B and 10,000 streams.

python tests/perf/scale.py plans                          no measurement: prints the tables of estimates
python tests/perf/scale.py streams N [EVENTS] [GAP_US]    N streams at once from tests/perf/bench_stream_server.c
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# Measured (tests/perf/checkpoint.md, runtime.md; two x86-64 cores and one H200, 2026-11-21), bytes per second of bf16 input.
DIRECT_BYTES_S = 9.75e9 / 24.4  # `quantize --strategy direct`, warm, disk to disk
COPY_BYTES_S = 9.75e9 / 25.7  # `cp -r` of the same, in the same run
AUDIT_BYTES_S = 6.0e9 / 6.2  # of NVFP4 output
DIRECT_RSS_BYTES = 300e6  # through the command line; independent of the model's size
NVFP4_BITS, BF16_BITS, Q4_K_M_BITS = 4.5, 16.0, 4.85


@dataclass(frozen=True)
class Model:
    """linear: share of the weights in linears that are quantized; the rest (embeddings, head, norms) stays bf16."""

    name: str
    weights: float
    linear: float

    @property
    def bf16_bytes(self) -> float:
        return self.weights * BF16_BITS / 8

    @property
    def nvfp4_bytes(self) -> float:
        return self.weights * (self.linear * NVFP4_BITS + (1 - self.linear) * BF16_BITS) / 8


MODELS = (Model("9B", 9.0e9, 0.77), Model("27B", 27e9, 0.91), Model("400B", 400e9, 0.99))


def plans() -> None:
    print(
        "| model | bf16 | NVFP4 | disk at once | direct, here | disk's own time | audit | memory |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for model in MODELS:
        both = model.bf16_bytes + model.nvfp4_bytes
        print(
            f"| {model.name} | {model.bf16_bytes / 1e9:,.0f} GB | {model.nvfp4_bytes / 1e9:,.0f} GB | {both / 1e9:,.0f} GB "
            f"| {clock(model.bf16_bytes / DIRECT_BYTES_S)} | {clock(model.bf16_bytes / COPY_BYTES_S)} "
            f"| {clock(model.nvfp4_bytes / AUDIT_BYTES_S)} | {DIRECT_RSS_BYTES / 1e9:.1f} GB |"
        )


def clock(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


# Changes of the load server for more than 1,024 streams: larger arrays, and requests in a separate one.
WIDER = {
    "MAX_STREAMS = 1024, REQUEST_BYTES = 65536": "MAX_STREAMS = 20000, REQUEST_BYTES = 8192",
    "char request[REQUEST_BYTES];": "char *request;",
    "streams[i].fd = fd;": "streams[i].fd = fd; streams[i].request = calloc(1, REQUEST_BYTES);",
}


def built(folder: Path) -> Path:
    """Build the load server with space for as many streams as there are file descriptors."""
    source = (Path(__file__).parent / "bench_stream_server.c").read_text()
    for before, after in WIDER.items():
        assert before in source, before
        source = source.replace(before, after)
    (folder / "server.c").write_text(source)
    subprocess.run(["cc", "-O2", "-o", folder / "server", folder / "server.c"], check=True)
    return folder / "server"


def streams(count: int, events: int = 20, gap_us: int = 1_000_000) -> None:
    """All streams at once, `events` events each: CPU time per event, memory, and whether all streams ended well."""
    from annie_quant import stream

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen([built(Path(folder)), "1"], stdout=subprocess.PIPE, text=True)
        try:
            port = server.stdout.readline().split()[-1]  # type: ignore[union-attr]
            body = {
                "model": "x",
                "messages": [{"role": "user", "content": "Hello"}],
                "stream": True,
            }
            path = f"http://127.0.0.1:{port}/v1/chat/completions?events={events}&gap_us={gap_us}&stagger=1&tokens=1&split=0"
            stream.run([stream.Request(f"{path}&streams=1", json=body)])
            before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
            requests = [
                stream.Request(f"{path}&streams={count}", json=body, timeout_s=120)
                for _ in range(count)
            ]
            done = stream.run(requests, concurrency=count)
            wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF)
        finally:
            server.kill()
            server.wait()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    actual = len(done.events)
    rows = done.records()
    faults = sorted({str(r["error"]) for r in rows if r["error"]})
    print(
        json.dumps(
            {
                "streams": count,
                "ended_well": sum(not r["error"] for r in rows),
                "faults": faults[:3],
                "events": actual,
                "wall_s": round(wall, 2),
                "cpu_s": round(cpu, 2),
                "cpu_us_an_event": round(cpu / max(1, actual) * 1e6, 2),
                "peak_rss_mb": after.ru_maxrss / 1e3,
            }
        )
    )


if __name__ == "__main__":
    kinds = {"plans": plans, "streams": streams}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=list(kinds))
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    kinds[options.kind](*map(int, options.arguments))
