"""What limits the conclusions of a benchmark, from what servers report about themselves and from their answers.

The first benchmarks of the original plan compared different models, timed hidden or leaked thinking, estimated token counts,
took a missing parser for a fault of the model and averaged cold starts. Each of these has a check here.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from annie_quant.bench import noise
from annie_quant.documents import BenchConfig, Confound, Ended, Identity, RequestRecord
from annie_quant.documents.results import Severity
from annie_quant.judge.answers import Answer, constant_answer
from annie_quant.judge.checks.calls import has_call_markup
from annie_quant.judge.pairing import has_label

Identities = Mapping[str, Identity]
Records = Sequence[RequestRecord]

SLOW_FACTOR, SLOW_MS = 10.0, 1000.0
NO_CACHE_RUNTIMES = ("llama.cpp", "vllm")  # their requests can switch the prefix cache off
BUSY_LOAD = 2.0  # per core; two servers and a client alone make about one
CLOCK_FACTOR, CLOCK_MS = 1.1, 0.2
OPENING_WORDS, LEAST_ANSWERS, LEAST_EQUAL_SHARE = 3, 10, 0.2
RARE = 0.05  # share of answers
LEAST_CUT_SHARE = 0.5  # of a side's answers, before its gates say nothing
SAME_SIZE = 0.01  # quantized files may count a tied head or scales
PARSER_OPTIONS = (
    "--enable-auto-tool-choice --tool-call-parser qwen3_coder (vLLM), --tool-call-parser qwen3_coder (SGLang)"
)


def check(identities: Identities, records: Records, config: BenchConfig, ended: Ended) -> list[Confound]:
    """All findings of a benchmark; records include warm-ups."""
    measured = [r for r in records if not r.warmup]
    everyone = list(identities)
    findings = [f for a, b in itertools.combinations(identities.values(), 2) for f in _pair(a, b)]
    findings += [*_prompt_tokens(everyone, measured), *_estimates(measured), *_smoke(records)]
    findings += [*_different_answers(everyone, measured, config), *_busy(everyone, measured)]
    findings += [*_priority(everyone, measured), *_incomplete(everyone, ended if not config.sustained else Ended())]
    findings += noise.check(everyone, measured)
    for name, identity in identities.items():
        own = [r for r in measured if r.backend == name]
        if ended.prefix_cache == "off" and identity.runtime not in NO_CACHE_RUNTIMES:
            message = f"{name} has no known way to switch its prefix cache off: repeats may be served from it"
            findings.append(_finding("prefix_cache", "confound", message, name))
        for caveat in identity.caveats:
            message = f"{name} reports itself in a way that cannot be read: {caveat}"
            findings.append(_finding("identity", "fault", message, name))
        findings += [*_thinking(name, own, config), *_tool_parser(name, own), *_slow_starts(name, own)]
        findings += [*_errors(name, own), *_cut(name, own), *_clock(name, own), *_stamps(name, own)]
    return findings


def _finding(code: str, severity: Severity, message: str, *backends: str) -> Confound:
    return Confound(code=code, severity=severity, message=message, backends=list(backends))


# ---- two servers


def _pair(a: Identity, b: Identity) -> list[Confound]:
    both = f"{a.name} and {b.name}"
    if a.url and a.url == b.url:
        message = f"{both} are the same server: this run measures the noise floor (A/A), any difference is false"
        return [_finding("same_server", "note", message, a.name, b.name)]
    sources = [side.meta.get("source") for side in (a, b)]
    compared: list[tuple[str, str, Any, Any]] = [("different_weights", "source weights", sources[0], sources[1])]
    sizes = {"n_params": "numbers of parameters", "n_vocab": "vocabulary sizes", "n_embd": "hidden sizes"}
    for field, what in sizes.items():
        x, y = getattr(a.model_meta, field), getattr(b.model_meta, field)
        if x and y and abs(x - y) > SAME_SIZE * max(x, y):
            compared.append(("different_models", what, x, y))
    compared += [
        ("different_templates", "chat templates", a.chat_template_sha256, b.chat_template_sha256),
        ("different_sampling", "default sampling settings", a.sampling_defaults, b.sampling_defaults),
        ("different_engines", "serving engines", a.runtime, b.runtime),
    ]
    findings = [
        _finding(
            code,
            "note" if code == "different_engines" else "confound",
            f"{both} have different {what}: {_short(x)} and {_short(y)}",
            a.name,
            b.name,
        )
        for code, what, x, y in compared
        if x and y and x != y
    ]
    if not all(sources) and not findings:
        message = f"it is unknown whether {both} come from the same fine-tuned weights (give both a meta 'source')"
        findings.append(_finding("weights_unknown", "note", message, a.name, b.name))
    return findings


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] + "…" if len(text) == 64 and text.isalnum() else text[:120]


def _prompt_tokens(everyone: Sequence[str], records: Records) -> list[Confound]:
    """The same first-turn request must be the same number of tokens, else template or tokenizer differ."""
    counts: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    for record in records:
        if record.prompt_tokens and record.turn == 0:
            counts[record.backend][record.workload, record.case] = record.prompt_tokens
    findings = []
    for a, b in itertools.combinations(everyone, 2):
        shared = counts[a].keys() & counts[b].keys()
        differing = sorted(key for key in shared if counts[a][key] != counts[b][key])
        if differing:
            first = differing[0]
            message = (
                f"{a} and {b} do not read the same prompts: {len(differing)} of {len(shared)} differ in tokens "
                f"({'/'.join(first)}: {counts[a][first]} and {counts[b][first]}); chat template or tokenizer differ"
            )
            findings.append(_finding("different_prompts", "confound", message, a, b))
    return findings


def _different_answers(everyone: Sequence[str], records: Records, config: BenchConfig) -> list[Confound]:
    """Two formats of one model start most greedy answers alike, and none gives one answer to different questions."""
    answers: dict[str, dict[tuple[str, str], RequestRecord]] = defaultdict(dict)
    for record in records:
        if record.workload in config.greedy and record.turn == 0:
            answers[record.backend][record.workload, record.case] = record
    findings = []
    for a, b in itertools.permutations(everyone, 2):
        both = [key for key in sorted(answers[a].keys() & answers[b].keys()) if not has_label(answers[b][key].checks)]
        if constant := constant_answer([answers[a][key] for key in both], [answers[b][key] for key in both]):
            findings.append(_finding("constant_answers", "confound", f"{a} gives {constant}, {b} does not", a, b))
    for a, b in itertools.combinations(everyone, 2):
        pairs = ([answers[side][key].text.split() for side in (a, b)] for key in answers[a].keys() & answers[b].keys())
        shared = [pair for pair in pairs if all(pair)]
        equal = sum(first[:OPENING_WORDS] == second[:OPENING_WORDS] for first, second in shared)
        if len(shared) >= LEAST_ANSWERS and equal < LEAST_EQUAL_SHARE * len(shared):
            message = (
                f"{a} and {b} start only {equal} of {len(shared)} greedy answers with the same {OPENING_WORDS} "
                "words: they are different models, or one of them is broken"
            )
            findings.append(_finding("different_answers", "confound", message, a, b))
    return findings


# ---- the whole run


def _incomplete(everyone: Sequence[str], ended: Ended) -> list[Confound]:
    stopped = ended.stopped
    if stopped:
        message = (
            f"stopped early at look {stopped.look} of {stopped.looks + 1}: every gate and comparison was decided at the "
            f"{stopped.level:.0%} level, which allows for all looks; the intervals shown are plain 95 % ones"
        )
        return [_finding("stopped_early", "note", message, *everyone)]
    if ended.unasked:
        message = (
            f"the time budget ended before {ended.unasked} prompts and backends were measured; the same command "
            "continues with them"
        )
        return [_finding("unfinished", "note", message, *everyone)]
    return []


def _busy(everyone: Sequence[str], records: Records) -> list[Confound]:
    """More work than the cores can do: every time is an upper bound, and so is the client's own delay."""
    loads = [r.load_per_core for r in records if r.load_per_core is not None]
    if not loads or statistics.median(loads) < BUSY_LOAD:
        return []
    message = (
        f"the machine was busy with other work (median load {statistics.median(loads):.1f} per core): all times are "
        "upper bounds, and limits in milliseconds are not tested fairly"
    )
    return [_finding("busy_machine", "note", message, *everyone)]


def _priority(everyone: Sequence[str], records: Records) -> list[Confound]:
    """Without real-time priority the client may read late, and one kernel stamp covers all events of a read."""
    flags = [r.realtime for r in records if r.realtime is not None]
    without = flags.count(False)
    if not without:
        return []
    message = (
        f"the client had no real-time priority in {without} of {len(flags)} requests: other work on the machine may "
        "have made its stamps late; root has it, and other users after `sudo prlimit --rtprio=1 --pid $$`"
    )
    return [_finding("normal_priority", "note", message, *everyone)]


def _estimates(records: Records) -> list[Confound]:
    names = sorted({r.backend for r in records if r.tokens_estimated and not r.error})
    if not names:
        return []
    message = f"{', '.join(names)} sent no usage: token counts and decode speed are estimates and are left out of the comparison"
    return [_finding("tokens_estimated", "confound", message, *names)]


def _smoke(records: Records) -> list[Confound]:
    last = {r.backend: r for r in records if r.workload == "smoke"}
    return [
        _finding(
            "smoke",
            "fault",
            f"{name} fails the smoke question (capital of Japan): {'; '.join(record.faults.values())}; "
            f"its answer was {record.text[:80]!r}",
            name,
        )
        for name, record in last.items()
        if record.faults
    ]


# ---- one server


def _in_times(code: str, name: str, what: str, some: Records, all_: Records, effect: str) -> list[Confound]:
    """Return a confound where answers change what a time measures. A note where they are so few that the median over all answers is
    within 2.5 percentiles of the others'.
    """
    if not some:
        return []
    rare = len(some) < RARE * len(all_)
    message = f"{name} {what} in {len(some)} of {len(all_)} answers: {'too few to change the median times' if rare else effect}"
    return [_finding(code, "note" if rare else "confound", message, name)]


def _thinking(name: str, records: Records, config: BenchConfig) -> list[Confound]:
    """Thinking that is shown, hidden, or uses up the whole answer although it is switched off."""
    off = [r for r in records if r.workload not in config.with_thinking and not r.error]
    leaked = [r for r in off if "thinking_leak" in r.faults and r.text.strip() and not r.reasoning.strip()]
    hidden = [r for r in off if r.reasoning.strip()]
    effect = (
        "its TTFT is the time to the first thinking token, not to an answer (is the server's --reasoning-parser set? is "
        "thinking off in its template?)"
    )
    findings = _in_times("thinking_as_content", name, "shows its thinking as content", leaked, off, effect)
    effect = "its content TTFT includes that thinking"
    findings += _in_times("hidden_thinking", name, "thinks although thinking is off", hidden, off, effect)
    empty = [r.completion_tokens for r in off if not r.text.strip() and not r.tool_calls]
    lengths = [tokens for tokens in empty if tokens and tokens > 8]
    if lengths:
        message = (
            f"{name} used its tokens (median {round(statistics.median(lengths))}) and showed nothing in {len(lengths)} of "
            f"{len(off)} answers: thinking used up the budget"
        )
        findings.append(_finding("empty_after_thinking", "fault", message, name))
    return findings


def _tool_parser(name: str, records: Records) -> list[Confound]:
    """HTTP 400 on requests with tools, or calls in the text: the fault is the server's parser, not the model."""
    tools = [r for r in records if "tool_call" in r.checks]
    findings = []
    refused = sum(r.status == 400 for r in tools)
    if refused:
        message = (
            f"{name} refuses tool requests with HTTP 400 ({refused} of {len(tools)}): not the model's fault; start the "
            f"server with {PARSER_OPTIONS}"
        )
        findings.append(_finding("tool_parser_missing", "fault", message, name))
    in_text = sum(not r.checks["tool_call"] and r.checks.get("tool_call_raw", False) for r in tools)
    unparsed = sum(
        not r.checks["tool_call"] and has_call_markup(Answer(text=r.text)) for r in tools if not r.tool_calls
    )
    if in_text or unparsed:
        message = (
            f"{name} leaves tool calls in the text ({max(in_text, unparsed)} of {len(tools)}): the server's parser is at "
            f"fault; start it with {PARSER_OPTIONS}"
        )
        findings.append(_finding("tool_parser_fault", "fault", message, name))
    return findings


def _slow_starts(name: str, records: Records) -> list[Confound]:
    slow = [r for r in records if r.cold] + stalls(records)
    if not slow:
        return []
    longest = max(r.e2e_ms or 0 for r in slow) / 1000
    message = (
        f"{name}: {len(slow)} measured request(s) were cold starts or stalls (up to {longest:.1f} s); they are on record "
        "and left out of the timings"
    )
    return [_finding("cold_start", "note", message, name)]


def stalls(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Requests whose first token took ten times their workload's median, and a second more: not a steady state."""
    groups: dict[tuple, list[tuple[float, RequestRecord]]] = defaultdict(list)
    for record in records:
        first = record.first_token_ms
        if first is not None and not record.warmup and not record.cold:
            groups[record.backend, record.workload, record.load, record.turn].append((first, record))
    slow = []
    for group in groups.values():
        median = statistics.median(first for first, _ in group)
        slow += [r for first, r in group if first > max(SLOW_FACTOR * median, median + SLOW_MS)]
    return slow


def impossible(record: RequestRecord) -> bool:
    """Whether an answer was stamped before its request was sent: the stamp, and so all its times, are wrong."""
    first, sent = record.first_event_ms, record.sent_ms
    return first is not None and sent is not None and first < sent


def _stamps(name: str, records: Records) -> list[Confound]:
    early = sum(map(impossible, records))
    if not early:
        return []
    message = (
        f"{name}: {early} of {len(records)} answers have a stamp from before their request was sent; they are left out "
        "of the timings"
    )
    return [_finding("stamp_fault", "note", message, name)]


def _errors(name: str, records: Records) -> list[Confound]:
    errors = [str(r.error)[:100] for r in records if r.error]
    if not errors:
        return []
    kinds = sorted(set(errors))
    more = f", and {len(kinds) - 1} other kinds" if len(kinds) > 1 else ""
    message = f"{name}: {len(errors)} of {len(records)} requests failed ({kinds[0]}{more})"
    if len(errors) == len(records):
        return [_finding("no_answers", "confound", message, name)]
    return [_finding("errors", "fault", message, name), *_hung(name, records)]


def _hung(name: str, records: Records) -> list[Confound]:
    """A side that stopped to answer: the time budget ended while one request took far longer than its others."""
    unanswered = [r for r in records if r.cause in ("hung", "not_sent")]
    if not unanswered:
        return []
    message = (
        f"{name} hung: {unanswered[0].workload}/{unanswered[0].case} had no answer when the time budget ended; it and "
        f"{len(unanswered) - 1} requests after it count as failed"
    )
    return [_finding("hung", "confound", message, name)]


def _cut(name: str, records: Records) -> list[Confound]:
    """Answers that max_tokens ended fail their gates: where they are many, the gates say nothing about the model."""
    judged = [r for r in records if r.checks and not r.error]
    cut = sum(r.finish_reason == "length" for r in judged)
    if not cut:
        return []
    often = cut >= LEAST_CUT_SHARE * len(judged)
    effect = "raise max_tokens of the workload" if often else "they count as failed"
    message = f"{name}: {cut} of {len(judged)} answers were cut at max_tokens: {effect}"
    return [_finding("cut_answers", "confound" if often else "note", message, name)]


def _clock(name: str, records: Records) -> list[Confound]:
    """Our time per token against the server's own (llama.cpp sends it): the rest is network, client or queueing."""
    pairs = []
    for record in records:
        theirs = (record.server_timings or {}).get("predicted_per_token_ms")
        if record.tpot_ms and isinstance(theirs, (int, float)) and theirs and not record.error:
            pairs.append((record.tpot_ms, theirs))
    if not pairs:
        return []
    measured, reported = (statistics.median(side) for side in zip(*pairs, strict=True))
    if measured <= CLOCK_FACTOR * reported or measured - reported < CLOCK_MS:
        return []
    message = (
        f"{name}: {measured:.3g} ms per token were measured where the server reports {reported:.3g} ms: network, client "
        "or queueing adds to every time"
    )
    return [_finding("client_overhead", "note", message, name)]
