"""The ways in which the streaming client sends a request, each with a server that shows what arrived and sends chosen answers."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from http2_server import DATA, END_HEADERS, END_STREAM, HEADERS, Http2Server, frame, literal
from msgspec.structs import asdict
from stream_server import RawServer, chunk

import annie_quant as aq

NAMES = ("plain", "libcurl", "TLS", "HTTP/2", "proxy")
HTTP_1 = tuple(name for name in NAMES if name != "HTTP/2")
FRAMING = {"content-length", "transfer-encoding", "connection"}


@dataclass
class Answer:
    """An answer without its framing. chunks: of the body; gaps_s: before each. to_end: the body ends with the connection."""

    status: int = 200
    fields: list[tuple[str, str]] = field(
        default_factory=lambda: [("Content-Type", "text/event-stream")]
    )
    chunks: list[bytes] = field(default_factory=list)
    interim: int = 0
    trailers: list[tuple[str, str]] = field(default_factory=list)
    framing: str = "chunked"  # length, to_end
    is_cut: bool = False  # the connection ends before the body does

    def http_1(self) -> bytes:
        body = b"".join(self.chunks)
        lines = [f"{name}: {value}" for name, value in self.fields]
        head = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * self.interim
        if self.status in (204, 304):
            pass
        elif self.framing == "chunked":
            lines += ["Transfer-Encoding: chunked"]
            body = b"".join(map(chunk, self.chunks))
            body += b"" if self.is_cut else b"0\r\n" + fields_of(self.trailers) + b"\r\n"
        elif self.framing == "length":
            lines += [f"Content-Length: {len(body) + self.is_cut}"]
        return (
            head
            + f"HTTP/1.1 {self.status} X\r\n".encode()
            + "".join(f"{x}\r\n" for x in lines).encode()
            + b"\r\n"
            + body
        )

    def http_2(self, number: int) -> bytes:
        early = literal(b":status", b"103") + literal(b"link", b"</x>")
        block = literal(b":status", str(self.status).encode())
        block += b"".join(literal(n.lower().encode(), v.encode()) for n, v in self.fields)
        result = frame(HEADERS, END_HEADERS, number, early) * self.interim + frame(
            HEADERS, END_HEADERS, number, block
        )
        for piece in self.chunks:
            for start in range(0, len(piece), 16384):
                result += frame(DATA, 0, number, piece[start : start + 16384])
        if self.is_cut:
            return result
        if self.trailers:
            names = b"".join(literal(n.lower().encode(), v.encode()) for n, v in self.trailers)
            return result + frame(HEADERS, END_HEADERS | END_STREAM, number, names)
        return result + frame(DATA, END_STREAM, number)


def fields_of(fields: list[tuple[str, str]]) -> bytes:
    return b"".join(f"{name}: {value}\r\n".encode() for name, value in fields)


Script = Callable[[int], Any]  # index of the request → its Answer, or bytes for HTTP/1.1


class Carrier:
    def __init__(self, name: str, certificate: Path) -> None:
        self.name = name
        self.certificate = certificate

    @property
    def options(self) -> dict[str, Any]:
        return {"verify_tls": False, "http": "2" if self.name in ("libcurl", "HTTP/2") else "1.1"}

    @contextlib.contextmanager
    def server(self, respond: Callable[..., None]) -> Iterator[RawServer]:
        tls = None
        if self.name in ("TLS", "HTTP/2"):
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(self.certificate)
            if self.name == "HTTP/2":
                tls.set_alpn_protocols(["h2"])
        with (Http2Server if self.name == "HTTP/2" else RawServer)(respond, tls=tls) as server:
            yield server

    def run(
        self, server: RawServer, requests: list[dict[str, Any]], concurrency: int = 1, **more: Any
    ) -> aq.stream.Timings:
        base = server.url.removesuffix("/v1/chat/completions")
        if self.name == "proxy":
            more["proxy"], base = base, "http://origin.example:8123"
        planned = [
            aq.stream.Request(f"{base}/{i}", **{"timeout_s": 10, **fields})
            for i, fields in enumerate(requests)
        ]
        return aq.stream.run(planned, concurrency, **self.options, **more)

    def answer(
        self, script: Script, cut: bool = False, pause_s: float = 0.0
    ) -> Callable[..., None]:
        """Return a server's `respond`: request /i gets script(i), in two parts after i bytes if `cut`."""

        def respond(connection: Any, *of: Any) -> None:
            if self.name == "HTTP/2":
                number, (fields, _) = of
                index = int(dict(fields)[b":path"].rsplit(b"/", 1)[1])
            else:
                index = int(of[0].split(b" ", 2)[1].rsplit(b"/", 1)[1])
            answer = script(index)
            data = (
                answer
                if isinstance(answer, bytes)
                else answer.http_2(number)
                if self.name == "HTTP/2"
                else answer.http_1()
            )
            at = index if cut else len(data)
            connection.sendall(data[:at])
            if at < len(data):
                time.sleep(pause_s)
                connection.sendall(data[at:])
            if isinstance(answer, Answer) and (
                answer.is_cut or (answer.framing == "to_end" and self.name != "HTTP/2")
            ):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

        return respond

    def arrived(self, request: Any) -> tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]:
        """Return (method, target, fields in order of name, body) of one request as the server read it, without what every
        carrier may do in its own way: the case of names, the form of the target and of Host, Proxy-Connection."""
        if self.name == "HTTP/2":
            fields, body = request
            own = dict(fields)
            method, target = own[b":method"], own[b":path"]
            fields = [
                (b"host", own[b":authority"]) if n == b":authority" else (n, v)
                for n, v in fields
                if n not in (b":method", b":path", b":scheme")
            ]
        else:
            head, _, body = request.partition(b"\r\n\r\n")
            first, *lines = head.split(b"\r\n")
            method, target, _ = first.split(b" ", 2)
            target = target.removeprefix(b"http://origin.example:8123")
            fields = [
                (n.lower(), v.removeprefix(b" "))
                for n, _, v in (line.partition(b":") for line in lines)
            ]
        fields = [
            (
                n,
                b"HOST"
                if n == b"host" and (v.startswith(b"127.0.0.1:") or v == b"origin.example:8123")
                else v,
            )
            for n, v in fields
            if n != b"proxy-connection"
        ]
        return method, target, sorted(fields), body


def result_of(timings: aq.stream.Timings, index: int) -> dict[str, Any]:
    """Return all of a result that must not depend on the carrier."""
    record = asdict(timings.record(index, "user"))
    names = (
        "status",
        "cause",
        "text",
        "reasoning",
        "tool_calls",
        "finish_reason",
        "usage",
        "warnings",
    )
    headers = {n: v for n, v in timings.headers(index).items() if n not in FRAMING}
    return {
        **{name: record[name] for name in names},
        "headers": headers,
        "body": timings.body(index),
    }
