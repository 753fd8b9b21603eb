"""Time two or more OpenAI-compatible servers over the same prompts, interleaved, and judge their answers.

    run([Backend(name, url), ...], workloads, output)   measure, or resume; returns what bench.json holds (documents.Bench)
    aggregate(folder)                                    records to percentiles, gates, paired comparisons, turns
    regression(before, after)                            what got significantly worse against a stored run

Nothing here imports torch. The stream client (annie_quant.stream) is imported when a run starts.
"""

from __future__ import annotations

from annie_quant.bench.aggregates import aggregate
from annie_quant.bench.backend import Backend, key_headers
from annie_quant.bench.regressions import losses, regression
from annie_quant.bench.session import run
from annie_quant.core.host import environment

__all__ = [
    "Backend",
    "aggregate",
    "environment",
    "key_headers",
    "losses",
    "regression",
    "run",
]
