"""Reports of other benchmarks: written from a run, and read as rows next to a run's own.

    guidellm.document(bench, records, name)   a report that GuideLLM 0.8 loads (`guidellm export FILE`)
    aiperf.summary(records)                   AIPerf's profile_export_aiperf.json
    read(path)                                rows of a run directory, or of a report of GuideLLM, AIPerf or `vllm bench serve`

The formats are those of GuideLLM 0.8.1 (report version 2), AIPerf 0.13.0 and vLLM 0.32; tests/data/peer_reports has one report of
each tool.
"""

from __future__ import annotations

from annie_quant.bench.exchange.read import ReportRow, is_report, read

__all__ = ["ReportRow", "is_report", "read"]
