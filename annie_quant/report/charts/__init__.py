"""The report's charts as SVG. draw(run) gives all of them in the order of the report."""

from __future__ import annotations

from annie_quant.bench.aggregates import timed
from annie_quant.report.charts.svg import Figure
from annie_quant.report.run import LoadedRun


def draw(run: LoadedRun) -> list[Figure]:
    from annie_quant.report.charts import gates, latency

    fit = timed(run.measured)
    return [
        gates.gate_rates(run),
        gates.offline_and_served(run),
        gates.kl_divergence(run),
        gates.size_and_gates(run),
        gates.calls_by_tools(run),
        latency.by_turn(run),
        latency.distributions(run, fit),
        latency.token_streams(run, fit),
        latency.by_length(run),
        latency.server_memory(run),
    ]
