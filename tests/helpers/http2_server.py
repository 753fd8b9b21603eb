"""Enough of HTTP/2 (RFC 9113) to answer requests, whose fields are not read, with chosen frames."""

from __future__ import annotations

import contextlib
import socket

from stream_server import RawServer

DATA, HEADERS, SETTINGS, WINDOW_UPDATE = 0, 1, 4, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
WINDOW = 1 << 24
# :status 200 of HPACK's static table; content-type as a literal (RFC 7541, index 31)
STREAM_HEAD = b"\x88\x0f\x10" + bytes([17]) + b"text/event-stream"


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + number.to_bytes(4, "big") + payload
    )


def stream_of(pieces: list[bytes], number: int) -> bytes:
    """Return an event stream as the frames of one stream of the connection."""
    data = b"".join(frame(DATA, 0, number, piece) for piece in pieces)
    head = frame(HEADERS, END_HEADERS, number, STREAM_HEAD)
    return head + data + frame(DATA, END_STREAM, number)


class Http2Server(RawServer):
    """respond(connection, number) sends the frames of a stream's answer; `requests` has the streams' numbers."""

    def _serve(self, connection: socket.socket) -> None:
        with (
            contextlib.suppress(OSError, LookupError, ValueError),
            self.tls.wrap_socket(connection, server_side=True) as secure,
        ):
            secure.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            source = secure.makefile("rb")
            source.read(24)
            window = WINDOW.to_bytes(4, "big")
            initial = frame(SETTINGS, 0, 0, (4).to_bytes(2, "big") + window)
            secure.sendall(initial + frame(WINDOW_UPDATE, 0, 0, window))
            while head := source.read(9):
                source.read(int.from_bytes(head[:3], "big"))
                kind, flags, number = head[3], head[4], int.from_bytes(head[5:], "big")
                if kind == SETTINGS and not flags & ACK:
                    secure.sendall(frame(SETTINGS, ACK, 0))
                if kind in (HEADERS, DATA) and flags & END_STREAM:
                    self.requests.append(number)
                    self.respond(secure, number)
