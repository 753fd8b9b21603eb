"""What a server reports about itself: each of these ended in a traceback, a hang or a run directory of 153 MB in 0.1."""

from __future__ import annotations

import json

import msgspec
import pytest
from stream_server import RawServer

from annie_quant.bench.backend import Backend, identity
from annie_quant.documents import Identity

DIGITS = b"9" * 4000
PAGES = {
    "deep": ("/v1/models", b"[" * 100_000),
    "deep and closed": ("/props", b'{"default_generation_settings":' * 900 + b"1" + b"}" * 900),
    "data is an object": ("/v1/models", b'{"data": {"0": {"id": "m"}}}'),
    "data is text": ("/v1/models", b'{"data": "m"}'),
    "an entry is a number": ("/v1/models", b'{"data": [5]}'),
    "an id is a list": ("/v1/models", b'{"data": [{"id": ["m"]}]}'),
    "an id of 900,000 characters": ("/v1/models", b'{"data": [{"id": "' + b"x" * 900_000 + b'"}]}'),
    "meta is a list": ("/v1/models", b'{"data": [{"id": "m", "meta": [1]}]}'),
    "a number of 4,000 digits": (
        "/v1/models",
        b'{"data": [{"id": "m", "meta": {"n_params": ' + DIGITS + b"}}]}",
    ),
    "a length of 4,000 digits": (
        "/v1/models",
        b'{"data": [{"id": "m", "max_model_len": ' + DIGITS + b"}]}",
    ),
    "half a surrogate pair": ("/v1/models", b'{"data": [{"id": "\\ud800"}]}'),
    "props is a list": ("/props", b"[1]"),
    "a template is an object": ("/props", b'{"chat_template": {"a": 1}}'),
    "settings are text": ("/props", b'{"default_generation_settings": "x"}'),
    "sampling is a number": ("/props", b'{"default_generation_settings": {"params": 5}}'),
    "samplers are objects": (
        "/props",
        b'{"default_generation_settings": {"params": {"samplers": [{"a": [1]}]}}}',
    ),
    "a build is a number": ("/props", b'{"build_info": 5}'),
    "a version is a list": ("/version", b'{"version": ["0.26"]}'),
    "no JSON": ("/props", b"<html>"),
    "not UTF-8": ("/v1/models", b'{"data": [{"id": "\xff"}]}'),
    "NaN": ("/v1/models", b'{"data": [{"id": "m", "max_model_len": NaN}]}'),
    "3 MB": ("/props", b'{"chat_template": "' + b"x" * (3 << 20) + b'"}'),
}
GOOD = {
    "/v1/models": b'{"data": [{"id": "m", "owned_by": "vllm"}]}',
    "/props": b"{}",
    "/version": b'{"version": "0.26"}',
}
WITHOUT_CAVEAT = {
    "deep and closed",
    "a number of 4,000 digits",
    "a length of 4,000 digits",
    "samplers are objects",
}  # one field is left out


@pytest.mark.parametrize("name", PAGES)
def test_a_hostile_page_is_a_caveat(name):
    path, body = PAGES[name]

    def respond(connection, request):
        page = (
            body
            if request.split(b" ", 2)[1].decode() == path
            else GOOD[request.split(b" ", 2)[1].decode()]
        )
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(page), page))

    with RawServer(respond) as server:
        result = identity(Backend("a", f"http://127.0.0.1:{server.port}"))
    stored = msgspec.json.encode(result)
    assert len(stored) < 20_000
    assert msgspec.json.decode(stored, type=Identity) == result
    assert json.loads(stored)
    if name not in WITHOUT_CAVEAT:
        assert any(caveat.startswith(path) and caveat.isprintable() for caveat in result.caveats), (
            result.caveats
        )


def test_an_honest_server_has_no_caveats():
    def respond(connection, request):
        page = GOOD[request.split(b" ", 2)[1].decode()]
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(page), page))

    with RawServer(respond) as server:
        result = identity(Backend("a", f"http://127.0.0.1:{server.port}"))
    assert (result.model, result.runtime, result.version, result.caveats) == (
        "m",
        "vllm",
        "0.26",
        [],
    )
