"""A benchmark in formats that other tools read: results.csv, vLLM's flat keys, reports of AIPerf and GuideLLM (exchange),
the layout of the original plan's benchmark script (R43), Prometheus text.

vLLM's keys are those of `vllm bench serve --save-result`; TTFT is that of content, as everywhere here. The backends take
turns, so a backend's duration is the time that its own requests took, not the wall clock of the run.
"""

from __future__ import annotations

import csv
import io
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from annie_quant import schema
from annie_quant.bench.aggregate import values_by_prompt
from annie_quant.bench.exchange import aiperf, guidellm
from annie_quant.bench.records import read_records
from annie_quant.files import write_text
from annie_quant.schema import Aggregates, Bench, RequestRecord, read_bench

Records = Sequence[RequestRecord]

COLUMNS = ("backend", "workload", "metric", "n", "n_prompts", "p50", "p90", "p99", "mean", "low", "high")
PROMETHEUS = {"ttft_content_ms": "ttft_content_seconds", "itl_ms": "itl_seconds", "e2e_ms": "e2e_seconds"}
_VLLM = {"ttft": "ttft_content_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "e2e_ms"}
_ORIGINAL = {
    "ttft_ms": "first_content_ms",
    "tool_ms": "first_tool_ms",
    "total_ms": "e2e_ms",
    "tokens": "completion_tokens",
    "tok_per_s": "decode_tok_s",
}


class VllmResult(msgspec.Struct, kw_only=True):
    """The result that `vllm bench serve --save-result` writes. Times are in ms, duration in seconds; None without data."""

    date: str
    endpoint_type: str = "openai-chat"
    backend: str = "openai-chat"
    label: str
    model_id: str | None
    tokenizer_id: str | None
    num_prompts: int
    request_rate: str = "inf"
    burstiness: float = 1.0
    max_concurrency: int = 1
    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float | None
    output_throughput: float | None
    total_token_throughput: float | None
    mean_ttft_ms: float | None
    median_ttft_ms: float | None
    std_ttft_ms: float | None
    p99_ttft_ms: float | None
    mean_tpot_ms: float | None
    median_tpot_ms: float | None
    std_tpot_ms: float | None
    p99_tpot_ms: float | None
    mean_itl_ms: float | None
    median_itl_ms: float | None
    std_itl_ms: float | None
    p99_itl_ms: float | None
    mean_e2el_ms: float | None
    median_e2el_ms: float | None
    std_e2el_ms: float | None
    p99_e2el_ms: float | None


class OriginalRun(msgspec.Struct, kw_only=True):
    """One request in the original plan's layout."""

    ttft_ms: float | None
    tool_ms: float | None
    total_ms: float | None
    tokens: int | None
    tok_per_s: float | None
    cold_start: bool
    error: str | None
    response: str
    tool_calls: list[str | None]


class OriginalTest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One workload, or one turn of it: medians of the requests without an error, then all requests."""

    ttft_ms_p50: float | None = None
    tool_ms_p50: float | None = None
    total_ms_p50: float | None = None
    tokens_p50: float | None = None
    tok_per_s_p50: float | None = None
    runs: list[OriginalRun]


class OriginalBackend(msgspec.Struct):
    url: str
    model: str | None
    runtime: str | None


class OriginalMethod(msgspec.Struct, kw_only=True):
    """How the original plan's results were measured. thinking: by workload."""

    thinking: dict[str, bool]
    warmup_runs: int
    measured_runs: int
    token_counting: str = "usage.completion_tokens"  # noqa: S105 - not a secret
    ttft: str = "first content token"
    order: str = "randomised ABBA blocks"
    prefix_cache: str


class OriginalPlan(msgspec.Struct, kw_only=True):
    """The layout of the original benchmark script. results: backend → test; quality_gates: backend → gate → "5/5"."""

    benchmark: str = "nvfp4_vs_q4km"
    date: str
    methodology: OriginalMethod
    confounds: list[str]
    backends: dict[str, OriginalBackend]
    results: dict[str, dict[str, OriginalTest]]
    quality_gates: dict[str, dict[str, str]]
    verdict: str


def export(folder: str | os.PathLike[str]) -> list[Path]:
    """Write results.csv and exports/ of a finished run directory; return their paths."""
    root = Path(folder)
    bench = read_bench(root)
    records = [r for r in read_records(root / "records.jsonl") if not r.warmup]
    texts = {
        root / "results.csv": results_csv(bench.aggregates),
        root / "exports" / "metrics.prom": prometheus(bench.aggregates),
    }
    documents: dict[Path, object] = {root / "exports" / "original_plan.json": original_plan(bench, records)}
    for name in bench.backends:
        own = [r for r in records if r.backend == name]
        documents[root / "exports" / f"vllm_{name}.json"] = vllm(bench, own, name)
        documents[root / "exports" / f"aiperf_{name}.json"] = aiperf.summary(own)
        documents[root / "exports" / f"guidellm_{name}.json"] = guidellm.document(bench, own, name)
    for path, text in texts.items():
        write_text(path, text)
    for path, document in documents.items():
        schema.write(path, document)
    return [*texts, *documents]


def results_csv(aggregates: Aggregates) -> str:
    """One row per backend, workload and metric; gates as metric "gate:NAME" with the pass rate in `mean`."""
    out = io.StringIO()
    table = csv.DictWriter(out, COLUMNS, lineterminator="\n", restval="")
    table.writeheader()
    for backend, side in aggregates.served.items():
        for workload, summary in side.workloads.items():
            for metric, values in summary.metrics():
                row = {"backend": backend, "workload": workload, "metric": metric}
                table.writerow(row | {k: v for k, v in msgspec.structs.asdict(values).items() if v is not None})
        for gate, result in side.gates.items():
            table.writerow(
                {
                    "backend": backend,
                    "workload": "all",
                    "metric": f"gate:{gate}",
                    "n": result.n,
                    "mean": result.passes / result.n,
                    "low": result.low,
                    "high": result.high,
                }
            )
    return out.getvalue()


def vllm(bench: Bench, records: Records, name: str) -> VllmResult:
    """vLLM's flat result of one backend, over all its workloads, one request in flight."""
    import numpy as np

    single = [r for r in records if r.alone and not r.cold]
    good = [r for r in single if not r.error]
    duration_s = sum(r.e2e_ms for r in good if r.e2e_ms) / 1e3
    tokens_in = sum(r.prompt_tokens for r in good)
    tokens_out = sum(r.completion_tokens or 0 for r in good)
    times: dict[str, Any] = {}  # figures or None, by field of VllmResult
    for key, metric in _VLLM.items():
        data = np.asarray([v for some in values_by_prompt(good, metric).values() for v in some], dtype=np.float64)
        figures = (data.mean(), np.median(data), data.std(), np.percentile(data, 99)) if data.size else (None,) * 4
        for label, figure in zip(("mean", "median", "std", "p99"), figures, strict=True):
            times[f"{label}_{key}_ms"] = None if figure is None else float(figure)
    return VllmResult(
        date=bench.environment.time,
        label=name,
        model_id=bench.backends[name].model,
        tokenizer_id=bench.backends[name].model,
        num_prompts=len(single),
        duration=duration_s,
        completed=len(good),
        failed=len(single) - len(good),
        total_input_tokens=tokens_in,
        total_output_tokens=tokens_out,
        request_throughput=_per_second(len(good), duration_s),
        output_throughput=_per_second(tokens_out, duration_s),
        total_token_throughput=_per_second(tokens_in + tokens_out, duration_s),
        **times,
    )


def _per_second(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds else None


def original_plan(bench: Bench, records: Records) -> OriginalPlan:
    """The layout of the original benchmark script: one test per workload (or turn) with its runs, gates as "5/5"."""
    tests: dict[str, dict[str, list[RequestRecord]]] = {name: defaultdict(list) for name in bench.backends}
    conversations = {r.workload for r in records if r.turn}
    for record in records:
        if record.alone:
            turn = f"_{record.turn + 1}" if record.workload in conversations else ""
            tests[record.backend][record.workload + turn].append(record)
    config, aggregates = bench.config, bench.aggregates
    return OriginalPlan(
        date=bench.environment.time,
        methodology=OriginalMethod(
            thinking={name: workload.thinking for name, workload in config.workloads.items()},
            warmup_runs=config.warmup,
            measured_runs=config.runs,
            prefix_cache=config.prefix_cache,
        ),
        confounds=[c.message for c in aggregates.confounds if c.severity == "confound"],
        backends={n: OriginalBackend(s.url, s.model, s.runtime) for n, s in bench.backends.items()},
        results={
            name: {test: _original_test(some) for test, some in sorted(own.items())} for name, own in tests.items()
        },
        quality_gates={
            name: {gate: f"{result.passes}/{result.n}" for gate, result in side.gates.items()}
            for name, side in aggregates.served.items()
        },
        verdict=bench.verdict.sentence,
    )


def _original_test(records: Records) -> OriginalTest:
    medians = {}
    for key, field in _ORIGINAL.items():
        values = [v for r in records if (v := getattr(r, field)) is not None and not r.error]
        if values:
            medians[f"{key}_p50"] = float(statistics.median(values))
    runs = [
        OriginalRun(
            **{key: getattr(r, field) for key, field in _ORIGINAL.items()},
            cold_start=r.cold,
            error=r.error or None,
            response=r.text,
            tool_calls=[call.get("name") for call in r.tool_calls],
        )
        for r in records
    ]
    return OriginalTest(runs=runs, **medians)


def prometheus(aggregates: Aggregates) -> str:
    """Gauges in Prometheus' text format, times in seconds as its conventions require."""
    lines = []
    for metric, name in PROMETHEUS.items():
        lines += [
            f"# HELP annie_quant_{name} {metric.removesuffix('_ms')} by workload",
            f"# TYPE annie_quant_{name} gauge",
        ]
        for backend, side in aggregates.served.items():
            for workload, summary in side.workloads.items():
                values = getattr(summary, metric)
                for quantile, key in (("0.5", "p50"), ("0.9", "p90"), ("0.99", "p99")) if values else ():
                    labels = f'backend="{_escape(backend)}",workload="{_escape(workload)}",quantile="{quantile}"'
                    lines.append(f"annie_quant_{name}{{{labels}}} {getattr(values, key) / 1e3:.9g}")
    lines += ["# HELP annie_quant_gate_share share of answers that pass a gate", "# TYPE annie_quant_gate_share gauge"]
    for backend, side in aggregates.served.items():
        for gate, result in side.gates.items():
            labels = f'backend="{_escape(backend)}",gate="{gate}"'
            lines.append(f"annie_quant_gate_share{{{labels}}} {result.passes / result.n:.9g}")
    return "\n".join(lines) + "\n"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
