"""Acceptance of a speculative decoder's drafts, from the counters of vLLM's /metrics.

llama.cpp reports drafted and accepted tokens of each request (its `timings`), which the stream client reads. vLLM only counts them
for the whole server, so its counters are read before and after the requests that are sent together, and their growth is split by
completion tokens. It is used only where the server's count of generated tokens grew by what these requests received: otherwise
somebody else used the server. Names of the counters: vllm/v1/spec_decode/metrics.py and vllm/v1/metrics/loggers.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from annie_quant.bench import server_metrics
from annie_quant.bench.backend import Backend
from annie_quant.schema import RequestRecord

SETTLE_S = (0.0, 0.05, 0.2)  # the counters may grow shortly after the last token was sent
OTHERS_TOKENS = 2  # difference of counts that is not another client's
_NAMES = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens", "vllm:generation_tokens")


@dataclass(frozen=True)
class Counters:
    """Tokens since the server's start: drafted, accepted, generated."""

    drafted: float
    accepted: float
    generated: float


def parse(page: str) -> Counters | None:
    """Return the counters in Prometheus text, summed over their labels; None where the server does not draft."""
    sums: dict[str, float] = {}
    for counter, _, value in server_metrics.lines(page):
        name = counter.removesuffix("_total")
        if name in _NAMES:
            sums[name] = sums.get(name, 0.0) + value
    if any(name not in sums for name in _NAMES):
        return None
    return Counters(*(sums[name] for name in _NAMES))


def read(backend: Backend) -> Counters | None:
    """Read a vLLM server's counters; None where it has none."""
    page = server_metrics.page_of(backend)
    return None if page is None else parse(page)


class Acceptance:
    """Reads the counters of the servers that have them, around each group of requests."""

    def __init__(self) -> None:
        self._drafts: dict[str, bool] = {}

    def before(self, backend: Backend, runtime: str | None) -> Counters | None:
        """Return the counters before requests are sent; None for a server that was found to have none."""
        if not self._drafts.setdefault(backend.name, runtime == "vllm"):
            return None
        counters = read(backend)
        self._drafts[backend.name] = counters is not None
        return counters

    def after(self, backend: Backend, before: Counters | None, records: Sequence[RequestRecord]) -> None:
        """Set the drafted and accepted tokens of these records, if nobody else used the server meanwhile."""
        if before is None:
            return
        received = sum(r.completion_tokens or 0 for r in records)
        if not received or any(r.tokens_estimated or r.error for r in records):
            return
        for wait_s in SETTLE_S:
            time.sleep(wait_s)
            now = read(backend)
            if now is not None and abs(now.generated - before.generated - received) <= OTHERS_TOKENS * len(records):
                split(before, now, records, received)
                return


def split(before: Counters, now: Counters, records: Sequence[RequestRecord], received: int) -> None:
    """Give each record its share of the counters' growth, by completion tokens."""
    drafted, accepted = now.drafted - before.drafted, now.accepted - before.accepted
    if not 0 <= accepted <= drafted:  # the server was restarted
        return
    for record in records:
        share = (record.completion_tokens or 0) / received
        record.drafted_tokens, record.accepted_tokens = drafted * share, accepted * share
        record.acceptance_source = "metrics"
