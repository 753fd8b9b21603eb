"""The servers' own Prometheus metrics, read before and after a run (server_metrics.json), so that their view is on record.

A server without /metrics (llama.cpp needs --metrics) has none. The page is another party's text: its size, number of samples and
the lengths of names are limited, and values that are not finite numbers are left out.

Acceptance of a speculative decoder's drafts, from the counters of vLLM's /metrics.

llama.cpp reports drafted and accepted tokens of each request (its `timings`), which the stream client reads. vLLM only counts them
for the whole server, so its counters are read before and after the requests that are sent together, and their growth is split by
completion tokens. It is used only where the server's count of generated tokens grew by what these requests received: otherwise
somebody else used the server. Names of the counters: vllm/v1/spec_decode/metrics.py and vllm/v1/metrics/loggers.py.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from annie_quant import documents
from annie_quant.bench.backend import PROBE_TIMEOUT_S, Backend
from annie_quant.documents import RequestRecord, ShortText
from annie_quant.stream.client import fetch

FILE = "server_metrics.json"
MAX_PAGE_BYTES, MAX_SAMPLES = 4 << 20, 2000
# A sample: name, labels in braces (values are quoted, with escapes), value, an optional timestamp.
_SAMPLE = re.compile(
    r'^([A-Za-z_:][A-Za-z0-9_:]*)(\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$'
)

Samples = dict[str, float]  # 'name{labels}' → value


class ServerMetrics(msgspec.Struct, kw_only=True):
    """All samples of one server before the run and after it; keys are name{labels}."""

    before: dict[ShortText, float] = {}
    after: dict[ShortText, float] = {}

    @property
    def growth(self) -> Samples:
        """By how much each sample grew; a sample that is new counts from 0."""
        return {key: value - self.before.get(key, 0.0) for key, value in self.after.items()}


def lines(page: str) -> Iterator[tuple[str, str, float]]:
    """Yield (name, labels in braces or "", value) of a page in Prometheus' text format; lines that cannot be read are left out."""
    for line in page.splitlines():
        sample = _SAMPLE.match(line) if line and not line.startswith("#") and len(line) <= 1000 else None
        if sample is None:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        if math.isfinite(value):
            yield sample[1], sample[2] or "", value


def parse(page: str) -> Samples:
    """Return the samples of a page; buckets of histograms and names of more than 200 characters are left out."""
    samples: Samples = {}
    for name, labels, value in lines(page):
        key = name + labels
        if not name.endswith(("_bucket", "_created")) and len(key) <= 200:
            samples[key] = value
        if len(samples) >= MAX_SAMPLES:
            break
    return samples


def page_of(backend: Backend) -> str | None:
    """Return a server's /metrics; None where it has none."""
    try:
        reply = fetch(f"{backend.root}/metrics", backend.headers, timeout_s=PROBE_TIMEOUT_S, max_bytes=MAX_PAGE_BYTES)
    except OSError:
        return None
    return reply.body.decode("utf-8", "replace") if reply.status == 200 and not reply.fault else None


def scrape(backends: Sequence[Backend]) -> dict[str, Samples]:
    """Return the samples of each server that has /metrics."""
    pages = {backend.name: page_of(backend) for backend in backends}
    return {name: samples for name, page in pages.items() if page and (samples := parse(page))}


def store(folder: Path, before: Mapping[str, Samples], after: Mapping[str, Samples]) -> None:
    """Write server_metrics.json for the servers that were read twice; a resumed run keeps the first run's start."""
    path = folder / FILE
    first = documents.decode(dict[str, ServerMetrics], path) if path.exists() else {}
    rows = {
        name: ServerMetrics(before=first[name].before if name in first else before[name], after=samples)
        for name, samples in after.items()
        if name in before
    }
    if rows:
        documents.write(path, rows)


SETTLE_S = (0.0, 0.05, 0.2)  # the counters may grow shortly after the last token was sent
OTHERS_TOKENS = 2  # difference of counts that is not another client's
_NAMES = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens", "vllm:generation_tokens")


@dataclass(frozen=True)
class Counters:
    """Tokens since the server's start: drafted, accepted, generated."""

    drafted: float
    accepted: float
    generated: float


def draft_counters(page: str) -> Counters | None:
    """Return the counters in Prometheus text, summed over their labels; None where the server does not draft."""
    sums: dict[str, float] = {}
    for counter, _, value in lines(page):
        name = counter.removesuffix("_total")
        if name in _NAMES:
            sums[name] = sums.get(name, 0.0) + value
    if any(name not in sums for name in _NAMES):
        return None
    return Counters(*(sums[name] for name in _NAMES))


def read(backend: Backend) -> Counters | None:
    """Read a vLLM server's counters; None where it has none."""
    page = page_of(backend)
    return None if page is None else draft_counters(page)


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
