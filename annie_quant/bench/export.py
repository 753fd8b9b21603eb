"""A benchmark in the forms that others read: results.csv, vLLM's flat keys, AIPerf's summary, the founding results JSON,
Prometheus text.

vLLM's keys are those of `vllm bench serve --save-result`; TTFT there means content, as everywhere here. The backends
take turns, so a backend's duration is the time that its own requests took, not the wall clock of the run.
"""

from __future__ import annotations

import csv
import io
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from annie_quant.bench.aggregate import values_by_prompt
from annie_quant.bench.confounds import first_ms
from annie_quant.bench.load_profile import alone
from annie_quant.bench.store import read_records
from annie_quant.files import read_json, write_json, write_text

Row = Mapping[str, Any]
COLUMNS = ("backend", "workload", "metric", "n", "n_prompts", "p50", "p90", "p99", "mean", "low", "high")
_VLLM = {"ttft": "ttft_content_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "e2e_ms"}


def export(folder: str | os.PathLike) -> list[Path]:
    """Write results.csv and exports/ of a finished run directory; returns the paths."""
    root = Path(folder)
    run = read_json(root / "bench.json")
    records = [r for r in read_records(root / "records.jsonl") if not r.get("warmup")]
    written = [root / "results.csv", root / "exports" / "founding.json", root / "exports" / "metrics.prom"]
    write_text(written[0], results_csv(run["aggregates"]))
    write_json(written[1], founding(run, records))
    write_text(written[2], prometheus(run["aggregates"]))
    for name in run["backends"]:
        own = [r for r in records if r["backend"] == name]
        for kind, made in (("vllm", vllm(run, own, name)), ("aiperf", aiperf(own))):
            written.append(root / "exports" / f"{kind}_{name}.json")
            write_json(written[-1], made)
    return written


def results_csv(aggregates: Mapping[str, Any]) -> str:
    """A row for each backend, workload and metric; gates as metric "gate:NAME" with the share in `mean`."""
    out = io.StringIO()
    table = csv.DictWriter(out, COLUMNS, lineterminator="\n", restval="")
    table.writeheader()
    for backend, side in aggregates["served"].items():
        for workload, metrics in side["workloads"].items():
            for metric, seen in metrics.items():
                if isinstance(seen, Mapping):
                    table.writerow(
                        {"backend": backend, "workload": workload, "metric": metric}
                        | {k: seen[k] for k in COLUMNS[3:] if seen.get(k) is not None}
                    )
        for gate, row in side["gates"].items():
            table.writerow(
                {
                    "backend": backend,
                    "workload": "all",
                    "metric": f"gate:{gate}",
                    "n": row["n"],
                    "mean": row["passes"] / row["n"],
                    "low": row["low"],
                    "high": row["high"],
                }
            )
    return out.getvalue()


def vllm(run: Mapping[str, Any], rows: Sequence[Row], name: str) -> dict[str, Any]:
    """vLLM's flat result of one backend, over all its workloads, one request in flight."""
    import numpy as np

    single = [r for r in rows if alone(r) and not r.get("cold")]
    good = [r for r in single if not r.get("error")]
    duration = sum(r["e2e_ms"] for r in good if r.get("e2e_ms")) / 1e3
    tokens_in = sum((r.get("usage") or {}).get("prompt_tokens") or 0 for r in good)
    tokens_out = sum(r.get("completion_tokens") or 0 for r in good)
    said = run["backends"][name]
    flat: dict[str, Any] = {
        "date": run["environment"]["time"],
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": name,
        "model_id": said.get("model"),
        "tokenizer_id": said.get("model"),
        "num_prompts": len(single),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 1,
        "duration": duration,
        "completed": len(good),
        "failed": len(single) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": _over(len(good), duration),
        "output_throughput": _over(tokens_out, duration),
        "total_token_throughput": _over(tokens_in + tokens_out, duration),
    }
    for key, metric in _VLLM.items():
        found = values_by_prompt(good, metric)
        values = np.concatenate([np.asarray(v, dtype=np.float64) for v in found.values()]) if found else np.zeros(0)
        for label, figure in (
            ("mean", np.mean),
            ("median", np.median),
            ("std", np.std),
            ("p99", lambda v: np.percentile(v, 99)),
        ):
            flat[f"{label}_{key}_ms"] = float(figure(values)) if values.size else None
    return flat


def aiperf(rows: Sequence[Row]) -> dict[str, Any]:
    """The summary that GenAI-Perf and AIPerf write (profile_export_*.json): a metric's unit, mean and percentiles.

    A first token there is one of any kind; content TTFT, which matters to a listener, is in the other files.
    """
    import numpy as np

    good = [r for r in rows if alone(r) and not r.get("cold") and not r.get("error")]
    seconds = sum(r["e2e_ms"] for r in good if r.get("e2e_ms")) / 1e3
    series: dict[str, tuple[str, list[float]]] = {
        "time_to_first_token": ("ms", [v for r in good if (v := first_ms(r)) is not None]),
        "inter_token_latency": ("ms", [r["tpot_ms"] for r in good if r.get("tpot_ms") is not None]),
        "request_latency": ("ms", [r["e2e_ms"] for r in good if r.get("e2e_ms") is not None]),
        "output_sequence_length": ("tokens", [r["completion_tokens"] for r in good if r.get("completion_tokens")]),
        "input_sequence_length": ("tokens", [t for r in good if (t := (r.get("usage") or {}).get("prompt_tokens"))]),
    }
    summary: dict[str, Any] = {}
    for name, (unit, values) in series.items():
        if values:
            data = np.asarray(values, dtype=np.float64)
            points = {f"p{q}": float(np.percentile(data, q)) for q in (1, 5, 25, 50, 75, 90, 95, 99)}
            extremes = {"min": float(data.min()), "max": float(data.max())}
            summary[name] = {"unit": unit, "avg": float(data.mean()), **points, **extremes, "std": float(data.std())}
    tokens = sum(r.get("completion_tokens") or 0 for r in good)
    summary["output_token_throughput"] = {"unit": "tokens/sec", "avg": _over(tokens, seconds)}
    summary["request_throughput"] = {"unit": "requests/sec", "avg": _over(len(good), seconds)}
    return summary


def _over(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds else None


def founding(run: Mapping[str, Any], records: Sequence[Row]) -> dict[str, Any]:
    """The founding benchmark's results: a test a workload (or turn), its runs' figures, gates as "5/5"."""
    config, served = run["config"], run["aggregates"]["served"]
    tests: dict[str, dict[str, list[Row]]] = {name: defaultdict(list) for name in run["backends"]}
    talks = {r["workload"] for r in records if r["turn"]}
    for row in records:
        if alone(row):
            turn = f"_{row['turn'] + 1}" if row["workload"] in talks else ""
            tests[row["backend"]][row["workload"] + turn].append(row)
    return {
        "benchmark": "nvfp4_vs_q4km",
        "date": run["environment"]["time"],
        "methodology": {
            "thinking": {name: known["thinking"] for name, known in config["workloads"].items()},
            "warmup_runs": config["warmup"],
            "measured_runs": config["runs"],
            "token_counting": "usage.completion_tokens",
            "ttft": "first content token",
            "order": "randomised ABBA blocks",
            "prefix_cache": config["prefix_cache"],
        },
        "confounds": [f["message"] for f in run["aggregates"]["confounds"] if f["severity"] == "confound"],
        "backends": {
            name: {"url": said["url"], "model": said["model"], "runtime": said["runtime"]}
            for name, said in run["backends"].items()
        },
        "results": {
            name: {test: _founding_test(rows) for test, rows in sorted(found.items())} for name, found in tests.items()
        },
        "quality_gates": {
            name: {gate: f"{row['passes']}/{row['n']}" for gate, row in side["gates"].items()}
            for name, side in served.items()
        },
        "verdict": run["verdict"]["sentence"],
    }


def _founding_test(rows: Sequence[Row]) -> dict[str, Any]:
    import numpy as np

    columns = {
        "ttft_ms": "first_content_ms",
        "tool_ms": "first_tool_ms",
        "total_ms": "e2e_ms",
        "tokens": "completion_tokens",
        "tok_per_s": "decode_tok_s",
    }
    test: dict[str, Any] = {}
    for key, field in columns.items():
        values = [r[field] for r in rows if r.get(field) is not None and not r.get("error")]
        if values:
            test[f"{key}_p50"] = float(np.median(values))
    test["runs"] = [
        {key: r.get(field) for key, field in columns.items()}
        | {
            "cold_start": bool(r.get("cold")),
            "error": r.get("error") or None,
            "response": r.get("text") or "",
            "tool_calls": [c.get("name") for c in r.get("tool_calls") or ()],
        }
        for r in rows
    ]
    return test


def prometheus(aggregates: Mapping[str, Any]) -> str:
    """Gauges in Prometheus' text format, times in seconds as its conventions ask."""
    lines = []
    for metric, name in (
        ("ttft_content_ms", "ttft_content_seconds"),
        ("itl_ms", "itl_seconds"),
        ("e2e_ms", "e2e_seconds"),
    ):
        lines += [
            f"# HELP annie_quant_{name} {metric.removesuffix('_ms')} by workload",
            f"# TYPE annie_quant_{name} gauge",
        ]
        for backend, side in aggregates["served"].items():
            for workload, metrics in side["workloads"].items():
                for quantile, key in (("0.5", "p50"), ("0.9", "p90"), ("0.99", "p99")):
                    if metric in metrics:
                        labels = f'backend="{_escape(backend)}",workload="{_escape(workload)}",quantile="{quantile}"'
                        lines.append(f"annie_quant_{name}{{{labels}}} {metrics[metric][key] / 1e3:.9g}")
    lines += ["# HELP annie_quant_gate_share share of answers that pass a gate", "# TYPE annie_quant_gate_share gauge"]
    for backend, side in aggregates["served"].items():
        for gate, row in side["gates"].items():
            lines.append(
                f'annie_quant_gate_share{{backend="{_escape(backend)}",gate="{gate}"}} {row["passes"] / row["n"]:.9g}'
            )
    return "\n".join(lines) + "\n"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
