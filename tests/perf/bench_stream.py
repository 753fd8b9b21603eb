"""Accuracy of the stream client compared with other clients: a C server sends events at fixed times and writes the time into each.

    python tests/perf/bench_stream.py [--repeats N] [--realtime] [--only LOAD] [--clients "A;B"] [--output FILE.json]

Server and client each have a processor. Every client runs the same loads in random ABBA order, each in a separate process.
--realtime runs the server and all clients with SCHED_FIFO, for a machine with other work (needs root). The floor
(bench_stream_floor.c) is the minimum that a client can do here: it waits, receives, and stores nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
CLIENTS = ("ours", "pycurl", "aiohttp", "httpx", "openai")
AGAIN = "ours again"  # the A/A floor: the same client with another name
NORMAL = "ours, normal priority"  # run(realtime=False)
FLOOR = "the floor"
OURS = ("ours", AGAIN, NORMAL)
# name: streams, events, gap_us, stagger, tokens, split
LOADS = {
    "1 stream, 5 ms": (1, 100, 5000, 0, 1, 0),
    "32 burst, 20 ms": (32, 50, 20000, 0, 1, 0),
    "32 staggered, 20 ms": (32, 50, 20000, 1, 1, 0),
    "128 burst, 20 ms": (128, 50, 20000, 0, 1, 0),
    "256 burst, 20 ms": (256, 50, 20000, 0, 1, 0),
    "256 staggered, 20 ms": (256, 50, 20000, 1, 1, 0),
    "256 burst, 1000 events": (256, 1000, 20000, 0, 1, 0),
    "32 burst, 8 tokens, split": (32, 50, 20000, 0, 8, 1),
    "TLS, 32 burst, 20 ms": (32, 50, 20000, 0, 1, 0),
    "TLS, 256 burst, 20 ms": (256, 50, 20000, 0, 1, 0),
}
LONG = "256 burst, 1000 events"
NO_TLS = (FLOOR, "openai")  # openai uses only the system's certificate authorities


def build(folder: Path, name: str, *more: str) -> Path:
    program = folder / "-".join((name, *more))
    source = HERE / f"bench_stream_{name}.c"
    subprocess.run(
        ["gcc", "-std=c11", "-O2", str(source), "-o", str(program), *more],
        check=True,
        capture_output=True,
    )
    return program


def server_command(folder: Path, tls: bool) -> list[str]:
    cpu = str((os.cpu_count() or 2) - 1)
    if not tls:
        return [str(build(folder, "server")), cpu]
    pem = folder / "both.pem"
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-keyout",
        pem,
    ]
    certificate = subprocess.run(make, check=True, capture_output=True, text=True).stdout
    pem.write_text(pem.read_text() + certificate)
    return [str(build(folder, "server", "-DWITH_TLS", "-lssl", "-lcrypto")), cpu, str(pem)]


def once(client: str, load: tuple[int, ...], base: str, realtime: list[str], floor: Path) -> dict:
    streams, events, gap_us, stagger, tokens, split = load
    query = f"streams={streams}&events={events}&gap_us={gap_us}&stagger={stagger}&tokens={tokens}&split={split}"
    url = f"{base}/v1/chat/completions?{query}"
    name = "ours" if client == AGAIN else client
    command = [
        *realtime,
        sys.executable,
        str(HERE / "bench_stream_clients.py"),
        name,
        url,
        str(streams),
        "0",
    ]
    if client == FLOOR:
        command = [
            *realtime,
            str(floor),
            base.rpartition(":")[2],
            str(streams),
            str(events),
            query,
            "0",
        ]
    path = os.pathsep.join(filter(None, [str(HERE.parent.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    if done.returncode:
        raise SystemExit(f"{client}: {done.stderr[-400:]}")
    got = json.loads(done.stdout)
    actual = sum(map(len, got["user"]))
    out = {
        "client": client,
        "lost": streams * events - actual,
        "shared": got.get("shared", 0),
        "cpu_us_per_event": got["cpu_s"] / max(actual, 1) * 1e6,
        "rss_mb": got.get("rss_mb", 0),
        "user_us": np.concatenate(got["user"]) / 1e3,
        "first_us": np.array([s[0] for s in got["user"] if s]) / 1e3,
        "itl_error_us": np.concatenate([np.abs(np.diff(s)) for s in got["user"]]) / 1e3,
    }
    if "kernel" in got:
        out["kernel_us"] = np.concatenate(got["kernel"]) / 1e3
    if client in OURS:
        out["kernel_first_us"] = np.array([s[0] for s in got["kernel"] if s]) / 1e3
        out["sent_us"] = (np.array(got["received"]) - np.array(got["started"])) / 1e3
    return out


def order_of(name: str, have: list[str], repeats: int, rng: random.Random) -> list[str]:
    """Return the clients in blocks of random order, forward and backward (ABBA)."""
    left_out = (
        ("pycurl", "httpx", "openai") if name == LONG else NO_TLS if name.startswith("TLS") else ()
    )
    clients = [c for c in have if c not in left_out]
    repeats = min(repeats, 2) if name == LONG else repeats
    order = []
    for _ in range((repeats + 1) // 2):
        block = rng.sample(clients, len(clients))
        order += block + block[::-1] if repeats > 1 else block
    return order


def table(name: str, runs: list[dict]) -> list[dict]:
    rows = []
    print(f"\n### {name}\n")
    print(
        "| client | lag p50 µs | p99 | p99.9 | max | ITL error p99 µs | lost | same stamp | CPU µs per event | RSS MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    both = [(f"{c}, kernel stamp", c, "kernel_us") for c in (*OURS, FLOOR)]
    for label, client, column in [
        *both,
        *((c, c, "user_us") for c in (*OURS, FLOOR, *CLIENTS[1:])),
    ]:
        mine = [r for r in runs if r["client"] == client]
        if not mine:
            continue
        lag = np.concatenate([r[column] for r in mine])
        gaps = np.concatenate([r["itl_error_us"] for r in mine])
        p50, p99, p999 = np.percentile(lag, [50, 99, 99.9])
        row = {
            "load": name, "client": label, "runs": len(mine), "p50": p50, "p99": p99, "p999": p999, "max": lag.max(),
            "itl_p99": None if column == "kernel_us" or client == FLOOR else np.percentile(gaps, 99),
            "lost": sum(r["lost"] for r in mine),
            "shared": sum(r["shared"] for r in mine), "cpu": np.median([r["cpu_us_per_event"] for r in mine]),
            "rss": max(r["rss_mb"] for r in mine),
        }  # fmt: skip
        rows.append(row)
        share = len(lag) / sum(len(r["user_us"]) for r in mine)
        label += f" ({share:.1%} of the events)" if share < 1 else ""
        itl = "" if row["itl_p99"] is None else f"{row['itl_p99']:.0f}"
        print(
            f"| {label} | {p50:.1f} | {p99:.0f} | {p999:.0f} | {row['max']:.0f} | {itl} | {row['lost']} | "
            f"{row['shared']} | {row['cpu']:.1f} | {'' if client == FLOOR else round(row['rss'])} |"
        )
    ours = [r for r in runs if r["client"] == "ours"]
    if name.startswith("1 stream"):
        first = np.concatenate([r["kernel_first_us"] for r in ours])
        sent = np.concatenate([r["sent_us"] for r in ours])
        print(
            f"\nTTFT bias of ours, kernel stamp: first event p50 {np.median(first):.1f} µs late; from the start of a"
        )
        print(
            f"request on a new connection to the server having read it p50 {np.median(sent):.0f} µs (n {len(sent)})."
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--clients", default="", help=f"these alone, split by ';': {'; '.join((*CLIENTS, NORMAL))}"
    )
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--only", default="", help="the loads whose name begins so")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    realtime = ["chrt", "-f", "10"] if chosen.realtime else []
    have = [c for c in CLIENTS if c == "ours" or importlib.util.find_spec(c)] + [AGAIN, FLOOR]
    if chosen.clients:
        have = [*chosen.clients.split(";"), AGAIN, FLOOR]
    if not shutil.which("gcc"):
        raise SystemExit("gcc is needed to build the load server")
    print(
        f"{platform.machine()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; clients: {', '.join(have)}"
    )
    rng, rows = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        floor = build(Path(folder), "floor")
        for tls in (False, True):
            loads = {
                n: load
                for n, load in LOADS.items()
                if n.startswith(chosen.only) and n.startswith("TLS") == tls
            }
            if not loads:
                continue
            command = [*realtime, *server_command(Path(folder), tls)]
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            try:
                base = f"{'https' if tls else 'http'}://127.0.0.1:{int(server.stdout.readline())}"
                for name, load in loads.items():
                    order = order_of(name, have, chosen.repeats, rng)
                    rows += table(
                        name, [once(client, load, base, realtime, floor) for client in order]
                    )
            finally:
                server.kill()
    if chosen.output:
        chosen.output.write_text(json.dumps(rows, indent=1, default=float))


if __name__ == "__main__":
    main()
