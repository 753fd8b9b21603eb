"""The ways in which the streaming client reaches a server: plain HTTP, TLS, HTTP/2 over TLS, a proxy."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from http2_server import Http2Server, stream_of
from stream_server import HEAD, RawServer, chunk

import annie_quant as aq

NAMES = ("plain", "TLS", "HTTP/2", "proxy")


class Route:
    def __init__(self, name: str, certificate: Path) -> None:
        self.name = name
        self.certificate = certificate

    def encode(self, pieces: list[bytes], number: int) -> bytes:
        """Return an event stream of these parts. number: the HTTP/2 stream's."""
        if self.name == "HTTP/2":
            return stream_of(pieces, number)
        return HEAD + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"

    def server(self, respond: Callable[[Any, int, int], None]) -> RawServer:
        """respond(connection, index of the request, number of its HTTP/2 stream) answers a request."""
        indices = iter(range(1 << 30))
        tls = None
        if self.name in ("TLS", "HTTP/2"):
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(self.certificate)
        if tls and self.name == "HTTP/2":
            tls.set_alpn_protocols(["h2"])
            return Http2Server(lambda c, number: respond(c, next(indices), number), tls=tls)
        return RawServer(lambda c, request: respond(c, next(indices), 0), tls=tls)

    def run(
        self, server: RawServer, count: int, concurrency: int = 1, body: bytes = b"{}", **more: Any
    ) -> aq.stream.Timings:
        url = server.url
        if self.name == "proxy":
            more["proxy"] = url
            url = "http://origin.example:8123/"
        requests = [aq.stream.Request(url, body=body, timeout_s=10)] * count
        http = "2" if self.name == "HTTP/2" else "1.1"
        return aq.stream.run(requests, concurrency, http=http, verify_tls=False, **more)
