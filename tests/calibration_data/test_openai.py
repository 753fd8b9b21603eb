"""The openai teacher against a local server: the key is only in the request, limits are waited for, faults are named."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from annie_quant.core.errors import EnvironmentFault, ServerError, UsageError
from annie_quant.data import Options, generate, generation

KEY = "sk-test-0123456789abcdef"


class Endpoint(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        status, headers = self.server.script.pop(0) if self.server.script else (200, {})
        if status != 200:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(
                json.dumps({"error": {"message": f"no: {self.headers['Authorization']}"}}).encode()
            )
            return
        number = len(self.server.requests)
        turns = 5 if "exactly 5 turns" in body["messages"][0]["content"] else 1
        talk = [
            {"user": f"Please describe part{t} of w{number}x", "assistant": "Gladly, it is fine."}
            for t in range(turns)
        ]
        prompt = body["messages"][0]["content"]
        for tool in ("search_memory", "web_search"):
            if f"calls {tool}" in prompt:
                talk[0] |= {
                    "call": {"name": tool, "arguments": {"query": f"w{number}x"}},
                    "result": "It is found.",
                }
        text = json.dumps({"conversations": [{"turns": talk}]})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        usage = {"prompt_tokens": 300, "completion_tokens": 100, "total_tokens": 400}
        for event in (
            {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage},
        ):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args):
        pass


@pytest.fixture
def endpoint(monkeypatch):
    pytest.importorskip("annie_quant._stream", reason="the C client is not built here")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.requests, server.script = [], []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.url, server.waits = f"http://127.0.0.1:{server.server_port}", []
    monkeypatch.setattr(generation, "sleep", server.waits.append)
    yield server
    server.shutdown()


def make(endpoint, path, **more):
    options = Options(model="some-model", url=endpoint.url, timeout_s=20, **more)
    return generate("annie", "openai", 5, path, options=options)


def test_conversations_are_made_and_the_key_is_stored_nowhere(endpoint, tmp_path):
    out = tmp_path / "d.jsonl"
    summary = make(endpoint, out)
    assert summary.valid == 5 and summary.with_tools == 2 and summary.tokens == 5 * 400
    assert (
        endpoint.requests[0][0] == "/v1/chat/completions"
        and endpoint.requests[0][1] == f"Bearer {KEY}"
    )
    assert not any(KEY in file.read_text() for file in tmp_path.rglob("*") if file.is_file())
    assert {json.loads(line)["provenance"]["model"] for line in out.read_text().splitlines()} == {
        "some-model"
    }


def test_a_limit_is_waited_for_as_long_as_it_requests(endpoint, tmp_path):
    endpoint.script = [(429, {"Retry-After": "7"}), (503, {}), (200, {})]
    assert make(endpoint, tmp_path / "d.jsonl").valid == 5
    assert endpoint.waits == [7.0, 10.0]


def test_a_wrong_key_and_a_wrong_url_end_the_run_and_the_error_hides_the_key(endpoint, tmp_path):
    endpoint.script = [(401, {})]
    with pytest.raises(EnvironmentFault) as error:
        make(endpoint, tmp_path / "a.jsonl")
    assert KEY not in error.value.message and "401" in error.value.message
    endpoint.script = [(404, {})]
    with pytest.raises(ServerError) as missing:
        make(endpoint, tmp_path / "b.jsonl")
    assert KEY not in missing.value.message and len(endpoint.requests) == 2


def test_a_server_error_is_retried(endpoint, tmp_path):
    endpoint.script = [(500, {}), (200, {})]
    assert make(endpoint, tmp_path / "a.jsonl").valid == 5


def test_missing_options_are_named(endpoint, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="model's name"):
        generate("annie", "openai", 5, None, options=Options(url=endpoint.url))
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(UsageError, match="needs an endpoint"):
        generate("annie", "openai", 5, None, options=Options(model="m"))
    with pytest.raises(UsageError, match="does not report its costs"):
        make(endpoint, tmp_path / "d.jsonl", max_usd=1.0)
