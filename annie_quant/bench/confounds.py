"""What limits the conclusions of a benchmark, from what servers report about themselves and from their answers.

The first benchmarks of the original plan compared different models, timed hidden or leaked thinking, estimated token counts,
took a missing parser for a fault of the model and averaged cold starts. Each of these has a check here.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from annie_quant.bench.cache_findings import (
    by_workload,
    depth_findings,
    different_caches,
    first_length_findings,
    prefix_cache_findings,
)
from annie_quant.bench.findings import finding
from annie_quant.bench.noise import measured_values
from annie_quant.documents import (
    BenchConfig,
    Confound,
    Ended,
    Identity,
    RequestRecord,
    by_backend,
)
from annie_quant.documents.results import Severity
from annie_quant.judge.answers import constant_answer, has_call_markup, parser_fault
from annie_quant.judge.checks.text import leaked
from annie_quant.judge.pairing import has_label
from annie_quant.judge.statistics import LEVEL, compare, holm
from annie_quant.models.server_parsers import parser_hint

_Records = Sequence[RequestRecord]
_Findings = Iterator[Confound]

SLOW_FACTOR = 10.0
SLOW_MS = 1000.0
NO_CACHE_RUNTIMES = ("llama.cpp", "vllm")  # their requests can switch the prefix cache off
BUSY_LOAD = 2.0  # per core; two servers and a client alone make about one
CLOCK_FACTOR = 1.1
CLOCK_MS = 0.2
OPENING_WORDS = 3
MIN_COMPARED_ANSWERS = 10
MIN_EQUAL_SHARE = 0.2
RARE = 0.05  # share of answers
MIN_CUT_SHARE = 0.5  # of a side's answers, from which its gates say nothing
SAME_SIZE = 0.01  # quantized files may count a tied head or scales
MIN_EVENT_RATIO = 0.8  # of events per token, and of tokens per event
MIN_EVENTS = 50  # of a side, before its ratio is judged


def find_confounds(
    identities: Mapping[str, Identity], records: _Records, config: BenchConfig, ended: Ended
) -> list[Confound]:
    """Return all findings of a benchmark; records include warm-ups."""
    measured = [r for r in records if not r.warmup]
    names = list(identities)
    findings: list[Confound] = []
    for a, b in itertools.combinations(identities.values(), 2):
        findings += _pair(a, b)
    findings += _prompt_tokens(names, measured)
    findings += _estimates(measured)
    findings += _smoke(records)
    findings += _different_answers(names, measured, config)
    findings += _busy(names, measured)
    findings += _priority(names, measured)
    if ended.unasked:
        findings.append(finding("unfinished", *names, n=ended.unasked))
    own = by_backend(measured, names)
    answered = by_backend((r for r in measured if not r.answer.error), names)
    for name, rows in answered.items():
        findings += _events(name, rows)
        findings += prefix_cache_findings(name, rows)
        findings += depth_findings(name, rows)
    findings += _different_acceptance(answered)
    findings += different_caches(identities, answered)
    for name, identity in identities.items():
        if ended.prefix_cache == "off" and identity.runtime not in NO_CACHE_RUNTIMES:
            findings.append(finding("prefix_cache", name))
        findings += [finding("identity", name, caveat=caveat) for caveat in identity.caveats]
        findings += _thinking(name, own[name], config)
        findings += _tool_parser(name, own[name], identity.runtime)
        for check in (_slow_starts, first_length_findings, _errors, _cut, _clock, _stamps):
            findings += check(name, own[name])
    return findings


# ---- two servers

MODEL_SIZES = {
    "n_params": "numbers of parameters",
    "n_vocab": "vocabulary sizes",
    "n_embd": "hidden sizes",
}
COMPARED_PROPERTIES = {
    "chat_template_sha256": ("different_templates", "chat templates"),
    "sampling_defaults": ("different_sampling", "default sampling settings"),
    "runtime": ("different_engines", "serving engines"),
}


def _pair(a: Identity, b: Identity) -> _Findings:
    if a.url and a.url == b.url:
        yield finding("same_server", a.name, b.name)
        return
    differing: list[tuple[str, str, object, object]] = []

    def compare_property(code: str, what: str, x: object, y: object) -> None:
        if x and y and x != y:
            differing.append((code, what, x, y))

    source_a = a.meta.get("source")
    source_b = b.meta.get("source")
    compare_property("different_weights", "source weights", source_a, source_b)
    for field, title in MODEL_SIZES.items():
        x = getattr(a.model_meta, field)
        y = getattr(b.model_meta, field)
        if x and y and abs(x - y) > SAME_SIZE * max(x, y):
            compare_property("different_models", title, x, y)
    for field, (code, title) in COMPARED_PROPERTIES.items():
        compare_property(code, title, getattr(a, field), getattr(b, field))
    for code, what, x, y in differing:
        yield finding(
            code,
            a.name,
            b.name,
            what=what,
            x=_short(x),
            y=_short(y),
        )
    if not (source_a and source_b) and not differing:
        yield finding("weights_unknown", a.name, b.name)


def _short(value: object) -> str:
    text = str(value)
    return text[:12] + "…" if len(text) == 64 and text.isalnum() else text[:120]


def _prompt_tokens(names: Sequence[str], records: _Records) -> _Findings:
    """Report first-turn requests with another number of tokens per side: template or tokenizer differ."""
    counts: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    for record in records:
        if record.tokens.prompt_tokens and record.turn == 0:
            counts[record.backend][record.workload, record.case] = record.tokens.prompt_tokens
    for a, b in itertools.combinations(names, 2):
        shared = counts[a].keys() & counts[b].keys()
        differing = sorted(key for key in shared if counts[a][key] != counts[b][key])
        if differing:
            first = differing[0]
            example = {"prompt": "/".join(first), "x": counts[a][first], "y": counts[b][first]}
            n = len(differing)
            yield finding(
                "different_prompts",
                a,
                b,
                n=n,
                shared=len(shared),
                **example,
            )


def _different_answers(names: Sequence[str], records: _Records, config: BenchConfig) -> _Findings:
    """Two formats of one model start most greedy answers alike, and none gives one answer to different questions."""
    answers: dict[str, dict[tuple[str, str], RequestRecord]] = defaultdict(dict)
    for record in records:
        is_judged = record.judgement.checks and not record.answer.error
        if record.workload in config.greedy and record.turn == 0 and is_judged:
            answers[record.backend][record.workload, record.case] = record
    for a, b in itertools.permutations(names, 2):
        shared = sorted(answers[a].keys() & answers[b].keys())
        unlabelled = [key for key in shared if not has_label(answers[b][key].judgement.checks)]
        ours = [answers[a][key].answer for key in unlabelled]
        theirs = [answers[b][key].answer for key in unlabelled]
        constant = constant_answer(ours, theirs)
        if constant:
            yield finding("constant_answers", a, b, answer=constant)
    for a, b in itertools.combinations(names, 2):
        openings = []
        for key in answers[a].keys() & answers[b].keys():
            x = answers[a][key].answer.text.split()[:OPENING_WORDS]
            y = answers[b][key].answer.text.split()[:OPENING_WORDS]
            if x and y:
                openings.append(x == y)
        n = len(openings)
        equal = sum(openings)
        if n >= MIN_COMPARED_ANSWERS and equal < MIN_EQUAL_SHARE * n:
            yield finding(
                "different_answers",
                a,
                b,
                equal=equal,
                n=n,
                words=OPENING_WORDS,
            )


# ---- the whole run


def _busy(names: Sequence[str], records: _Records) -> _Findings:
    """More work than the cores can do: every time is an upper bound, and so is the client's own delay."""
    loads = [r.load.load_per_core for r in records if r.load.load_per_core is not None]
    load = statistics.median(loads or [0.0])
    if load >= BUSY_LOAD:
        yield finding("busy_machine", *names, load=load)


def _priority(names: Sequence[str], records: _Records) -> _Findings:
    """Without real-time priority the client may read late, and one kernel stamp covers all events of a read."""
    flags = [r.timings.realtime for r in records if r.timings.realtime is not None]
    without = flags.count(False)
    if without:
        yield finding("normal_priority", *names, n=without, of=len(flags))


def _estimates(records: _Records) -> _Findings:
    names = {r.backend for r in records if r.answer.tokens_estimated and not r.answer.error}
    if names:
        yield finding("tokens_estimated", *sorted(names))


def _smoke(records: _Records) -> _Findings:
    last = {r.backend: r for r in records if r.workload == "smoke"}
    for name, record in last.items():
        if record.judgement.faults:
            yield smoke_finding(name, record)


def smoke_finding(name: str, record: RequestRecord) -> Confound:
    """Return the finding about an answer to the smoke question that has faults."""
    faults = record.answer.fault or "; ".join(dict.fromkeys(record.judgement.faults.values()))
    return finding("smoke", name, faults=faults, answer=record.answer.text[:80])


# ---- one server: its answers


def _in_times(
    code: str, name: str, affected: _Records, answers: _Records, effect: str
) -> _Findings:
    """Report answers that change what a time measures.

    They are a confound, or a note where they are so few that the median over all answers is within 2.5 percentiles of the others'.
    """
    if not affected:
        return
    severity: Severity = "confound"
    if len(affected) < RARE * len(answers):
        severity = "note"
        effect = "too few to change the median times"
    counts = {"n": len(affected), "of": len(answers)}
    yield finding(
        code,
        name,
        severity=severity,
        effect=effect,
        **counts,
    )


LEAK_EFFECT = (
    "its TTFT is the time to the first thinking token, not to an answer (is the server's --reasoning-parser set? is "
    "thinking off in its template?)"
)


def _thinking(name: str, records: _Records, config: BenchConfig) -> _Findings:
    """Thinking that is shown, hidden, or uses up the whole answer although it is switched off."""
    off = [r for r in records if r.workload not in config.with_thinking and not r.answer.error]
    hidden = [r for r in off if r.answer.reasoning.strip()]
    # The text is read again: an incomplete answer fails the gate whatever it shows.
    leaks = [r for r in off if leaked(r.answer.text) and not r.answer.reasoning.strip()]
    yield from _in_times(
        "thinking_as_content",
        name,
        leaks,
        off,
        LEAK_EFFECT,
    )
    effect = "its content TTFT includes that thinking"
    yield from _in_times(
        "hidden_thinking",
        name,
        hidden,
        off,
        effect,
    )
    taken = 0
    lengths = []
    for record in off:
        answer = record.answer
        if not answer.silent:
            continue
        if not answer.fault and answer.reasoning.strip():
            taken += 1
            continue
        was_complete = not answer.fault or answer.finish_reason == "length"
        lost_call = _offers_tools(record) and parser_fault(answer)
        if was_complete and not lost_call and (answer.completion_tokens or 0) > 8:
            lengths.append(answer.completion_tokens or 0)
    if taken:
        yield finding("reasoning_parser_fault", name, n=taken, of=len(off))
    if lengths:
        tokens = round(statistics.median(lengths))
        yield finding(
            "empty_after_thinking",
            name,
            tokens=tokens,
            n=len(lengths),
            of=len(off),
        )


def _offers_tools(record: RequestRecord) -> bool:
    """Return whether a call was expected, so that the request had tools."""
    return "tool_call" in record.judgement.checks


def _tool_parser(name: str, records: _Records, runtime: str | None) -> _Findings:
    """HTTP 400 on requests with tools, or calls that do not arrive: the fault is the server's parser, not the model."""
    tools = [r for r in records if _offers_tools(r)]
    hint = parser_hint(runtime)
    refused = sum(r.answer.status == 400 for r in tools)
    if refused:
        yield finding("tool_parser_missing", name, n=refused, of=len(tools), hint=hint)
    faults: Counter[str] = Counter()
    for record in tools:
        checks = record.judgement.checks
        answer = record.answer
        if checks["tool_call"]:
            continue
        fault = parser_fault(answer)
        # No parser can read a call that was cut.
        if not fault and not answer.fault and not answer.tool_calls and has_call_markup(answer):
            fault = "a mark of a call is left in the text"
        if not fault and checks.get("tool_call_raw", False):
            fault = "a call is left in the text"
        if fault:
            faults[fault] += 1
    if faults:
        what = ", ".join(f"{count} x {fault}" for fault, count in faults.most_common())
        n = faults.total()
        yield finding("tool_parser_fault", name, n=n, of=len(tools), what=what, hint=hint)


def _errors(name: str, records: _Records) -> _Findings:
    errors = [str(r.answer.error)[:100] for r in records if r.answer.error]
    if not errors:
        return
    kinds = sorted(set(errors))
    reason = kinds[0]
    if len(kinds) > 1:
        reason += f", and {len(kinds) - 1} other kinds"
    code = "no_answers" if len(errors) == len(records) else "errors"
    yield finding(
        code,
        name,
        n=len(errors),
        of=len(records),
        reason=reason,
    )
    unanswered = [r for r in records if r.answer.cause in ("hung", "not_sent")]
    if unanswered and code == "errors":
        first = unanswered[0]
        prompt = f"{first.workload}/{first.case}"
        yield finding("hung", name, prompt=prompt, others=len(unanswered) - 1)


def _cut(name: str, records: _Records) -> _Findings:
    """Incomplete answers fail their gates: where they are many, the gates say nothing about the model."""
    judged = [r for r in records if r.judgement.checks and not r.answer.error]
    incomplete = [r for r in judged if r.answer.fault]
    cut = [r for r in incomplete if r.answer.finish_reason == "length"]
    ended = [r for r in incomplete if r.answer.finish_reason != "length"]
    of = len(judged)
    yield from _incomplete(
        "cut_answers",
        name,
        cut,
        of,
        effect=_longer_answers(cut),
    )
    yield from _incomplete(
        "incomplete_answers",
        name,
        ended,
        of,
        effect="its gates say nothing about the model",
    )


def _incomplete(code: str, name: str, answers: _Records, of: int, effect: str) -> _Findings:
    """Report incomplete answers: a confound where they are many, else a note."""
    if not answers:
        return
    severity: Severity = "confound"
    if len(answers) < MIN_CUT_SHARE * of:
        severity = "note"
        effect = "they count as failed"
    counts = {"n": len(answers), "of": of, "reason": answers[0].answer.fault}
    yield finding(
        code,
        name,
        severity=severity,
        effect=effect,
        **counts,
    )


def _longer_answers(cut: _Records) -> str:
    """Return which files need which max_tokens, so that these answers are not cut."""
    limits: dict[str, int] = {}
    for record in cut:
        tokens = record.answer.completion_tokens or 0
        limits[record.workload] = max(tokens, limits.get(record.workload, 0))
    files = []
    for workload, limit in sorted(limits.items()):
        value = f"from {limit} to {2 * limit}" if limit else "to twice its value"
        files.append(f"in workloads/{workload}.json {value}")
    return f"raise max_tokens {', '.join(files)}"


# ---- one server: its times


def _slow_starts(name: str, records: _Records) -> _Findings:
    slow = [r for r in records if r.cold] + stalls(records)
    if slow:
        longest_ms = max(r.timings.e2e_ms or 0 for r in slow)
        yield finding("cold_start", name, n=len(slow), longest=longest_ms / 1000)


def is_slow(time_ms: float, usual_ms: float) -> bool:
    """Whether a time is ten times the usual one, and a second longer: not a steady state."""
    return time_ms > max(SLOW_FACTOR * usual_ms, usual_ms + SLOW_MS)


def stalls(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Return the requests whose first token was slow against their workload's median."""
    groups: dict[tuple[object, ...], list[tuple[float, RequestRecord]]] = defaultdict(list)
    for r in records:
        first_ms = r.timings.first_token_ms
        if first_ms is not None and not r.warmup and not r.cold:
            group = (r.backend, r.workload, r.load.level, r.turn)
            groups[group].append((first_ms, r))
    slow = []
    for times in groups.values():
        usual_ms = statistics.median(first_ms for first_ms, _ in times)
        slow += [r for first_ms, r in times if is_slow(first_ms, usual_ms)]
    return slow


def impossible(record: RequestRecord) -> bool:
    """Whether an answer was stamped before its request was sent: the stamp, and so all its times, are wrong."""
    first = record.timings.first_event_ms
    sent = record.timings.sent_ms
    return first is not None and sent is not None and first < sent


def _stamps(name: str, records: _Records) -> _Findings:
    early = sum(map(impossible, records))
    if early:
        yield finding("stamp_fault", name, n=early, of=len(records))


def _clock(name: str, records: _Records) -> _Findings:
    """Our time per token against the server's own (llama.cpp sends it): the rest is network, client or queueing."""
    pairs = []
    for record in records:
        ours = record.timings.tpot_ms
        theirs = (record.timings.server_timings or {}).get("predicted_per_token_ms")
        if ours and theirs and isinstance(theirs, (int, float)) and not record.answer.error:
            pairs.append((ours, theirs))
    if not pairs:
        return
    measured, reported = map(statistics.median, zip(*pairs, strict=True))
    if measured > CLOCK_FACTOR * reported and measured - reported >= CLOCK_MS:
        yield finding("client_overhead", name, measured=measured, reported=reported)


# ---- one server: events are not tokens


def tokens_per_event(rows: Iterable[RequestRecord]) -> tuple[float, int] | None:
    """Return (the server's tokens per event with text, number of events) over answers without tool calls; None below MIN_EVENTS.

    The end-of-turn token, which no event has, is not counted. Calls are left out because servers send their syntax in pieces of
    their own.
    """
    tokens = 0
    events = 0
    for r in rows:
        answer = r.answer
        n_events = r.tokens.token_events
        n_tokens = answer.completion_tokens
        is_counted = not (answer.tokens_estimated or answer.tool_calls or answer.error)
        if n_events and n_tokens and is_counted:
            tokens += max(0, n_tokens - (answer.finish_reason == "stop"))
            events += n_events
    return (tokens / events, events) if events >= MIN_EVENTS and tokens else None


def _events(name: str, rows: _Records) -> _Findings:
    ratio, events = tokens_per_event(rows) or (1.0, 0)
    if not MIN_EVENT_RATIO <= ratio <= 1 / MIN_EVENT_RATIO:
        code = "merged_tokens" if ratio > 1 else "split_tokens"
        figures = {"ratio": ratio, "inverse": 1 / ratio, "least": MIN_EVENT_RATIO}
        yield finding(code, name, events=events, **figures)


# ---- speculative decoding


def acceptance(rows: Iterable[RequestRecord]) -> tuple[float, float] | None:
    """Return (share of drafted tokens that were accepted, drafted tokens); None where nothing was drafted."""
    all_drafted = 0.0
    all_accepted = 0.0
    for r in rows:
        drafted = r.tokens.drafted_tokens
        accepted = r.tokens.accepted_tokens
        if drafted and accepted is not None:
            all_drafted += drafted
            all_accepted += accepted
    return (all_accepted / all_drafted, all_drafted) if all_drafted else None


def _different_acceptance(by_side: Mapping[str, _Records]) -> _Findings:
    """Paired over prompts, Holm over workloads and pairs of sides."""
    tests = []
    p_values = []
    for a, b in itertools.combinations(by_side, 2):
        left = by_workload(by_side[a])
        right = by_workload(by_side[b])
        for workload in sorted(left.keys() & right.keys()):
            x = acceptance(left[workload])
            y = acceptance(right[workload])
            if x is not None and y is not None:
                ours = measured_values(left[workload], "acceptance")
                theirs = measured_values(right[workload], "acceptance")
                result = compare(ours, theirs)
                figures = {
                    "workload": workload,
                    "x": x,
                    "y": y,
                    "prompts": result.n_prompts,
                }
                tests.append((a, b, figures))
                p_values.append(result.p)
    for (a, b, figures), p in zip(tests, holm(p_values), strict=True):
        if p is not None and p < LEVEL:
            yield finding(
                "different_acceptance",
                a,
                b,
                p=p,
                **figures,
            )
