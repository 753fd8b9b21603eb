"""One small answer, whole: for what a server says about itself. The same client as everything else, so that a key goes to
the origin that was named and nowhere else: redirects are not followed, no proxy of the environment is used, only http and
https are spoken, and neither size nor time is the server's to choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reply:
    """status: of HTTP, 0 where no status line came. fault: why the answer is not whole, or None. body: what came of it."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    fault: str | None = None


def fetch(
    url: str, headers: Mapping[str, str] | None = None, *, timeout_s: float = 5.0, max_bytes: int = 1 << 20
) -> Reply:
    """GET `url`, for at most `timeout_s` seconds in all and `max_bytes` of body. Never raises for what a server does."""
    from annie_quant.stream.client import Request, run

    timings = run(
        [Request(url, headers=headers, timeout_s=timeout_s)],
        kernel_stamps=False,
        realtime=False,
        max_event_bytes=max_bytes,
        max_answer_bytes=max_bytes,
    )
    fault = timings.transport_fault(0)
    return Reply(int(timings.requests["status"][0]), timings.headers(0), timings.body(0), fault[1] if fault else None)
