"""A scheduled OpenAI-compatible server for tests/perf/bench_peers.py: prints its port, and logs when it wrote each event.

    python peer_server.py LOG [--ttft-ms 40] [--itl-ms 8] [--tokens 64] [--role early|late]

One word is one token and one event. The first content leaves --ttft-ms after the request was read; the role event at once (early)
or directly before the first content (late). LOG has one JSON line per answer: seconds on CLOCK_MONOTONIC when the request was
read, and of each content event's write.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

from aiohttp import web


def application(options) -> web.Application:
    async def models(request):
        entry = {"id": options.model, "object": "model", "owned_by": "vllm", "max_model_len": 8192}
        return web.json_response({"object": "list", "data": [entry]})

    async def health(request):
        return web.Response()

    async def chat(request):
        received = time.monotonic()
        body = await request.json()
        tokens = min(
            options.tokens,
            body.get("max_tokens") or body.get("max_completion_tokens") or options.tokens,
        )
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": options.model}

        async def send(**more):
            await reply.write(b"data: " + json.dumps(head | more).encode() + b"\n\n")

        def choice(delta, finish=None):
            return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

        role = choice({"role": "assistant", "content": ""})
        if options.role == "early":
            await send(**role)
        stamps = []
        for index in range(tokens):
            due = received + options.ttft_ms / 1e3 + index * options.itl_ms / 1e3
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if index == 0 and options.role == "late":
                await send(**role)
            stamps.append(time.monotonic())
            await send(**choice({"content": " Tokyo" if index else "Tokyo"}))
        await send(**choice({}, "stop"))
        prompt = sum(len(str(message.get("content")).split()) for message in body["messages"])
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }
        await send(choices=[], usage=usage)
        await reply.write(b"data: [DONE]\n\n")
        await reply.write_eof()
        with Path(options.log).open("a", encoding="utf-8") as log:
            log.write(
                json.dumps(
                    {"received": received, "stamps": stamps, "stream": bool(body.get("stream"))}
                )
                + "\n"
            )
        return reply

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    app.router.add_post("/v1/chat/completions", chat)
    return app


async def main(options) -> None:
    runner = web.AppRunner(application(options))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("log")
    parser.add_argument("--ttft-ms", type=float, default=40.0)
    parser.add_argument("--itl-ms", type=float, default=8.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--role", choices=("early", "late"), default="late")
    parser.add_argument("--model", default="scheduled")
    asyncio.run(main(parser.parse_args()))
