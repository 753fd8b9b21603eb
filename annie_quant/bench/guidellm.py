"""A report in GuideLLM's format (0.8, report version 2): `guidellm export FILE` reads it and renders its own tables from it.

Only what was measured is filled in: one benchmark with the requests that were alone at the server, in the order of their start.
Its TPOT is a request's time per output token, prompt included; its ITL is what this package calls TPOT. A stamp is the request's
start on the wall clock plus a time of the record.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from annie_quant.documents import Bench, RequestRecord

VERSION = "0.8.1"
PERCENTILES = {"p001": 0.1, "p01": 1, "p05": 5, "p10": 10, "p25": 25, "p50": 50, "p75": 75, "p90": 90, "p95": 95,
               "p99": 99, "p999": 99.9}  # fmt: skip
KINDS = {
    "image": ("tokens", "images", "pixels", "bytes"),
    "video": ("tokens", "frames", "seconds", "bytes"),
    "audio": ("tokens", "samples", "seconds", "bytes"),
    "tool_call": ("tokens", "mixed_tokens", "count"),
}
SUMMARY = tuple(
    f"{kind}{what}" for kind in ("input", "output", "total") for what in ("", "_per_second", "_concurrency")
)
_IDS = uuid.UUID("6d1cf9a2-6e0b-4b4c-9f55-0c6a3c1f2b77")  # so that the same run gives the same ids
_PHASE = {"percent": None, "value": None, "mode": "prefer_duration"}

Json = dict[str, Any]


def document(bench: Bench, records: Sequence[RequestRecord], name: str) -> Json:
    """Return the report of one backend."""
    alone = sorted((r for r in records if r.alone and not r.cold and r.started_unix_s), key=_start)
    good = [r for r in alone if not r.error]
    identity = bench.backends[name]
    backend = {
        "kind": "openai_http",
        "target": identity.url or "http://localhost",
        "model": identity.model,
        "request_format": "/v1/chat/completions",
        "stream": True,
    }
    profile = {"kind": "synchronous", "rampup_duration": 0.0, "warmup": _PHASE, "cooldown": _PHASE}
    begin = _start(alone[0]) if alone else 0.0
    end = max((_start(r) + (r.e2e_ms or 0.0) / 1e3 for r in alone), default=begin)
    run_id = str(uuid.uuid5(_IDS, f"{bench.environment.time}/{name}"))
    totals = {"successful": len(good), "errored": len(alone) - len(good), "incomplete": 0, "total": len(alone)}
    config = {
        "id_": str(uuid.uuid5(_IDS, f"{run_id}/0")),
        "run_id": run_id,
        "run_index": 0,
        "strategy": {"type_": "synchronous", "worker_count": 1, "max_concurrency": 1},
        "constraints": {},
        "warmup": _PHASE,
        "cooldown": _PHASE,
        "prefer_response_metrics": True,
        "confidence": 0.95,
        "warnings": [],
        "profile": profile,
        "requests": {"kind": "annie_quant", "workloads": list(bench.config.workloads)},
        "backend": backend,
        "environment": {"kind": "annie_quant"},
    }
    one = {
        "type_": "generative_benchmark",
        "config": config,
        "scheduler_state": _scheduler_state(begin, end, totals),
        "scheduler_metrics": _scheduler_metrics(begin, end, good, totals),
        "metrics": _metrics(good, totals, end - begin),
        "requests": {
            "successful": [_request(r) for r in good],
            "errored": [_request(r) for r in alone if r.error],
            "incomplete": [],
            "total": None,
        },
        "warnings": [],
        "start_time": begin,
        "end_time": end,
        "duration": end - begin,
        "warmup_duration": 0.0,
        "cooldown_duration": 0.0,
    }
    environment = bench.environment
    return {
        "metadata": {
            "version": 2,
            "guidellm_version": VERSION,
            "python_version": environment.python,
            "platform": environment.system,
        },
        "config": {
            "metadata": {"labels": {"written_by": "annie-quant", "backend": name}},
            "spec": {
                "backend": backend,
                "profile": profile,
                "constraints": [{"kind": "max_requests", "count": max(1, len(alone))}],
                "data": [{"kind": "json_file", "path": "inputs.json"}],
                "outputs": [],
            },
            "benchmarks": [None],
        },
        "benchmarks": [one],
        "conclusions": [],
    }


def _start(record: RequestRecord) -> float:
    return record.started_unix_s or 0.0


def distribution(values: Sequence[float]) -> Json:
    """Return GuideLLM's summary of values; zeros without any."""
    import numpy as np

    if not values:
        zeros = dict.fromkeys(("mean", "median", "mode", "variance", "std_dev", "min", "max"), 0.0)
        return zeros | {"count": 0, "total_sum": 0.0, "percentiles": dict.fromkeys(PERCENTILES, 0.0)}
    data = np.asarray(values, dtype=np.float64)
    return {
        "mean": float(data.mean()),
        "median": float(np.median(data)),
        "mode": float(statistics.mode(values)),
        "variance": float(data.var()),
        "std_dev": float(data.std()),
        "min": float(data.min()),
        "max": float(data.max()),
        "count": len(values),
        "total_sum": float(data.sum()),
        "percentiles": dict(zip(PERCENTILES, np.percentile(data, [*PERCENTILES.values()]).tolist(), strict=True)),
    }


def _by_status(values: Sequence[float]) -> Json:
    full, none = distribution(values), distribution([])
    return {"successful": full, "errored": none, "incomplete": none, "total": full}


def _metrics(good: Sequence[RequestRecord], totals: Json, seconds: float) -> Json:
    def values(read: Callable[[RequestRecord], float | None]) -> list[float]:
        return [float(v) for r in good if (v := read(r)) is not None]

    counted = [r for r in good if not r.tokens_estimated]
    rate = len(good) / seconds if seconds else 0.0
    prompt = values(lambda r: r.prompt_tokens or None)
    output = [float(r.completion_tokens) for r in counted if r.completion_tokens]
    both = [float(r.prompt_tokens + r.completion_tokens) for r in counted if r.completion_tokens]
    per_request = [1e3 * r.completion_tokens / r.e2e_ms for r in counted if r.completion_tokens and r.e2e_ms]
    everything = [
        1e3 * (r.prompt_tokens + r.completion_tokens) / r.e2e_ms for r in counted if r.completion_tokens and r.e2e_ms
    ]
    concurrency = sum(r.e2e_ms or 0 for r in good) / 1e3 / seconds if seconds else 0.0
    events = values(lambda r: float(len(r.itl_ms) + 1) if r.itl_ms else None)
    per_event = [r.completion_tokens / (len(r.itl_ms) + 1) for r in counted if r.completion_tokens and r.itl_ms]
    series = {
        "requests_per_second": [rate] if good else [],
        "request_concurrency": [concurrency] if good else [],
        "request_latency": values(lambda r: None if r.e2e_ms is None else r.e2e_ms / 1e3),
        "request_streaming_iterations_count": events,
        "prompt_token_count": prompt,
        "output_token_count": output,
        "total_token_count": both,
        "time_to_first_token_ms": values(lambda r: r.first_token_ms),
        "time_to_first_output_token_ms": values(lambda r: r.first_content_ms),
        "time_per_output_token_ms": [
            r.e2e_ms / r.completion_tokens for r in counted if r.completion_tokens and r.e2e_ms
        ],
        "inter_token_latency_ms": [r.tpot_ms for r in counted if r.tpot_ms is not None],
        "time_to_last_round_trip_ms": [],
        "avg_round_trip_time_ms": [],
        "prompt_tokens_per_second": [1e3 * r.prompt_tokens / first for r in good if (first := r.first_token_ms)],
        "output_tokens_per_second": per_request,
        "tokens_per_second": everything,
        "output_tokens_per_iteration": per_event,
        "iter_tokens_per_iteration": per_event,
    }
    empty = dict.fromkeys(SUMMARY)
    text = {"input": _by_status(prompt), "output": _by_status(output), "total": _by_status(both)}
    return {
        "request_totals": totals,
        **{name: _by_status(some) for name, some in series.items()},
        "text": {"tokens": empty | text, "words": empty, "characters": empty},
        **{kind: {part: empty for part in parts} for kind, parts in KINDS.items()},
        "turns": None,
        "slo_attainment": None,
        "slo_determined_requests": 0,
        "request_goodput": None,
    }


def _request(record: RequestRecord) -> Json:
    start = _start(record)

    def at(ms: float | None) -> float | None:
        return None if ms is None else start + ms / 1e3

    end, first = at(record.e2e_ms) or start, at(record.first_token_ms)
    failed = bool(record.error)
    timings = {
        "targeted_start": start,
        "queued": start,
        "dequeued": start,
        "scheduled_at": start,
        "resolve_start": start,
        "request_start": start,
        "first_request_iteration": at(record.first_event_ms),
        "first_token_iteration": first,
        "first_output_token_iteration": at(record.first_content_ms),
        "last_token_iteration": at(record.last_token_ms),
        "last_request_iteration": end,
        "request_iterations": len(record.itl_ms) + 1,
        "token_iterations": len(record.itl_ms) + 1,
        "request_end": end,
        "resolve_end": end,
        "finalized": end,
    }
    identifier = str(uuid.uuid5(_IDS, record.id))
    return {
        "type_": "generative_request_stats",
        "request_id": identifier,
        "response_id": None,
        "request_args": None,
        "output": record.text or None,
        "reasoning_output": record.reasoning or None,
        "tool_calls": None,
        "info": {
            "request_id": identifier,
            "conversation_id": str(
                uuid.uuid5(_IDS, f"{record.backend}/{record.workload}/{record.case}/{record.repeat}")
            ),
            "turn_index": record.turn,
            "status": "errored" if failed else "completed",
            "scheduler_node_id": 0,
            "scheduler_process_id": 0,
            "scheduler_start_time": start,
            "timings": timings,
            "error": record.error,
        },
        "input_metrics": {"text_tokens": record.prompt_tokens or None},
        "output_metrics": {"text_tokens": None if failed or record.tokens_estimated else record.completion_tokens},
    }


def _scheduler_state(begin: float, end: float, totals: Json) -> Json:
    return {
        "node_id": 0,
        "num_processes": 1,
        "start_time": begin,
        "end_time": end,
        "start_requests_time": begin,
        "end_requests_time": end,
        "created_requests": totals["total"],
        "processed_requests": totals["total"],
        "successful_requests": totals["successful"],
        "errored_requests": totals["errored"],
    }


def _scheduler_metrics(begin: float, end: float, good: Sequence[RequestRecord], totals: Json) -> Json:
    times = ("queued_time", "resolve_start_delay", "resolve_targeted_start_delay", "request_start_delay",
             "request_targeted_start_delay", "resolve_end_delay", "finalized_delay", "processed_delay")  # fmt: skip
    mean = statistics.fmean(r.e2e_ms or 0.0 for r in good) / 1e3 if good else 0.0
    return {
        "start_time": begin,
        "request_start_time": begin,
        "measure_start_time": begin,
        "measure_end_time": end,
        "request_end_time": end,
        "end_time": end,
        "requests_made": totals,
        "generation_delay": distribution([]),
        **{f"{name}_avg": 0.0 for name in times},
        "request_time_avg": mean,
        "resolve_time_avg": mean,
        "dataset_incomplete": False,
        "strategy_type": "synchronous",
    }
