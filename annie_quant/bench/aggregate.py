"""Records → what the report shows: percentiles, gates, paired comparisons, turns, verbosity, crossover.

Warm-ups, cold starts and failed requests are left out of every timing; failed requests count in the gates.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from annie_quant.bench import confounds as confound_checks
from annie_quant.bench.confounds import impossible, outliers
from annie_quant.bench.load_profile import alone, load_of
from annie_quant.bench.store import read_records
from annie_quant.errors import UsageError
from annie_quant.files import read_json
from annie_quant.judge.intervals import median_interval, wilson
from annie_quant.judge.paired import LEVEL, compare, holm
from annie_quant.judge.tabulation import count, tabulate

Row = Mapping[str, Any]
Values = dict[Hashable, list[float]]

# Name in the aggregates → field of a record. ITL is pooled gap by gap; the rest is one value a request.
METRICS = {
    "ttft_content_ms": "first_content_ms",
    "ttft_reasoning_ms": "first_reasoning_ms",
    "ttft_tool_ms": "first_tool_ms",
    "first_byte_ms": "first_byte_ms",
    "itl_ms": "itl_ms",
    "tpot_ms": "tpot_ms",
    "e2e_ms": "e2e_ms",
    "decode_tok_s": "decode_tok_s",
    "completion_tokens": "completion_tokens",
}
COUNTED = ("tpot_ms", "decode_tok_s", "completion_tokens")  # these need the server's own token counts
COMPARED = ("ttft_content_ms", "ttft_tool_ms", "itl_ms", "tpot_ms", "e2e_ms", "decode_tok_s", "completion_tokens")
TTFT_LIMIT_MS, DECODE_LEAST = 120.0, 25.0


def aggregate(folder: str | os.PathLike) -> dict[str, Any]:
    """The aggregates of a run directory, made anew from its records.jsonl, inputs.json and bench.json."""
    root = Path(folder)
    try:
        run = read_json(root / "bench.json")
        records = read_records(root / "records.jsonl")
    except FileNotFoundError as error:
        raise UsageError(
            f"{root} holds no finished benchmark ({Path(error.filename).name} is missing)",
            "run annie-quant bench first",
        ) from error
    config = run["config"]
    return aggregate_records(
        records,
        config["workloads"],
        run["backends"],
        reference=config["reference"],
        seed=config["seed"],
        memories=run["memory"],
        ended=run["ended"],
    )


def aggregate_records(
    records: Iterable[Row],
    asked: Mapping[str, Mapping[str, Any]],
    identities: Mapping[str, Mapping[str, Any]],
    *,
    reference: str | None = None,
    seed: int = 0,
    memories: Mapping[str, Any] | None = None,
    ended: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """{"served", "comparisons", "turns", "turn_ratio", "crossover", "tool_surface", "confounds"} as in run.json.

    asked: {workload: {"thinking", "temperature", ...}}. identities: {backend: what it says of itself}. ended: how the
    run ended, {"unasked": visits that a budget or an early stop left out, "stopped": which look decided, or None,
    "prefix_cache"}.
    """
    rows = list(records)
    measured = [r for r in rows if not r.get("warmup")]
    fit = timed(measured)
    served = {
        name: _served(name, said, measured, fit, asked, seed)
        | {
            "verbosity": _verbosity(fit, reference, name),
            "memory_bytes": _memory((memories or {}).get(name)),
            "memory": (memories or {}).get(name),
            "energy": _energy(r for r in measured if r["backend"] == name),
        }
        for name, said in identities.items()
    }
    turns = {name: _turns([r for r in fit if r["backend"] == name], seed) for name in served}
    return {
        "served": served,
        "comparisons": _comparisons(fit, list(served), seed),
        "turns": turns,
        "turn_ratio": {name: ratio for name, points in turns.items() if (ratio := _turn_ratio(points))},
        "crossover": [row for a, b in itertools.combinations(served, 2) if (row := _crossover(served, a, b))],
        "tool_surface": {name: table for name in served if (table := tool_surface(measured, name))},
        "confounds": confound_checks.check(identities, rows, {"workloads": asked, **(ended or {})}),
    }


def timed(measured: Sequence[Row]) -> list[Row]:
    """The requests whose times count: no cold starts, no stalls, no failures, no stamps that cannot be."""
    whole = [r for r in measured if not r.get("cold") and not r.get("error") and not impossible(r)]
    stalls = {id(r) for r in outliers(whole)}
    return [r for r in whole if id(r) not in stalls]


def _served(
    name: str,
    said: Mapping[str, Any],
    measured: Sequence[Row],
    fit: Sequence[Row],
    asked: Mapping[str, Mapping[str, Any]],
    seed: int,
) -> dict[str, Any]:
    own = [r for r in measured if r["backend"] == name]
    fit = [r for r in fit if r["backend"] == name]
    greedy = {w for w, known in asked.items() if not known.get("temperature")}
    aloud = {w for w, known in asked.items() if known.get("thinking")}
    return {
        "model": said.get("meta", {}).get("model") or said.get("model"),
        "runtime": said.get("runtime"),
        "requests": len(own),
        "errors": sum(bool(r.get("error")) for r in own),
        "left_out_of_timings": len(own) - len(fit),
        "gates": tabulate(_gate_rows(own, greedy)),
        "speed_gates": _speed_gates(fit, aloud, seed),
        "workloads": _workloads(fit, seed),
    }


def _turn_ratio(points: Sequence[Mapping[str, Any]]) -> float | None:
    """Content TTFT of the last turn over that of the first."""
    if len(points) < 2 or not points[0]["ttft_content_ms"] or not points[-1]["ttft_content_ms"]:
        return None
    return points[-1]["ttft_content_ms"] / points[0]["ttft_content_ms"]


def _gate_rows(rows: Sequence[Row], greedy: Collection[str]) -> list[dict[str, bool]]:
    """One row of checks an answer. Greedy answers to one prompt are one answer: it passes if it did every time."""
    prompts: dict[tuple, dict[str, bool]] = {}
    for index, row in enumerate(rows):
        unit: tuple = (row["workload"], row["case"], row["turn"])
        if row["workload"] not in greedy:
            unit = (*unit, index)
        merged = prompts.setdefault(unit, {})
        for gate, passed in (row.get("checks") or {}).items():
            merged[gate] = merged.get(gate, True) and bool(passed)
    return list(prompts.values())


def gate_counts(rows: Sequence[Row], greedy: Collection[str]) -> dict[str, tuple[int, int]]:
    """{gate: (passes, n)} of one backend's records, repeats of a greedy prompt counted once."""
    return count(_gate_rows(rows, greedy))


def tool_surface(rows: Iterable[Row], name: str) -> list[dict[str, Any]]:
    """Right calls against the number of tools on offer: a row a number, with Wilson's interval, and whether it is
    surely worse than the fewest (exact McNemar over the same prompts, Holm over the numbers)."""
    from scipy.stats import binomtest

    levels: dict[int, dict[str, bool]] = defaultdict(dict)
    for row in rows:
        passed = (row.get("checks") or {}).get("tool_call")
        if row["workload"] == "tool_surface" and row["backend"] == name and passed is not None:
            prompt = row["case"].rpartition("-")[2]  # the same number at every level
            levels[row["n_tools"]][prompt] = levels[row["n_tools"]].get(prompt, True) and passed
    table: list[dict[str, Any]] = []
    for n_tools, answers in sorted(levels.items()):
        fewest = levels[min(levels)]
        lost = sum(fewest[p] and not answers[p] for p in answers if p in fewest)
        won = sum(answers[p] and not fewest[p] for p in answers if p in fewest)
        low, high = wilson(sum(answers.values()), len(answers))
        p = binomtest(lost, lost + won, alternative="greater").pvalue if lost + won else 1.0
        table.append(
            {
                "n_tools": n_tools,
                "passes": sum(answers.values()),
                "n": len(answers),
                "low": low,
                "high": high,
                "p": float(p),
            }
        )
    for row, p in zip(table, holm([row["p"] for row in table]), strict=True):
        row["worse"] = p is not None and p < LEVEL
    return table


def _energy(rows: Iterable[Row]) -> dict[str, Any] | None:
    """Joules over a backend's measured requests, and for a token; None where nothing counted them."""
    spent = [(r["energy_j"], r.get("completion_tokens") or 0) for r in rows if r.get("energy_j") is not None]
    if not spent:
        return None
    joules, tokens = sum(j for j, _ in spent), sum(t for _, t in spent)
    return {"joules": joules, "completion_tokens": tokens, "joules_per_token": joules / tokens if tokens else None}


def values_by_prompt(rows: Iterable[Row], metric: str) -> Values:
    """{(workload, case, turn): values}; token metrics only where the server itself counted."""
    field = METRICS[metric]
    found: Values = defaultdict(list)
    for row in rows:
        value = row.get(field)
        if value is None or (metric in COUNTED and row.get("tokens_estimated")):
            continue
        found[row["workload"], row["case"], row["turn"]] += value if isinstance(value, list) else [value]
    return {key: values for key, values in found.items() if values}


def summary(by_prompt: Values, seed: int = 0) -> dict[str, Any] | None:
    """p50, p90, p99 and mean over all values; low and high: bootstrap interval of the median, by prompts."""
    import numpy as np

    if not by_prompt:
        return None
    pooled = np.concatenate([np.asarray(v, dtype=np.float64) for v in by_prompt.values()])
    p50, p90, p99 = np.percentile(pooled, [50, 90, 99])
    low, high = median_interval([statistics.median(v) for v in by_prompt.values()], seed=seed)
    return {
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "mean": float(pooled.mean()),
        "low": low,
        "high": high,
        "n": int(pooled.size),
        "n_prompts": len(by_prompt),
    }


def _workloads(rows: Sequence[Row], seed: int) -> dict[str, Any]:
    found = {}
    for label, group in labelled(rows).items():
        metrics = {m: s for m in METRICS if (s := summary(values_by_prompt(group, m), seed))}
        found[label] = {"n": len(group), **metrics}
    return found


def labelled(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by workload; another load than one in flight makes a label of its own: 'greeting@8', 'greeting@2/s'."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["workload"] + load_of(row).label].append(row)
    return dict(sorted(groups.items()))


def _speed_gates(rows: Sequence[Row], aloud: set[str], seed: int) -> dict[str, Any]:
    """The founding limits (content TTFT <= 120 ms, decode >= 25 tok/s) on the median, one in flight, thinking off."""
    single = [r for r in rows if r["workload"] not in aloud and alone(r)]
    found = {}
    for gate, metric, limit in (("ttft", "ttft_content_ms", TTFT_LIMIT_MS), ("decode", "decode_tok_s", DECODE_LEAST)):
        seen = summary(values_by_prompt(single, metric), seed)
        if seen is None:
            continue
        low, high = (seen["low"], seen["high"]) if seen["low"] is not None else (seen["p50"], seen["p50"])
        good, bad = (high <= limit, low > limit) if gate == "ttft" else (low >= limit, high < limit)
        found[gate] = {
            "metric": metric,
            "value": seen["p50"],
            "low": seen["low"],
            "high": seen["high"],
            "n": seen["n"],
            "limit": limit,
            "verdict": "pass" if good else "fail" if bad else "undecided",
        }
    return found


def _verbosity(rows: Sequence[Row], reference: str | None, name: str) -> dict[str, Any] | None:
    """Tokens of an answer against the reference's to the same prompt: the median of the ratios."""
    import numpy as np

    if reference is None or reference == name:
        return None
    own = values_by_prompt((r for r in rows if r["backend"] == name), "completion_tokens")
    theirs = values_by_prompt((r for r in rows if r["backend"] == reference), "completion_tokens")
    ratios = [float(np.median(own[k]) / np.median(theirs[k])) for k in own if k in theirs and np.median(theirs[k]) > 0]
    if not ratios:
        return None
    low, high = median_interval(ratios)
    return {
        "reference": reference,
        "ratio": float(np.median(ratios)),
        "low": low,
        "high": high,
        "n_prompts": len(ratios),
    }


def _memory(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The one figure for the table: NVML's per process, else resident, else what the whole machine uses."""
    if not found:
        return None
    first = ("gpu_process_bytes", "process_rss_bytes", "system_used_bytes")
    source = next((name for name in first if found["idle"].get(name) is not None), None)
    return {level: figures.get(source) for level, figures in found.items()} | {"source": source} if source else None


def _comparisons(rows: Sequence[Row], names: Sequence[str], seed: int) -> list[dict[str, Any]]:
    table = []
    for a, b in itertools.combinations(names, 2):
        table += _compare_pair(rows, a, b, seed)
    return table


def _compare_pair(rows: Sequence[Row], a: str, b: str, seed: int) -> list[dict[str, Any]]:
    sides = [labelled(r for r in rows if r["backend"] == name) for name in (a, b)]
    labels = [label for label in sides[0] if label in sides[1]]
    groups = [(label, sides[0][label], sides[1][label]) for label in labels]
    if len(labels) > 1:
        left, right = ([r for name in labels for r in side[name] if alone(r)] for side in sides)
        groups.append(("all", left, right))
    table = []
    for label, left, right in groups:
        for metric in COMPARED:
            x, y = values_by_prompt(left, metric), values_by_prompt(right, metric)
            found = compare(x, y, seed=seed)
            if found["n_prompts"]:
                table.append({"a": a, "b": b, "workload": label, "metric": metric, **found})
    for row, p in zip(table, holm([row["p"] for row in table]), strict=True):
        row |= {"p_holm": p, "significant": p is not None and p < LEVEL}
    return table


def _turns(rows: Sequence[Row], seed: int) -> list[dict[str, Any]]:
    """Content TTFT against the turn, over the workloads that are conversations, one in flight."""
    talking = {r["workload"] for r in rows if r["turn"] > 0}
    by_turn: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if row["workload"] in talking and alone(row):
            by_turn[row["turn"]].append(row)
    found = []
    for turn, group in sorted(by_turn.items()):
        seen = summary(values_by_prompt(group, "ttft_content_ms"), seed)
        total = summary(values_by_prompt(group, "e2e_ms"), seed)
        found.append(
            {
                "turn": turn + 1,
                "n": len(group),
                "ttft_content_ms": seen and seen["p50"],
                "low": seen and seen["low"],
                "high": seen and seen["high"],
                "e2e_ms": total and total["p50"],
            }
        )
    return found


def _crossover(served: Mapping[str, Any], a: str, b: str) -> dict[str, Any] | None:
    """The answer length in tokens where total latency (TTFT + tokens x TPOT, medians) of two backends is the same."""
    lines = []
    for name in (a, b):
        seen = [
            w
            for label, w in served[name]["workloads"].items()
            if "@" not in label and "ttft_content_ms" in w and "tpot_ms" in w
        ]
        if not seen:
            return None
        lines.append([sum(w[m]["p50"] for w in seen) / len(seen) for m in ("ttft_content_ms", "tpot_ms")])
    (ttft_a, tpot_a), (ttft_b, tpot_b) = lines
    tokens = (ttft_b - ttft_a) / (tpot_a - tpot_b) if tpot_a != tpot_b else None
    shorter = a if ttft_a <= ttft_b else b
    return {
        "a": a,
        "b": b,
        "tokens": tokens if tokens and tokens > 0 else None,
        "faster_when_short": shorter,
        "faster_when_long": a if tpot_a < tpot_b else b,
    }
