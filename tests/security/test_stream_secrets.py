"""A hostile server: redirects, echoes of the key, endless answers."""

from __future__ import annotations

import base64
import json
import socket
import time
from pathlib import Path

import pytest
from command_line import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from randomised import examples
from stream_server import DONE, HEAD, RawServer, chunk, event, stream

import annie_quant as aq
from annie_quant.bench.backend import Backend, alive, get_json, identity
from annie_quant.cli import app as cli
from annie_quant.core.secrets import Redactor
from annie_quant.stream import Request
from annie_quant.stream.client import fetch

KEY = "sk-planted-0123456789abcdefghijklmnop"
BEARER = {"Authorization": f"Bearer {KEY}"}


def plain(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n%b" % (
        status, len(body), more, body)  # fmt: skip


# ---- the key goes to the origin that was named, and nowhere else


@pytest.mark.parametrize("status", [b"301 Moved", b"302 Found", b"307 Temporary", b"308 Permanent"])
def test_no_probe_follows_a_redirect(status):
    thief = RawServer(lambda connection, request: connection.sendall(plain(b"{}")))
    with thief:

        def send_on(connection, request) -> None:
            where = b"Location: http://127.0.0.1:%d/v1/models\r\n" % thief.port
            connection.sendall(plain(b"", status, where))

        with RawServer(send_on) as server:
            backend = Backend("a", f"http://127.0.0.1:{server.port}", headers=BEARER)
            assert get_json(backend, "/v1/models") is None
            assert alive(backend)
            assert identity(backend).model is None
            record = aq.stream.run([Request(server.url, json={}, headers=BEARER)]).records()[0]
            assert all(KEY.encode() in r for r in server.requests), "the named origin gets the key"
    assert thief.requests == []
    assert record["cause"] == "redirect"
    assert f"http://127.0.0.1:{thief.port}/v1/models" in record["error"]


def test_probes_use_no_proxy_of_the_environment(monkeypatch):
    with (
        RawServer(lambda c, r: c.sendall(plain(b"{}"))) as proxy,
        RawServer(lambda c, r: c.sendall(plain(b"{}"))) as real,
    ):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", "")
        identity(Backend("a", f"http://127.0.0.1:{real.port}", headers=BEARER))
        assert len(real.requests) >= 2
        assert proxy.requests == []


def test_only_this_client_uses_http():
    """No module of the package imports another HTTP client, but the recording proxy and the audit from afar.

    tests/calibration_data/test_record.py and tests/checkpoint/test_remote.py look at what these send.
    """
    package = Path(aq.__file__).parent
    allowed = {
        package / "data/record_proxy.py": ["aiohttp"],
        package / "checkpoint/remote.py": ["httpx"],
    }
    others = ("urllib.request", "http.client", "requests", "httpx", "aiohttp", "urllib3", "ftplib")
    for path in sorted(Path(aq.__file__).parent.rglob("*.py")):
        text = path.read_text()
        clients = [
            name for name in others if f"import {name}\n" in text or f"from {name} import" in text
        ]
        assert clients == allowed.get(path, []), path


# ---- echoes


def variants() -> dict[str, str]:
    return {
        "plain": KEY,
        "upper": KEY.upper(),
        "swapped case": KEY.swapcase(),
        "half": KEY[:20],
        "base64": base64.b64encode(KEY.encode()).decode(),
        "base64 in a text": base64.b64encode(f"the key: {KEY}!".encode()).decode(),
        "base64 for URLs": base64.urlsafe_b64encode(b"??" + KEY.encode()).decode(),
    }


def leaked(stored: str) -> list[str]:
    """Return the encodings that a reader of the text would find: each complete, and its first 20 characters."""
    return [
        name
        for name, v in variants().items()
        if name != "base64 in a text" and v[:20].lower() in stored.lower()
    ]


FIELDS = {
    "text": lambda piece: event({"content": piece}),
    "reasoning": lambda piece: event({"reasoning_content": piece}),
    "arguments": lambda piece: event({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": piece}}]}),
    "unknown field": lambda piece: event({"content": "a"}, other={"deep": [1, {"piece": piece}]}),
    "escaped": lambda piece: b'data: {"choices":[{"index":0,"delta":{"content":"'
    + b"".join(b"\\u%04x" % ord(c) for c in piece)
    + b'"}}]}\n\n',
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_key_echoed_in_pieces_is_nowhere(tmp_path, field, size):
    pieces = []
    for text in variants().values():
        pieces += [FIELDS[field](text[i : i + size]) for i in range(0, len(text), size)]
        pieces += [FIELDS[field](" and also ")]
    with RawServer(stream([*pieces, event({}, "stop"), DONE])) as server:
        timings = aq.stream.run([Request(server.url, json={}, headers=BEARER)])
    timings.save(tmp_path)
    loaded = aq.stream.Timings.load(tmp_path)
    record = loaded.records()[0]
    assert record["error"] is None
    assert leaked(json.dumps(record)) == []
    assert leaked(bytes(loaded.frames).decode()) == []
    texts: dict[str, str] = {}
    for i in loaded.rows_of(0):
        _collect(texts, loaded.raw(int(i)))
    assert leaked(json.dumps(texts)) == [], "no text joined from the stored stream holds it"
    assert " and also " in json.dumps(texts), "what is not a secret stays"


OVER_FIELDS = {
    "reasoning and content": [{"reasoning_content": KEY[:12]}, {"content": KEY[12:] + " ok"}],
    "content and arguments": [
        {"content": KEY[:9]}, {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": KEY[9:]}}]}],
    "interleaved": [{"content": "a ", "reasoning_content": KEY[:25]}, {"role": "assistant", "content": KEY[25:]}],
    "property name": [{"content": "a", KEY: {KEY: 1}}],
    "escaped property name": [{"content": "a", "\u00e9" + KEY: 1}],
}  # fmt: skip


@pytest.mark.parametrize("form", OVER_FIELDS)
def test_a_key_over_several_fields_is_nowhere(tmp_path, form):
    pieces = [event(delta) for delta in OVER_FIELDS[form]]
    with RawServer(stream([*pieces, event({}, "stop"), DONE])) as server:
        timings = aq.stream.run([Request(server.url, json={}, headers=BEARER)])
    timings.save(tmp_path)
    loaded = aq.stream.Timings.load(tmp_path)
    record = loaded.records()[0]
    assert record["error"] is None
    calls = "".join(c["arguments"] for c in record["tool_calls"])
    joined = record["reasoning"] + record["text"] + calls
    for text in (joined, record["text"] + calls, bytes(loaded.frames).decode(), json.dumps(record)):
        assert leaked(text) == [] and KEY[12:32].lower() not in text.lower(), text


def _collect(texts: dict[str, str], raw: bytes) -> None:
    data = raw.decode().removeprefix("data: ").strip()
    stack = [("", json.loads(data))] if data.startswith("{") else []
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            texts[path] = texts.get(path, "") + value
        elif isinstance(value, (dict, list)):
            stack += [
                (f"{path}/{k}", v)
                for k, v in (value.items() if isinstance(value, dict) else enumerate(value))
            ]


def test_an_escaped_echo_in_an_error_page_is_masked():
    spelled = "".join(f"\\u{ord(c):04x}" for c in KEY)
    page = plain(b'{"error":{"message":"bad key %b"}}' % spelled.encode(), b"401 No")

    def respond(connection, request) -> None:
        connection.sendall(page[:200])
        time.sleep(0.05)
        connection.sendall(page[200:])

    with RawServer(respond) as server:
        record = aq.stream.run([Request(server.url, json={}, headers=BEARER)]).records()[0]
    assert record["status"] == 401
    assert KEY[:10] not in record["error"]


@settings(max_examples=examples(200), deadline=None)
@given(
    before=st.binary(max_size=40),
    after=st.binary(max_size=40),
    secret=st.binary(min_size=8, max_size=64),
)
def test_complete_secrets_are_found_and_short_texts_are_not(before, after, secret):
    text = before + secret + after
    covered = bytearray(text)
    for start, end in Redactor([secret]).spans(text):
        assert end - start >= 8
        covered[start:end] = b"*" * (end - start)
    assert secret not in bytes(covered)
    assert Redactor([secret]).spans(secret[:7]) == []


def test_a_benchmark_of_such_a_server_stores_no_key(tmp_path, monkeypatch):
    """Through `bench` and `report`: records, exports, streams, HTML and Markdown."""
    from planted_secrets import bytes_of

    monkeypatch.setenv("PLANTED_KEY", KEY)

    def respond(connection, request) -> None:
        if request.startswith(b"GET"):
            connection.sendall(
                plain(json.dumps({"data": [{"id": f"model-{KEY}"}], "build_info": KEY}).encode())
            )
        else:
            stream(
                [*(event({"content": c}) for c in f"Your key is {KEY}."), event({}, "stop"), DONE]
            )(connection, request)

    workload = tmp_path / "one.json"
    workload.write_text(json.dumps({"name": "one", "gates": ["non_empty"], "max_tokens": 9, "temperature": 0, "cases": [
        {"id": "a", "messages": [{"role": "user", "content": "Hello"}], "expect": {}}]}))  # fmt: skip
    run = tmp_path / "run"
    with RawServer(respond) as a, RawServer(respond) as b:
        words = ["bench", "--backend-a", "a", f"http://127.0.0.1:{a.port}", "--backend-b", "b", f"http://127.0.0.1:{b.port}",
                 "--runs", "1", "--warmup", "0", "--workloads", str(workload), "--key-env", "PLANTED_KEY",
                 "--output", str(run)]  # fmt: skip
        done = CliRunner().invoke(cli, words)
        assert (run / "records.jsonl").exists(), (done.output, done.exception)
    CliRunner().invoke(cli, ["report", str(run)])
    assert (run / "report.html").exists()
    assert b"Your key is ****" in (run / "records.jsonl").read_bytes()
    assert [
        name for name, text in bytes_of(run).items() if leaked(text.decode("utf-8", "replace"))
    ] == []


# ---- patience


def endless(piece: bytes):
    def respond(connection: socket.socket, request: bytes) -> None:
        connection.sendall(HEAD)
        block = b"".join(chunk(piece) for _ in range(200))
        while True:
            connection.sendall(block)

    return respond


ENDLESS = {
    "event": event({"content": "a"}),
    "comment": b": ping\n\n",
    "blank": b"\n",
    "body": b"x" * 4000,
}


@pytest.mark.parametrize("piece", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_answer_ends_with_a_cause(piece):
    with RawServer(endless(piece)) as server:
        start = time.monotonic()
        limits = {"max_answer_bytes": 4 << 20, "max_answer_events": 10_000}
        timings = aq.stream.run([Request(server.url, json={}, timeout_s=60)], **limits)
        took = time.monotonic() - start
    record = timings.records()[0]
    assert record["cause"] == "answer_too_large"
    assert record["body_bytes"] <= (4 << 20) + (64 << 10)
    assert len(timings.events) <= 10_000
    assert took < 30


def test_an_answer_at_its_limits_is_complete():
    pieces = [event({"content": "a"})] * 8 + [event({}, "stop"), DONE]
    with RawServer(stream(pieces)) as server:
        exact = {"max_answer_bytes": sum(map(len, pieces)), "max_answer_events": len(pieces)}
        assert (
            aq.stream.run([Request(server.url, json={})], **exact).records()[0]["text"] == "a" * 8
        )
        for name in exact:
            less = exact | {name: exact[name] - 1}
            assert (
                aq.stream.run([Request(server.url, json={})], **less).records()[0]["cause"]
                == "answer_too_large"
            )


def drip(connection: socket.socket, request: bytes) -> None:
    connection.sendall(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    )
    while True:
        connection.sendall(b" ")
        time.sleep(0.1)


def test_a_dripping_probe_ends_by_its_deadline():
    with RawServer(drip) as server:
        start = time.monotonic()
        reply = fetch(f"http://127.0.0.1:{server.port}/props", timeout_s=0.6)
        assert 0.5 < time.monotonic() - start < 15
        assert reply.status == 200
        assert "timed out" in reply.fault
        with pytest.raises(ValueError, match="timed out"):
            get_json(Backend("a", f"http://127.0.0.1:{server.port}"), "/props", timeout_s=0.6)


def test_a_large_probe_ends_by_its_size():
    with RawServer(lambda c, r: c.sendall(plain(b'"' + b"x" * (3 << 20) + b'"'))) as server:
        reply = fetch(f"http://127.0.0.1:{server.port}/props", max_bytes=1 << 20)
        assert reply.fault
        assert len(reply.body) <= 1 << 20


def test_no_server_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert fetch(f"http://127.0.0.1:{port}/").status == 0
    with pytest.raises(ConnectionError, match="refused"):
        get_json(Backend("a", f"http://127.0.0.1:{port}"), "/v1/models")
