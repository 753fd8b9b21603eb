"""Time to the first token over the prompt tokens that a server computes, cold and after a cached prefix.

One request in flight. The unit is the prompt: each has the median of its repeats. The line is that of Theil and Sen, the median of
the slopes of all pairs, with Sen's interval (scipy.stats.theilslopes). Its slope compares servers, because it does not depend
on the lengths of the prompts. Requests whose length the server had not computed before (first_of_length) are left out.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import msgspec

from annie_quant.documents import Identity, PrefillLine, PrefillPoint, RequestRecord
from annie_quant.documents.results import CacheState
from annie_quant.judge.statistics import median_interval

# Up to one block of vLLM's cache, or this share of the prompt, is the beginning of the template.
COLD_TOKENS = 16
COLD_SHARE = 0.05
_MIN_PROMPTS = 5  # of a line
MIN_SPAN_TOKENS = 512  # between its shortest and longest prompt
PER_TOKENS = 1000  # of a slope
MIN_COLD_LENGTH = 128  # tokens; below, the time is not that of products
COLD_FACTOR = 1.5
COLD_MS = 20.0
# Their usage leaves out cached tokens where there are none (enable_prompt_tokens_details and
# num_cached_tokens; UsageProcessor._details_if_cached).
LEAVE_OUT_ZERO = ("vllm", "sglang")
STATES: tuple[CacheState, ...] = ("cold", "cached", "unknown")


def length_class(tokens: int) -> int:
    """Return the power of two that is nearest to a length: prompts of one class run the same kernels."""
    return 1 << round(math.log2(tokens)) if tokens > 0 else 0


def with_known_zeros(
    records: Iterable[RequestRecord], identities: Mapping[str, Identity]
) -> list[RequestRecord]:
    """Return the records, with 0 cached tokens where a server that reports them left them out.

    A server that reports them in no request of the run may not count them: they stay unknown.
    """
    rows = list(records)
    reporting = set()
    for record in rows:
        details = (record.tokens.usage or {}).get("prompt_tokens_details")
        if record.tokens.cached_tokens and details:
            reporting.add(record.backend)
    zeros = {
        name for name in reporting & identities.keys() if identities[name].runtime in LEAVE_OUT_ZERO
    }
    return [_with_zero(r) if _left_out(r, zeros) else r for r in rows]


def _left_out(record: RequestRecord, zeros: set[str]) -> bool:
    tokens = record.tokens
    return record.backend in zeros and bool(tokens.usage) and tokens.cached_tokens is None


def _with_zero(record: RequestRecord) -> RequestRecord:
    tokens = msgspec.structs.replace(record.tokens, cached_tokens=0)
    return msgspec.structs.replace(record, tokens=tokens)


def cold_lengths(records: Iterable[RequestRecord]) -> dict[int, float | None]:
    """Return length → how many times as long its first request took as later ones; None without later ones.

    records: one backend's measured ones. Lengths that a warm-up has computed, and first requests
    that were as fast as others, are left out.
    """
    first: dict[int, float] = {}
    later: dict[int, list[float]] = defaultdict(list)
    for record in records:
        computed = record.tokens.prompt_tokens - (record.tokens.cached_tokens or 0)
        length = length_class(computed)
        first_ms = record.timings.first_token_ms
        if first_ms is None or record.answer.error or not record.load.alone:
            continue
        if record.first_of_length and not record.cold:
            first[length] = max(first_ms, first.get(length, 0.0))
        else:
            later[length].append(first_ms)
    result: dict[int, float | None] = {}
    for length, first_ms in sorted(first.items()):
        usual_ms = statistics.median(later[length]) if later[length] else None
        if length < MIN_COLD_LENGTH:
            continue
        if usual_ms is None:
            result[length] = None
        elif first_ms > COLD_FACTOR * usual_ms and first_ms > usual_ms + COLD_MS:
            result[length] = first_ms / usual_ms
    return result


def cache_state(record: RequestRecord) -> CacheState:
    """Return whether a prompt's beginning came from a cache."""
    cached = record.tokens.cached_tokens
    if cached is None:
        return "unknown"
    most = max(COLD_TOKENS, COLD_SHARE * record.tokens.prompt_tokens)
    return "cold" if cached <= most else "cached"


def prefill_lines(timed_records: Sequence[RequestRecord]) -> list[PrefillLine]:
    """Return one backend's line per state of the cache. timed_records: those whose times count."""
    groups: dict[CacheState, list[RequestRecord]] = defaultdict(list)
    for record in timed_records:
        state = cache_state(record)
        # Later turns mix cold and cached prompts where the server does not tell them apart.
        if _has_prefill_time(record) and not (state == "unknown" and record.turn):
            groups[state].append(record)
    return [_line(state, groups[state]) for state in STATES if groups[state]]


def _has_prefill_time(record: RequestRecord) -> bool:
    """Return whether the first token shows the time of the prompt: a server may hold a tool call back until it has a name."""
    if not record.load.alone or record.first_of_length or record.answer.tool_calls:
        return False
    return bool(record.tokens.prompt_tokens) and record.timings.first_token_ms is not None


def _line(state: CacheState, records: Sequence[RequestRecord]) -> PrefillLine:
    tokens: dict[Hashable, list[float]] = defaultdict(list)
    times: dict[Hashable, list[float]] = defaultdict(list)
    for record in records:
        computed = record.tokens.computed_tokens
        tokens[record.prompt].append(record.tokens.prompt_tokens if computed is None else computed)
        times[record.prompt].append(record.timings.first_token_ms or 0.0)
    x = [statistics.median(values) for values in tokens.values()]
    y = [statistics.median(values) for values in times.values()]
    line = PrefillLine(
        cache=state,
        n=len(records),
        n_prompts=len(x),
        fewest_tokens=round(min(x)),
        most_tokens=round(max(x)),
        points=_points(x, y),
    )
    if len(x) >= _MIN_PROMPTS and max(x) - min(x) >= MIN_SPAN_TOKENS:
        from scipy.stats import theilslopes

        fit = theilslopes(y, x)
        line.ms_per_1000 = PER_TOKENS * float(fit.slope)
        line.low = PER_TOKENS * float(fit.low_slope)
        line.high = PER_TOKENS * float(fit.high_slope)
        line.start_ms = float(fit.intercept)
    return line


def _points(x: Sequence[float], y: Sequence[float]) -> list[PrefillPoint]:
    """Return the median time of each class of lengths."""
    classes: dict[int, list[int]] = defaultdict(list)
    for index, tokens in enumerate(x):
        classes[length_class(round(tokens))].append(index)
    points = []
    for indices in dict(sorted(classes.items())).values():
        times = [y[i] for i in indices]
        low, high = median_interval(times)
        points.append(
            PrefillPoint(
                tokens=round(statistics.median(x[i] for i in indices)),
                ms=statistics.median(times),
                low=low,
                high=high,
                n_prompts=len(indices),
            )
        )
    return points
