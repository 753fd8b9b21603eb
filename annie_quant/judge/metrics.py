"""The metrics of a benchmark, one entry each, in the order in which tables show them.

Adding a metric: one entry here, and one field of schema.WorkloadSummary that has its name.
"""

from __future__ import annotations

from annie_quant.schema import Metric

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name="ttft_content_ms",
            field="first_content_ms",
            unit="ms",
            title="content TTFT",
            better="lower",
            compared=True,
            in_verdict=True,
            user_latency=True,
        ),
        Metric(name="ttft_reasoning_ms", field="first_reasoning_ms", unit="ms", title="reasoning TTFT", better="lower"),
        Metric(
            name="ttft_tool_ms",
            field="first_tool_ms",
            unit="ms",
            title="tool call TTFT",
            better="lower",
            compared=True,
            in_verdict=True,
            user_latency=True,
        ),
        Metric(name="first_byte_ms", field="first_byte_ms", unit="ms", title="first byte", better="lower"),
        Metric(name="itl_ms", field="itl_ms", unit="ms", title="ITL", better="lower", compared=True),
        Metric(
            name="tpot_ms",
            field="tpot_ms",
            unit="ms",
            title="TPOT",
            better="lower",
            server_counted=True,
            compared=True,
            in_verdict=True,
        ),
        Metric(
            name="e2e_ms",
            field="e2e_ms",
            unit="ms",
            title="E2E latency",
            better="lower",
            compared=True,
            in_verdict=True,
            user_latency=True,
        ),
        Metric(
            name="decode_tok_s",
            field="decode_tok_s",
            unit="tok/s",
            title="decode speed",
            better="higher",
            server_counted=True,
            compared=True,
        ),
        Metric(
            name="completion_tokens",
            field="completion_tokens",
            unit="tokens",
            title="answer length",
            better="neither",
            server_counted=True,
            compared=True,
            in_verdict=True,
        ),
    )
}
COMPARED = tuple(metric.name for metric in METRICS.values() if metric.compared)
