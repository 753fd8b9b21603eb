"""One row per side of a run directory or of another tool's report. Reports are another party's data: only numbers are taken."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from annie_quant.bench.aggregates import summary, timed, values_by_prompt
from annie_quant.bench.run_folder import read_records
from annie_quant.core.errors import UsageError
from annie_quant.core.untrusted import decode_json, printable
from annie_quant.documents import MetricSummary, RequestRecord, Run, decode, read_bench

MAX_REPORT_BYTES = 1 << 30
NAMES = ("benchmarks.json", "profile_export_aiperf.json")  # in a folder of GuideLLM or AIPerf
TTFT = {
    "annie-quant": "content",
    "GuideLLM": "any token",
    "AIPerf": "any token",
    "vllm bench": "first event with a choice",
}

Numbers = Mapping[str, Any]


class ReportRow(msgspec.Struct, kw_only=True):
    """One side of one run; times in ms, p50. Figures that a tool does not report are None.

    ttft: what counts as a first token. low, high: 95 % interval of the TTFT's median. request_per_s: of one request at a time where
    concurrency is 1. verdict: of a run directory.
    """

    source: str
    tool: str
    side: str
    load: str = ""
    requests: int = 0
    errors: int = 0
    ttft: str = ""
    ttft_ms: float | None = None
    ttft_low: float | None = None
    ttft_high: float | None = None
    itl_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    decode_tok_s: float | None = None
    completion_tokens: float | None = None
    gates_lost: list[str] = []
    verdict: str = ""


def is_report(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a run directory or a report that `read` knows, by its name or keys."""
    root = Path(path)
    if root.is_dir():
        return _is_run(root) or any((root / name).is_file() for name in NAMES)
    return root.suffix == ".json" and root.is_file() and _reader(_load(root)) is not None


def read(path: str | os.PathLike[str]) -> list[ReportRow]:
    """Return the rows of a run directory or report. Raises UsageError for anything else."""
    root = Path(path)
    if _is_run(root):
        return _own(root)
    file = next((root / name for name in NAMES if (root / name).is_file()), root)
    document = _load(file) if file.is_file() else None
    reader = _reader(document)
    if reader is None or not isinstance(document, dict):
        raise UsageError(
            f"{root} is not a run directory or a report of GuideLLM, AIPerf or vllm bench serve",
            "pass the folder of a finished annie-quant bench, or the report's JSON file",
        )
    return reader(document, printable(str(path), 200))


def _is_run(root: Path) -> bool:
    return any((root / name).is_file() for name in ("bench.json", "run.json"))


def _load(file: Path) -> Any:
    if file.stat().st_size > MAX_REPORT_BYTES:
        return None
    try:
        return decode_json(file.read_bytes(), lenient=True)
    except ValueError:
        return None


def _reader(document: Any) -> Callable[[Numbers, str], list[ReportRow]] | None:
    if not isinstance(document, dict):
        return None
    if isinstance(document.get("benchmarks"), list) and "guidellm_version" in _dict(
        document.get("metadata")
    ):
        return _guidellm
    if "unit" in _dict(document.get("request_latency")):
        return _aiperf
    return _vllm if "median_ttft_ms" in document else None


def _dict(value: Any) -> Numbers:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    finite = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    )
    return float(value) if finite else None


def _at(document: Any, *keys: str) -> float | None:
    """The number at a path of keys; None where there is none."""
    for key in keys:
        document = _dict(document).get(key)
    return _number(document)


def _text(value: Any, default: str) -> str:
    return printable(value, 200) if isinstance(value, str) and value else default


def _guidellm(document: Numbers, source: str) -> list[ReportRow]:
    rows = []
    for benchmark in document["benchmarks"]:
        metrics = _dict(_dict(benchmark).get("metrics"))
        config = _dict(_dict(benchmark).get("config"))
        backend, strategy = _dict(config.get("backend")), _dict(config.get("strategy"))

        def median(name: str, metrics: Numbers = metrics) -> float | None:
            return _at(metrics, name, "successful", "median")

        interval = ("time_to_first_token_ms", "successful", "percentile_cis", "p50")
        e2e_s = median("request_latency")
        rows.append(
            ReportRow(
                source=source,
                tool="GuideLLM",
                side=_text(backend.get("model"), "server"),
                load=_text(strategy.get("type_"), ""),
                requests=int(_at(metrics, "request_totals", "total") or 0),
                errors=int(_at(metrics, "request_totals", "errored") or 0),
                ttft=TTFT["GuideLLM"],
                ttft_ms=median("time_to_first_token_ms"),
                ttft_low=_at(metrics, *interval, "lower"),
                ttft_high=_at(metrics, *interval, "upper"),
                itl_ms=median("inter_token_latency_ms"),
                tpot_ms=median(
                    "inter_token_latency_ms"
                ),  # its own TPOT is the whole request's time per token
                e2e_ms=None if e2e_s is None else 1e3 * e2e_s,
                completion_tokens=median("output_token_count"),
            )
        )
    return rows


def _aiperf(document: Numbers, source: str) -> list[ReportRow]:
    def median(name: str) -> float | None:
        return _at(document, name, "p50")

    config = _dict(document.get("input_config"))
    items = _dict(config.get("models")).get("items")
    names = [_dict(item).get("name") for item in items] if isinstance(items, list) else []
    older = _dict(config.get("endpoint")).get("model_names")
    names += older if isinstance(older, list) else []
    errors = int(_at(document, "error_request_count", "avg") or 0)
    return [
        ReportRow(
            source=source,
            tool="AIPerf",
            side=_text(names[0] if names else None, "server"),
            requests=int(_at(document, "request_count", "avg") or 0) + errors,
            errors=errors,
            ttft=TTFT["AIPerf"],
            ttft_ms=median("time_to_first_token"),
            itl_ms=median("inter_chunk_latency"),
            tpot_ms=median("inter_token_latency"),
            e2e_ms=median("request_latency"),
            decode_tok_s=median("output_token_throughput_per_user"),
            completion_tokens=median("output_sequence_length"),
        )
    ]


def _vllm(document: Numbers, source: str) -> list[ReportRow]:
    completed, failed = (int(_at(document, name) or 0) for name in ("completed", "failed"))
    tokens = _at(document, "total_output_tokens")
    concurrency = _at(document, "max_concurrency")
    return [
        ReportRow(
            source=source,
            tool="vllm bench",
            side=_text(document.get("label") or document.get("model_id"), "server"),
            load=f"@{concurrency:g}" if concurrency and concurrency > 1 else "",
            requests=completed + failed,
            errors=failed,
            ttft=TTFT["vllm bench"],
            ttft_ms=_at(document, "median_ttft_ms"),
            itl_ms=_at(document, "median_itl_ms"),
            tpot_ms=_at(document, "median_tpot_ms"),
            e2e_ms=_at(document, "median_e2el_ms"),
            completion_tokens=tokens / completed if tokens is not None and completed else None,
        )
    ]


# ---- run directories


def _own(root: Path) -> list[ReportRow]:
    if not (root / "bench.json").is_file():
        return _without_records(root)
    bench = read_bench(root)
    records = read_records(root / "records.jsonl") if (root / "records.jsonl").is_file() else []
    fit = timed([r for r in records if not r.warmup])
    rows = []
    for name, side in bench.aggregates.served.items():
        by_load: dict[str, list[RequestRecord]] = {}
        for record in fit:
            if record.backend == name:
                by_load.setdefault(record.load.level.label, []).append(record)
        for load, own in by_load.items() or [("", [])]:
            ttft = _summary(own, "ttft_content_ms")
            row = ReportRow(
                source=str(root),
                tool="annie-quant",
                side=name,
                load=load,
                requests=side.requests if len(by_load) < 2 else len(own),
                errors=side.errors if not load else 0,
                ttft=TTFT["annie-quant"],
                gates_lost=[
                    gate
                    for gate, result in side.gates.items()
                    if result.verdict == "fail" and not result.advisory
                ],
                verdict=(bench.verdict.outcome or "") if name == bench.verdict.candidate else "",
            )
            if ttft:
                row.ttft_ms, row.ttft_low, row.ttft_high = ttft.p50, ttft.low, ttft.high
            for metric in ("itl_ms", "tpot_ms", "e2e_ms", "decode_tok_s", "completion_tokens"):
                setattr(row, metric, getattr(_summary(own, metric), "p50", None))
            rows.append(row)
    return rows


def _summary(records: list[RequestRecord], metric: str) -> MetricSummary | None:
    return summary(values_by_prompt(records, metric))


def _without_records(root: Path) -> list[ReportRow]:
    """The verdict of a run that has no benchmark (an evaluation, a search)."""
    run = decode(Run, root / "run.json")
    side = run.verdict.candidate or next(iter(run.aggregates.offline), "run")
    return [
        ReportRow(
            source=str(root), tool="annie-quant", side=side, verdict=run.verdict.outcome or ""
        )
    ]
