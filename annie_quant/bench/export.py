"""A benchmark in formats that other tools read: results.csv, vLLM's flat keys, reports of AIPerf and GuideLLM, and the layout of
the original plan's benchmark script (R43).

vLLM's keys are those of `vllm bench serve --save-result`; TTFT is that of content, as everywhere here. In AIPerf's summary a
first token is one of any kind, an inter-token latency is one request's mean over its tokens, and an inter-chunk latency is each
gap between two events. The backends take turns, so a backend's duration is the time that its own requests took.
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

from annie_quant.bench import guidellm
from annie_quant.bench.aggregate import values_by_prompt
from annie_quant.bench.run_config import read_records
from annie_quant.core.files import write_text
from annie_quant.documents import Aggregates, Bench, RequestRecord, read_bench, write

Records = Sequence[RequestRecord]
Json = dict[str, Any]

COLUMNS = ("backend", "workload", "metric", "n", "n_prompts", "p50", "p90", "p99", "mean", "low", "high")
_VLLM = {"ttft": "ttft_content_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "e2e_ms"}
_ORIGINAL = {
    "ttft_ms": "first_content_ms",
    "tool_ms": "first_tool_ms",
    "total_ms": "e2e_ms",
    "tokens": "completion_tokens",
    "tok_per_s": "decode_tok_s",
}
_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def export(folder: str | os.PathLike[str]) -> list[Path]:
    """Write results.csv and exports/ of a finished run directory; return their paths."""
    root = Path(folder)
    bench = read_bench(root)
    records = [r for r in read_records(root / "records.jsonl") if not r.warmup]
    documents: dict[Path, object] = {root / "exports" / "original_plan.json": original_plan(bench, records)}
    for name in bench.backends:
        own = [r for r in records if r.backend == name]
        documents[root / "exports" / f"vllm_{name}.json"] = vllm(bench, own, name)
        documents[root / "exports" / f"aiperf_{name}.json"] = aiperf(own)
        documents[root / "exports" / f"guidellm_{name}.json"] = guidellm.document(bench, own, name)
    write_text(root / "results.csv", results_csv(bench.aggregates))
    for path, document in documents.items():
        write(path, document)
    return [root / "results.csv", *documents]


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


def vllm(bench: Bench, records: Records, name: str) -> Json:
    """Return vLLM's flat result of one backend, over all its workloads, one request in flight. Times in ms, duration in s."""
    import numpy as np

    single = [r for r in records if r.alone and not r.cold]
    good = [r for r in single if not r.error]
    duration_s = sum(r.e2e_ms for r in good if r.e2e_ms) / 1e3
    tokens_in = sum(r.prompt_tokens for r in good)
    tokens_out = sum(r.completion_tokens or 0 for r in good)
    times: dict[str, float | None] = {}
    for key, metric in _VLLM.items():
        data = np.asarray([v for some in values_by_prompt(good, metric).values() for v in some], dtype=np.float64)
        figures = (data.mean(), np.median(data), data.std(), np.percentile(data, 99)) if data.size else (None,) * 4
        for label, figure in zip(("mean", "median", "std", "p99"), figures, strict=True):
            times[f"{label}_{key}_ms"] = None if figure is None else float(figure)
    return {
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
        **times,
    }


def _per_second(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds else None


def aiperf(records: Records) -> dict[str, Json]:
    """Return AIPerf's metrics (profile_export_aiperf.json) of the requests that were alone at the server, without cold starts."""
    import numpy as np

    alone = [r for r in records if r.alone and not r.cold]
    good = [r for r in alone if not r.error]
    seconds = sum(r.e2e_ms for r in good if r.e2e_ms) / 1e3
    series: dict[str, tuple[str, list[float]]] = {
        "time_to_first_token": ("ms", [v for r in good if (v := r.first_token_ms) is not None]),
        "time_to_second_token": ("ms", [r.itl_ms[0] for r in good if r.itl_ms]),
        "inter_token_latency": ("ms", [r.tpot_ms for r in good if r.tpot_ms is not None]),
        "inter_chunk_latency": ("ms", [gap for r in good for gap in r.itl_ms]),
        "request_latency": ("ms", [r.e2e_ms for r in good if r.e2e_ms is not None]),
        "output_sequence_length": ("tokens", [r.completion_tokens for r in good if r.completion_tokens]),
        "input_sequence_length": ("tokens", [r.prompt_tokens for r in good if r.prompt_tokens]),
        "output_token_throughput_per_user": (
            "tokens/sec/user",
            [1e3 / r.tpot_ms for r in good if r.tpot_ms and not r.tokens_estimated],
        ),
    }
    rows: dict[str, Json] = {}
    for name, (unit, values) in series.items():
        if values:
            data = np.asarray(values, dtype=np.float64)
            figures = {"avg": data.mean(), "min": data.min(), "max": data.max(), "std": data.std(), "sum": data.sum()}
            figures |= {
                f"p{at}": value for at, value in zip(_PERCENTILES, np.percentile(data, _PERCENTILES), strict=True)
            }
            rows[name] = {"unit": unit, "count": len(values), **{key: float(value) for key, value in figures.items()}}
    tokens = sum(r.completion_tokens or 0 for r in good)
    totals: dict[str, tuple[str, float | None]] = {
        "output_token_throughput": ("tokens/sec", _per_second(tokens, seconds)),
        "request_throughput": ("requests/sec", _per_second(len(good), seconds)),
        "request_count": ("requests", float(len(good))),
        "error_request_count": ("requests", float(len(alone) - len(good))),
        "total_osl": ("tokens", float(tokens)),
        "total_isl": ("tokens", float(sum(r.prompt_tokens for r in good))),
        "benchmark_duration": ("sec", seconds),
    }
    return rows | {name: {"unit": unit, "avg": amount} for name, (unit, amount) in totals.items()}


def original_plan(bench: Bench, records: Records) -> Json:
    """Return the original script's layout: backend → test (one per workload, or turn of it) → runs; gates as "5/5"."""
    tests: dict[str, dict[str, list[RequestRecord]]] = {name: defaultdict(list) for name in bench.backends}
    conversations = {r.workload for r in records if r.turn}
    for record in records:
        if record.alone:
            turn = f"_{record.turn + 1}" if record.workload in conversations else ""
            tests[record.backend][record.workload + turn].append(record)
    config, aggregates = bench.config, bench.aggregates
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
        "confounds": [c.message for c in aggregates.confounds if c.severity == "confound"],
        "backends": {n: {"url": s.url, "model": s.model, "runtime": s.runtime} for n, s in bench.backends.items()},
        "results": {
            name: {test: _original_test(some) for test, some in sorted(own.items())} for name, own in tests.items()
        },
        "quality_gates": {
            name: {gate: f"{result.passes}/{result.n}" for gate, result in side.gates.items()}
            for name, side in aggregates.served.items()
        },
        "verdict": bench.verdict.sentence,
    }


def _original_test(records: Records) -> Json:
    """Medians of the requests without an error, then all requests."""
    medians = {}
    for key, field in _ORIGINAL.items():
        values = [v for r in records if (v := getattr(r, field)) is not None and not r.error]
        if values:
            medians[f"{key}_p50"] = float(statistics.median(values))
    runs = [
        {
            **{key: getattr(r, field) for key, field in _ORIGINAL.items()},
            "cold_start": r.cold,
            "error": r.error or None,
            "response": r.text,
            "tool_calls": [call.get("name") for call in r.tool_calls],
        }
        for r in records
    ]
    return medians | {"runs": runs}
