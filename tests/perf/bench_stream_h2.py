"""The stream client over HTTP/2 (TLS, all streams on one connection) compared with pycurl: delay of each event, CPU time.

    python tests/perf/bench_stream_h2.py [--repeats N] [--streams N]        needs pycurl and the openssl command; root

The server, which writes frames of RFC 9113 itself, sends each event in one frame and one TLS record at a fixed time, with
CLOCK_MONOTONIC written into it just before. Server and client each have a processor and SCHED_FIFO; random ABBA order.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench_stream_clients as clients
import numpy as np

EVENTS, GAP_NS = 250, 20_000_000
SETTINGS, ACK, DATA, HEADERS, END_STREAM, END_HEADERS = 4, 1, 0, 1, 1, 4
# :status 200 of the static table; content-type as a literal (RFC 7541, index 31)
ANSWER = b"\x88\x0f\x10" + bytes([17]) + b"text/event-stream"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def requests_of(connection: ssl.SSLSocket, count: int) -> list[int]:
    """Read until `count` requests are complete; return their stream numbers."""
    source, whole = connection.makefile("rb"), []
    source.read(24)
    connection.sendall(frame(SETTINGS, 0, 0))
    while len(whole) < count:
        head = source.read(9)
        source.read(int.from_bytes(head[:3], "big"))
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        if kind == SETTINGS and not flags & ACK:
            connection.sendall(frame(SETTINGS, ACK, 0))
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            whole.append(stream)
    return whole


def serve(pem: str, streams: int) -> None:
    """Serve one load after another, each on the next connection."""
    os.sched_setaffinity(0, {(os.cpu_count() or 2) - 1})
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    context.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            raw, _ = listener.accept()
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with context.wrap_socket(raw, server_side=True) as connection:
                requests = requests_of(connection, streams)
                for stream in requests:
                    connection.sendall(frame(HEADERS, END_HEADERS, stream, ANSWER))
                start = time.monotonic_ns() + GAP_NS
                for k in range(EVENTS):
                    time.sleep(max(0, start + k * GAP_NS - time.monotonic_ns()) / 1e9)
                    for stream in requests:
                        event = (
                            b'data: {"choices":[{"delta":{"content":"%019d "}}]}\n\n'
                            % time.monotonic_ns()
                        )
                        connection.sendall(frame(DATA, 0, stream, event))
                for stream in requests:
                    connection.sendall(frame(DATA, END_STREAM, stream, b"data: [DONE]\n\n"))
                time.sleep(0.2)


def client(name: str, url: str, streams: int) -> None:
    os.sched_setaffinity(0, {0})
    import pycurl

    import annie_quant as aq
    from annie_quant import _stream  # noqa: F401

    began, kernel = clients.usage(), []
    if name == "pycurl":
        answers = clients.pycurl_(url, streams, pycurl.CURL_HTTP_VERSION_2TLS)
        user = [lag for events in answers for lag in clients.lags(events)]
        spent = clients.usage() - began
    else:
        requests = [aq.stream.Request(url, json=clients.BODY)] * streams
        timings = aq.stream.run(requests, concurrency=streams, http="2", verify_tls=False)
        spent, rows = clients.usage() - began, timings.events
        which = np.flatnonzero(rows["kind"] == 1).tolist()
        user = clients.lags([(int(rows["user_ns"][i]), timings.raw(i)) for i in which])
        kernel = clients.lags(
            [(int(rows["kernel_ns"][i]), timings.raw(i)) for i in which if rows["kernel_ns"][i]]
        )
    print(json.dumps({"user": user, "kernel": kernel, "cpu_us": spent * 1e6 / max(1, len(user))}))


def row(label: str, lags_ns: list[int], of: int, cpu_us: float) -> str:
    p50, p99, most = (
        (np.percentile(lags_ns, q) / 1e3 for q in (50, 99, 100)) if lags_ns else (np.nan,) * 3
    )
    return (
        f"| {label} | {len(lags_ns)} of {of} | {p50:.0f} | {p99:.0f} | {most:.0f} | {cpu_us:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        return serve(chosen.serve, chosen.streams)
    if chosen.client:
        return client(*chosen.client, chosen.streams)
    names, rng = ["ours", "pycurl", "ours again"], random.Random(0)
    got: dict[str, list[dict]] = {name: [] for name in names}
    again = ["chrt", "-f", "10", sys.executable, __file__, "--streams", str(chosen.streams)]
    path = os.pathsep.join(
        [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        pem = Path(folder) / "both.pem"
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
        server = subprocess.Popen([*again, "--serve", str(pem)], stdout=subprocess.PIPE, text=True)
        try:
            url = f"https://127.0.0.1:{re.search(r'[0-9]+', server.stdout.readline())[0]}/v1/chat/completions"
            for _ in range((chosen.repeats + 1) // 2):
                block = rng.sample(names, len(names))
                for name in block + block[::-1]:
                    done = subprocess.run(
                        [*again, "--client", name, url],
                        capture_output=True,
                        text=True,
                        timeout=60,
                        env=environment,
                    )
                    if done.returncode:
                        raise SystemExit(f"{name}: {done.stderr[-400:]}")
                    got[name].append(json.loads(done.stdout))
        finally:
            server.kill()
    print(
        "| client | events | lag p50 µs | p99 | max | CPU µs per event |\n|---|---|---|---|---|---|"
    )
    for name, runs in got.items():
        cpu_us = float(np.median([r["cpu_us"] for r in runs]))
        for clock in ("user", "kernel") if name != "pycurl" else ("user",):
            lags = [lag for r in runs for lag in r[clock]]
            print(row(f"{name}, {clock} stamp", lags, len(runs) * chosen.streams * EVENTS, cpu_us))


if __name__ == "__main__":
    main()
