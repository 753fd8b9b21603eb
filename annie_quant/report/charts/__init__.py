"""The report's charts as SVG, one per module. draw(run) gives all of them in the order of the report."""

from __future__ import annotations

from annie_quant.report import recount
from annie_quant.report.charts.figure import Figure
from annie_quant.report.run import LoadedRun


def draw(run: LoadedRun) -> list[Figure]:
    from annie_quant.report.charts import (
        calls_by_tools,
        gate_rates,
        kl_divergence,
        latency_by_length,
        latency_distributions,
        offline_and_served,
        server_memory,
        size_and_gates,
        token_streams,
        ttft_by_turn,
    )

    timed = recount.timed_requests(run.measured)
    return [
        gate_rates.draw(run),
        offline_and_served.draw(run),
        kl_divergence.draw(run),
        size_and_gates.draw(run),
        calls_by_tools.draw(run),
        ttft_by_turn.draw(run),
        latency_distributions.draw(run, timed),
        token_streams.draw(run, timed),
        latency_by_length.draw(run),
        server_memory.draw(run),
    ]
