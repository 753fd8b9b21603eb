"""A benchmark in the layout of the original plan's script (R43), and with the flat keys of vLLM's `vllm bench serve`.

vLLM's keys have only the requests that were alone at the server, without cold starts. The backends take turns, so a backend's
duration is the time that its own requests took. TTFT is that of content, as everywhere here.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from annie_quant import documents
from annie_quant.bench.aggregates import values_by_prompt
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import Bench, RequestRecord

Records = Sequence[RequestRecord]

VLLM_METRICS = {
    "ttft": "ttft_content_ms",
    "tpot": "tpot_ms",
    "itl": "itl_ms",
    "e2el": "e2e_ms",
}
ORIGINAL_FIGURES: Mapping[str, Callable[[RequestRecord], float | None]] = {
    "ttft_ms": lambda r: r.timings.first_content_ms,
    "tool_ms": lambda r: r.timings.first_tool_ms,
    "total_ms": lambda r: r.timings.e2e_ms,
    "tokens": lambda r: r.answer.completion_tokens,
    "tok_per_s": lambda r: r.timings.decode_tok_s,
}


def write_exports(folder: Path, bench: Bench, records: Records) -> None:
    """Write exports/ of a run directory. records: the run's, warm-ups included."""
    measured = [r for r in records if not r.warmup]
    documents.write(folder / "exports/original_plan.json", original_plan(bench, measured))
    for name in bench.backends:
        own = [r for r in measured if r.backend == name]
        documents.write(folder / f"exports/vllm_{name}.json", _vllm(bench, own, name))


def _vllm(bench: Bench, records: Records, name: str) -> JsonObject:
    """Return vLLM's flat result of one backend, over all its workloads. Times in ms, duration in s."""
    alone = [r for r in records if r.load.alone and not r.cold]
    complete = [r for r in alone if not r.answer.error]
    seconds = sum(r.timings.e2e_ms or 0.0 for r in complete) / 1e3
    tokens_in = sum(r.tokens.prompt_tokens for r in complete)
    tokens_out = sum(r.answer.completion_tokens or 0 for r in complete)

    def per_second(amount: float) -> float | None:
        return amount / seconds if seconds else None

    model = bench.backends[name].model
    return {
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 1,
        "date": bench.environment.time,
        "label": name,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(alone),
        "duration": seconds,
        "completed": len(complete),
        "failed": len(alone) - len(complete),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": per_second(len(complete)),
        "output_throughput": per_second(tokens_out),
        "total_token_throughput": per_second(tokens_in + tokens_out),
        **_vllm_times(complete),
    }


def _vllm_times(records: Records) -> dict[str, float | None]:
    times: dict[str, float | None] = {}
    for key, metric in VLLM_METRICS.items():
        by_prompt = values_by_prompt(records, metric).values()
        values = np.array([value for values in by_prompt for value in values])
        known = bool(values.size)
        times |= {
            f"mean_{key}_ms": float(values.mean()) if known else None,
            f"median_{key}_ms": float(np.median(values)) if known else None,
            f"std_{key}_ms": float(values.std()) if known else None,
            f"p99_{key}_ms": float(np.percentile(values, 99)) if known else None,
        }
    return times


def original_plan(bench: Bench, records: Records) -> JsonObject:
    """Return the original script's layout: backend → test (one per workload, or turn of it) → runs; gates as "5/5"."""
    config = bench.config
    served = bench.aggregates.served
    confounds = [c.message for c in bench.aggregates.confounds if c.severity == "confound"]
    sides = documents.by_backend(records, bench.backends)
    return {
        "benchmark": "nvfp4_vs_q4km",
        "date": bench.environment.time,
        "methodology": {
            "token_counting": "usage.completion_tokens",
            "ttft": "first content token",
            "order": "randomised ABBA blocks",
            "warmup_runs": config.warmup,
            "measured_runs": config.runs,
            "prefix_cache": config.prefix_cache,
            "thinking": {name: w.thinking for name, w in config.workloads.items()},
        },
        "confounds": confounds,
        "backends": {
            name: {"url": side.url, "model": side.model, "runtime": side.runtime}
            for name, side in bench.backends.items()
        },
        "results": {name: _original_tests(rows) for name, rows in sides.items()},
        "quality_gates": {name: _original_gates(side) for name, side in served.items()},
        "verdict": bench.verdict.sentence,
    }


def _original_gates(side: documents.ServedSide) -> dict[str, str]:
    return {gate: f"{result.passes}/{result.n}" for gate, result in side.gates.items()}


def _original_tests(records: Records) -> JsonObject:
    conversations = {r.workload for r in records if r.turn}
    tests: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        if record.load.alone:
            turn = f"_{record.turn + 1}" if record.workload in conversations else ""
            tests[record.workload + turn].append(record)
    return {test: _original_test(rows) for test, rows in sorted(tests.items())}


def _original_test(records: Records) -> JsonObject:
    """Return the medians of the requests without an error, and all requests."""
    complete = [r for r in records if not r.answer.error]
    medians: JsonObject = {}
    for key, figure in ORIGINAL_FIGURES.items():
        values = [value for value in map(figure, complete) if value is not None]
        if values:
            medians[f"{key}_p50"] = float(statistics.median(values))
    return {**medians, "runs": [_original_run(r) for r in records]}


def _original_run(record: RequestRecord) -> JsonObject:
    figures = {key: figure(record) for key, figure in ORIGINAL_FIGURES.items()}
    return {
        **figures,
        "cold_start": record.cold,
        "error": record.answer.error or None,
        "response": record.answer.text,
        "tool_calls": [call.get("name") for call in record.answer.tool_calls],
    }
