"""A server with settings, for tests of `annie-quant attribute`: it answers "yes", or "no" where its settings break answers.

    python tests/helpers/scripted_server.py PORT RULES COUNT [NAME=VALUE ...]

RULES is a comma-separated list: "break:mtp+prefix" answers "no" where both are on; "die:kv" ends at the third prompt,
"refuse:kv" does not start, "hang:kv" never answers, "fail:kv" answers HTTP 500 and "reject:kv" HTTP 400, "cold" reports no token
from the prefix cache. A setting is on where it is neither "off" nor "0"; `prefix` is the request's (cache_prompt), `batch` is on
while two requests are in flight, `sampling` with a temperature. COUNT is a file that gets one line per prompt.

It uses the standard library alone: tests start dozens of these servers, and importing aiohttp takes a quarter of a second.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT, RULES, COUNT = (
    int(sys.argv[1]),
    [rule for rule in sys.argv[2].split(",") if rule],
    Path(sys.argv[3]),
)
SETTINGS = dict(word.split("=", 1) for word in sys.argv[4:])
PAGES = {
    "/health": {},
    "/v1/models": {"data": [{"id": "scripted"}]},
    "/props": {"build_info": "b1"},
}
lock = threading.Lock()
in_flight = prompts = 0


def matches(action: str, on: set[str]) -> bool:
    return any(
        rule.startswith(f"{action}:") and {*rule.partition(":")[2].split("+")} <= on
        for rule in RULES
    )


def answer(body: dict) -> tuple[int, str, str]:
    """Return status, type and text of the answer to one prompt."""
    on = {name for name, value in SETTINGS.items() if value not in ("off", "0")}
    on |= {"prefix"} if body.get("cache_prompt", True) else set()
    on |= {"sampling"} if body["temperature"] else set()
    time.sleep(0.03)
    on |= {"batch"} if in_flight > 1 else set()
    if matches("die", on) and prompts >= 3:
        os._exit(3)
    if matches("hang", on):
        time.sleep(60)
    for action, status in (("fail", 500), ("reject", 400)):
        if matches(action, on):
            return (
                status,
                "application/json",
                json.dumps({"error": {"message": f"the server {action}s this"}}),
            )
    cached = 7 if "prefix" in on and "cold" not in RULES and prompts > 1 else 0
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    drafted = {"draft_n": 4, "draft_n_accepted": 2} if "mtp" in on else {}
    delta = {"content": "no" if matches("break", on) else "yes"}
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage, "timings": drafted},
    ]
    lines = [*(json.dumps(chunk) for chunk in chunks), "[DONE]"]
    return 200, "text/event-stream", "".join(f"data: {line}\n\n" for line in lines)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def reply(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        global in_flight, prompts
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock, COUNT.open("a") as file:
            in_flight, prompts = in_flight + 1, prompts + 1
            file.write(body["messages"][-1]["content"] + "\n")
        try:
            self.reply(*answer(body))
        finally:
            with lock:
                in_flight -= 1

    def do_GET(self) -> None:
        self.reply(
            200 if self.path in PAGES else 404,
            "application/json",
            json.dumps(PAGES.get(self.path, {})),
        )

    def log_message(self, *_: object) -> None: ...


if __name__ == "__main__":
    if matches("refuse", {name for name, value in SETTINGS.items() if value not in ("off", "0")}):
        sys.exit("error: these settings are not supported")
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
