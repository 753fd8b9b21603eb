"""The servers' own Prometheus metrics, read before and after a run (server_metrics.json), so that their view is on record.

A server without /metrics (llama.cpp needs --metrics) has none. The page is another party's text: its size, number of samples and
the lengths of names are limited, and values that are not finite numbers are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
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
    """The samples of one server that changed during the run, and the gauges at its end; keys are name{labels}."""

    before: dict[ShortText, float] = {}
    after: dict[ShortText, float] = {}

    @property
    def growth(self) -> Samples:
        """By how much each sample grew; a sample that is new counts from 0."""
        return {key: value - self.before.get(key, 0.0) for key, value in self.after.items()}


def parse(page: str) -> Samples:
    """Return the samples of a page in Prometheus' text format; buckets of histograms and lines that cannot be read are left out."""
    samples: Samples = {}
    for line in page.splitlines():
        sample = _SAMPLE.match(line) if line and not line.startswith("#") and len(line) <= 1000 else None
        if sample is None or sample[1].endswith(("_bucket", "_created")):
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        key = sample[1] + (sample[2] or "")
        if math.isfinite(value) and len(key) <= 200:
            samples[key] = value
        if len(samples) >= MAX_SAMPLES:
            break
    return samples


def scrape(backends: Sequence[Backend]) -> dict[str, Samples]:
    """Return the samples of each server that has /metrics."""
    pages = {}
    for backend in backends:
        try:
            reply = fetch(
                f"{backend.root}/metrics", backend.headers, timeout_s=PROBE_TIMEOUT_S, max_bytes=MAX_PAGE_BYTES
            )
        except OSError:
            continue
        if reply.status == 200 and not reply.fault and (samples := parse(reply.body.decode("utf-8", "replace"))):
            pages[backend.name] = samples
    return pages


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
