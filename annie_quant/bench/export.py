"""A benchmark in formats that other tools read: results.csv, vLLM's flat keys, AIPerf's summary, the layout of the original
plan's benchmark script (R43), Prometheus text.

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


def export(folder: str | os.PathLike[str]) -> list[Path]:
    """Write results.csv and exports/ of a finished run directory; return their paths."""
    root = Path(folder)
    bench = read_bench(root)
    records = [r for r in read_records(root / "records.jsonl") if not r.warmup]
    texts = {
        root / "results.csv": results_csv(bench.aggregates),
        root / "exports" / "metrics.prom": prometheus(bench.aggregates),
    }
    documents = {root / "exports" / "original_plan.json": original_plan(bench, records)}
    for name in bench.backends:
        own = [r for r in records if r.backend == name]
        documents[root / "exports" / f"vllm_{name}.json"] = vllm(bench, own, name)
        documents[root / "exports" / f"aiperf_{name}.json"] = aiperf(own)
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


def vllm(bench: Bench, records: Records, name: str) -> dict[str, Any]:
    """vLLM's flat result of one backend, over all its workloads, one request in flight."""
    import numpy as np

    single = [r for r in records if r.alone and not r.cold]
    good = [r for r in single if not r.error]
    duration_s = sum(r.e2e_ms for r in good if r.e2e_ms) / 1e3
    tokens_in = sum(r.prompt_tokens for r in good)
    tokens_out = sum(r.completion_tokens or 0 for r in good)
    flat: dict[str, Any] = {
        "date": bench.environment.time,
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": name,
        "model_id": bench.backends[name].model,
        "tokenizer_id": bench.backends[name].model,
        "num_prompts": len(single),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 1,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(single) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": _per_second(len(good), duration_s),
        "output_throughput": _per_second(tokens_out, duration_s),
        "total_token_throughput": _per_second(tokens_in + tokens_out, duration_s),
    }
    for key, metric in _VLLM.items():
        data = np.asarray([v for some in values_by_prompt(good, metric).values() for v in some], dtype=np.float64)
        figures = (data.mean(), np.median(data), data.std(), np.percentile(data, 99)) if data.size else (None,) * 4
        for label, figure in zip(("mean", "median", "std", "p99"), figures, strict=True):
            flat[f"{label}_{key}_ms"] = None if figure is None else float(figure)
    return flat


def aiperf(records: Records) -> dict[str, Any]:
    """The summary that GenAI-Perf and AIPerf write (profile_export_*.json): unit, mean and percentiles per metric.

    A first token is one of any kind in that format; content TTFT is in the other files.
    """
    import numpy as np

    good = [r for r in records if r.alone and not r.cold and not r.error]
    seconds = sum(r.e2e_ms for r in good if r.e2e_ms) / 1e3
    series: dict[str, tuple[str, list[float]]] = {
        "time_to_first_token": ("ms", [v for r in good if (v := r.first_token_ms) is not None]),
        "inter_token_latency": ("ms", [r.tpot_ms for r in good if r.tpot_ms is not None]),
        "request_latency": ("ms", [r.e2e_ms for r in good if r.e2e_ms is not None]),
        "output_sequence_length": ("tokens", [r.completion_tokens for r in good if r.completion_tokens]),
        "input_sequence_length": ("tokens", [r.prompt_tokens for r in good if r.prompt_tokens]),
    }
    summary: dict[str, Any] = {}
    for name, (unit, values) in series.items():
        if values:
            data = np.asarray(values, dtype=np.float64)
            percentiles = {f"p{q}": float(np.percentile(data, q)) for q in (1, 5, 25, 50, 75, 90, 95, 99)}
            extremes = {"min": float(data.min()), "max": float(data.max())}
            summary[name] = {
                "unit": unit,
                "avg": float(data.mean()),
                **percentiles,
                **extremes,
                "std": float(data.std()),
            }
    tokens = sum(r.completion_tokens or 0 for r in good)
    summary["output_token_throughput"] = {"unit": "tokens/sec", "avg": _per_second(tokens, seconds)}
    summary["request_throughput"] = {"unit": "requests/sec", "avg": _per_second(len(good), seconds)}
    return summary


def _per_second(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds else None


def original_plan(bench: Bench, records: Records) -> dict[str, Any]:
    """The layout of the original benchmark script: one test per workload (or turn) with its runs, gates as "5/5"."""
    tests: dict[str, dict[str, list[RequestRecord]]] = {name: defaultdict(list) for name in bench.backends}
    conversations = {r.workload for r in records if r.turn}
    for record in records:
        if record.alone:
            turn = f"_{record.turn + 1}" if record.workload in conversations else ""
            tests[record.backend][record.workload + turn].append(record)
    config = bench.config
    return {
        "benchmark": "nvfp4_vs_q4km",
        "date": bench.environment.time,
        "methodology": {
            "thinking": {name: workload.thinking for name, workload in config.workloads.items()},
            "warmup_runs": config.warmup,
            "measured_runs": config.runs,
            "token_counting": "usage.completion_tokens",
            "ttft": "first content token",
            "order": "randomised ABBA blocks",
            "prefix_cache": config.prefix_cache,
        },
        "confounds": [c.message for c in bench.aggregates.confounds if c.severity == "confound"],
        "backends": {
            name: {"url": server.url, "model": server.model, "runtime": server.runtime}
            for name, server in bench.backends.items()
        },
        "results": {
            name: {test: _original_test(some) for test, some in sorted(own.items())} for name, own in tests.items()
        },
        "quality_gates": {
            name: {gate: f"{result.passes}/{result.n}" for gate, result in side.gates.items()}
            for name, side in bench.aggregates.served.items()
        },
        "verdict": bench.verdict.sentence,
    }


def _original_test(records: Records) -> dict[str, Any]:
    test: dict[str, Any] = {}
    for key, field in _ORIGINAL.items():
        values = [v for r in records if (v := getattr(r, field)) is not None and not r.error]
        if values:
            test[f"{key}_p50"] = float(statistics.median(values))
    test["runs"] = [
        {key: getattr(r, field) for key, field in _ORIGINAL.items()}
        | {
            "cold_start": r.cold,
            "error": r.error or None,
            "response": r.text,
            "tool_calls": [call.get("name") for call in r.tool_calls],
        }
        for r in records
    ]
    return test


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
