"""Served figures counted again from records.jsonl, and compared with those that run.json reports.

A report whose figures cannot be had from its records is worth nothing, so this check runs in every build and its
outcome is printed. It follows the rules the benchmark states (no warm-ups; failed requests count in gates only; cold
and stalled requests are left out of times; repeats of a greedy prompt are one answer) in code of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from annie_quant.report.text import number

Row = dict[str, Any]
# run.json's name of a metric → the field of a record
METRICS = {
    "ttft_content_ms": "first_content_ms",
    "ttft_tool_ms": "first_tool_ms",
    "tpot_ms": "tpot_ms",
    "e2e_ms": "e2e_ms",
    "decode_tok_s": "decode_tok_s",
    "completion_tokens": "completion_tokens",
    "itl_ms": "itl_ms",
}
SERVER_COUNTED = ("tpot_ms", "decode_tok_s", "completion_tokens")


def label(record: Row) -> str:
    level = number(record.get("concurrency")) or 1
    return str(record["workload"]) + (f"@{level:.0f}" if level > 1 else "")


def grouped(records: Iterable[Row], key: Any) -> dict[Any, list[Row]]:
    """Records by a field's name or a function's value."""
    groups: dict[Any, list[Row]] = defaultdict(list)
    for record in records:
        groups[key(record) if callable(key) else record.get(key)].append(record)
    return dict(groups)


def timed(measured: list[Row]) -> list[Row]:
    """The requests whose times count."""
    from annie_quant.bench.confounds import outliers

    sound = [r for r in measured if isinstance(r.get("turn"), int)]
    stalls = {id(r) for r in outliers(sound)}
    return [r for r in sound if not r.get("cold") and not r.get("error") and id(r) not in stalls]


def values(records: Iterable[Row], metric: str) -> list[float]:
    """All values of a metric in the order of the records; itl_ms gives every gap of every stream."""
    found: list[float] = []
    for record in records:
        if metric in SERVER_COUNTED and record.get("tokens_estimated"):
            continue
        value = record.get(METRICS[metric])
        found += [v for v in (map(number, value) if isinstance(value, list) else [number(value)]) if v is not None]
    return found


def gate_counts(records: Iterable[Row], greedy: Any) -> dict[str, tuple[int, int]]:
    """{gate: (passes, n)}; where `greedy(workload)`, repeats of a prompt are one answer, right if always right."""
    answers: dict[tuple, bool] = {}
    for index, record in enumerate(records):
        checks = record.get("checks")
        once = None if greedy(record["workload"]) else index
        for gate, passed in checks.items() if isinstance(checks, dict) else ():
            unit = (gate, record["workload"], record.get("case"), record.get("turn"), once)
            answers[unit] = answers.get(unit, True) and bool(passed)
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for unit, passed in answers.items():
        counts[unit[0]][0] += passed
        counts[unit[0]][1] += 1
    return {gate: (k, n) for gate, (k, n) in counts.items()}


def greedy_workloads(inputs: Mapping[str, Any]) -> Any:
    """A predicate from inputs.json; a workload that it does not name counts as greedy, as the shipped ones are."""
    rows = inputs.get("workloads")
    temperature = {
        w.get("name"): w.get("temperature", 0) for w in (rows if isinstance(rows, list) else []) if isinstance(w, dict)
    }
    return lambda workload: not temperature.get(workload)


def check(served: Mapping[str, Any], measured: list[Row], greedy: Any, tolerance: float = 1e-3) -> dict[str, Any]:
    """{"compared": number of figures, "differ": [{"what", "reported", "counted"}]}"""
    compared, differ = 0, []

    def compare(what: str, reported: Any, counted: Any) -> None:
        nonlocal compared
        a, b = number(reported), number(counted)
        if a is None:
            return
        compared += 1
        if b is None or abs(a - b) > tolerance * max(1.0, abs(a)):
            differ.append({"what": what, "reported": reported, "counted": counted})

    everything, clocked = grouped(measured, "backend"), grouped(timed(measured), "backend")
    for backend, data in served.items():
        counts = gate_counts(everything.get(backend, []), greedy)
        for gate, row in (data.get("gates") or {}).items():
            passes, n = counts.get(gate, (None, None))
            compare(f"{backend}: {gate}, passes", row.get("passes"), passes)
            compare(f"{backend}: {gate}, n", row.get("n"), n)
        by_label = grouped(clocked.get(backend, []), label)
        for workload, row in (data.get("workloads") or {}).items():
            for metric in METRICS:
                reported = row.get(metric) if isinstance(row, dict) else None
                if isinstance(reported, dict):
                    compare(
                        f"{backend}: {workload}, {metric} p50",
                        reported.get("p50"),
                        quantile(values(by_label.get(workload, []), metric), 0.5),
                    )
    return {"compared": compared, "differ": differ}


def quantile(found: list[float], at: float) -> float | None:
    """Linear between order statistics, as NumPy's default."""
    if not found:
        return None
    ordered = sorted(found)
    place = at * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
