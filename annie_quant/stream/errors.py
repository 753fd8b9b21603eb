"""Reasons of a failed request: a short cause for tables and a one-line message for people.

libcurl's codes: https://curl.se/libcurl/c/libcurl-errors.html
"""

from __future__ import annotations

import errno
import os
import re
import resource

import msgspec

from annie_quant.core.errors import UsageError
from annie_quant.core.text import printable
from annie_quant.core.untrusted import decode_json, limited

# request_row.cause (csrc/stream/plan.h)
NONE, TRANSPORT, TIMEOUT, IDLE, DEADLINE, CANCELLED, EVENT_SIZE, NOT_STARTED, ANSWER_SIZE, HEAD_SIZE = range(10)


class RequestError(UsageError, ValueError):
    """A request, or an option of a run, that is not valid. Nothing was sent."""


_CODES = {
    "protocol": (1, 8, 16, 61, 92, 95),  # 1: also a reply that is not HTTP
    "truncated": (18, 52),
    "tls": (35, 51, 58, 59, 60, 77, 83),
    **{"url": (3,), "dns": (5, 6), "connect": (7,), "timeout": (28,), "reset": (55, 56)},
}
_CURL_CAUSES = {code: cause for cause, codes in _CODES.items() for code in codes}
_STOPPED = {
    DEADLINE: ("deadline", "stopped: the run reached its deadline"),
    CANCELLED: ("cancelled", "stopped: the run was interrupted"),
    NOT_STARTED: ("not_started", "not started: the run was stopped before"),
    EVENT_SIZE: ("event_too_large", "one event was larger than max_event_bytes"),
    ANSWER_SIZE: ("answer_too_large", "the answer did not end within max_answer_bytes and max_answer_events"),
    HEAD_SIZE: ("protocol", "the answer's head or trailers are too large (over 256 KiB)"),
}


def transport(
    cause: int, code: int, os_errno: int, text: str, timeout_s: float | None, idle_s: float | None
) -> tuple[str, str] | None:
    """Return (cause, message) of a request that did not complete at the HTTP level; None if it did."""
    if cause == NONE:
        return None
    if cause == TIMEOUT:
        return "timeout", f"timed out: not complete {timeout_s:g} s after its start"
    if cause == IDLE:
        return "idle", f"stalled: no bytes received for {idle_s:g} s"
    if cause in _STOPPED:
        return _STOPPED[cause]
    if os_errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            "file_descriptors",
            f"no file descriptor left for a connection (limit {limit}): raise ulimit -n, or lower the concurrency",
        )
    if os_errno == errno.ECONNREFUSED:
        return "refused", f"connection refused: {text}"
    if os_errno == errno.ECONNRESET:
        return "reset", f"connection reset by the server: {text}"
    if code == 56 and re.match(r"CONNECT tunnel failed|Received HTTP code \d+ from proxy", text):
        return "proxy", f"the proxy refused the connection: {text}"
    reason = f" ({os.strerror(os_errno)})" if os_errno else ""
    return _CURL_CAUSES.get(code, "transport"), f"{text}{reason} [libcurl {code}]"


def http(status: int, body: bytes) -> str:
    """Return one line for an error page: the JSON error's message, or the page's text."""
    return f"HTTP {status}: {message_of(body) or 'no message'}"


def message_of(body: bytes) -> str:
    """Return the message in an error body of vLLM, llama.cpp, OpenAI or FastAPI; else its text without markup."""
    try:
        message = error_in(decode_json(body))
    except ValueError:
        message = None
    return message or _plain(body)


def error_in(value: object) -> str | None:
    """Return the message of an error object: {"error": {"message"}}, {"error": "..."}, {"detail": ...}, {"message"}."""
    if not isinstance(value, dict):
        return None
    error = value.get("error", value.get("detail"))
    if error is None and value.get("object") == "error":
        error = value
    if isinstance(error, dict):
        error = error.get("message") or error.get("type") or error
    elif error is None and "choices" not in value:
        error = value["message"] if isinstance(value.get("message"), str) else None  # an object: an API's own event
    if error is None:
        return None
    text = error if isinstance(error, str) else msgspec.json.encode(limited(error)).decode()
    return one_line(text)


def _plain(body: bytes) -> str:
    text = body[:65536].decode("utf-8", "replace")
    title = re.search(r"<title[^>]*>(.*?)</title>", text, re.DOTALL | re.IGNORECASE)
    return one_line(title[1] if title else re.sub(r"<[^>]*>", " ", text))


def one_line(text: str, most: int = 300) -> str:
    return printable(text[: 20 * most], most)
