"""Runs that are stopped: by another thread, by a task's end, by signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from stream_server import HEAD, HELLO, RawServer, chunk, event, stream

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

import annie_quant as aq  # noqa: E402


def Request(url: str, **fields) -> aq.stream.Request:
    return aq.stream.Request(url, **{"timeout_s": 5, **fields})


def slow(connection, request: bytes) -> None:
    time.sleep(4)
    stream(HELLO)(connection, request)


def test_cancelling_the_warm_up_cancels_the_run() -> None:
    with RawServer(slow) as server:
        cancel = aq.stream.Cancel()
        threading.Timer(0.1, cancel.cancel).start()
        began = time.monotonic()
        timings = aq.stream.run(
            [Request(server.url)] * 3, warmup=[Request(server.url)] * 2, cancel=cancel
        )
        assert time.monotonic() - began < 3.5, "before the server answers"
        assert [r["cause"] for r in timings.records()] == ["not_started"] * 3 and len(
            server.requests
        ) == 1
        again = aq.stream.run([Request(server.url)], cancel=cancel)
        assert again.records()[0]["cause"] == "not_started" and len(server.requests) == 1, (
            "it stays cancelled"
        )
        cancel.close()


def endless(connection, request: bytes) -> None:
    connection.sendall(HEAD)
    while True:
        connection.sendall(chunk(event({"content": "x"})))
        time.sleep(0.02)


def test_one_cancel_stops_every_run_that_has_it() -> None:
    with RawServer(endless) as server, ThreadPoolExecutor(4) as pool:
        cancel = aq.stream.Cancel()
        began = time.monotonic()
        runs = [pool.submit(aq.stream.run, [Request(server.url)], cancel=cancel) for _ in range(4)]
        time.sleep(0.3)
        cancel.cancel()
        cancel.cancel()
        assert [r.result().records()[0]["cause"] for r in runs] == ["cancelled"] * 4
        assert time.monotonic() - began < 4.5, "before the requests' own limit of 5 s"
        cancel.close()
        with pytest.raises(aq.errors.UsageError, match="closed"):
            aq.stream.run([Request(server.url)], cancel=cancel)


def test_a_cancel_that_is_closed_stops_its_run() -> None:
    with RawServer(endless) as server, ThreadPoolExecutor(1) as pool:
        cancel = aq.stream.Cancel()
        run = pool.submit(aq.stream.run, [Request(server.url)], cancel=cancel)
        time.sleep(0.2)
        cancel.close()
        cancel.close()
        assert run.result(timeout=2).records()[0]["cause"] == "cancelled"


# ---- signals

ASYNCIO = """
    import asyncio, signal, sys
    import annie_quant as aq

    async def main():
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        print("ready", flush=True)
        records = aq.stream.run([aq.stream.Request(sys.argv[1], timeout_s=5)]).records()
        assert records[0]["error"] is None, records
        await asyncio.wait_for(ended.wait(), 3)
        print("handled", flush=True)

    asyncio.run(main())
"""


def test_a_signal_during_a_run_reaches_the_handler_of_an_event_loop() -> None:
    with RawServer(slow) as server:
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(ASYNCIO), server.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout.readline() == "ready\n"
        while not server.requests:
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=20)
    assert out == "handled\n", err


def test_the_wakeup_descriptor_is_restored_and_gets_every_signal() -> None:
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK)
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: numbers.append(number))
    previous = signal.set_wakeup_fd(write_fd)
    try:
        with RawServer(slow) as server:
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            assert aq.stream.run([Request(server.url)]).records()[0]["error"] is None
            timer.join()
    finally:
        assert signal.set_wakeup_fd(previous) == write_fd
        signal.signal(signal.SIGUSR1, before)
    assert numbers == [signal.SIGUSR1] and os.read(read_fd, 99) == bytes(numbers)
    os.close(read_fd)
    os.close(write_fd)
