"""A server with settings, for tests of `annie-quant attribute`: it answers "yes", or "no" where its settings break answers.

    python tests/helpers/scripted_server.py PORT RULES COUNT [NAME=VALUE ...]

RULES is a comma-separated list: "break:mtp+prefix" answers "no" where both are on; "die:kv" ends at the third prompt,
"refuse:kv" does not start, "hang:kv" never answers, "fail:kv" answers HTTP 500 and "reject:kv" HTTP 400, "cold" reports no token
from the prefix cache. A setting is on where it is neither "off" nor "0"; `prefix` is the request's (cache_prompt), `batch` is on
while two requests are in flight, `sampling` with a temperature. COUNT is a file that gets one line per prompt.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from aiohttp import web

PORT, RULES, COUNT = int(sys.argv[1]), [rule for rule in sys.argv[2].split(",") if rule], Path(sys.argv[3])
SETTINGS = dict(word.split("=", 1) for word in sys.argv[4:])
in_flight = prompts = 0


def matches(action: str, on: set[str]) -> bool:
    return any(rule.startswith(f"{action}:") and {*rule.partition(":")[2].split("+")} <= on for rule in RULES)


async def chat(request: web.Request) -> web.StreamResponse:
    global in_flight, prompts
    body = await request.json()
    in_flight, prompts = in_flight + 1, prompts + 1
    with COUNT.open("a") as file:
        file.write(body["messages"][-1]["content"] + "\n")
    on = {name for name, value in SETTINGS.items() if value not in ("off", "0")}
    on |= {"prefix"} if body.get("cache_prompt", True) else set()
    on |= {"sampling"} if body["temperature"] else set()
    await asyncio.sleep(0.03)
    on |= {"batch"} if in_flight > 1 else set()
    if matches("die", on) and prompts >= 3:
        os._exit(3)
    if matches("hang", on):
        await asyncio.sleep(60)
    for action, status in (("fail", 500), ("reject", 400)):
        if matches(action, on):
            in_flight -= 1
            return web.json_response({"error": {"message": f"the server {action}s this"}}, status=status)
    cached = 7 if "prefix" in on and "cold" not in RULES and prompts > 1 else 0
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
    drafted = {"draft_n": 4, "draft_n_accepted": 2} if "mtp" in on else {}
    delta = {"content": "no" if matches("break", on) else "yes"}
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage, "timings": drafted},
    ]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    in_flight -= 1
    return response


async def page(request: web.Request) -> web.Response:
    pages = {"/health": {}, "/v1/models": {"data": [{"id": "scripted"}]}, "/props": {"build_info": "b1"}}
    return web.json_response(pages.get(request.path, {}), status=200 if request.path in pages else 404)


if __name__ == "__main__":
    if matches("refuse", {name for name, value in SETTINGS.items() if value not in ("off", "0")}):
        sys.exit("error: these settings are not supported")
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/{path:.*}", page)
    web.run_app(app, host="127.0.0.1", port=PORT, print=None)
