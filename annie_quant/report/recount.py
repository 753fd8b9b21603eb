"""Served figures counted again from records.jsonl, and compared with those that run.json reports.

A report whose figures cannot be had from its records is worth nothing, so this check runs in every build and its
outcome is printed. Which requests count is the benchmark's rule; what they come to is counted here in code of its own
(repeats of a greedy prompt are one answer).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from annie_quant.judge.metrics import COMPARED, METRICS
from annie_quant.report import typed
from annie_quant.report.format import number
from annie_quant.schema import Load

Row = dict[str, Any]
SOONEST = 0.8  # of the server's own time; the two clocks may differ a little


def label(record: Row) -> str:
    rate = record["rate_per_s"]
    load = Load(0, rate) if rate else Load(record["concurrency"])
    return str(record["workload"]) + load.label


def grouped(records: Iterable[Row], key: str | Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Records by a field, or by a function's value."""
    groups: dict[Any, list[Row]] = defaultdict(list)
    for record in records:
        groups[key(record) if callable(key) else record[key]].append(record)
    return dict(groups)


def timed(measured: list[Row]) -> list[Row]:
    """The requests whose times count, by the benchmark's own rule (failed, cold, stalled and mis-stamped ones do not)."""
    from annie_quant.bench.aggregate import timed as fit

    records = typed.records(measured)
    counted = {id(record) for record in fit(records)}
    return [row for row, record in zip(measured, records, strict=True) if id(record) in counted]


def impossible(measured: list[Row]) -> int:
    """Requests that ended, by the client's clock, well before the server's own account of its work allows."""
    known = [r for r in measured if r["server_ms"] and r.get("e2e_ms") is not None and not r["error"]]
    return sum(r["e2e_ms"] < SOONEST * r["server_ms"] for r in known)


def values(records: Iterable[Row], metric: str) -> list[float]:
    """All values of a metric in the order of the records; itl_ms gives every gap of every stream."""
    found: list[float] = []
    for record in records:
        value = record.get(METRICS[metric].field)
        if value is not None and not (METRICS[metric].server_counted and record["tokens_estimated"]):
            found += value if isinstance(value, list) else [value]
    return found


def gate_counts(records: Iterable[Row], greedy: Callable[[str], bool]) -> dict[str, tuple[int, int]]:
    """{gate: (passes, n)}; where `greedy(workload)`, repeats of a prompt are one answer, right if always right."""
    answers: dict[tuple, bool] = {}
    for index, record in enumerate(records):
        once = None if greedy(record["workload"]) else index
        for gate, passed in record["checks"].items():
            unit = (gate, record["workload"], record["case"], record["turn"], once)
            answers[unit] = answers.get(unit, True) and passed
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for unit, passed in answers.items():
        counts[unit[0]][0] += passed
        counts[unit[0]][1] += 1
    return {gate: (k, n) for gate, (k, n) in counts.items()}


def greedy_workloads(inputs: list[dict[str, Any]]) -> Callable[[str], bool]:
    """A predicate from inputs.json; a workload that it does not name counts as greedy, as the shipped ones are."""
    temperature = {w["name"]: w["temperature"] for w in inputs}
    return lambda workload: not temperature.get(workload)


def served(measured: list[Row], greedy: Callable[[str], bool]) -> dict[str, Any]:
    """run.json's `served` as far as records alone give it: gates and percentiles, no intervals of medians."""
    clocked = grouped(timed(measured), "backend")
    return {
        backend: {
            "gates": {gate: _judged(gate, k, n) for gate, (k, n) in gate_counts(rows, greedy).items()},
            "workloads": {
                workload: {"n": len(some)} | {m: found for m in COMPARED if (found := _summary(values(some, m)))}
                for workload, some in grouped(clocked.get(backend, []), label).items()
            },
        }
        for backend, rows in grouped(measured, "backend").items()
    }


def _judged(gate: str, passes: int, n: int) -> dict[str, Any]:
    from annie_quant.judge import wilson
    from annie_quant.judge.gates import GATES, tabulate

    if gate in GATES:
        row: dict[str, Any] = msgspec.to_builtins(tabulate([{gate: i < passes} for i in range(n)])[gate])
        return row
    low, high = wilson(passes, n)
    return {"passes": passes, "n": n, "low": low, "high": high, "verdict": "undecided"}


def _summary(found: list[float]) -> dict[str, Any]:
    points = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    return {"n": len(found)} | {name: quantile(found, at) for name, at in points} if found else {}


def check(
    reported: Mapping[str, Any], measured: list[Row], greedy: Callable[[str], bool], tolerance: float = 1e-3
) -> dict[str, Any]:
    """{"compared": number of figures, "differ": [{"what", "reported", "counted"}]}"""
    compared, differ = 0, []

    def compare(what: str, said: Any, counted: Any) -> None:
        nonlocal compared
        a, b = number(said), number(counted)
        if a is None:
            return
        compared += 1
        if b is None or abs(a - b) > tolerance * max(1.0, abs(a)):
            differ.append({"what": what, "reported": said, "counted": counted})

    everything, clocked = grouped(measured, "backend"), grouped(timed(measured), "backend")
    for backend, data in reported.items():
        counts = gate_counts(everything.get(backend, []), greedy)
        for gate, row in data["gates"].items():
            passes, n = counts.get(gate, (None, None))
            compare(f"{backend}: {gate}, passes", row.get("passes"), passes)
            compare(f"{backend}: {gate}, n", row.get("n"), n)
        by_label = grouped(clocked.get(backend, []), label)
        for workload, row in data["workloads"].items():
            for metric in COMPARED:
                seen = row.get(metric)
                if seen is not None:
                    compare(
                        f"{backend}: {workload}, {metric} p50",
                        seen.get("p50"),
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
