"""The outcome in plain words: one sentence, whether it passed, the reasons, and what cannot be concluded.

The candidate is the NVFP4 side (of several, the best); the incumbent is what it would replace. Speed alone never makes
a recommendation: gates come first, then what differs between the two, then what changes in operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SPEED_TITLES = {"ttft": "TTFT (content)", "decode": "decode"}
_METRICS = {
    "ttft_content_ms": ("content TTFT", "ms", "lower"),
    "ttft_tool_ms": ("time to a tool call", "ms", "lower"),
    "tpot_ms": ("time per token", "ms", "lower"),
    "e2e_ms": ("total latency", "ms", "lower"),
    "completion_tokens": ("answer length", "tokens", "neither"),
}


def verdict(aggregates: Mapping[str, Any], candidate: str | None = None) -> dict[str, Any]:
    """{"sentence", "passed", "candidate", "incumbent", "comparable", "reasons", "caveats"} of run.json's aggregates.

    passed: the candidate fails no gate, served or offline. `aggregates["confounds"]` is read where present.
    candidate: a served backend or an offline model; by default the best NVFP4 side, else the first backend.
    """
    names = _sides(aggregates)
    if not names:
        return {
            "sentence": "Nothing was measured, so nothing can be said.",
            "passed": False,
            "candidate": None,
            "incumbent": None,
            "comparable": False,
            "reasons": [],
            "caveats": [],
        }
    chosen = candidate or min(_candidates(aggregates, names), key=lambda name: _rank(aggregates, name))
    other = _incumbent(aggregates, names, chosen)
    confounds = [f for f in aggregates.get("confounds") or () if _touches(f, chosen, other)]
    comparable = other is not None and not any(f["severity"] == "confound" for f in confounds)
    failing = _gates(aggregates, chosen, "fail")
    undecided = _gates(aggregates, chosen, "undecided")
    return {
        "sentence": _sentence(aggregates, chosen, other, failing, undecided, confounds),
        "passed": not failing,
        "candidate": chosen,
        "incumbent": other,
        "comparable": comparable,
        "reasons": _reasons(aggregates, names, chosen, other, failing),
        "caveats": _caveats(aggregates, chosen, other, undecided, confounds),
    }


def _sides(aggregates: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*(aggregates.get("served") or {}), *(aggregates.get("offline") or {})]))


def _model(aggregates: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What is known of a side's model; a backend may bear another name than the model that it serves."""
    served = (aggregates.get("served") or {}).get(name) or {}
    models = {m["name"]: m for m in aggregates.get("models") or ()}
    return models.get(name) or models.get(served.get("model")) or {}


def _label(aggregates: Mapping[str, Any], name: str) -> str:
    return _model(aggregates, name).get("label") or name


def _format(aggregates: Mapping[str, Any], name: str) -> str:
    return str(_model(aggregates, name).get("format") or name).upper()


def _candidates(aggregates: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    served = aggregates.get("served") or {}
    nvfp4 = [n for n in names if "NVFP4" in _format(aggregates, n)]
    return [n for n in nvfp4 if n in served] or nvfp4 or [names[0]]


def _incumbent(aggregates: Mapping[str, Any], names: Sequence[str], chosen: str) -> str | None:
    others = [n for n in names if n != chosen and n in (aggregates.get("served") or {})]
    q4 = [n for n in others if "Q4" in _format(aggregates, n)]
    found = q4 or others
    return found[-1] if found else None


def _rank(aggregates: Mapping[str, Any], name: str) -> tuple[int, int]:
    return len(_gates(aggregates, name, "fail")), len(_gates(aggregates, name, "undecided"))


def _gates(aggregates: Mapping[str, Any], name: str, outcome: str) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(where, gate's title, row) of the deciding gates of a side with this outcome."""
    found = []
    served = (aggregates.get("served") or {}).get(name) or {}
    for gate, row in (served.get("gates") or {}).items():
        if row["verdict"] == outcome and not row.get("advisory"):
            found.append(("served", row.get("title") or gate, row))
    for gate, row in (served.get("speed_gates") or {}).items():
        if row["verdict"] == outcome:
            found.append(("served", _SPEED_TITLES.get(gate, gate), row))
    model = name if name in (aggregates.get("offline") or {}) else served.get("model")
    for numerics, result in ((aggregates.get("offline") or {}).get(model) or {}).items():
        for gate, row in (result.get("gates") or {}).items():
            if row["verdict"] == outcome and not row.get("advisory"):
                found.append((numerics.upper(), row.get("title") or gate, row))
    return found


def _told(where: str, title: str, row: Mapping[str, Any]) -> str:
    if "passes" in row:
        return f"{title} {row['passes']} of {row['n']} ({where})"
    unit = "ms" if row["metric"].endswith("_ms") else "tok/s"
    return f"{title} {row['value']:.4g} {unit}, limit {row['limit']:g} ({where})"


def _sentence(
    aggregates: Mapping[str, Any],
    chosen: str,
    other: str | None,
    failing: list,
    undecided: list,
    confounds: list,
) -> str:
    label = _label(aggregates, chosen)
    if failing:
        head = f"{label} fails {_count(len(failing), 'gate')}: {'; '.join(_told(*f) for f in failing[:4])}"
        head += f"; and {len(failing) - 4} more" if len(failing) > 4 else ""
        tail = f". It cannot replace {_label(aggregates, other)}." if other else "."
    elif undecided:
        head = f"{label} fails no gate, but {_count(len(undecided), 'gate')} cannot be decided with so few answers"
        tail = "."
    else:
        head, tail = f"{label} passes every gate", "."
    spoiled = [f for f in confounds if f["severity"] == "confound"]
    if spoiled and other:
        codes = ", ".join(sorted({f["code"].replace("_", " ") for f in spoiled}))
        return f"CONFOUNDED ({codes}): the two sides cannot be compared. {head}{tail}"
    speed = _speed(aggregates, chosen, other) if other and not failing else ""
    return f"{head}{speed}{tail}"


def _speed(aggregates: Mapping[str, Any], chosen: str, other: str) -> str:
    parts = []
    for metric, words in (("ttft_content_ms", "content TTFT"), ("decode_tok_s", "decode")):
        row = _comparison(aggregates, chosen, other, metric)
        if row:
            unit = "ms" if metric.endswith("_ms") else "tok/s"
            sure = "" if row["significant"] else ", no sure difference"
            parts.append(f"{words} {row['own']:.3g} {unit} against {row['theirs']:.3g}{sure}")
    return f", with {' and '.join(parts)} of {_label(aggregates, other)}" if parts else ""


def _comparison(aggregates: Mapping[str, Any], chosen: str, other: str, metric: str) -> dict[str, Any] | None:
    """The pooled row of two backends, seen from the chosen one; the only workload's row where there is one alone."""
    rows = [
        r for r in aggregates.get("comparisons") or () if {r["a"], r["b"]} == {chosen, other} and r["metric"] == metric
    ]
    rows = [r for r in rows if r["workload"] == "all"] or (rows if len(rows) == 1 else [])
    if not rows or rows[0]["median_difference"] is None:
        return None
    row, turned = rows[0], rows[0]["a"] != chosen
    low, high = (row["high"], row["low"]) if not turned else (row["low"], row["high"])
    sign = 1 if turned else -1
    return {
        **row,
        "own": row["median_b" if turned else "median_a"],
        "theirs": row["median_a" if turned else "median_b"],
        "difference": sign * row["median_difference"],
        "low": None if low is None else sign * low,
        "high": None if high is None else sign * high,
    }


def _reasons(
    aggregates: Mapping[str, Any],
    names: Sequence[str],
    chosen: str,
    other: str | None,
    failing: list,
) -> list[str]:
    reasons = [f"fails {_told(*f)}: 95 % interval {_interval(f[2])}, {f[2].get('rule') or 'limit'}" for f in failing]
    if not failing:
        reasons += _passing(aggregates, chosen)
    reasons += _worse_than_reference(aggregates, names, chosen)
    for name in names:
        others = [] if name == chosen else _gates(aggregates, name, "fail")
        if others:
            reasons.append(f"{_label(aggregates, name)} fails {'; '.join(_told(*f) for f in others[:4])}")
    if other:
        reasons += _differences(aggregates, chosen, other)
        reasons += _operation(aggregates, chosen, other)
    return reasons


def _passing(aggregates: Mapping[str, Any], chosen: str) -> list[str]:
    passing = _gates(aggregates, chosen, "pass")
    places = dict.fromkeys(where for where, _, _ in passing)
    return [f"passes {_count(sum(w == place for w, _, _ in passing), 'gate')} ({place})" for place in places]


def _interval(row: Mapping[str, Any]) -> str:
    if row.get("low") is None:
        return "none"
    share = "passes" in row
    return f"{row['low']:.1%} to {row['high']:.1%}" if share else f"{row['low']:.4g} to {row['high']:.4g}"


def _worse_than_reference(aggregates: Mapping[str, Any], names: Sequence[str], chosen: str) -> list[str]:
    """Gates whose interval lies wholly below that of the bf16 model: what quantization took."""
    served = aggregates.get("served") or {}
    reference = next((n for n in names if n in served and "BF16" in _format(aggregates, n)), None)
    if reference is None or chosen not in served or reference == chosen:
        return []
    found = []
    for gate, row in served[chosen]["gates"].items():
        theirs = served[reference]["gates"].get(gate)
        if theirs and row["high"] < theirs["low"]:
            found.append(
                f"{row.get('title') or gate} is worse than {_label(aggregates, reference)}'s for sure: "
                f"{row['passes']} of {row['n']} against {theirs['passes']} of {theirs['n']}"
            )
    return found


def _differences(aggregates: Mapping[str, Any], chosen: str, other: str) -> list[str]:
    found = []
    for metric, (words, unit, better) in _METRICS.items():
        row = _comparison(aggregates, chosen, other, metric)
        if not row or not row["significant"]:
            continue
        kind = {"neither": "shorter" if row["difference"] < 0 else "longer"}.get(
            better, "better" if row["difference"] < 0 else "worse"
        )
        found.append(
            f"{words} is {kind} than {_label(aggregates, other)}'s by {abs(row['difference']):.3g} {unit} (95 % "
            f"{row['low']:.3g} to {row['high']:.3g}, {row['n_prompts']} prompts, Holm p {row['p_holm']:.2g})"
        )
    return found


def _operation(aggregates: Mapping[str, Any], chosen: str, other: str) -> list[str]:
    served = aggregates["served"]
    found = []
    runtimes = [(served.get(n) or {}).get("runtime") for n in (chosen, other)]
    if all(runtimes) and runtimes[0] != runtimes[1]:
        found.append(f"operational change: {runtimes[1]} → {runtimes[0]} (another server to install, start and watch)")
    sizes = [_model(aggregates, n).get("size_bytes") for n in (chosen, other)]
    if sizes[0] and sizes[1]:
        found.append(f"size {sizes[0] / 1e6:.3g} MB against {sizes[1] / 1e6:.3g} MB")
    memories = [((served.get(n) or {}).get("memory_bytes") or {}).get("five") for n in (chosen, other)]
    if memories[0] and memories[1]:
        found.append(f"memory with five requests {memories[0] / 2**20:.4g} MiB against {memories[1] / 2**20:.4g} MiB")
    return found


def _caveats(
    aggregates: Mapping[str, Any],
    chosen: str,
    other: str | None,
    undecided: list,
    confounds: Iterable[Mapping[str, Any]],
) -> list[str]:
    order = {"confound": 0, "fault": 1, "note": 2}
    caveats = [f["message"] for f in sorted(confounds, key=lambda f: order[f["severity"]])]
    for where, title, row in undecided:
        needed = row.get("n_to_decide")
        more = f"about {needed} answers would decide it" if needed else "no number of answers decides a share this near"
        caveats.append(
            f"undecided: {_told(where, title, row)}; {more}"
            if "passes" in row
            else f"undecided: {_told(where, title, row)}"
        )
    if other:
        pair = [r for r in aggregates.get("comparisons") or () if {r["a"], r["b"]} == {chosen, other}]
        few = sorted({r["workload"] for r in pair} - {r["workload"] for r in pair if not r.get("too_few")})
        if few:
            caveats.append(
                f"fewer than 6 prompts cannot show a difference at 5 %, whatever the repeats: {', '.join(few)}"
            )
    return caveats


def _touches(finding: Mapping[str, Any], chosen: str, other: str | None) -> bool:
    """A finding about a pair matters when it is this pair; one about sides, when one of these is among them."""
    about, ours = set(finding["backends"]), {chosen, other}
    return about <= ours if len(about) == 2 else bool(about & ours)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
