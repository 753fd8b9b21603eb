"""One client and one load in a separate process: prints JSON with the stamps of all events. Run by bench_stream.py.

Every client does the same work per event: split the stream into events, stamp each, store its bytes. The content is decoded after
the measurement, except in openai, which returns only decoded events. Certificates are not verified.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

Events = list[tuple[int, bytes]]  # (stamp, bytes) of one stream, in order
STAMP = re.compile(rb'"content":"(\d{19})')
BODY = {"model": "load", "messages": [{"role": "user", "content": "x"}], "stream": True}


def ours(url: str, streams: int, realtime: bool) -> tuple[list[Events], dict]:
    import numpy as np

    import annie_quant as aq
    from annie_quant import _stream  # noqa: F401  loading libcurl is not part of an event

    request = aq.stream.Request(url, json=BODY)
    began = usage()
    timings = aq.stream.run(
        [request] * streams, concurrency=streams, realtime=realtime, verify_tls=False
    )
    spent, peak_mb = usage() - began, rss_mb()
    rows = timings.events
    user: list[Events] = [[] for _ in range(streams)]
    kernel: list[Events] = [[] for _ in range(streams)]
    for i in np.flatnonzero(rows["kind"] == 1).tolist():
        raw = timings.raw(i)
        user[rows["request"][i]].append((int(rows["user_ns"][i]), raw))
        if rows["kernel_ns"][i]:
            kernel[rows["request"][i]].append((int(rows["kernel_ns"][i]), raw))
    more = {
        "cpu_s": spent,
        "rss_mb": peak_mb,
        "kernel": [lags(e) for e in kernel],  # of the events that it stamped
        "merged": int((rows["flags"][rows["kind"] == 1] & 1).sum()),
        "started": timings.requests["started_ns"].tolist(),
        "received": [int(timings.headers(i)["x-received-ns"]) for i in range(streams)],
    }
    return user, more


class Cutter:
    """Splits one stream into events at blank lines and stamps each with the read that completed it."""

    def __init__(self) -> None:
        self.held = b""
        self.events: Events = []

    def feed(self, piece: bytes) -> None:
        now = time.monotonic_ns()
        *whole, self.held = (self.held + piece).split(b"\n\n")
        for event in whole:
            self.events.append((now, event))


def pycurl_(url: str, streams: int, http_version: int = 0) -> list[Events]:
    """http_version: libcurl's CURL_HTTP_VERSION_*, 0 for its default; streams share a connection if it supports several."""
    import pycurl

    multi, cutters, handles = pycurl.CurlMulti(), [], []
    for _ in range(streams):
        cutter, handle = Cutter(), pycurl.Curl()
        handle.setopt(pycurl.URL, url)
        handle.setopt(pycurl.HTTP_VERSION, http_version)
        handle.setopt(pycurl.PIPEWAIT, 1 if http_version else 0)
        handle.setopt(pycurl.SSL_VERIFYPEER, 0)
        handle.setopt(pycurl.SSL_VERIFYHOST, 0)
        handle.setopt(pycurl.POSTFIELDS, json.dumps(BODY))
        handle.setopt(pycurl.WRITEFUNCTION, cutter.feed)
        multi.add_handle(handle)
        cutters.append(cutter)
        handles.append(handle)
    active = 1
    while active:
        _, active = multi.perform()
        if active:
            multi.poll(1.0) if hasattr(multi, "poll") else multi.select(1.0)
    return [c.events for c in cutters]


def aiohttp_(url: str, streams: int) -> list[Events]:
    import asyncio

    import aiohttp

    async def one(session: aiohttp.ClientSession) -> Events:
        cutter = Cutter()
        async with session.post(url, json=BODY, ssl=False) as response:
            async for piece in response.content.iter_any():
                cutter.feed(piece)
        return cutter.events

    async def every() -> list[Events]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=300)
        ) as session:
            return list(await asyncio.gather(*(one(session) for _ in range(streams))))

    return asyncio.run(every())


def httpx_(url: str, streams: int) -> list[Events]:
    import asyncio

    import httpx

    async def one(client: httpx.AsyncClient) -> Events:
        cutter = Cutter()
        async with client.stream("POST", url, json=BODY) as response:
            async for piece in response.aiter_raw():
                cutter.feed(piece)
        return cutter.events

    async def every() -> list[Events]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=300, verify=False) as client:
            return list(await asyncio.gather(*(one(client) for _ in range(streams))))

    return asyncio.run(every())


def openai_(url: str, streams: int) -> list[Events]:
    import asyncio

    import openai

    base, _, query = url.partition("/chat/completions?")
    options = dict(pair.split("=") for pair in query.split("&"))

    async def one(client: openai.AsyncOpenAI) -> Events:
        events: Events = []
        answer = await client.chat.completions.create(**BODY)
        async for part in answer:
            now = time.monotonic_ns()
            if part.choices:
                events.append(
                    (now, b'"content":"%b"' % (part.choices[0].delta.content or "").encode())
                )
        return events

    async def every() -> list[Events]:
        client = openai.AsyncOpenAI(
            base_url=base, api_key="none", default_query=options, max_retries=0, timeout=300
        )
        return list(await asyncio.gather(*(one(client) for _ in range(streams))))

    return asyncio.run(every())


PEERS: dict[str, Callable[[str, int], list[Events]]] = {
    "pycurl": pycurl_,
    "aiohttp": aiohttp_,
    "httpx": httpx_,
    "openai": openai_,
}


def usage() -> float:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime


def rss_mb() -> float:
    """Return the peak memory of this process since its exec (ru_maxrss would include the parent's)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+)", status)[1]) / 1024


def lags(events: Events) -> list[int]:
    """Return the delay of each stamped event in nanoseconds."""
    result = ((when, STAMP.search(raw)) for when, raw in events)
    return [when - int(match[1]) for when, match in result if match]


def arrivals(events: Events) -> list[int]:
    return [when for when, raw in events if STAMP.search(raw)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="a client: ours, ours-plain or one of PEERS")
    parser.add_argument("url")
    parser.add_argument("streams", type=int)
    parser.add_argument("cpu", type=int, help="the processor that it runs on")
    options = parser.parse_args()
    name, url, streams = options.name, options.url, options.streams
    os.sched_setaffinity(0, {options.cpu})
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    began = usage()
    if name.startswith("ours"):
        events, more = ours(url, streams, realtime=name == "ours")
    else:
        __import__(name)
        began = usage()
        events, more = PEERS[name](url, streams), {}
        more["cpu_s"], more["rss_mb"] = usage() - began, rss_mb()
    stamps = [arrivals(e) for e in events]
    shared = sum(b == a for s in stamps for a, b in itertools.pairwise(s))
    print(json.dumps({"user": [lags(e) for e in events], "shared": shared, **more}))


if __name__ == "__main__":
    main()
