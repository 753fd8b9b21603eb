"""The servers' own Prometheus metrics, read before and after a run (server_metrics.json), so that their view is on record.

A server without /metrics (llama.cpp needs --metrics) has none. The page is another party's text: its size, number of samples and
the lengths of names are limited, and values that are not finite numbers are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from annie_quant import schema
from annie_quant.bench.backend import PROBE_TIMEOUT_S, Backend
from annie_quant.schema import ShortText
from annie_quant.stream.fetch import fetch

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
    first = schema.decode(dict[str, ServerMetrics], path) if path.exists() else {}
    rows = {
        name: ServerMetrics(before=first[name].before if name in first else before[name], after=samples)
        for name, samples in after.items()
        if name in before
    }
    if rows:
        schema.write(path, rows)
