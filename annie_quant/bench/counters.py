"""Counters of vLLM's /metrics: drafts that were accepted, and prompt tokens from the prefix cache.

llama.cpp reports both per request (its `timings`), which the stream client reads. vLLM counts drafts for the whole server only, and
its usage leaves out cached tokens where there are none, so its counters are read before and after the requests that are sent
together. They are used only where the server's counts of tokens grew by what these requests sent and received: otherwise another
client used the server too. Names of the counters: vllm/v1/spec_decode/metrics.py and vllm/v1/metrics/loggers.py.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from annie_quant.bench.backend import PROBE_TIMEOUT_S, Backend
from annie_quant.documents import RequestRecord
from annie_quant.stream.client import fetch

MAX_PAGE_BYTES = 4 << 20
MAX_LINE_CHARACTERS = 1000
# A sample: name, labels in braces (values are quoted, with escapes), value, an optional timestamp.
_SAMPLE = re.compile(
    r'^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$'
)
SETTLE_S = (0.0, 0.05, 0.2)  # the counters may grow shortly after the last token was sent
OTHERS_TOKENS = 2  # difference of counts per request that is not another client's


def _metric_lines(page: str) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of a page in Prometheus' text format; lines that cannot be read are left out."""
    for line in page.splitlines():
        sample = _SAMPLE.match(line) if len(line) <= MAX_LINE_CHARACTERS else None
        if sample is not None:
            with contextlib.suppress(ValueError):
                value = float(sample[2])
                if math.isfinite(value):
                    yield sample[1], value


def metrics_page(backend: Backend) -> str | None:
    """Return a server's /metrics; None where it has none."""
    url = f"{backend.root}/metrics"
    timeout_s = PROBE_TIMEOUT_S
    try:
        reply = fetch(url, backend.headers, timeout_s=timeout_s, max_bytes=MAX_PAGE_BYTES)
    except OSError:
        return None
    if reply.status != 200 or reply.fault:
        return None
    return reply.body.decode("utf-8", "replace")


@dataclass(frozen=True)
class Counters:
    """Tokens since the server's start: drafted, accepted, generated."""

    drafted: float
    accepted: float
    generated: float


@dataclass(frozen=True)
class PromptCounters:
    """Tokens since the server's start: of prompts, and of these from its prefix caches."""

    prompt: float
    cached: float


def _totals(page: str) -> dict[str, float]:
    """Return counter → its sum over all labels."""
    totals: dict[str, float] = {}
    for counter, value in _metric_lines(page):
        name = counter.removesuffix("_total")
        totals[name] = totals.get(name, 0.0) + value
    return totals


def draft_counters(page: str) -> Counters | None:
    """Return the counters in Prometheus text; None where the server does not draft."""
    totals = _totals(page)
    drafted = totals.get("vllm:spec_decode_num_draft_tokens")
    accepted = totals.get("vllm:spec_decode_num_accepted_tokens")
    generated = totals.get("vllm:generation_tokens")
    if drafted is None or accepted is None or generated is None:
        return None
    return Counters(drafted, accepted, generated)


def prompt_counters(page: str) -> PromptCounters | None:
    """Return the counters in Prometheus text; None where the server does not count cached tokens."""
    totals = _totals(page)
    prompt = totals.get("vllm:prompt_tokens")
    cached = totals.get("vllm:prefix_cache_hits")
    if prompt is None or cached is None:
        return None
    # A connector's cache, outside the server's own memory.
    return PromptCounters(prompt, cached + totals.get("vllm:external_prefix_cache_hits", 0.0))


@dataclass(frozen=True)
class PositionCounters:
    """Since the server's start: steps with drafts, and per position from 1 on the accepted drafts."""

    steps: float
    accepted: list[float]


_POSITION = re.compile(
    r'^vllm:spec_decode_num_accepted_tokens_per_pos(?:_total)?\{[^}]*position="(\d{1,3})"[^}]*\} (\S+)'
)


def position_counters(page: str) -> PositionCounters | None:
    """Return the counters in Prometheus text, summed over engines; None where the server does not count them."""
    accepted: dict[int, float] = {}
    for line in page.splitlines():
        match = _POSITION.match(line)
        if match:
            with contextlib.suppress(ValueError):
                position = int(match[1])
                accepted[position] = accepted.get(position, 0.0) + float(match[2])
    steps = _totals(page).get("vllm:spec_decode_num_drafts")
    if steps is None or sorted(accepted) != list(range(len(accepted))):
        return None
    return PositionCounters(steps, [accepted[k] for k in sorted(accepted)])


class CounterReader:
    """Reads the counters of the servers that have them, around each group of requests."""

    def __init__(self) -> None:
        self._has_counters: dict[str, bool] = {}

    def before(self, backend: Backend, runtime: str | None) -> str | None:
        """Return /metrics before requests are sent; None for a server that was found to have no such counters."""
        if not self._has_counters.setdefault(backend.name, runtime == "vllm"):
            return None
        page = metrics_page(backend) or ""
        counts = draft_counters(page) or prompt_counters(page)
        self._has_counters[backend.name] = counts is not None
        return page if counts else None

    def after(self, backend: Backend, before: str | None, records: Sequence[RequestRecord]) -> None:
        """Set these records' drafted, accepted and cached tokens, if no other client used the server meanwhile."""
        if before is None or any(r.answer.tokens_estimated or r.answer.error for r in records):
            return
        drafts = draft_counters(before)
        prompts = prompt_counters(before)
        for wait_s in SETTLE_S:
            time.sleep(wait_s)
            now = metrics_page(backend) or ""
            if drafts and _share_drafts(drafts, draft_counters(now), records):
                drafts = None
            if prompts and _set_cached(prompts, prompt_counters(now), records):
                prompts = None
            if not drafts and not prompts:
                return


def _is_ours(growth: float, tokens: int, records: Sequence[RequestRecord]) -> bool:
    """Return whether a counter grew by the tokens of these requests alone."""
    return tokens > 0 and abs(growth - tokens) <= OTHERS_TOKENS * len(records)


def _share_drafts(before: Counters, now: Counters | None, records: Sequence[RequestRecord]) -> bool:
    """Divide drafted and accepted tokens among records by their completion tokens; return whether that is done."""
    received = sum(r.answer.completion_tokens or 0 for r in records)
    if now is None or not _is_ours(now.generated - before.generated, received, records):
        return False
    drafted = now.drafted - before.drafted
    accepted = now.accepted - before.accepted
    if not 0 <= accepted <= drafted:  # the server was restarted
        return True
    for record in records:
        share = (record.answer.completion_tokens or 0) / received
        record.tokens.drafted_tokens = drafted * share
        record.tokens.accepted_tokens = accepted * share
        record.tokens.acceptance_source = "metrics"
    return True


def _set_cached(
    before: PromptCounters, now: PromptCounters | None, records: Sequence[RequestRecord]
) -> bool:
    """Set the cached tokens of records whose usage has none; return whether that is done.

    Of several requests only "none cached" is known per request.
    """
    sent = sum(r.tokens.prompt_tokens for r in records)
    if now is None or not _is_ours(now.prompt - before.prompt, sent, records):
        return False
    cached = round(now.cached - before.cached)
    if cached < 0 or (cached and len(records) > 1):
        return True
    for record in records:
        if record.tokens.cached_tokens is None and cached <= record.tokens.prompt_tokens:
            record.tokens.cached_tokens = cached
    return True
