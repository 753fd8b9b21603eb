"""A scripted OpenAI-compatible server for tests: streams SSE as llama.cpp's server or vLLM does.

with FakeServer(answer) as server: ...      # answer(body) -> Script; server.url, server.bodies
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Script:
    """One answer. One piece is sent per event, `gap_s` apart, the first after `first_s`."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tools: list[tuple[str, str]] = field(default_factory=list)  # (name, arguments JSON)
    finish: str | None = None  # "": the answer ends without a finish reason
    status: int = 200
    error: str = ""
    first_s: float = 0.0
    gap_s: float = 0.0
    usage: bool = True
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    break_after: int | None = None  # events, then the connection is cut
    cached_tokens: int | None = None
    timings: dict[str, Any] = field(default_factory=dict)  # further fields of llama.cpp's


def words(text: str, **more: Any) -> Script:
    """A plain answer, one word per event."""
    pieces = text.split(" ")
    return Script(content=[p if i == 0 else " " + p for i, p in enumerate(pieces)], **more)


class FakeServer:
    def __init__(
        self,
        answer: Callable[[dict], Script],
        style: str = "llama.cpp",
        model: str = "fake",
        props: dict | None = None,
        model_meta: dict | None = None,
    ) -> None:
        self.answer, self.style, self.model, self.props = answer, style, model, props
        self.model_meta = model_meta or {}
        self.bodies: list[dict] = []
        self.generated = 0
        self.metrics: Callable[[], str] | None = None  # the page /metrics
        self.dead = False
        self.in_flight = self.most_in_flight = 0

    def __enter__(self) -> FakeServer:
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self.thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        if not self.dead:
            self.dead = True
            asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(10)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(10)

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        app = web.Application(client_max_size=1 << 26)
        self._add_routes(app)

        async def start() -> None:
            self.runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self.runner.setup()
            site = web.TCPSite(self.runner, "127.0.0.1", getattr(self, "port", 0))
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"

        self.loop.run_until_complete(start())
        ready.set()
        self.loop.run_forever()

    def _add_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/props", self._props)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)

    async def _models(self, request: web.Request) -> web.Response:
        owner = {"llama.cpp": "llamacpp", "ollama": "library"}.get(self.style, "vllm")
        return web.json_response(
            {
                "object": "list",
                "data": [
                    {
                        "id": self.model,
                        "object": "model",
                        "owned_by": owner,
                        "meta": self.model_meta or None,
                    }
                ],
            }
        )

    async def _props(self, request: web.Request) -> web.Response:
        if self.style != "llama.cpp":
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(
            self.props
            or {
                "build_info": "b1-fake",
                "chat_template": "{{ x }}",
                "default_generation_settings": {"params": {"top_k": 40}, "n_ctx": 4096},
            }
        )

    async def _version(self, request: web.Request) -> web.Response:
        if self.style == "llama.cpp":
            return web.json_response({"error": {"code": 404}}, status=404)
        return web.json_response({"version": "0.32.0"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics()) if self.metrics else web.Response(status=404)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        script = self.answer(body)
        if script.status != 200:
            return web.json_response(
                {"error": {"code": script.status, "message": script.error, "type": "invalid"}},
                status=script.status,
            )
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._stream(request, body, script)
        finally:
            self.in_flight -= 1

    async def _stream(self, request: web.Request, body: dict, script: Script) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        await asyncio.sleep(script.first_s)
        for count, choice in enumerate(self._choices(script)):
            if script.break_after is not None and count >= script.break_after:
                request.transport.abort()
                return reply
            if count > 1 and script.gap_s:
                await asyncio.sleep(script.gap_s)
            await self._send(reply, {"choices": [choice]})
        tokens = script.completion_tokens
        tokens = (
            len(script.content) + len(script.reasoning) + 6 * len(script.tools) + 1
            if tokens is None
            else tokens
        )
        prompt = script.prompt_tokens or sum(
            len(str(m.get("content")).split()) for m in body["messages"]
        )
        if script.usage and (body.get("stream_options") or {}).get("include_usage"):
            last: dict[str, Any] = {
                "choices": [],
                "usage": {
                    "prompt_tokens": prompt,
                    "completion_tokens": tokens,
                    "total_tokens": prompt + tokens,
                },
            }
            if self.style == "llama.cpp":
                last["timings"] = {
                    "prompt_n": prompt,
                    "prompt_ms": 1.0,
                    "predicted_n": tokens,
                    "predicted_ms": 1.0,
                }
                last["timings"]["prompt_n"] -= script.cached_tokens or 0
                last["timings"] |= script.timings
            if script.cached_tokens is not None:
                last["usage"]["prompt_tokens_details"] = {"cached_tokens": script.cached_tokens}
            self.generated += tokens
            await self._send(reply, last)
        await reply.write(b"data: [DONE]\n\n")
        await reply.write_eof()
        return reply

    async def _send(self, reply: web.StreamResponse, chunk: dict) -> None:
        chunk = {
            "id": "c1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": self.model,
            **chunk,
        }
        await reply.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _choices(self, script: Script) -> list[dict]:
        llama = self.style == "llama.cpp"
        deltas: list[dict] = [{"role": "assistant", "content": None if llama else ""}]
        deltas += [
            {"reasoning_content" if llama else "reasoning": piece} for piece in script.reasoning
        ]
        deltas += [{"content": piece} for piece in script.content]
        for index, (name, arguments) in enumerate(script.tools):
            first, rest = (arguments[:1], arguments[1:]) if llama else ("", arguments)
            deltas.append(
                {
                    "tool_calls": [
                        {
                            "index": index,
                            "id": f"call_{index}",
                            "type": "function",
                            "function": {"name": name, "arguments": first},
                        }
                    ]
                }
            )
            deltas += [
                {"tool_calls": [{"index": index, "function": {"arguments": rest[i : i + 6]}}]}
                for i in range(0, len(rest), 6)
            ]
        finish = (
            ("tool_calls" if script.tools else "stop")
            if script.finish is None
            else script.finish or None
        )
        return [{"index": 0, "delta": d, "finish_reason": None} for d in deltas] + [
            {"index": 0, "delta": {}, "finish_reason": finish}
        ]
