"""A run against a stored one: what got worse for sure, backend by backend, prompt by prompt."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from annie_quant.bench.aggregate import COMPARED, labelled, timed, values_by_prompt
from annie_quant.bench.store import read_records
from annie_quant.errors import UsageError
from annie_quant.files import read_json
from annie_quant.judge.paired import LEVEL, compare, holm
from annie_quant.pipeline.run_directory import check_schema

HIGHER_IS_BETTER = ("decode_tok_s",)
NEITHER = ("completion_tokens",)
LEAST_LOSS = 0.02  # of the stored median: less is nothing to stop a release for, however sure


def regression(before: str | os.PathLike, after: str | os.PathLike, least_loss: float = LEAST_LOSS) -> dict[str, Any]:
    """Compare two run directories over the backends, workloads and prompts that they share.

    Returns {"worse", "better", "rows", "gates_lost"}: rows as in comparisons (a: the stored run, b: the new one) with
    "backend" and "change" (share of the stored median); worse and better hold the significant ones beyond `least_loss`;
    gates_lost: deciding gates that did not fail before and fail now. Raises UsageError when nothing is shared.
    """
    sides = [
        timed([r for r in read_records(Path(f) / "records.jsonl") if not r.get("warmup")]) for f in (before, after)
    ]
    runs = [_served(Path(f) / "bench.json") for f in (before, after)]
    rows = [row for backend in runs[0] if backend in runs[1] for row in _rows(sides, backend)]
    if not rows:
        raise UsageError(
            f"{before} and {after} share no backend, workload and prompt", "run with the same backends and workloads"
        )
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row |= {"p_holm": p, "significant": p is not None and p < LEVEL}
    sure = [
        row for row in rows if row["significant"] and abs(row["change"]) > least_loss and row["metric"] not in NEITHER
    ]
    worse = [row for row in sure if (row["change"] < 0) == (row["metric"] in HIGHER_IS_BETTER)]
    return {
        "worse": worse,
        "better": [row for row in sure if row not in worse],
        "rows": rows,
        "gates_lost": _gates_lost(*runs),
    }


def _served(path: Path) -> dict[str, Any]:
    found = read_json(path)
    check_schema(found, path)
    served: dict[str, Any] = found["aggregates"]["served"]
    return served


def _rows(sides: Sequence[Sequence[Mapping[str, Any]]], backend: str) -> list[dict[str, Any]]:
    before, after = (labelled(r for r in rows if r["backend"] == backend) for rows in sides)
    found = []
    for label in before:
        for metric in COMPARED if label in after else ():
            row = compare(values_by_prompt(before[label], metric), values_by_prompt(after[label], metric))
            if row["n_prompts"] and row["median_a"]:
                change = row["median_difference"] / row["median_a"]
                found.append({"backend": backend, "workload": label, "metric": metric, **row, "change": change})
    return found


def _gates_lost(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"backend": backend, "gate": gate, "before": then, "after": now}
        for backend, side in before.items()
        for gate, then in side["gates"].items()
        for now in [after.get(backend, {}).get("gates", {}).get(gate)]
        if now and not now["advisory"] and then["verdict"] != "fail" and now["verdict"] == "fail"
    ]


def losses(found: Mapping[str, Any]) -> list[str]:
    """What got worse, a line each, for people."""
    lines = [
        f"worse: {row['backend']} {row['workload']} {row['metric']} {row['median_a']:.4g} → {row['median_b']:.4g} "
        f"({row['change']:+.1%}, p {row['p_holm']:.2g} after Holm, {row['n_prompts']} prompts)"
        for row in found["worse"]
    ]
    return lines + [
        f"gate lost: {row['backend']} {row['gate']} {row['before']['passes']}/{row['before']['n']} → "
        f"{row['after']['passes']}/{row['after']['n']}"
        for row in found["gates_lost"]
    ]
