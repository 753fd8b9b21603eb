"""A server's answers: one benchmark of PER_RUN requests, each answered by a hostile stream that knows the key."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

from fuzz.boundaries.grammar import Hostile, Raw, encode
from fuzz.boundaries.harness import KEY, Finding, Sandbox
from stream_server import RawServer

PER_RUN = 100
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNK = {
    "id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hi", "reasoning_content": "so", "tool_calls": [
        {"index": 0, "id": "call", "type": "function", "function": {"name": "search_memory", "arguments": "{\"query\": 1}"}}
    ]}, "logprobs": None, "finish_reason": None}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 1}},
    "timings": {"predicted_n": 5, "prompt_ms": 1.5},
}  # fmt: skip
TOKYO = {"choices": [{"index": 0, "delta": {"content": "Tokyo."}, "finish_reason": "stop"}]}
SMOKE_ANSWER = HEAD + b"data: " + json.dumps(TOKYO).encode() + b"\n\ndata: [DONE]\n\n"
MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]}
STATUSES = (
    b"200 OK",
    b"400 Bad",
    b"500 X",
    b"302 Found\r\nLocation: http://evil/",
    b"204 No",
    b"999 Z",
)
OTHER_EVENTS = (
    b": ping\n\n", b"event: error\ndata: {}\n\n", b"data\n\n", b"id: 1\n\n", b"\r\r", b"data: " + b"[" * 200_000 + b"\n\n",
)  # fmt: skip
NO_HTTP = (
    b"",
    b"HTTP/1.1 ",
    b"\x00" * 50,
    b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000,
    b"SSH-2.0\r\n",
)
ECHOES = (
    KEY, KEY[: len(KEY) * 2 // 3], KEY.upper(), base64.b64encode(KEY.encode()).decode(),
    base64.b64encode(f"xx{KEY}".encode()).decode(),
)  # fmt: skip


@contextlib.contextmanager
def opened(sandbox: Sandbox) -> Iterator[Any]:
    state: dict[str, Any] = {}
    lock = threading.Lock()

    def respond(connection: Any, request: bytes) -> None:
        if request.startswith(b"GET"):
            body = json.dumps(MODELS).encode() if b"/v1/models" in request[:40] else b"{}"
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            return
        if b"capital of Japan" in request:  # the smoke question: a run ends where it fails
            connection.sendall(SMOKE_ANSWER)
            raise OSError("the end of this connection")
        with lock:
            number = state["n"]
            state["n"] += 1
        connection.sendall(answer(Hostile(f"{state['seed']}/{number}")))
        raise OSError("the end of this connection")

    with RawServer(respond) as server:

        def case(seed: str, left: int) -> int:
            count = min(PER_RUN, left)
            cases = [
                {"id": f"c{i}", "messages": [{"role": "user", "content": f"{i}"}]}
                for i in range(count)
            ]
            workload = sandbox.inputs / "hostile.json"
            gates = ["non_empty", "no_markdown", "thinking_leak"]
            workload.write_text(
                json.dumps({"name": "hostile", "max_tokens": 20, "gates": gates, "cases": cases})
            )
            sandbox.clear_output()
            state.update(seed=seed, n=0)
            output = sandbox.output / "run"
            url = server.url.removesuffix("/v1/chat/completions")
            options = ("--workloads", workload, "--warmup", 0, "--runs", 1, "--n", 0, "--key-env", "ANNIE_FUZZ_KEY",
                       "--noise-share", 0)  # fmt: skip
            _, _, error = sandbox.run(
                "bench", "--backend-a", "a", url, *options, "--output", output, codes=(0, 1)
            )
            rows = [
                json.loads(line) for line in (output / "records.jsonl").read_bytes().splitlines()
            ]
            measured = [row for row in rows if not row["warmup"]]
            if len(measured) != count:
                raise Finding(f"{len(measured)} rows for {count} requests: {error[-300:]}")
            for row in measured:
                text = json.dumps([row["text"], row["reasoning"], row["tool_calls"]])
                if any(form.lower() in text.lower() for form in ECHOES):
                    raise Finding(f"{row['id']}: the key, in some form, is in the record")
                if bool(row["error"]) != bool(row["cause"]):
                    raise Finding(
                        f"{row['id']}: an error without a cause: {row['error']!r}, {row['cause']!r}"
                    )
            return count

        yield case


def answer(hostile: Hostile) -> bytes:
    """Return a whole response."""
    kind = hostile.random.random()
    if kind < 0.05:
        body = encode(hostile.value())
        status = hostile.random.choice(STATUSES)
        return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
    if kind < 0.08:
        return hostile.random.choice(NO_HTTP)
    events = [event(hostile) for _ in range(hostile.random.randrange(1, 8))]
    if hostile.random.random() < 0.3:
        events += spelled(hostile)
    if hostile.random.random() < 0.8:
        events.append(b"data: [DONE]\n\n")
    return hostile.damaged(HEAD + b"".join(events))


def event(hostile: Hostile) -> bytes:
    kind = hostile.random.random()
    if kind < 0.2:
        return b"data: " + encode(CHUNK) + b"\n\n"
    if kind < 0.85:
        return b"data: " + encode(hostile.changed(CHUNK)).replace(b"\n", b" ") + b"\n\n"
    if kind < 0.95:
        return b"data: " + encode(hostile.value()) + b"\n\n"
    return hostile.random.choice(OTHER_EVENTS)


def spelled(hostile: Hostile) -> list[bytes]:
    """Return the key in one of its forms, cut into deltas of one field."""
    form, field = (
        hostile.random.choice(ECHOES),
        hostile.random.choice(("content", "reasoning_content", "tool")),
    )
    step = hostile.random.choice((1, 1, 2, 5, 100))
    events = []
    for at in range(0, len(form), step):
        piece: Any = form[at : at + step]
        if hostile.random.random() < 0.2:
            piece = Raw(b'"' + b"".join(b"\\u%04x" % ord(c) for c in piece) + b'"')
        delta = (
            {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
            if field == "tool"
            else {field: piece}
        )
        events.append(b"data: " + encode({"choices": [{"index": 0, "delta": delta}]}) + b"\n\n")
    return events
