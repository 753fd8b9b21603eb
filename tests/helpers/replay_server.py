"""A server that answers with a recording: its bytes, its order and its gaps."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from typing import BinaryIO

from annie_quant.stream.timings import Timings

_REPLAYED_HEADERS = ("content-type",)


class ReplayServer:
    """with ReplayServer(timings) as server: aq.stream.run([Request(server.url)])

    The n-th request gets the answer of the recording's n-th request, cyclically. Each recorded network read is sent as
    one chunk, `speed` times as fast. One thread per connection.
    """

    def __init__(self, timings: Timings, speed: float = 1.0) -> None:
        self._timings, self._speed = timings, speed
        self._turn = itertools.cycle(range(len(timings)))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def __enter__(self) -> ReplayServer:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1/chat/completions"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):  # the client may have closed it first
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as incoming:
                while _read_request(incoming):
                    with self._lock:
                        turn = next(self._turn)
                    self._answer(connection, turn, time.monotonic())
        except OSError:
            pass  # the client closed the connection
        finally:
            with self._lock:
                self._open.discard(connection)

    def _answer(self, connection: socket.socket, request: int, received_s: float) -> None:
        row = self._timings.requests[request]
        started, body, at = int(row["started_ns"]), self._timings.body(request), 0
        reads = self._timings.reads[self._timings.reads["request"] == request]
        self._wait(received_s, max(0, int(row["first_byte_ns"]) - started))
        connection.sendall(_head(self._timings, request))
        for stamp, size in zip(reads["user_ns"].tolist(), reads["size"].tolist(), strict=True):
            self._wait(received_s, stamp - started)
            piece = body[at : at + size]
            at += size
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        self._wait(received_s, int(row["ended_ns"]) - started)
        if row["cause"]:
            connection.shutdown(socket.SHUT_RDWR)  # replay the broken end as well
        else:
            connection.sendall(b"0\r\n\r\n")

    def _wait(self, received_s: float, after_ns: int) -> None:
        time.sleep(max(0.0, received_s + after_ns / 1e9 / self._speed - time.monotonic()))


def _head(timings: Timings, request: int) -> bytes:
    status = int(timings.requests["status"][request]) or 200
    headers = timings.headers(request)
    lines = [f"HTTP/1.1 {status} Replayed", "Transfer-Encoding: chunked"]
    lines += [f"{name}: {headers[name]}" for name in _REPLAYED_HEADERS if name in headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _read_request(incoming: BinaryIO) -> bool:
    """Read one request with its body. Returns False at the end of the connection."""
    length = 0
    first = incoming.readline()
    for line in iter(incoming.readline, b"\r\n"):
        if not line:
            return False
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    incoming.read(length)
    return bool(first)
