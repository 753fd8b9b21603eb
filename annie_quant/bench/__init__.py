"""Timing two or more OpenAI-compatible servers against each other, over identical prompts, and judging what they say.

    run([Backend(name, url), ...], workloads, output)   measure; resumes; returns what bench.json holds
    aggregate(folder)                                    records → percentiles, gates, paired comparisons, turns
    export(folder)                                       results.csv, vLLM's flat keys, the founding results JSON
    regression(before, after)                            what got worse for sure against a stored run

Nothing here imports torch. The stream client (annie_quant.stream) is imported when a run starts.
"""

from __future__ import annotations

from annie_quant.bench.aggregate import aggregate
from annie_quant.bench.backend import Backend, key_headers
from annie_quant.bench.export import export
from annie_quant.bench.regression import losses, regression
from annie_quant.bench.runner import run
from annie_quant.host import environment

__all__ = ["Backend", "aggregate", "environment", "export", "key_headers", "losses", "regression", "run"]
