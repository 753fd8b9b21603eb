"""A benchmark in forms that other tools read.

They are vLLM's flat keys, reports of AIPerf, GuideLLM and llama-benchy, and the layout of the original plan's script (R43).

All but the last have only the requests that were alone at the server, without cold starts. The backends take turns, so a backend's
duration is the time that its own requests took. vLLM's keys are those of `vllm bench serve --save-result`; TTFT is that of content,
as everywhere here. In AIPerf's summary (profile_export_aiperf.json) a first token is one of any kind, an inter-token latency is one
request's mean over its tokens, and an inter-chunk latency is each gap between two events.
"""

from __future__ import annotations

import os
import statistics
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from annie_quant import __version__, documents
from annie_quant.bench.aggregates import values_by_prompt
from annie_quant.bench.run_folder import read_records
from annie_quant.bench.stability import start_of
from annie_quant.core.files import ASSETS
from annie_quant.core.untrusted import JsonObject, decode_json
from annie_quant.documents import Bench, RequestRecord, read_bench

Records = Sequence[RequestRecord]
Json = JsonObject

_VLLM = {"ttft": "ttft_content_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "e2e_ms"}
_ORIGINAL: Mapping[str, Callable[[RequestRecord], float | None]] = {
    "ttft_ms": lambda r: r.timings.first_content_ms,
    "tool_ms": lambda r: r.timings.first_tool_ms,
    "total_ms": lambda r: r.timings.e2e_ms,
    "tokens": lambda r: r.tokens.completion_tokens,
    "tok_per_s": lambda r: r.timings.decode_tok_s,
}
# The parts of each form that are the same for all runs.
_FORMS: Json = decode_json((ASSETS / "exports.json").read_bytes())
# What a form says about a series of values: its name → a function of NumPy, or a percentile.
Figures = Mapping[str, str | float]
_VLLM_FIGURES: Figures = {"mean": "mean", "median": "median", "std": "std", "p99": 99}
_AIPERF_FIGURES: Figures = {
    "avg": "mean",
    "min": "min",
    "max": "max",
    "std": "std",
    "sum": "sum",
    **{f"p{at}": at for at in (1, 5, 10, 25, 50, 75, 90, 95, 99)},
}
_GUIDELLM_FIGURES: Figures = {
    "mean": "mean",
    "median": "median",
    "variance": "var",
    "std_dev": "std",
    "min": "min",
    "max": "max",
    "total_sum": "sum",
}
_GUIDELLM_PERCENTILES: Figures = {
    "p001": 0.1,
    "p01": 1,
    "p05": 5,
    "p10": 10,
    "p25": 25,
    "p50": 50,
    "p75": 75,
    "p90": 90,
    "p95": 95,
    "p99": 99,
    "p999": 99.9,
}


def export(folder: str | os.PathLike[str]) -> list[Path]:
    """Write exports/ of a finished run directory; return the paths."""
    root = Path(folder) / "exports"
    bench = read_bench(Path(folder))
    records = [r for r in read_records(Path(folder) / "records.jsonl") if not r.warmup]
    files: dict[Path, Json] = {root / "original_plan.json": original_plan(bench, records)}
    for name in bench.backends:
        own = [r for r in records if r.backend == name]
        files[root / f"vllm_{name}.json"] = vllm(bench, own, name)
        files[root / f"aiperf_{name}.json"] = aiperf(own)
        files[root / f"guidellm_{name}.json"] = guidellm(bench, own, name)
        files[root / f"llama_benchy_{name}.json"] = llama_benchy(bench, own, name)
    for path, content in files.items():
        documents.write(path, content)
    return list(files)


def filled(form: Json, values: Json) -> Json:
    """Return a form with values in it; objects of both are joined."""
    inner = {
        k: filled(form[k], v)
        for k, v in values.items()
        if isinstance(v, dict) and isinstance(form.get(k), dict)
    }
    return form | values | inner


def _figures(values: Iterable[float], figures: Figures) -> dict[str, float]:
    """Return a form's figures of values; {} without any."""
    data = np.asarray([*values], dtype=np.float64)
    if not data.size:
        return {}
    percentiles = iter(np.percentile(data, [f for f in figures.values() if not isinstance(f, str)]))
    return {
        k: float(getattr(np, f)(data) if isinstance(f, str) else next(percentiles))
        for k, f in figures.items()
    }


class _Alone:
    """The requests of one backend that were alone at it.

    good: those without an error.
    seconds: the time that these took.
    """

    def __init__(self, records: Records) -> None:
        self.records = [r for r in records if r.load.alone and not r.cold]
        self.good = [r for r in self.records if not r.answer.error]
        self.failed = len(self.records) - len(self.good)
        self.seconds = sum(r.timings.e2e_ms for r in self.good if r.timings.e2e_ms) / 1e3
        self.tokens_in = sum(r.tokens.prompt_tokens for r in self.good)
        self.tokens_out = sum(r.tokens.completion_tokens or 0 for r in self.good)

    def per_second(self, amount: float) -> float | None:
        return amount / self.seconds if self.seconds else None


def vllm(bench: Bench, records: Records, name: str) -> Json:
    """Return vLLM's flat result of one backend, over all its workloads. Times in ms, duration in s."""
    alone, times = _Alone(records), dict[str, float | None]()
    for key, metric in _VLLM.items():
        values = [v for values in values_by_prompt(alone.good, metric).values() for v in values]
        figures = _figures(values, _VLLM_FIGURES)
        times |= {f"{label}_{key}_ms": figures.get(label) for label in _VLLM_FIGURES}
    return _FORMS["vllm"] | {
        "date": bench.environment.time,
        "label": name,
        "model_id": bench.backends[name].model,
        "tokenizer_id": bench.backends[name].model,
        "num_prompts": len(alone.records),
        "duration": alone.seconds,
        "completed": len(alone.good),
        "failed": alone.failed,
        "total_input_tokens": alone.tokens_in,
        "total_output_tokens": alone.tokens_out,
        "request_throughput": alone.per_second(len(alone.good)),
        "output_throughput": alone.per_second(alone.tokens_out),
        "total_token_throughput": alone.per_second(alone.tokens_in + alone.tokens_out),
        **times,
    }


def aiperf(records: Records) -> Json:
    """Return AIPerf's metrics of one backend."""
    alone = _Alone(records)
    good = alone.good
    series: dict[tuple[str, str], Sequence[float | None]] = {
        ("time_to_first_token", "ms"): [r.timings.first_token_ms for r in good],
        ("time_to_second_token", "ms"): [r.timings.itl_ms[0] for r in good if r.timings.itl_ms],
        ("inter_token_latency", "ms"): [r.timings.tpot_ms for r in good],
        ("inter_chunk_latency", "ms"): [gap for r in good for gap in r.timings.itl_ms],
        ("request_latency", "ms"): [r.timings.e2e_ms for r in good],
        ("output_sequence_length", "tokens"): [r.tokens.completion_tokens or None for r in good],
        ("input_sequence_length", "tokens"): [r.tokens.prompt_tokens or None for r in good],
        ("output_token_throughput_per_user", "tokens/sec/user"): [
            1e3 / r.timings.tpot_ms
            for r in good
            if r.timings.tpot_ms and not r.tokens.tokens_estimated
        ],
    }
    totals: dict[tuple[str, str], float | None] = {
        ("output_token_throughput", "tokens/sec"): alone.per_second(alone.tokens_out),
        ("request_throughput", "requests/sec"): alone.per_second(len(good)),
        ("request_count", "requests"): float(len(good)),
        ("error_request_count", "requests"): float(alone.failed),
        ("total_osl", "tokens"): float(alone.tokens_out),
        ("total_isl", "tokens"): float(alone.tokens_in),
        ("benchmark_duration", "sec"): alone.seconds,
    }
    rows: Json = {}
    for (name, unit), every in series.items():
        if values := [v for v in every if v is not None]:
            rows[name] = {"unit": unit, "count": len(values)} | _figures(values, _AIPERF_FIGURES)
    return rows | {name: {"unit": unit, "avg": amount} for (name, unit), amount in totals.items()}


def llama_benchy(bench: Bench, records: Records, name: str) -> Json:
    """Return llama-benchy's report (0.4.0, `--save-result --format json`) of one backend: one benchmark per workload.

    Its latency mode is "none": nothing is subtracted from a time. ttfr is the time to the first event.
    """
    by_workload: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in _Alone(records).good:
        if (
            record.tokens.prompt_tokens
            and record.tokens.completion_tokens
            and not record.tokens.tokens_estimated
        ):
            by_workload[record.workload].append(record)
    return {
        "version": __version__,
        "timestamp": bench.environment.time,
        "latency_mode": "none",
        "latency_ms": 0.0,
        "model": bench.backends[name].model or name,
        "prefix_caching_enabled": bench.config.prefix_cache == "warm",
        "max_concurrency": 1,
        "benchmarks": [_benchy_run(rows) for rows in by_workload.values()],
    }


def _benchy_run(rows: Records) -> Json:
    depth = rows[0].load.depth or 0
    firsts = [(r, first) for r in rows if (first := r.timings.first_event_ms)]
    prefill = _benchy_metric([1e3 * r.tokens.prompt_tokens / first for r, first in firsts])
    decode = _benchy_metric([r.timings.decode_tok_s for r in rows])
    first_event = _benchy_metric([first for _, first in firsts])
    return {
        "concurrency": 1,
        "context_size": depth,
        "prompt_size": max(
            0, round(statistics.median(r.tokens.prompt_tokens for r in rows)) - depth
        ),
        "response_size": round(statistics.median(r.tokens.completion_tokens or 0 for r in rows)),
        "is_context_prefill_phase": False,
        "pp_throughput": prefill,
        "pp_req_throughput": prefill,
        "tg_throughput": decode,
        "tg_req_throughput": decode,
        "ttfr": first_event,
        "est_ppt": first_event,
        "e2e_ttft": _benchy_metric([r.timings.first_token_ms for r in rows]),
    }


def _benchy_metric(values: Sequence[float | None]) -> Json | None:
    known = [float(value) for value in values if value is not None]
    return (
        {"mean": statistics.fmean(known), "std": statistics.pstdev(known), "values": known}
        if known
        else None
    )


def original_plan(bench: Bench, records: Records) -> Json:
    """Return the original script's layout: backend → test (one per workload, or turn of it) → runs; gates as "5/5"."""
    tests: dict[str, dict[str, list[RequestRecord]]] = {
        name: defaultdict(list) for name in bench.backends
    }
    conversations = {r.workload for r in records if r.turn}
    for record in records:
        if record.load.alone:
            turn = f"_{record.turn + 1}" if record.workload in conversations else ""
            tests[record.backend][record.workload + turn].append(record)
    config, aggregates = bench.config, bench.aggregates
    method = {
        "warmup_runs": config.warmup,
        "measured_runs": config.runs,
        "prefix_cache": config.prefix_cache,
    }
    result = {
        "date": bench.environment.time,
        "methodology": method
        | {"thinking": {name: w.thinking for name, w in config.workloads.items()}},
        "confounds": [c.message for c in aggregates.confounds if c.severity == "confound"],
        "backends": {
            n: {"url": s.url, "model": s.model, "runtime": s.runtime}
            for n, s in bench.backends.items()
        },
        "results": {
            name: {test: _original_test(rows) for test, rows in sorted(own.items())}
            for name, own in tests.items()
        },
        "quality_gates": {
            name: {gate: f"{result.passes}/{result.n}" for gate, result in side.gates.items()}
            for name, side in aggregates.served.items()
        },
        "verdict": bench.verdict.sentence,
    }
    return filled(_FORMS["original_plan"], result)


def _original_test(records: Records) -> Json:
    """Return the medians of the requests without an error, and all requests."""
    medians: Json = {}
    for key, value in _ORIGINAL.items():
        values = [v for r in records if (v := value(r)) is not None and not r.answer.error]
        medians |= _figures(values, {f"{key}_p50": "median"})
    runs = [
        {key: value(r) for key, value in _ORIGINAL.items()}
        | {"cold_start": r.cold, "error": r.answer.error or None, "response": r.answer.text}
        | {"tool_calls": [call.get("name") for call in r.answer.tool_calls]}
        for r in records
    ]
    return medians | {"runs": runs}


# ---- GuideLLM 0.8, report version 2: `guidellm export FILE` reads it and renders its own tables
#
# Only what was measured is filled in: one benchmark, its requests in the order of their start. GuideLLM's TPOT is a request's time
# per output token, prompt included; its ITL is what this package calls TPOT. A stamp is the request's start on the wall clock plus
# a time of the record.


_IDS = uuid.UUID("6d1cf9a2-6e0b-4b4c-9f55-0c6a3c1f2b77")  # so that the same run gives the same ids


def guidellm(bench: Bench, records: Records, name: str) -> Json:
    """Return GuideLLM's report of one backend."""
    alone = sorted(
        (r for r in records if r.load.alone and not r.cold and r.timings.started_unix_s),
        key=start_of,
    )
    good = [r for r in alone if not r.answer.error]
    begin = start_of(alone[0]) if alone else 0.0
    end = max((start_of(r) + (r.timings.e2e_ms or 0.0) / 1e3 for r in alone), default=begin)
    totals = {
        "successful": len(good),
        "errored": len(alone) - len(good),
        "incomplete": 0,
        "total": len(alone),
    }
    identity, environment = bench.backends[name], bench.environment
    backend = _FORMS["guidellm"]["backend"] | {
        "target": identity.url or "http://localhost",
        "model": identity.model,
    }
    run_id = str(uuid.uuid5(_IDS, f"{environment.time}/{name}"))
    config = {"id_": str(uuid.uuid5(_IDS, f"{run_id}/0")), "run_id": run_id, "backend": backend}
    config["requests"] = {"workloads": list(bench.config.workloads)}
    requests = {"successful": good, "errored": [r for r in alone if r.answer.error]}
    benchmark = {
        "config": config,
        **_scheduler(begin, end, good, totals),
        "metrics": _guidellm_metrics(good, totals, end - begin),
        "requests": {
            status: [_guidellm_request(r) for r in rows] for status, rows in requests.items()
        },
        "start_time": begin,
        "end_time": end,
        "duration": end - begin,
    }
    spec = {
        "backend": backend,
        "constraints": [{"kind": "max_requests", "count": max(1, len(alone))}],
    }
    report = {
        "metadata": {"python_version": environment.python, "platform": environment.system},
        "config": {"metadata": {"labels": {"backend": name}}, "spec": spec},
        "benchmarks": [filled(_FORMS["guidellm"]["benchmark"], benchmark)],
    }
    return filled(_FORMS["guidellm"]["report"], report)


def _distribution(values: Sequence[float]) -> Json:
    """Return GuideLLM's summary of values; zeros without any."""
    values, n = values or [0.0], len(values)
    figures = {
        "mode": float(statistics.mode(values)),
        "count": n,
        "percentiles": _figures(values, _GUIDELLM_PERCENTILES),
    }
    return _figures(values, _GUIDELLM_FIGURES) | figures


_NO_VALUES = _distribution([])


def _by_status(values: Sequence[float | None]) -> Json:
    full = _distribution([float(v) for v in values if v is not None])
    return {"successful": full, "errored": _NO_VALUES, "incomplete": _NO_VALUES, "total": full}


def _guidellm_metrics(good: Records, totals: Json, seconds: float) -> Json:
    counted = [r for r in good if r.tokens.completion_tokens and not r.tokens.tokens_estimated]
    timed = [
        (r, r.tokens.completion_tokens or 0, r.timings.e2e_ms) for r in counted if r.timings.e2e_ms
    ]
    events = [
        (r, r.tokens.completion_tokens or 0, len(r.timings.itl_ms) + 1)
        for r in counted
        if r.timings.itl_ms
    ]
    per_event = [tokens / n for _, tokens, n in events]
    busy_s = sum(r.timings.e2e_ms or 0 for r in good) / 1e3
    counts: dict[str, Sequence[float | None]] = {
        "prompt": [r.tokens.prompt_tokens or None for r in good],
        "output": [r.tokens.completion_tokens for r in counted],
        "total": [r.tokens.prompt_tokens + (r.tokens.completion_tokens or 0) for r in counted],
    }
    series: dict[str, Sequence[float | None]] = {
        "requests_per_second": [len(good) / seconds if seconds else 0.0] if good else [],
        "request_concurrency": [busy_s / seconds if seconds else 0.0] if good else [],
        "request_latency": [
            None if r.timings.e2e_ms is None else r.timings.e2e_ms / 1e3 for r in good
        ],
        "request_streaming_iterations_count": [
            len(r.timings.itl_ms) + 1 for r in good if r.timings.itl_ms
        ],
        **{f"{side}_token_count": values for side, values in counts.items()},
        "time_to_first_token_ms": [r.timings.first_token_ms for r in good],
        "time_to_first_output_token_ms": [r.timings.first_content_ms for r in good],
        "time_per_output_token_ms": [ms / tokens for _, tokens, ms in timed],
        "inter_token_latency_ms": [
            r.timings.tpot_ms for r in good if not r.tokens.tokens_estimated
        ],
        "time_to_last_round_trip_ms": [],
        "avg_round_trip_time_ms": [],
        "prompt_tokens_per_second": [
            1e3 * r.tokens.prompt_tokens / first
            for r in good
            if (first := r.timings.first_token_ms)
        ],
        "output_tokens_per_second": [1e3 * tokens / ms for _, tokens, ms in timed],
        "tokens_per_second": [
            1e3 * (r.tokens.prompt_tokens + tokens) / ms for r, tokens, ms in timed
        ],
        **dict.fromkeys(("output_tokens_per_iteration", "iter_tokens_per_iteration"), per_event),
    }
    text = {
        "input" if side == "prompt" else side: _by_status(values) for side, values in counts.items()
    }
    rows = {name: _by_status(values) for name, values in series.items()}
    return {"request_totals": totals, **rows, "text": {"tokens": text}}


def _guidellm_request(record: RequestRecord) -> Json:
    start = start_of(record)

    def at(ms: float | None) -> float | None:
        return None if ms is None else start + ms / 1e3

    before = (
        "targeted_start",
        "queued",
        "dequeued",
        "scheduled_at",
        "resolve_start",
        "request_start",
    )
    after = ("last_request_iteration", "request_end", "resolve_end", "finalized")
    timings = {
        **dict.fromkeys(before, start),
        "first_request_iteration": at(record.timings.first_event_ms),
        "first_token_iteration": at(record.timings.first_token_ms),
        "first_output_token_iteration": at(record.timings.first_content_ms),
        "last_token_iteration": at(record.timings.last_token_ms),
        "request_iterations": len(record.timings.itl_ms) + 1,
        "token_iterations": len(record.timings.itl_ms) + 1,
        **dict.fromkeys(after, at(record.timings.e2e_ms) or start),
    }
    identifier = str(uuid.uuid5(_IDS, record.id))
    conversation = f"{record.backend}/{record.workload}/{record.case}/{record.repeat}"
    counted = not record.answer.error and not record.tokens.tokens_estimated
    request = {
        "request_id": identifier,
        "output": record.answer.text or None,
        "reasoning_output": record.answer.reasoning or None,
        "info": {
            "request_id": identifier,
            "conversation_id": str(uuid.uuid5(_IDS, conversation)),
            "turn_index": record.turn,
            "status": "errored" if record.answer.error else "completed",
            "scheduler_start_time": start,
            "timings": timings,
            "error": record.answer.error,
        },
        "input_metrics": {"text_tokens": record.tokens.prompt_tokens or None},
        "output_metrics": {"text_tokens": record.tokens.completion_tokens if counted else None},
    }
    return filled(_FORMS["guidellm"]["request"], request)


def _scheduler(begin: float, end: float, good: Records, totals: Json) -> Json:
    """Return the state and the metrics of GuideLLM's scheduler, which had nothing to wait for."""
    mean = statistics.fmean(r.timings.e2e_ms or 0.0 for r in good) / 1e3 if good else 0.0
    names = {
        "created": "total",
        "processed": "total",
        "successful": "successful",
        "errored": "errored",
    }
    state = {f"{state}_requests": totals[name] for state, name in names.items()}
    state |= {
        "start_time": begin,
        "end_time": end,
        "start_requests_time": begin,
        "end_requests_time": end,
    }
    metrics = {
        **dict.fromkeys(("start_time", "request_start_time", "measure_start_time"), begin),
        **dict.fromkeys(("measure_end_time", "request_end_time", "end_time"), end),
        "requests_made": totals,
        "request_time_avg": mean,
        "resolve_time_avg": mean,
    }
    return {"scheduler_state": state, "scheduler_metrics": metrics}
