"""The sanitized run as the types that judge and bench take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from annie_quant.judge import wilson
from annie_quant.schema import Aggregates, RequestRecord

if TYPE_CHECKING:
    from annie_quant.report.run import Run


def records(rows: Iterable[dict[str, Any]]) -> list[RequestRecord]:
    """Return sanitized records as RequestRecords, in the same order."""
    names = RequestRecord.__struct_fields__
    return [RequestRecord(**{"id": ""} | {k: v for k, v in row.items() if k in names}) for row in rows]


def aggregates(run: Run) -> Aggregates:
    """Return what decisions need of a run: gates, memory, comparisons and labels, with offline sides from eval/."""
    served = {
        _backend(side.key): {
            "model": side.model,
            "runtime": side.data.get("runtime"),
            "gates": _gates(side.gates),
            "memory_bytes": side.data["memory_bytes"] or None,
        }
        for side in run.of("served")
    }
    offline: dict[str, dict[str, Any]] = {}
    for side in run.of("offline"):
        offline.setdefault(side.model, {})[side.key.rsplit("/", 1)[1]] = {"gates": _gates(side.gates)}
    document = {
        "served": served,
        "offline": offline,
        "comparisons": run.aggregates["comparisons"],
        "models": run.models,
    }
    return msgspec.convert(document, Aggregates, strict=False)


def _backend(key: str) -> str:
    return key.split("/", 1)[1]


def _gates(gates: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Gate rows with the interval that an older or edited document may lack."""
    complete = {}
    for gate, row in gates.items():
        low, high = wilson(row["passes"], int(row["n"]))
        defaults = {"low": low, "high": high, "threshold": 0.0}
        complete[gate] = row | {k: v for k, v in defaults.items() if row.get(k) is None}
    return complete
