"""A plain-Python stand-in for annie_quant.stream with the same records(), for tests where the C module is not built."""

from __future__ import annotations

import http.client
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Request:
    url: str
    json: Any = None
    headers: dict | None = None
    timeout_s: float = 60.0
    start_s: float | None = None
    tag: str | None = None


class Timings:
    def __init__(self, rows: list[dict]) -> None:
        self._rows = rows

    def records(self) -> list[dict]:
        return self._rows

    def save(self, folder: Any) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "rows.json").write_text(json.dumps(self._rows))


def run(requests: list[Request], concurrency: int = 1) -> Timings:
    with ThreadPoolExecutor(concurrency) as pool:
        return Timings(list(pool.map(_one, requests)))


def _one(request: Request) -> dict:
    row: dict[str, Any] = {
        "tag": request.tag,
        "status": 0,
        "error": None,
        "text": "",
        "reasoning": "",
        "tool_calls": [],
        "finish_reason": None,
        "usage": None,
        "server_timings": None,
        "first_byte_ms": None,
        "first_event_ms": None,
        "first_reasoning_ms": None,
        "first_content_ms": None,
        "first_tool_ms": None,
        "last_token_ms": None,
        "done_ms": None,
        "e2e_ms": None,
        "tpot_ms": None,
        "itl_ms": [],
        "decode_tok_s": None,
        "completion_tokens": None,
        "tokens_estimated": True,
        "merged_reads": 0,
    }
    start = time.monotonic()
    try:
        _talk(request, row, start)
    except (OSError, http.client.HTTPException) as error:
        row["error"] = f"{type(error).__name__}: {error}"
    row["e2e_ms"] = (time.monotonic() - start) * 1e3
    return row


def _talk(request: Request, row: dict, start: float) -> None:
    parts = urlsplit(request.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=request.timeout_s)
    connection.request(
        "POST", parts.path, json.dumps(request.json), {"Content-Type": "application/json", **(request.headers or {})}
    )
    reply = connection.getresponse()
    row["status"] = reply.status
    if reply.status != 200:
        row["error"] = f"HTTP {reply.status}: {json.loads(reply.read())['error']['message']}"
        return
    stamps, calls, done = [], {}, False
    for line in reply:
        now = (time.monotonic() - start) * 1e3
        row["first_byte_ms"] = row["first_byte_ms"] or now
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done, row["done_ms"] = True, now
            continue
        row["first_event_ms"] = row["first_event_ms"] or now
        chunk = json.loads(data)
        row["usage"] = chunk.get("usage") or row["usage"]
        row["server_timings"] = chunk.get("timings") or row["server_timings"]
        for choice in chunk["choices"]:
            row["finish_reason"] = choice.get("finish_reason") or row["finish_reason"]
            if _delta(row, calls, choice["delta"], now):
                stamps.append(now)
    if not done:
        raise ConnectionError("the stream ended without [DONE]")
    row["tool_calls"] = list(calls.values())
    _finish(row, stamps)


def _delta(row: dict, calls: dict, delta: dict, now: float) -> bool:
    bearing = False
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    for text, field, stamp in (
        (reasoning, "reasoning", "first_reasoning_ms"),
        (delta.get("content"), "text", "first_content_ms"),
    ):
        if text:
            row[field] += text
            row[stamp] = row[stamp] or now
            bearing = True
    for piece in delta.get("tool_calls") or ():
        call = calls.setdefault(piece["index"], {"id": piece.get("id"), "name": None, "arguments": ""})
        call["name"] = piece["function"].get("name") or call["name"]
        call["arguments"] += piece["function"].get("arguments") or ""
        row["first_tool_ms"] = row["first_tool_ms"] or now
        bearing = True
    return bearing


def _finish(row: dict, stamps: list[float]) -> None:
    row["last_token_ms"] = stamps[-1] if stamps else None
    row["itl_ms"] = [b - a for a, b in itertools.pairwise(stamps)]
    usage = row["usage"]
    row["tokens_estimated"] = usage is None
    row["completion_tokens"] = tokens = usage["completion_tokens"] if usage else len(stamps)
    if len(stamps) > 1 and tokens > 1:
        row["tpot_ms"] = (stamps[-1] - stamps[0]) / (tokens - 1)
        row["decode_tok_s"] = 1e3 / row["tpot_ms"] if row["tpot_ms"] else None
