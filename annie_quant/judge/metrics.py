"""The metrics of a benchmark, one entry each, in the order in which tables show them.

Adding a metric: one entry here, and one field of documents.WorkloadSummary with its name.
"""

from __future__ import annotations

from annie_quant.documents import Metric, RequestRecord

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("ttft_content_ms", "first_content_ms", "ms", "content TTFT", in_verdict=True, user_latency=True),
        Metric("ttft_reasoning_ms", "first_reasoning_ms", "ms", "reasoning TTFT", compared=False),
        Metric("ttft_tool_ms", "first_tool_ms", "ms", "tool call TTFT", in_verdict=True, user_latency=True),
        Metric("first_byte_ms", "first_byte_ms", "ms", "first byte", compared=False),
        Metric("itl_ms", "itl_ms", "ms", "ITL"),
        Metric("itl_token_ms", "itl_token_ms", "ms", "ITL per token", server_counted=True),
        Metric("tpot_ms", "tpot_ms", "ms", "TPOT", server_counted=True, in_verdict=True),
        Metric("e2e_ms", "e2e_ms", "ms", "E2E latency", in_verdict=True, user_latency=True),
        Metric("decode_tok_s", "decode_tok_s", "tok/s", "decode speed", "higher", server_counted=True),
        Metric(
            "completion_tokens", "completion_tokens", "tokens", "answer length", "neither", server_counted=True,
            in_verdict=True,
        ),
        Metric("acceptance", "acceptance", "share", "draft acceptance", "higher"),
    )
}  # fmt: skip
COMPARED = tuple(metric.name for metric in METRICS.values() if metric.compared)


def metric_value(record: RequestRecord, metric: str) -> float | list[float] | None:
    """Return a request's value of a metric, or its list of values; None without one. Token metrics need the server's own count."""
    definition = METRICS[metric]
    value: float | list[float] | None = getattr(record, definition.field)
    return None if value in (None, []) or (definition.server_counted and record.tokens_estimated) else value


def three_digits(value: float, sign: str = "") -> str:
    """Return a figure with three significant digits, and whole from 1000 on: 0.0123, 12.3, 1234.

    sign: "+" for a difference.
    """
    return f"{value:{sign}.0f}" if abs(value) >= 999.5 else f"{value:{sign}.3g}"
