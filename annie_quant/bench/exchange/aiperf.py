"""The summary that AIPerf writes (profile_export_aiperf.json, as GenAI-Perf before it).

A first token is one of any kind in that format, an inter-token latency is one request's mean over its tokens, and an inter-chunk
latency is each gap between two events. A throughput has an average only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from annie_quant.schema import RequestRecord

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


class Metric(msgspec.Struct, omit_defaults=True):
    """One metric of the summary."""

    unit: str
    avg: float | None
    p1: float | None = None
    p5: float | None = None
    p10: float | None = None
    p25: float | None = None
    p50: float | None = None
    p75: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    min: float | None = None
    max: float | None = None
    std: float | None = None
    count: int | None = None
    sum: float | None = None


def summary(records: Sequence[RequestRecord]) -> dict[str, Metric]:
    """Return the metrics of the requests that were alone at the server; cold starts are left out."""
    import numpy as np

    alone = [r for r in records if r.alone and not r.cold]
    good = [r for r in alone if not r.error]
    seconds = sum(r.e2e_ms for r in good if r.e2e_ms) / 1e3
    counted = [r for r in good if not r.tokens_estimated]
    series: dict[str, tuple[str, list[float]]] = {
        "time_to_first_token": ("ms", [v for r in good if (v := r.first_token_ms) is not None]),
        "time_to_second_token": ("ms", [r.itl_ms[0] for r in good if r.itl_ms]),
        "inter_token_latency": ("ms", [r.tpot_ms for r in good if r.tpot_ms is not None]),
        "inter_chunk_latency": ("ms", [gap for r in good for gap in r.itl_ms]),
        "request_latency": ("ms", [r.e2e_ms for r in good if r.e2e_ms is not None]),
        "output_sequence_length": ("tokens", [r.completion_tokens for r in good if r.completion_tokens]),
        "input_sequence_length": ("tokens", [r.prompt_tokens for r in good if r.prompt_tokens]),
        "output_token_throughput_per_user": ("tokens/sec/user", [1e3 / r.tpot_ms for r in counted if r.tpot_ms]),
    }
    rows = {}
    for name, (unit, values) in series.items():
        if values:
            data = np.asarray(values, dtype=np.float64)
            percentiles = {
                f"p{at}": float(value) for at, value in zip(PERCENTILES, np.percentile(data, PERCENTILES), strict=True)
            }
            rows[name] = Metric(
                unit,
                float(data.mean()),
                min=float(data.min()),
                max=float(data.max()),
                std=float(data.std()),
                count=len(values),
                sum=float(data.sum()),
                **percentiles,
            )
    tokens = sum(r.completion_tokens or 0 for r in good)
    prompts = sum(r.prompt_tokens for r in good)
    per_second = {"output_token_throughput": (tokens, "tokens/sec"), "request_throughput": (len(good), "requests/sec")}
    rows |= {name: Metric(unit, amount / seconds if seconds else None) for name, (amount, unit) in per_second.items()}
    totals = {
        "request_count": (len(good), "requests"),
        "error_request_count": (len(alone) - len(good), "requests"),
        "total_osl": (tokens, "tokens"),
        "total_isl": (prompts, "tokens"),
        "benchmark_duration": (seconds, "sec"),
    }
    return rows | {name: Metric(unit, float(amount)) for name, (amount, unit) in totals.items()}
