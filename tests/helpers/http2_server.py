"""Enough of HTTP/2 (RFC 9113) and HPACK (RFC 7541) to read a request as bytes and to send an answer in chosen frames."""

from __future__ import annotations

import contextlib
import socket

from stream_server import RawServer

DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 7, 8, 9
ACK, END_STREAM, END_HEADERS, PADDED, PRIORITY = 1, 1, 4, 8, 32
WINDOW = 1 << 24

# The lengths of the code of each byte (RFC 7541, appendix B); the codes follow from them, in order of length and byte.
_LENGTHS = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c060a0a0c0d06080b0a0a080b08060606050505060606060606060708"
    "0f060c0a0d06070707070707070707070707070707070707070707070807080d130d0e060f0506050605060606050707060606050607060505060707"
    "0707070f0b0e0d1c14161414161616171617171717171817181816171817171717151617161717181615141616171715171616181516171715151615"
    "1716171714161616171616171a1a1413161716191a1a1a1b1b1a181913151a1b1b1a1b1815151a1a1c1b1b1b14181415161515171616191918181a17"
    "1a1b1a1a1b1b1b1b1b1c1b1b1b1b1b1a1e"
)
_STATIC = (
    b":authority|;:method|GET;:method|POST;:path|/;:path|/index.html;:scheme|http;:scheme|https;:status|200;:status|204;:status|206;"
    b":status|304;:status|400;:status|404;:status|500;accept-charset|;accept-encoding|gzip, deflate;accept-language|;"
    b"accept-ranges|;accept|;access-control-allow-origin|;age|;allow|;authorization|;cache-control|;content-disposition|;content-encoding|;"
    b"content-language|;content-length|;content-location|;content-range|;content-type|;cookie|;date|;etag|;expect|;expires|;from|;"
    b"host|;if-match|;if-modified-since|;if-none-match|;if-range|;if-unmodified-since|;last-modified|;link|;location|;max-forwards|;"
    b"proxy-authenticate|;proxy-authorization|;range|;referer|;refresh|;retry-after|;server|;set-cookie|;strict-transport-security|;"
    b"transfer-encoding|;user-agent|;vary|;via|;www-authenticate|"
)


def _codes() -> dict[tuple[int, int], int]:
    """Return (length, code) → byte."""
    result, code, before = {}, 0, 0
    for length, byte in sorted((length, byte) for byte, length in enumerate(_LENGTHS)):
        code <<= length - before
        result[length, code], before = byte, length
        code += 1
    return result


class Hpack:
    """The decoder of one connection's header blocks."""

    CODES = _codes()

    def __init__(self) -> None:
        self.table: list[tuple[bytes, bytes]] = []  # the newest first
        self.static = [tuple(entry.split(b"|")) for entry in _STATIC.split(b";")]

    def decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        self.block, self.at, fields = block, 0, []
        while self.at < len(block):
            first = block[self.at]
            if first & 0x80:
                fields.append(self._entry(self._integer(7)))
            elif first & 0xE0 == 0x20:
                self._integer(5)  # the table's size, which is not limited here
            else:
                index = self._integer(6 if first & 0x40 else 4)
                name = self._entry(index)[0] if index else self._string()
                fields.append((name, self._string()))
                if first & 0x40:
                    self.table.insert(0, fields[-1])
        return fields

    def _entry(self, index: int) -> tuple[bytes, bytes]:
        return (
            self.static[index - 1]
            if index <= len(self.static)
            else self.table[index - 1 - len(self.static)]
        )

    def _integer(self, bits: int) -> int:
        value, shift = self.block[self.at] & ((1 << bits) - 1), 0
        self.at += 1
        if value == (1 << bits) - 1:
            more = 0x80
            while more & 0x80:
                more = self.block[self.at]
                self.at += 1
                value += (more & 0x7F) << shift
                shift += 7
        return value

    def _string(self) -> bytes:
        is_coded = self.block[self.at] & 0x80
        size = self._integer(7)
        raw = self.block[self.at : self.at + size]
        self.at += size
        if not is_coded:
            return raw
        text, code, length = bytearray(), 0, 0
        for byte in raw:
            for bit in range(7, -1, -1):
                code, length = code << 1 | byte >> bit & 1, length + 1
                if (length, code) in self.CODES:
                    text.append(self.CODES[length, code])
                    code = length = 0
        return bytes(text)


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + number.to_bytes(4, "big") + payload
    )


def literal(name: bytes, value: bytes) -> bytes:
    """Return a field that is not added to the table. Both texts have fewer than 127 bytes."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


class Http2Server(RawServer):
    """respond(connection, number, request) sends frames. A request is (fields, body); `requests` has all of them.

    LookupError: after a shutdown, an SSLSocket passes on ciphertext.
    """

    def _serve(self, connection: socket.socket) -> None:
        with (
            contextlib.suppress(OSError, LookupError, ValueError),
            self.tls.wrap_socket(connection, server_side=True) as secure,
        ):
            secure.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            source, hpack = secure.makefile("rb"), Hpack()
            streams: dict[int, tuple[list[tuple[bytes, bytes]], bytearray]] = {}
            source.read(24)
            initial = (4).to_bytes(2, "big") + WINDOW.to_bytes(4, "big")
            secure.sendall(
                frame(SETTINGS, 0, 0, initial)
                + frame(WINDOW_UPDATE, 0, 0, WINDOW.to_bytes(4, "big"))
            )
            while head := source.read(9):
                payload = source.read(int.from_bytes(head[:3], "big"))
                kind, flags, number = head[3], head[4], int.from_bytes(head[5:], "big")
                if kind == SETTINGS and not flags & ACK:
                    secure.sendall(frame(SETTINGS, ACK, 0))
                elif kind == HEADERS:
                    payload = payload[1 : len(payload) - payload[0]] if flags & PADDED else payload
                    block = payload[5:] if flags & PRIORITY else payload
                    while not flags & END_HEADERS and (more := source.read(9)):
                        block += source.read(int.from_bytes(more[:3], "big"))
                        flags |= more[4] & END_HEADERS
                    streams[number] = (hpack.decode(block), bytearray())
                elif kind == DATA:
                    streams[number][1].extend(payload)
                if kind in (HEADERS, DATA) and flags & END_STREAM:
                    fields, body = streams.pop(number)
                    self.requests.append((fields, bytes(body)))
                    self.respond(secure, number, self.requests[-1])
