"""annie-quant record: what passes through the proxy is unchanged, what is written has no secrets and is what init reads."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import zlib

import pytest
from command_line import CliRunner
from fake_server import FakeServer, Script, words
from planted_secrets import HUB, KEY, PASSWORD, where
from record_server import RawServer, Running, body_of, chat, completion, raw_call, response

aiohttp = pytest.importorskip(
    "aiohttp", reason="the proxy needs aiohttp: pip install annie-quant[record]"
)

from annie_quant.cli import app as cli  # noqa: E402
from annie_quant.core.errors import UsageError  # noqa: E402
from annie_quant.data import record_proxy as proxy  # noqa: E402
from annie_quant.data import recorded_chat  # noqa: E402
from annie_quant.data.logs import read_logs  # noqa: E402
from annie_quant.data.record_proxy import Recorder  # noqa: E402

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set_light",
            "description": "Switch a light",
            "parameters": {
                "type": "object",
                "properties": {"room": {"type": "string"}},
                "required": ["room"],
            },
        },
    }
]


STREAM = (
    b': ping\r\n\r\ndata: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\r\n\r\n'
    b'event: message\r\ndata: {"choices":[{"index":0,"delta":\r\ndata: {"content":"Gr\xc3\xbc\xc3\x9fe"}}]}\r\n\r\n'
    b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"a",'
    b'"function":{"name":"set_light","arguments":""}}]}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\\"room\\": \\"hall\\"}"}}]}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}\n\ndata: [DONE]\n\n'
)


def test_a_stream_passes_byte_for_byte_and_as_it_comes(tmp_path):
    released = threading.Event()

    def answer(head, body):
        yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Own: 1\r\nConnection: close\r\n\r\n"
        for i in range(0, len(STREAM), 7):  # cut anywhere, also within a character
            yield STREAM[i : i + 7]
            if i == 70:
                assert released.wait(10)  # the client has the first part before the rest is sent

    with RawServer(answer) as server, Running(server.url, tmp_path / "r.jsonl") as proxied:
        host, port = proxied.url.removeprefix("http://").split(":")
        data = json.dumps(body_of("Light in the hall", tools=TOOLS, stream=True)).encode()
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(data)
                + data
            )
            received = b""
            while STREAM[:77] not in received:
                received += client.recv(65536)
            released.set()
            while piece := client.recv(65536):
                received += piece
        assert server.requests[0][1] == data
    head, _, stream = received.partition(b"\r\n\r\n")
    assert stream == STREAM and b"X-Own: 1" in head
    (line,) = proxied.lines
    assert line["messages"][2]["content"] == "Grüße" and line["tools"] == TOOLS
    assert line["messages"][2]["tool_calls"][0]["function"] == {
        "name": "set_light",
        "arguments": '{"room": "hall"}',
    }
    assert line["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("coding", ["identity", "gzip", "deflate", "raw deflate"])
def test_a_body_passes_byte_for_byte_in_its_coding(tmp_path, coding):
    text = completion("It is on.", reasoning_content="The user needs light.")
    packed = {
        "identity": lambda: text,
        "gzip": lambda: gzip.compress(text),
        "deflate": lambda: zlib.compress(text),
        "raw deflate": lambda: zlib.compress(text)[2:-4],
    }[coding]()
    extra = f"Content-Encoding: {coding.split()[-1]}\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n"
    with (
        RawServer(lambda head, body: [response(packed, extra=extra)]) as server,
        Running(server.url + "/v1/", tmp_path / "r.jsonl") as proxied,
    ):
        head, _, body = chat(
            proxied.url, body_of("Light"), "Accept-Encoding: br, gzip;q=1, zstd\r\nCookie: c=3\r\n"
        ).partition(b"\r\n\r\n")
        second = chat(proxied.url, body_of("Light again"))
    assert body == packed and head.count(b"Set-Cookie") == 2 and second.endswith(packed)
    sent = server.requests[0][0]
    assert (
        b"POST /v1/chat/completions HTTP" in sent
        and b"Accept-Encoding: gzip;q=1\r\n" in sent
        and b"c=3" in sent
    )
    assert b"ookie" not in server.requests[1][0]  # one client's cookies are not sent for another
    assert [line["messages"][-1]["content"] for line in proxied.lines] == ["It is on."] * 2
    assert proxied.lines[0]["messages"][-1]["reasoning_content"] == "The user needs light."


def test_everything_else_passes_too_and_is_not_recorded(tmp_path):
    def answer(head, body):
        method, path = head.split(b" ")[:2]
        if path == b"/v1/missing":
            return [response(b'{"error": "no"}', status="404 Not Here")]
        return (
            [response(method + b" " + path + b" " + body)] if method != b"HEAD" else [response(b"")]
        )

    with RawServer(answer) as server, Running(server.url, tmp_path / "r.jsonl") as proxied:
        close = b"Host: x\r\nConnection: close\r\n"
        assert raw_call(
            proxied.url, b"GET /v1/models?a=%2F+b HTTP/1.1\r\n" + close + b"\r\n"
        ).endswith(b"\r\n\r\nGET /v1/models?a=%2F+b ")
        chunked = (
            b"PUT /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
            + close
            + b"\r\n3\r\nabc\r\n0\r\n\r\n"
        )
        assert b"PUT /x" in raw_call(proxied.url, chunked)
        assert b"HTTP/1.1 200" in raw_call(
            proxied.url, b"HEAD /v1/models HTTP/1.1\r\n" + close + b"\r\n"
        )
        missing = raw_call(proxied.url, b"GET /v1/missing HTTP/1.1\r\n" + close + b"\r\n")
        assert missing.startswith(b"HTTP/1.1 404 Not Here") and missing.endswith(b'{"error": "no"}')
        # an address of another host in the request line is not followed
        assert (
            b"400"
            in raw_call(
                proxied.url, b"GET http://127.0.0.1:1/x HTTP/1.1\r\n" + close + b"\r\n"
            ).split(b"\r\n")[0]
        )
        assert b"//evil.example/x" in raw_call(
            proxied.url, b"GET //evil.example/x HTTP/1.1\r\n" + close + b"\r\n"
        )
    assert proxied.lines == [] and proxied.result.requests >= 5


def test_secrets_are_never_written(tmp_path, capfd):
    name = "Friederike Vogelsang"
    echo = f"Your key is {KEY} and {KEY.upper()}, {PASSWORD}; {HUB}. Bye Friederike."
    arguments = json.dumps({"room": "hall", "password": PASSWORD})
    calls = [
        {"id": "1", "type": "function", "function": {"name": "set_light", "arguments": arguments}}
    ]
    user = f"My name is {name}, friederike@example.org; key {KEY}, my password is {PASSWORD}"
    text = completion(echo, tool_calls=calls)
    with (
        RawServer(lambda head, body: [response(text, extra=f"X-Api-Key: {KEY}\r\n")]) as server,
        Running(server.url, tmp_path / "r.jsonl", personal=True, words=("Vogelnest",)) as proxied,
    ):
        headers = f"Authorization: Bearer {KEY}\r\nX-Api-Key: {PASSWORD}\r\nCookie: s={HUB}\r\n"
        body = body_of(user, tools=TOOLS, user=KEY, metadata={"token": HUB})
        body["messages"][0]["content"] = f"You are Vogelnest. The token is: {HUB}"
        path = f"/v1/chat/completions?api_key={PASSWORD}"
        answer = chat(proxied.url, body, headers, path)
        assert KEY.encode() in answer  # the client gets what the server sent
        sent = server.requests[0][0]
        assert f"Bearer {KEY}".encode() in sent and path.encode() in sent and HUB.encode() in sent
        # a request that aiohttp cannot parse, and a server that cannot be parsed
        raw_call(proxied.url, b"GET / HTTP/1.1\r\n" + KEY.encode() + b" : x\r\n\r\n")
    stored = proxied.settings.output.read_text()
    assert len(proxied.lines) == 1 and "set_light" in stored
    assert where(tmp_path, *capfd.readouterr()) == []
    assert KEY.upper() not in stored and KEY.upper()[:20] not in stored
    assert not any(
        word in stored for word in ("Friederike", "Vogelsang", "friederike@", "Vogelnest")
    )
    assert sum(proxied.result.masked.values()) >= 6
    assert stat.S_IMODE(proxied.settings.output.stat().st_mode) == 0o600


def test_a_redirect_is_passed_back_and_not_followed(tmp_path):
    with (
        RawServer(lambda head, body: [response(completion())]) as other,
        RawServer(
            lambda head, body: [
                response(
                    b"", status="307 T", extra=f"Location: {other.url}/v1/chat/completions\r\n"
                )
            ]
        ) as server,
        Running(server.url, tmp_path / "r.jsonl") as proxied,
    ):
        answer = chat(proxied.url, body_of("Hi"), f"Authorization: Bearer {KEY}\r\n")
        assert answer.startswith(b"HTTP/1.1 307") and other.url.encode() in answer
        assert other.requests == []
    assert proxied.lines == [] and proxied.result.left_out == {"status 307": 1}


def test_the_environments_proxy_gets_nothing(tmp_path, monkeypatch):
    with RawServer(lambda head, body: [response(b"{}")]) as other:
        for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(variable, other.url)
        with (
            RawServer(lambda head, body: [response(completion())]) as server,
            Running(server.url, tmp_path / "r.jsonl") as proxied,
        ):
            assert b"Hello there." in chat(
                proxied.url, body_of("Hi"), f"Authorization: Bearer {KEY}\r\n"
            )
        assert other.requests == []


EVENT_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
HALF = b'data: {"choices":[{"delta":{"content":"half"}}]}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(HALF), HALF)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([EVENT_STREAM, CHUNK, 0.3, None], "ended it early"),
        ([EVENT_STREAM, CHUNK, 0.3, b"zz\r\n"], "ended it early"),
        ([response(STREAM[:60], "text/event-stream")], "broken"),
        ([response(HALF, "text/event-stream")], "does not end"),
        (
            [response(b'data: {"error": {"message": "out of memory"}}\n\n', "text/event-stream")],
            "an error in place of an answer",
        ),
        ([response(b"\xff\xfe[1")], "not a chat completion"),
        ([response(b'{"choices": "x"}')], "not a chat completion"),
        (
            [response(gzip.compress(b"0" * (17 << 20)), extra="Content-Encoding: gzip\r\n")],
            "more than 16 MB",
        ),
        ([response(b"abc", extra="Content-Encoding: gzip\r\n")], "decompressed"),
        ([response(b"abc", extra="Content-Encoding: br\r\n")], "coding"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}"], "ended it early"),
    ],
)
def test_a_hostile_answer_is_passed_on_and_its_prompt_kept(tmp_path, pieces, reason):
    with (
        RawServer(lambda head, body: pieces) as server,
        Running(server.url, tmp_path / "r.jsonl") as proxied,
    ):
        answer = chat(proxied.url, body_of("Hi"))
    assert answer.startswith(b"HTTP/1.1 200")
    if "early" in reason:  # the client sees that the answer is not complete
        assert not answer.endswith(b"0\r\n\r\n") and (
            b"Content-Length: 50" in answer or b"half" in answer
        )
    (line,) = proxied.lines
    assert [m["role"] for m in line["messages"]] == ["system", "user"]
    assert reason in next(iter(proxied.result.left_out))


@pytest.mark.parametrize(
    "pieces",
    [
        [None],
        [b"no HTTP at all\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nA: " + b"b" * (1 << 20) + b"\r\n\r\n"],
    ],
    ids=["reset", "not HTTP", "1 MB header"],
)
def test_a_server_that_is_not_one_is_an_error_page(tmp_path, pieces):
    with (
        RawServer(lambda head, body: pieces) as server,
        Running(server.url, tmp_path / "r.jsonl") as proxied,
    ):
        answer = chat(proxied.url, body_of("Hi"))
    assert answer.startswith(b"HTTP/1.1 502") and b"error" in answer and proxied.lines == []


def test_an_endless_stream_uses_bounded_memory_and_ends_with_its_client(tmp_path):
    ended = threading.Event()

    def endless(head, body):
        yield EVENT_STREAM
        piece = b"10000\r\n" + b"data: x" * 9362 + b"xx\r\n"
        try:
            while True:
                yield piece
        finally:
            ended.set()

    with RawServer(endless) as server, Running(server.url, tmp_path / "r.jsonl") as proxied:
        host, port = proxied.url.removeprefix("http://").split(":")
        data = json.dumps(body_of("Hi")).encode()
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
                % len(data)
                + data
            )
            received = 0
            while received < 40 << 20:
                received += len(client.recv(1 << 20))
                assert (
                    proxied.recorder._held.now
                    <= recorded_chat.MAX_ANSWER_BYTES + recorded_chat.MAX_REQUEST_BYTES
                )
        assert ended.wait(10)  # the server is not left generating for nobody
        deadline = time.monotonic() + 10
        while proxied.recorder.result.lines < 1 and time.monotonic() < deadline:
            time.sleep(0.02)
    assert proxied.result.lines == 1 and proxied.recorder._held.now == 0
    assert any(
        "more than 16 MB" in reason or "client left" in reason for reason in proxied.result.left_out
    )


def test_a_huge_request_passes_and_is_not_recorded(tmp_path):
    with (
        RawServer(lambda head, body: [response(completion(str(len(body))))]) as server,
        Running(server.url, tmp_path / "r.jsonl") as proxied,
    ):
        data = json.dumps(body_of("x" * 8_100_000)).encode()
        assert str(len(data)).encode() in chat(proxied.url, data)
        assert b"Hello" not in chat(proxied.url, body_of("y" * 70_000))  # its answer is its length
        assert str(len(json.dumps(body_of("Hi")))).encode() in chat(proxied.url, body_of("Hi"))
    # A long conversation is recorded, for `bench --replay`; `init` leaves it out when it reads.
    assert [len(line["messages"][1]["content"]) for line in proxied.lines] == [70_000, 2]
    assert [r for r in proxied.result.left_out if "more than 8 MB" in r] == list(
        proxied.result.left_out
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{",
        b"\x16\x03\x01\x02\0",
        b"\0" * 9000,
    ],
)
def test_broken_clients_do_not_stop_the_proxy(tmp_path, data):
    with (
        RawServer(lambda head, body: [response(completion())]) as server,
        Running(server.url, tmp_path / "r.jsonl") as proxied,
    ):
        host, port = proxied.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(data)
        assert b"Hello there." in chat(proxied.url, body_of("Hi"))
        assert b"Hello there." in chat(proxied.url, b"[1, 2")  # the server's own matter
    assert len(proxied.lines) == 1


def test_32_streams_at_once_each_get_their_own_answer(tmp_path):
    n = 32

    def answer(body):
        number = body["messages"][-1]["content"].split()[-1]
        return words(
            f"This is the answer to the question number {number} of all", gap_s=0.01, first_s=0.2
        )

    async def ask(session, url, i):
        async with session.post(
            f"{url}/v1/chat/completions", json=body_of(f"question {i}", stream=True)
        ) as got:
            return await got.read()

    async def ask_all(url):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(ask(session, url, i) for i in range(n)))

    with FakeServer(answer) as server, Running(server.url, tmp_path / "r.jsonl") as proxied:
        through = asyncio.run(ask_all(proxied.url))
        assert server.most_in_flight == n
        direct = asyncio.run(ask_all(server.url))
    assert through == direct
    answers = {
        line["messages"][1]["content"]: line["messages"][2]["content"] for line in proxied.lines
    }
    assert answers == {
        f"question {i}": f"This is the answer to the question number {i} of all" for i in range(n)
    }


def test_more_clients_than_the_limit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(proxy, "MAX_CLIENTS", 0)
    with (
        RawServer(lambda head, body: []) as server,
        Running(server.url, tmp_path / "r.jsonl") as proxied,
    ):
        assert chat(proxied.url, body_of("Hi")).startswith(b"HTTP/1.1 503")


def test_the_file_stops_at_its_limit_and_traffic_goes_on(tmp_path):
    with (
        RawServer(lambda head, body: [response(completion())]) as server,
        Running(server.url, tmp_path / "r.jsonl", most_bytes=600) as proxied,
    ):
        for i in range(9):
            assert b"Hello there." in chat(proxied.url, body_of(f"Question {i}"))
    assert 1 <= len(proxied.lines) < 9 and proxied.settings.output.stat().st_size <= 600
    assert "--max-mb" in proxied.result.stopped and proxied.result.left_out["the file's limit"] >= 1


def test_a_file_that_a_kill_cut_short_is_continued(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [{"ro')
    with (
        RawServer(lambda head, body: [response(completion())]) as server,
        Running(server.url, path) as proxied,
        pytest.raises(UsageError, match="another annie-quant"),
    ):
        chat(proxied.url, body_of("Hi"))
        Recorder(proxied.settings)
    assert [line["messages"][-1]["content"] for line in proxied.lines] == ["a", "Hello there."]


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "127.0.0.1:8000",
        "http://u:p@127.0.0.1",
        "http://127.0.0.1/?key=1",
        "http://localhost:8100/v1",
        "http://x:y",
    ],
)
def test_addresses_that_cannot_be_used(tmp_path, url):
    outcome = CliRunner().invoke(
        cli, ["record", "--upstream", url, "--output", str(tmp_path / "r.jsonl")]
    )
    assert isinstance(outcome.exception, UsageError) and "p@" not in str(outcome.exception)
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_from_recorded_traffic_to_workloads(tmp_path, number):
    """The command itself, ended by a signal while a stream is in flight; then init on its file."""

    def answer(body):
        text = body["messages"][-1]["content"]
        if "slow" in text:
            return words("one two three four five six", gap_s=0.15)
        return (
            Script(tools=[("set_light", json.dumps({"room": text.split()[-1]}))])
            if "Light" in text
            else words("All is well here.")
        )

    with FakeServer(answer) as server:
        command = [
            sys.executable,
            "-m",
            "annie_quant",
            "record",
            "--upstream",
            server.url,
            "--port",
            "0",
            "--json",
        ]
        process = subprocess.Popen(
            [*command, "--output", str(tmp_path / "r.jsonl")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ,
        )  # fmt: skip
        try:
            note = ""
            while "base URL" not in note:
                note = process.stderr.readline()
                assert note, process.stderr.read()
            url = next(word for word in note.split() if word.startswith("http")).removesuffix("/v1")
            for i in range(12):
                chat(url, body_of(f"Light in the room{i}", tools=TOOLS, stream=bool(i % 2)))
                chat(
                    url,
                    body_of(
                        f"What do you know about the number {i * 977}", tools=TOOLS, stream=True
                    ),
                )
            in_flight = threading.Thread(
                target=chat, args=(url, body_of("slow one", tools=TOOLS, stream=True))
            )
            in_flight.start()
            time.sleep(0.3)
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
            in_flight.join(10)
        finally:
            process.kill()
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["lines"] == result["with_answer"] == 25
    conversations = list(read_logs([tmp_path / "r.jsonl"]))
    assert len(conversations) == 25 and all(
        c.has_answer and c.system == "Be brief." for c in conversations
    )
    assert (
        CliRunner()
        .invoke(
            cli, ["init", "--logs", str(tmp_path / "r.jsonl"), "--output", str(tmp_path / "mine")]
        )
        .exit_code
        == 0
    )
    stored = {
        p.stem: json.loads(p.read_text()) for p in (tmp_path / "mine" / "workloads").glob("*.json")
    }
    assert set(stored) == {"calls", "answers"} and len(stored["calls"]["cases"]) >= 5
    persona = json.loads((tmp_path / "mine" / "persona.json").read_text())
    assert persona["system_prompt"] == "Be brief." and persona["tools"] == TOOLS
