"""run.json and records as the report may trust them: what has the wrong kind is dropped here, once.

Files may come from another version, a killed run or an editor. A field that is not what the schema says counts as
missing; so do numbers that are not finite. Unknown fields are kept only where the report shows them as they are
(environment, settings).
"""

from __future__ import annotations

from typing import Any

from annie_quant.report.format import number

Data = dict[str, Any]
VERDICTS = ("pass", "fail", "undecided")
SUMMARY = ("p50", "p90", "p99", "mean", "low", "high", "n", "n_prompts")
GATE = ("low", "high", "threshold", "n_to_decide")
KL = ("mean", "median", "p99", "max", "same_top", "n_tokens")
COMPARISON = ("n_prompts", "median_a", "median_b", "median_difference", "low", "high", "p", "p_holm")
TIMES = (
    "sent_ms", "first_byte_ms", "first_event_ms", "first_reasoning_ms", "first_content_ms", "first_tool_ms", "last_token_ms",
    "done_ms", "e2e_ms", "tpot_ms", "decode_tok_s", "completion_tokens",
)  # fmt: skip
# What every side has, offline or served.
EMPTY_SIDE: Data = {"gates": {}, "kl": {}, "workloads": {}, "speed_gates": {}, "memory_bytes": {}}


def mapping(value: Any) -> Data:
    return value if isinstance(value, dict) else {}


def rows_of(value: Any) -> list[Data]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def texts(value: Any) -> list[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def numbers(value: Any, names: tuple[str, ...]) -> Data:
    """The named entries of a mapping that are finite numbers."""
    found = mapping(value)
    return {k: found[k] for k in names if number(found.get(k)) is not None}


def words(value: Any, *names: str) -> Data:
    found = mapping(value)
    return {k: found[k] for k in names if isinstance(found.get(k), str)}


def gates(value: Any) -> dict[str, Data]:
    found = {}
    for gate, row in mapping(value).items():
        seen = numbers(row, ("passes", "n", *GATE))
        if {"passes", "n"} <= seen.keys() and 0 <= seen["passes"] <= seen["n"]:
            for name in ("low", "high", "threshold"):
                seen[name] = min(1.0, max(0.0, seen[name])) if name in seen else None
            verdict = row.get("verdict") if row.get("verdict") in VERDICTS else "undecided"
            seen |= words(row, "rule", "title") | {"verdict": verdict, "advisory": row.get("advisory") is True}
            found[gate] = seen
    return found


def kl(value: Any) -> Data:
    found = numbers(value, KL)
    for part in ("by_class", "by_category", "by_layer"):
        rows = {
            k: seen
            for k, v in mapping(mapping(value).get(part)).items()
            if (seen := number(v.get("mean") if isinstance(v, dict) else v)) is not None
        }
        if rows:
            found[part] = rows
    return found


def offline_side(value: Any) -> Data:
    found = mapping(value)
    return (
        EMPTY_SIDE | {"gates": gates(found.get("gates")), "kl": kl(found.get("kl"))} | numbers(found, ("perplexity",))
    )


def served_side(value: Any, backend: str) -> Data:
    found = mapping(value)
    memory = numbers(found.get("memory_bytes"), ("idle", "one", "five"))
    side = EMPTY_SIDE | {
        "model": backend,
        "gates": gates(found.get("gates")),
        "workloads": {w: _metrics(v) for w, v in mapping(found.get("workloads")).items()},
        "speed_gates": {
            g: numbers(v, ("value", "low", "high", "n", "limit")) | words(v, "verdict")
            for g, v in mapping(found.get("speed_gates")).items()
        },
        "memory_bytes": memory | words(found.get("memory_bytes"), "source") if memory else {},
    }
    return side | words(found, "model", "runtime")


def _metrics(value: Any) -> Data:
    found: Data = {m: seen for m, v in mapping(value).items() if (seen := numbers(v, SUMMARY))}
    return found | numbers(value, ("n",))


def aggregates(value: Any) -> Data:
    found = mapping(value)
    models = [
        words(m, "name", "label", "format", "checkpoint", "gguf") | numbers(m, ("size_bytes", "bits_per_weight"))
        for m in rows_of(found.get("models"))
    ]
    offline = {
        m: {numerics: offline_side(v) for numerics, v in mapping(side).items()}
        for m, side in mapping(found.get("offline")).items()
    }
    crossover = [
        words(r, "a", "b", "faster_when_short", "faster_when_long") | numbers(r, ("tokens",))
        for r in rows_of(found.get("crossover"))
    ]
    return {
        "models": [m for m in models if "name" in m],
        "offline": offline,
        "served": {b: served_side(v, b) for b, v in mapping(found.get("served")).items()},
        "comparisons": [
            words(r, "a", "b", "workload", "metric")
            | numbers(r, COMPARISON)
            | {k: r.get(k) is True for k in ("significant", "too_few")}
            for r in rows_of(found.get("comparisons"))
            if {"a", "b", "workload", "metric"} <= words(r, "a", "b", "workload", "metric").keys()
        ],
        "turns": {b: [t for r in rows_of(v) if (t := _turn(r))] for b, v in mapping(found.get("turns")).items()},
        "tool_surface": {b: _surface(v) for b, v in mapping(found.get("tool_surface")).items()},
        "crossover": [r for r in crossover if {"faster_when_short", "faster_when_long"} <= r.keys()],
        "confounds": texts([r.get("message") for r in rows_of(found.get("confounds"))]),
    }


def _turn(row: Data) -> Data | None:
    value = row.get("ttft_content_ms", row.get("p50"))
    found = numbers({"p50": value.get("p50") if isinstance(value, dict) else value}, ("p50",))
    if not found or not isinstance(row.get("turn"), int) or not 1 <= row["turn"] <= 999:
        return None
    return found | numbers(row, ("turn", "n", "low", "high"))


def _surface(value: Any) -> list[Data]:
    """Rows by number of tools, ascending; a row without its counts is left out."""
    rows = [
        numbers(r, ("n_tools", "passes", "n", "low", "high")) | {"worse": r.get("worse") is True}
        for r in rows_of(value)
    ]
    whole = [r for r in rows if {"n_tools", "passes", "n"} <= r.keys()]
    return sorted(
        (r for r in whole if 1 <= r["n_tools"] < 1e6 and 0 <= r["passes"] <= r["n"] < 1e9), key=lambda r: r["n_tools"]
    )


def document(value: Any) -> Data:
    """run.json or bench.json."""
    found = mapping(value)
    verdict = mapping(found.get("verdict"))
    return {
        "argv": texts(found.get("argv")),
        "environment": mapping(found.get("environment")),
        "config": mapping(found.get("config")),
        "backends": mapping(found.get("backends")),
        "stages": [
            {"name": s["name"], "seconds": number(s.get("seconds")), "summary": words(s, "summary").get("summary", "")}
            for s in rows_of(found.get("stages"))
            if isinstance(s.get("name"), str)
        ],
        "aggregates": aggregates(found.get("aggregates")),
        "verdict": words(verdict, "sentence", "candidate", "incumbent")
        | {"passed": verdict.get("passed") is True}
        | {k: texts(verdict.get(k)) for k in ("reasons", "caveats")},
        "confounds": texts([r.get("message") for r in rows_of(found.get("confounds"))]),
    }


def record(value: Any) -> Data | None:
    """One line of records.jsonl; None where it does not say which backend was asked what."""
    seen = words(value, "backend", "workload", "case", "id", "text", "reasoning", "error")
    if not {"backend", "workload"} <= seen.keys():
        return None
    turn, gaps, level = value.get("turn"), value.get("itl_ms"), number(value.get("concurrency"))
    rate = number(value.get("rate_per_s"))
    busy = numbers(value.get("server_timings"), ("prompt_ms", "predicted_ms"))
    tools = [words(c, "name", "arguments") for c in rows_of(value.get("tool_calls"))]
    return seen | numbers(value, TIMES) | {
        "case": str(value.get("case")),
        "turn": turn if isinstance(turn, int) and not isinstance(turn, bool) else 0,
        "concurrency": int(level) if level and 1 <= level < 1e6 else 1,
        "rate_per_s": rate if rate and 0 < rate < 1e9 else None,
        "itl_ms": [v for v in gaps if number(v) is not None] if isinstance(gaps, list) else [],
        "tool_calls": tools,
        "server_ms": sum(busy.values()) if len(busy) == 2 else None,
        "checks": {k: v for k, v in mapping(value.get("checks")).items() if isinstance(v, bool)},
        "faults": {k: v for k, v in mapping(value.get("faults")).items() if isinstance(v, str)},
        "error": seen.get("error", ""),
        **{k: value.get(k) is True for k in ("warmup", "cold", "tokens_estimated")},
    }  # fmt: skip


def inputs(value: Any) -> list[Data]:
    """inputs.json's workloads: name, temperature and each case's prompts by turn."""
    found = []
    for row in rows_of(mapping(value).get("workloads")):
        cases = {}
        for case in rows_of(row.get("cases")):
            asked = [m.get("content") for m in rows_of(case.get("messages")) if m.get("role") == "user"]
            turns = texts(case.get("turns")) or texts(asked)[-1:]
            cases[str(case.get("id"))] = turns
        if isinstance(row.get("name"), str):
            found.append(
                {
                    "name": row["name"],
                    "temperature": number(row.get("temperature")) or 0.0,
                    "thinking": row.get("thinking") is True,
                    "cases": cases,
                }
            )
    return found
