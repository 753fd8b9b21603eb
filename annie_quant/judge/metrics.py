"""The metrics of a benchmark, one entry each, in the order in which tables show them.

Adding a metric: one entry in METRICS, and one field of documents.WorkloadSummary with its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from annie_quant.documents import RequestRecord

MetricValue = float | list[float] | None


@dataclass(frozen=True)
class Metric:
    """Definition of a metric.

    value: returns a request's value, or its list of values; None or [] without one.
    better: which of two values is the better one.
    server_counted: needs the server's own token count, so records with an estimated count are left out.
    compared: compared between backends and shown in the report.
    in_verdict: a significant difference is named among the verdict's reasons.
    user_latency: a user notices it, so it counts as a gain or loss in the recommendation.
    """

    name: str
    value: Callable[[RequestRecord], MetricValue]
    unit: str
    title: str
    better: Literal["lower", "higher", "neither"] = "lower"
    server_counted: bool = False
    compared: bool = True
    in_verdict: bool = False
    user_latency: bool = False

    @property
    def label(self) -> str:
        """Title and unit, as a table's header."""
        return f"{self.title}, {self.unit}"


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "ttft_content_ms",
            lambda r: r.timings.first_content_ms,
            "ms",
            "content TTFT",
            in_verdict=True,
            user_latency=True,
        ),
        Metric(
            "ttft_reasoning_ms",
            lambda r: r.timings.first_reasoning_ms,
            "ms",
            "reasoning TTFT",
            compared=False,
        ),
        Metric(
            "ttft_tool_ms",
            lambda r: r.timings.first_tool_ms,
            "ms",
            "tool call TTFT",
            in_verdict=True,
            user_latency=True,
        ),
        Metric(
            "first_byte_ms", lambda r: r.timings.first_byte_ms, "ms", "first byte", compared=False
        ),
        Metric("itl_ms", lambda r: r.timings.itl_ms, "ms", "ITL"),
        Metric(
            "itl_token_ms", lambda r: r.itl_token_ms, "ms", "ITL per token", server_counted=True
        ),
        Metric(
            "tpot_ms",
            lambda r: r.timings.tpot_ms,
            "ms",
            "TPOT",
            server_counted=True,
            in_verdict=True,
        ),
        Metric(
            "e2e_ms",
            lambda r: r.timings.e2e_ms,
            "ms",
            "E2E latency",
            in_verdict=True,
            user_latency=True,
        ),
        Metric(
            "decode_tok_s",
            lambda r: r.timings.decode_tok_s,
            "tok/s",
            "decode speed",
            "higher",
            server_counted=True,
        ),
        Metric(
            "completion_tokens",
            lambda r: r.answer.completion_tokens,
            "tokens",
            "answer length",
            "neither",
            server_counted=True,
            in_verdict=True,
        ),
        Metric("acceptance", lambda r: r.tokens.acceptance, "share", "draft acceptance", "higher"),
    )
}
COMPARED = tuple(metric.name for metric in METRICS.values() if metric.compared)


def metric_value(record: RequestRecord, metric: str) -> MetricValue:
    """Return a request's value of a metric, or its list of values; None without one. Token metrics need the server's own count."""
    definition = METRICS[metric]
    value = definition.value(record)
    return (
        None
        if value in (None, []) or (definition.server_counted and record.answer.tokens_estimated)
        else value
    )


def three_digits(value: float, sign: str = "") -> str:
    """Return a figure with three significant digits, and whole from 1000 on: 0.0123, 12.3, 1234.

    sign: "+" for a difference.
    """
    return f"{value:{sign}.0f}" if abs(value) >= 999.5 else f"{value:{sign}.3g}"
