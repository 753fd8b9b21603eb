"""A server that sends slowly, or without end, cannot keep a benchmark longer than its budget."""

from __future__ import annotations

import json
import time

import pytest
from stream_server import RawServer

from annie_quant import bench
from annie_quant.judge.library import build_workload

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
WORKLOAD = {
    "name": "w",
    "max_tokens": 5,
    "gates": ["non_empty"],
    "cases": [
        {"id": f"c{i}", "messages": [{"role": "user", "content": f"{i}"}]} for i in range(20)
    ],
}
GOOD = (
    b'data: {"choices": [{"index": 0, "delta": {"content": "Tokyo"}, "finish_reason": "stop"}]}\n\n'
    + b"data: [DONE]\n\n"
)


def plain(value: object) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def drip(connection, byte: bytes = b"x") -> None:
    while True:
        connection.sendall(byte)
        time.sleep(0.1)


def server(slow: str):
    """Return a responder that is slow at one kind of request: models, props, smoke or answers."""
    sent = []

    def respond(connection, request):
        if request.startswith(b"POST"):
            sent.append(request)
            if (slow == "answers" and len(sent) > 3) or slow == "smoke":
                connection.sendall(HEAD)
                drip(connection, b": ping\n\n")
            connection.sendall(
                HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: %d\r\n\r\n" % len(GOOD)) + GOOD
            )
            return
        path = request.split(b" ", 2)[1].decode()
        if slow in path:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            drip(connection)
        connection.sendall(plain({"data": [{"id": "m"}]} if "models" in path else {}))

    return respond


@pytest.mark.parametrize("slow", ["models", "props", "smoke", "answers"])
def test_the_budget_is_a_deadline_of_everything(tmp_path, slow):
    with RawServer(server(slow)) as running:
        backend = bench.Backend("a", f"http://127.0.0.1:{running.port}")
        start = time.monotonic()
        done = bench.run(
            [backend], [build_workload(WORKLOAD)], tmp_path, warmup=0, runs=1, budget_s=2.0
        )
        assert time.monotonic() - start < 25
    rows = [json.loads(line) for line in (tmp_path / "records.jsonl").read_bytes().splitlines()]
    measured = [row for row in rows if not row["warmup"]]
    assert done.ended.unasked == 20 - len(measured) > 0
    assert not any(row["error"] for row in measured), (
        "what the budget cut is sent again by a resumed run"
    )


def test_a_resumed_run_sends_what_the_budget_cut(tmp_path):
    with RawServer(server("answers")) as running:
        backend = bench.Backend("a", f"http://127.0.0.1:{running.port}")
        first = bench.run(
            [backend], [build_workload(WORKLOAD)], tmp_path, warmup=0, runs=1, budget_s=4.0
        )
    assert 0 < first.ended.unasked < 20
    with RawServer(server("nothing")) as running:
        backend = bench.Backend("a", f"http://127.0.0.1:{running.port}")
        second = bench.run([backend], [build_workload(WORKLOAD)], tmp_path, warmup=0, runs=1)
    assert second.ended.unasked == 0 and second.requests == 20
