"""Clients of `record` that are slow to send or to read: they end in time, and keep nobody out."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import pytest
from record_server import RawServer, Running, body_of, chat, completion, response

pytest.importorskip("aiohttp", reason="the proxy needs aiohttp: pip install annie-quant[serve]")

from annie_quant.data import record_proxy as proxy


def slow_client(url, after_head=b"{"):
    """Open a connection that sends a head, one byte of its body, and then nothing."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    if after_head is not None:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
            + after_head
        )
    else:
        connection.sendall(b"POST /v1/chat")
    return connection


def closed_after(connection):
    """Return the seconds until the other side ends a connection."""
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return time.monotonic() - began


def test_slow_clients_keep_nobody_out(tmp_path, monkeypatch):
    """As 520 clients at the real limits: they hold every place, and one more request comes.

    A place is taken from a request whose body is LATE_S late: until then the answer is status 503."""
    monkeypatch.setattr(proxy, "MAX_CLIENTS", 8)
    monkeypatch.setattr(proxy, "LATE_S", 0.2)
    with (
        RawServer(lambda head, body: [response(completion())]) as server,
        Running(server.url, tmp_path / "r.jsonl") as proxied,
    ):
        slow = [slow_client(proxied.url) for _ in range(20)]
        began = time.monotonic()
        answers = []
        while len(answers) < 3 and time.monotonic() - began < proxy.BODY_S:
            answer = chat(proxied.url, body_of("Hi"))
            assert b"Hello there." in answer or b"more than 8 requests at once" in answer
            answers += [answer] if b"Hello there." in answer else []
        assert len(answers) == 3, "the slow clients hold their places until BODY_S ends them"
        began = time.monotonic()
    assert time.monotonic() - began < proxy.SHUTDOWN_S, "they hold up the end"
    assert len(proxied.lines) == 3
    for connection in slow:
        connection.close()


@pytest.mark.parametrize("after_head", [b"{", None], ids=["body", "head"])
def test_a_request_that_does_not_come_ends_in_time(tmp_path, monkeypatch, after_head):
    for name in ("HEAD_S", "BODY_S", "LATE_S"):
        monkeypatch.setattr(proxy, name, 0.3)
    with (
        RawServer(lambda head, body: []) as server,
        Running(server.url, tmp_path / "r.jsonl") as proxied,
        slow_client(proxied.url, after_head) as connection,
    ):
        assert closed_after(connection) < 9, "the ordinary limits are 10 s"


def test_a_body_that_drips_ends_in_time_and_a_slow_upload_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(proxy, "BODY_S", 0.5)
    data = json.dumps(body_of("x" * 40_000)).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % len(data)
    )
    with (
        RawServer(lambda head, body: [response(completion())]) as server,
        Running(server.url, tmp_path / "r.jsonl") as proxied,
    ):
        with slow_client(proxied.url) as drip, contextlib.suppress(OSError):
            began = time.monotonic()
            while time.monotonic() - began < 20:
                drip.sendall(b" ")
                time.sleep(0.05)
        assert time.monotonic() - began < 15
        host, port = proxied.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as upload:
            upload.sendall(head)
            for start in range(0, len(data), 8000):  # 40 kB in 1.5 s
                time.sleep(0.25)
                upload.sendall(data[start : start + 8000])
            answer = b"".join(iter(lambda: upload.recv(65536), b""))  # until the server closes
            assert b"Hello there." in answer
    assert proxied.result.left_out == {"the client was too slow": 1}


def test_a_client_that_does_not_read_ends_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(proxy, "WRITE_S", 0.3)
    big = response(b"x" * 40_000_000)
    with (
        RawServer(lambda head, body: [big]) as server,
        Running(server.url, tmp_path / "r.jsonl") as proxied,
        slow_client(proxied.url, b"x" * 100),
    ):
        for _ in range(100):
            if proxied.recorder.result.requests and not proxied.recorder._passed:
                break
            time.sleep(0.1)
        assert not proxied.recorder._passed
