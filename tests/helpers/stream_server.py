"""A server that sends exact bytes at exact times: one thread per connection, no HTTP library.

with RawServer(respond) as server: ...     # respond(connection, request_bytes) sends, sleeps, resets
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def event(delta: dict | None = None, finish: str | None = None, **more) -> bytes:
    """Return one SSE event of a chat completion."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    body = {"id": "c", "object": "chat.completion.chunk", "choices": choices, **more}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
HELLO = [event({"role": "assistant", "content": ""}), event({"content": "Hello"}), event({"content": " there."}),
         event({}, "stop"), event(usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}), DONE]  # fmt: skip


def reset(connection: socket.socket) -> None:
    """Close the connection so that the peer gets a TCP reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_request(connection: socket.socket) -> bytes:
    """Return one complete request; b"" at the end of the connection."""
    held = b""
    while b"\r\n\r\n" not in held:
        got = connection.recv(65536)
        if not got:
            return b""
        held += got
    head, _, body = held.partition(b"\r\n\r\n")
    length = next(
        (
            int(h.split(b":")[1])
            for h in head.split(b"\r\n")
            if h.lower().startswith(b"content-length:")
        ),
        0,
    )
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def stream(pieces: list[bytes]) -> Callable[[socket.socket, bytes], None]:
    """Return a `respond` function that sends one chunk per part and ends well."""

    def respond(connection: socket.socket, request: bytes) -> None:
        connection.sendall(HEAD)
        for piece in pieces:
            connection.sendall(chunk(piece))
        connection.sendall(b"0\r\n\r\n")

    return respond


class RawServer:
    def __init__(self, respond, tls: ssl.SSLContext | None = None, path: str | None = None) -> None:
        self.respond, self.tls, self.path = respond, tls, path
        self.connections = 0
        self.requests: list[bytes] = []

    def __enter__(self) -> RawServer:
        if self.path:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(self.path)
            self.listener.listen(512)
            self.url = "http://localhost/v1/chat/completions"
        else:
            self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
            self.port = self.listener.getsockname()[1]
            self.url = (
                f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}/v1/chat/completions"
            )
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if self.tls:
                connection = self.tls.wrap_socket(connection, server_side=True)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while request := read_request(connection):
                self.requests.append(request)
                self.respond(connection, request)
                if connection.fileno() < 0:
                    return
