"""The embedded llama.cpp server behind a proxy that plants faults which a server cannot be asked for.

    python tests/helpers/faulty_server.py PORT MODEL [--kv TYPE] [--mtp N] [--template FILE] [--parser auto|none] [--fault NAME ...]

prefix      from the second request on that may use the prefix cache, the prompt's beginning is another conversation's
draft       with a draft head, tokens are sampled at a high temperature, as if the drafts were trusted
mtp-prefix  the fault of `draft`, where the request may also use the prefix cache
kv          with another type of cached keys and values than f16, the same sampling, as wrong scales of an FP8 cache give
batch       a request that comes while another is in flight gets that one's question
die         the server ends at the fifth request
hang        no request is answered
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from pathlib import Path

from aiohttp import ClientSession, web

from annie_quant.ops import serving

WRONG = "You are a pirate. Answer each message with a short rhyme about the sea."


class FaultyServer:
    """A proxy in front of the server at `url`."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.url, self.options, self.n_cached, self.n_requests = url, options, 0, 0
        self.in_flight: list[list[dict]] = []

    def plant(self, body: dict) -> dict:
        """Return the body that the server gets instead."""
        faults, cached = self.options.fault, body.get("cache_prompt", True)
        noisy = {"temperature": 4.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
        self.n_cached += cached
        if "prefix" in faults and cached and self.n_cached > 1:
            rest = [m for m in body["messages"] if m["role"] != "system"]
            body = {**body, "messages": [{"role": "system", "content": WRONG}, *rest]}
            body.pop("tools", None)
            body.pop("tool_choice", None)
        if self.options.mtp and ("draft" in faults or ("mtp-prefix" in faults and cached)):
            body = {**body, **noisy}
        if "kv" in faults and self.options.kv != "f16":
            body = {**body, **noisy}
        if "batch" in faults and self.in_flight:
            body = {**body, "messages": self.in_flight[0]}
            body.pop("tools", None)
            body.pop("tool_choice", None)
        return body

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        if body is not None:
            self.n_requests += 1
            if "die" in self.options.fault and self.n_requests == 5:
                os._exit(3)
            if "hang" in self.options.fault:
                await asyncio.sleep(600)
            sent, messages = self.plant(body), body["messages"]
            self.in_flight.append(messages)
        try:
            async with (
                ClientSession() as session,
                session.request(
                    request.method, self.url + request.path, json=sent if body else None
                ) as answer,
            ):
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        finally:
            if body is not None:
                self.in_flight.remove(messages)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("port", type=int)
    parser.add_argument("model", type=Path)
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--mtp", type=int, default=0)
    parser.add_argument("--template", type=Path)
    parser.add_argument("--parser", default="auto")
    parser.add_argument("--fault", action="append", default=[])
    options = parser.parse_args()
    with serving.start(
        options.model, drafts=options.mtp, kv_type=options.kv, template=options.template,
        parse_calls=options.parser != "none", parallel=2,
    ) as server:  # fmt: skip
        print(server.log.read_text(), flush=True)
        server.log.unlink()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", FaultyServer(server.url, options).pass_on)
        with contextlib.suppress(KeyboardInterrupt):
            web.run_app(app, host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
