"""One small HTTP answer, for what a server reports about itself.

It uses the same client as all other requests, so a key is sent to the named origin only: redirects are not followed, the
environment's proxies are not used, only http and https are allowed, and size and time are limited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reply:
    """An HTTP answer. status: 0 if no status line was received. fault: why the answer is incomplete, or None."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    fault: str | None = None


def fetch(
    url: str, headers: Mapping[str, str] | None = None, *, timeout_s: float = 5.0, max_bytes: int = 1_000_000
) -> Reply:
    """GET `url` within `timeout_s` seconds in total and `max_bytes` of body. Server errors never raise."""
    from annie_quant.stream.client import Request, run
    from annie_quant.stream.record import transport_fault

    timings = run(
        [Request(url, headers=headers, timeout_s=timeout_s)],
        kernel_stamps=False,
        realtime=False,
        max_event_bytes=max_bytes,
        max_answer_bytes=max_bytes,
    )
    fault = transport_fault(timings, 0)
    return Reply(int(timings.requests["status"][0]), timings.headers(0), timings.body(0), fault[1] if fault else None)
