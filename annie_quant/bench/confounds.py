"""What spoils a comparison, found in what servers say of themselves and in what came back.

The founding rounds v1 to v3 compared different models, timed hidden or leaked thinking, guessed token counts, called a
missing parser a model's fault and averaged cold starts in. Each of these has a check here, and each is said aloud.
severity: "confound" (the comparison does not show what it seems to), "fault" (of a server, names the mend), "note".
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from annie_quant.bench.load_profile import load_of

Finding = dict[str, Any]
SLOW_FACTOR, SLOW_MS = 10.0, 1000.0
CACHE_FIELDS = ("llama.cpp", "vllm")  # runtimes whose requests can leave the prefix cache out
BUSY_LOAD = 2.0  # two servers and a client alone make about one
CLOCK_FACTOR, CLOCK_MS = 1.1, 0.2
OPENING_WORDS, STRANGERS_LEAST, STRANGERS_SHARE = 3, 10, 0.2


def check(
    identities: Mapping[str, Mapping[str, Any]], records: Iterable[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[Finding]:
    rows = list(records)
    measured = [r for r in rows if not r.get("warmup")]
    found = [f for a, b in itertools.combinations(identities.values(), 2) for f in _pair(a, b)]
    found += _prompt_tokens(identities, measured) + _estimates(measured) + _smoke(rows)
    found += _strangers(identities, measured, config) + _busy(identities, measured) + _waiting(identities, measured)
    stopped = config.get("stopped")
    if stopped:
        told = f"stopped early at look {stopped['look']} of {stopped['looks'] + 1}: every gate and comparison was decided at the "
        told += f"{stopped['level']:.0%} level, which allows for all looks; the intervals shown are plain 95 % ones"
        found.append(_finding("stopped_early", "note", told, identities))
    elif config.get("unasked"):
        left = f"the budget of time ended before {config['unasked']} prompts and backends were asked"
        found.append(_finding("unfinished", "note", f"{left}; the same command goes on with them", identities))
    if config.get("prefix_cache") == "off":
        found += [_cache_kept(name) for name, said in identities.items() if said["runtime"] not in CACHE_FIELDS]
    for name in identities:
        own = [r for r in measured if r["backend"] == name]
        found += [
            f for look in (_thinking, _parser, _slow_starts, _errors, _clock, _stamps) for f in look(name, own, config)
        ]
    return found


def _cache_kept(name: str) -> Finding:
    told = f"{name} has no known way to leave its prefix cache out of a request: repeats may be served from it"
    return _finding("prefix_cache", "confound", told, [name])


def _finding(code: str, severity: str, message: str, backends: Iterable[str]) -> Finding:
    return {"code": code, "severity": severity, "message": message, "backends": list(backends)}


def _pair(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Finding]:
    names, found = (a["name"], b["name"]), []

    def differ(code: str, what: str, x: Any, y: Any, severity: str = "confound") -> None:
        if x and y and x != y:
            found.append(
                _finding(
                    code,
                    severity,
                    f"{names[0]} and {names[1]} have different {what}: {_short(x)} and {_short(y)}",
                    names,
                )
            )

    if a.get("url") and a.get("url") == b.get("url"):
        return [
            _finding(
                "same_server",
                "note",
                f"{names[0]} and {names[1]} are the same server: this run measures the "
                "noise floor (A/A), any difference it shows is false",
                names,
            )
        ]
    source = [side["meta"].get("source") for side in (a, b)]
    differ("different_weights", "source weights", *source)
    for key, what in (
        ("n_params", "numbers of parameters"),
        ("n_vocab", "vocabulary sizes"),
        ("n_embd", "hidden sizes"),
    ):
        x, y = a["model_meta"].get(key), b["model_meta"].get(key)
        # Quantized files may count a tied head or scales; a percent is no other model.
        if isinstance(x, (int, float)) and isinstance(y, (int, float)) and abs(x - y) <= 0.01 * max(x, y):
            continue
        differ("different_models", what, x, y)
    differ("different_templates", "chat templates", a["chat_template_sha256"], b["chat_template_sha256"])
    differ("different_sampling", "default sampling settings", a["sampling_defaults"], b["sampling_defaults"])
    differ("different_engines", "serving engines", a["runtime"], b["runtime"], "note")
    if not all(source) and not found:
        found.append(
            _finding(
                "weights_unknown",
                "note",
                f"whether {names[0]} and {names[1]} come from the same fine-tuned "
                "weights is not known to the benchmark (give both a meta 'source')",
                names,
            )
        )
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] + "…" if len(text) == 64 and text.isalnum() else text[:120]


def _prompt_tokens(identities: Mapping[str, Mapping[str, Any]], rows: list[Mapping[str, Any]]) -> list[Finding]:
    """The same first-turn request must be the same number of tokens; else template or tokenizer differ."""
    counts: dict[str, dict[tuple, int]] = defaultdict(dict)
    for row in rows:
        tokens = (row.get("usage") or {}).get("prompt_tokens")
        if tokens and row["turn"] == 0:
            counts[row["backend"]][row["workload"], row["case"]] = tokens
    found = []
    for a, b in itertools.combinations(identities, 2):
        shared = counts[a].keys() & counts[b].keys()
        differing = sorted(key for key in shared if counts[a][key] != counts[b][key])
        if differing:
            first = differing[0]
            found.append(
                _finding(
                    "different_prompts",
                    "confound",
                    f"{a} and {b} do not read the same prompts: {len(differing)} of {len(shared)} differ in tokens "
                    f"({'/'.join(first)}: {counts[a][first]} and {counts[b][first]}); chat template or tokenizer differ",
                    (a, b),
                )
            )
    return found


def _busy(identities: Mapping[str, Mapping[str, Any]], rows: list[Mapping[str, Any]]) -> list[Finding]:
    """More runs here than the cores can do: every time is then an upper bound, and so is the client's own delay."""
    loads = [row["load_per_core"] for row in rows if row.get("load_per_core") is not None]
    if not loads or statistics.median(loads) < BUSY_LOAD:
        return []
    return [
        _finding(
            "busy_machine",
            "note",
            f"the machine was busy with other work (median load {statistics.median(loads):.1f} a core): all times are upper "
            "bounds, and limits in milliseconds are not fairly tried",
            identities,
        )
    ]


def _waiting(identities: Mapping[str, Mapping[str, Any]], rows: list[Mapping[str, Any]]) -> list[Finding]:
    """The client had no real-time priority: events waited for it whenever other work was before it, and the kernel's stamp
    of a read with several events is the last one's."""
    asked = [row["realtime"] for row in rows if row.get("realtime") is not None]
    without = asked.count(False)
    if not without:
        return []
    return [
        _finding(
            "normal_priority",
            "note",
            f"the client had no real-time priority in {without} of {len(asked)} requests: other work on the machine may have "
            "made its stamps late; root has one, and anybody else after `sudo prlimit --rtprio=1 --pid $$`",
            identities,
        )
    ]


def _strangers(
    identities: Mapping[str, Mapping[str, Any]], rows: list[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[Finding]:
    """Two formats of one model begin most greedy answers alike; where hardly any, it is two models or one is broken."""
    greedy = {name for name, known in config["workloads"].items() if not known.get("temperature")}
    openings: dict[str, dict[tuple, str]] = defaultdict(dict)
    for row in rows:
        text = (row.get("text") or "").split()
        if row["workload"] in greedy and row["turn"] == 0 and text:
            openings[row["backend"]][row["workload"], row["case"]] = " ".join(text[:OPENING_WORDS])
    found = []
    for a, b in itertools.combinations(identities, 2):
        shared = openings[a].keys() & openings[b].keys()
        same = sum(openings[a][key] == openings[b][key] for key in shared)
        if len(shared) >= STRANGERS_LEAST and same < STRANGERS_SHARE * len(shared):
            found.append(
                _finding(
                    "different_answers",
                    "confound",
                    f"{a} and {b} begin only {same} of {len(shared)} greedy answers with the same {OPENING_WORDS} "
                    "words: they are different models, or one of them is broken",
                    (a, b),
                )
            )
    return found


def _estimates(rows: list[Mapping[str, Any]]) -> list[Finding]:
    names = sorted({r["backend"] for r in rows if r.get("tokens_estimated") and not r.get("error")})
    return (
        [
            _finding(
                "tokens_estimated",
                "confound",
                f"{', '.join(names)} sent no usage: token counts and decode speed are "
                "estimates and are left out of the comparison",
                names,
            )
        ]
        if names
        else []
    )


def _smoke(rows: list[Mapping[str, Any]]) -> list[Finding]:
    last = {r["backend"]: r for r in rows if r["workload"] == "smoke"}
    return [
        _finding(
            "smoke",
            "fault",
            f"{name} fails the smoke question (capital of Japan): "
            + "; ".join(row.get("faults", {}).values())
            + f"; it said {(row.get('text') or '')[:80]!r}",
            [name],
        )
        for name, row in last.items()
        if row.get("faults")
    ]


def _thinking(name: str, rows: list[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Finding]:
    off = [r for r in rows if not config["workloads"].get(r["workload"], {}).get("thinking") and not r.get("error")]
    found = []
    leaked = [
        r
        for r in off
        if "thinking_leak" in r.get("faults", {})
        and (r.get("text") or "").strip()
        and not (r.get("reasoning") or "").strip()
    ]
    if leaked:
        found.append(
            _finding(
                "thinking_as_content",
                "confound",
                f"{name} shows its thinking as content in {len(leaked)} of "
                f"{len(off)} answers: its TTFT is the time to the first thinking token, not to an answer "
                "(is the server's --reasoning-parser set? is thinking off in its template?)",
                [name],
            )
        )
    hidden = [r for r in off if (r.get("reasoning") or "").strip()]
    if hidden:
        found.append(
            _finding(
                "hidden_thinking",
                "confound",
                f"{name} thinks although thinking is off in {len(hidden)} of "
                f"{len(off)} answers: its content TTFT holds that thinking",
                [name],
            )
        )
    empty = [
        r
        for r in off
        if not (r.get("text") or "").strip() and not r.get("tool_calls") and (r.get("completion_tokens") or 0) > 8
    ]
    if empty:
        spent = round(statistics.median(r["completion_tokens"] for r in empty))
        found.append(
            _finding(
                "empty_after_thinking",
                "fault",
                f"{name} spent its tokens (median {spent}) and showed nothing in "
                f"{len(empty)} of {len(off)} answers: thinking used the budget up",
                [name],
            )
        )
    return found


def _parser(name: str, rows: list[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Finding]:
    """A 400 on every request with tools, or calls left in the text: the server's parser, not the model."""
    tools = [r for r in rows if "tool_call" in r.get("checks", {})]
    refused = [r for r in tools if r.get("status") == 400]
    flags = "--enable-auto-tool-choice --tool-call-parser qwen3_coder (vLLM), --tool-call-parser qwen3_coder (SGLang)"
    found = []
    if refused:
        found.append(
            _finding(
                "tool_parser_missing",
                "fault",
                f"{name} refuses tool requests with HTTP 400 ({len(refused)} of "
                f"{len(tools)}): not the model's fault; start the server with {flags}",
                [name],
            )
        )
    left = [r for r in tools if not r["checks"]["tool_call"] and r.get("checks", {}).get("tool_call_raw")]
    unparsed = [r for r in tools if "unparsed" in r.get("faults", {}).get("tool_call", "")]
    if left or unparsed:
        found.append(
            _finding(
                "tool_parser_fault",
                "fault",
                f"{name} leaves tool calls in the text ({max(len(left), len(unparsed))} "
                f"of {len(tools)}): the server's parser is at fault; start it with {flags}",
                [name],
            )
        )
    return found


def _slow_starts(name: str, rows: list[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Finding]:
    slow = [r for r in rows if r.get("cold")] + outliers(rows)
    if not slow:
        return []
    worst = max(r.get("e2e_ms") or 0 for r in slow)
    return [
        _finding(
            "cold_start",
            "note",
            f"{name}: {len(slow)} measured request(s) were cold starts or stalls (up to "
            f"{worst / 1000:.1f} s); they stand in the record and are left out of the timings",
            [name],
        )
    ]


def first_ms(row: Mapping[str, Any]) -> float | None:
    """Time to the first thing of any kind that a model said."""
    times = [row.get(k) for k in ("first_reasoning_ms", "first_content_ms", "first_tool_ms")]
    return min((t for t in times if t is not None), default=None)


def outliers(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Requests whose first token took ten times their workload's median and a second more: a start, not a speed."""
    groups: dict[tuple, list[tuple[float, Mapping[str, Any]]]] = defaultdict(list)
    for row in rows:
        first = first_ms(row)
        if first is not None and not row.get("warmup") and not row.get("cold"):
            groups[row["backend"], row["workload"], load_of(row), row["turn"]].append((first, row))
    found = []
    for group in groups.values():
        middle = statistics.median(first for first, _ in group)
        found += [row for first, row in group if first > max(SLOW_FACTOR * middle, middle + SLOW_MS)]
    return found


def impossible(row: Mapping[str, Any]) -> bool:
    """An answer stamped before its request was sent: the stamp is wrong, whatever the cause, and so are its times."""
    first, sent = row.get("first_event_ms"), row.get("sent_ms")
    return first is not None and sent is not None and first < sent


def _stamps(name: str, rows: list[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Finding]:
    bad = [row for row in rows if impossible(row)]
    if not bad:
        return []
    told = f"{name}: {len(bad)} of {len(rows)} answers bear a stamp from before their request was sent"
    return [_finding("stamp_fault", "note", f"{told}; they are left out of the timings", [name])]


def _errors(name: str, rows: list[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Finding]:
    bad = [r for r in rows if r.get("error")]
    if not bad:
        return []
    kinds = sorted({str(r["error"])[:100] for r in bad})
    return [
        _finding(
            "errors",
            "fault",
            f"{name}: {len(bad)} of {len(rows)} requests failed ({kinds[0]}"
            + (f", and {len(kinds) - 1} other kinds)" if len(kinds) > 1 else ")"),
            [name],
        )
    ]


def _clock(name: str, rows: list[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Finding]:
    """Our time per token against the server's own (llama.cpp sends it): more than it is network, client or queueing."""
    pairs = [
        (row["tpot_ms"], timings["predicted_per_token_ms"])
        for row in rows
        for timings in [row.get("server_timings") or {}]
        if row.get("tpot_ms") and timings.get("predicted_per_token_ms") and not row.get("error")
    ]
    if not pairs:
        return []
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    if ours <= CLOCK_FACTOR * theirs or ours - theirs < CLOCK_MS:
        return []
    return [
        _finding(
            "client_overhead",
            "note",
            f"{name}: {ours:.3g} ms a token were seen where the server counts {theirs:.3g} ms: network, client or "
            "queueing adds to every time",
            [name],
        )
    ]
