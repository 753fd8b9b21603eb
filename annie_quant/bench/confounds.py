"""What limits the conclusions of a benchmark, from what servers report about themselves and from their answers.

The first benchmarks of the original plan compared different models, timed hidden or leaked thinking, estimated token counts,
took a missing parser for a fault of the model and averaged cold starts. Each of these has a check here.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from annie_quant.bench.findings import finding
from annie_quant.bench.stability import measured_values
from annie_quant.documents import (
    Answer,
    BenchConfig,
    Confound,
    Ended,
    Identity,
    RequestRecord,
    by_backend,
)
from annie_quant.documents.results import Severity
from annie_quant.judge.answers import constant_answer
from annie_quant.judge.checks.calls import has_call_markup
from annie_quant.judge.checks.text import leaked
from annie_quant.judge.pairing import has_label
from annie_quant.judge.statistics import LEVEL, compare, holm

Records = Sequence[RequestRecord]
Findings = Iterator[Confound]

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
LEAST_RATIO = 0.8  # of events per token, and of tokens per event
LEAST_EVENTS = 50  # of a side, before its ratio is judged
HIT_SHARE = 0.5  # of a prompt's tokens: at least this share is read from the cache in a hit, at most in a miss
DEPTH_SHARE = 0.7  # of the depth that a workload aims at
LEAST_PROMPTS = 5  # of a workload, before its acceptance is compared


def find_confounds(
    identities: Mapping[str, Identity], records: Records, config: BenchConfig, ended: Ended
) -> list[Confound]:
    """Return all findings of a benchmark; records include warm-ups."""
    measured = [r for r in records if not r.warmup]
    names = list(identities)
    good = by_backend((r for r in measured if not r.answer.error), names)
    findings: list[Confound] = []
    for a, b in itertools.combinations(identities.values(), 2):
        findings += _pair(a, b)
    findings += [*_prompt_tokens(names, measured), *_estimates(measured), *_smoke(records)]
    findings += [
        *_different_answers(names, measured, config),
        *_busy(names, measured),
        *_priority(names, measured),
    ]
    findings += _incomplete(names, ended if not config.sustained else Ended())
    for name, rows in good.items():
        findings += [*_events(name, rows), *_prefix_cache(name, rows), *_depth(name, rows)]
        findings += _acceptance_falls(name, rows)
    findings += _different_acceptance(good)
    for name, identity in identities.items():
        rows = [r for r in measured if r.backend == name]
        if ended.prefix_cache == "off" and identity.runtime not in NO_CACHE_RUNTIMES:
            findings.append(finding("prefix_cache", name))
        findings += [finding("identity", name, caveat=caveat) for caveat in identity.caveats]
        findings += [
            *_thinking(name, rows, config),
            *_tool_parser(name, rows),
            *_slow_starts(name, rows),
        ]
        findings += [
            *_errors(name, rows),
            *_cut(name, rows),
            *_clock(name, rows),
            *_stamps(name, rows),
        ]
    return findings


# ---- two servers


def _pair(a: Identity, b: Identity) -> Findings:
    if a.url and a.url == b.url:
        yield finding("same_server", a.name, b.name)
        return
    sources = [side.meta.get("source") for side in (a, b)]
    compared: list[tuple[str, str, object, object]] = [
        ("different_weights", "source weights", sources[0], sources[1])
    ]
    sizes = {
        "n_params": "numbers of parameters",
        "n_vocab": "vocabulary sizes",
        "n_embd": "hidden sizes",
    }
    for field, title in sizes.items():
        x = getattr(a.model_meta, field)
        y = getattr(b.model_meta, field)
        if x and y and abs(x - y) > SAME_SIZE * max(x, y):
            compared.append(("different_models", title, x, y))
    compared += [
        ("different_templates", "chat templates", a.chat_template_sha256, b.chat_template_sha256),
        (
            "different_sampling",
            "default sampling settings",
            a.sampling_defaults,
            b.sampling_defaults,
        ),
        ("different_engines", "serving engines", a.runtime, b.runtime),
    ]
    differing = [row for row in compared if row[2] and row[3] and row[2] != row[3]]
    for code, what, x, y in differing:
        yield finding(code, a.name, b.name, what=what, x=_short(x), y=_short(y))
    if not all(sources) and not differing:
        yield finding("weights_unknown", a.name, b.name)


def _short(value: object) -> str:
    text = str(value)
    return text[:12] + "…" if len(text) == 64 and text.isalnum() else text[:120]


def _prompt_tokens(names: Sequence[str], records: Records) -> Findings:
    """Report first-turn requests with another number of tokens per side: template or tokenizer differ."""
    counts: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    for record in records:
        if record.tokens.prompt_tokens and record.turn == 0:
            counts[record.backend][record.workload, record.case] = record.tokens.prompt_tokens
    for a, b in itertools.combinations(names, 2):
        shared = counts[a].keys() & counts[b].keys()
        differing = sorted(key for key in shared if counts[a][key] != counts[b][key])
        if differing:
            first, *_ = differing
            n = len(differing)
            both = [counts[side][differing[0]] for side in (a, b)]
            prompt = "/".join(first)
            yield finding(
                "different_prompts",
                a,
                b,
                n=n,
                shared=len(shared),
                prompt=prompt,
                x=both[0],
                y=both[1],
            )


def _different_answers(names: Sequence[str], records: Records, config: BenchConfig) -> Findings:
    """Two formats of one model start most greedy answers alike, and none gives one answer to different questions."""
    answers: dict[str, dict[tuple[str, str], RequestRecord]] = defaultdict(dict)
    for record in records:
        if record.workload in config.greedy and record.turn == 0 and not record.answer.error:
            answers[record.backend][record.workload, record.case] = record
    for a, b in itertools.permutations(names, 2):
        shared = sorted(answers[a].keys() & answers[b].keys())
        unlabelled = [key for key in shared if not has_label(answers[b][key].judgement.checks)]
        constant = constant_answer(
            [answers[a][key].answer for key in unlabelled],
            [answers[b][key].answer for key in unlabelled],
        )
        if constant:
            yield finding("constant_answers", a, b, answer=constant)
    for a, b in itertools.combinations(names, 2):
        both = answers[a].keys() & answers[b].keys()
        n = equal = 0
        for key in both:
            ours = answers[a][key].answer.text.split()
            theirs = answers[b][key].answer.text.split()
            if ours and theirs:
                n += 1
                equal += ours[:OPENING_WORDS] == theirs[:OPENING_WORDS]
        if n >= MIN_COMPARED_ANSWERS and equal < MIN_EQUAL_SHARE * n:
            yield finding("different_answers", a, b, equal=equal, n=n, words=OPENING_WORDS)


# ---- the whole run


def _incomplete(names: Sequence[str], ended: Ended) -> Findings:
    stopped = ended.stopped
    if stopped:
        yield finding(
            "stopped_early", *names, look=stopped.look, looks=stopped.looks + 1, level=stopped.level
        )
    elif ended.unasked:
        yield finding("unfinished", *names, n=ended.unasked)


def _busy(names: Sequence[str], records: Records) -> Findings:
    """More work than the cores can do: every time is an upper bound, and so is the client's own delay."""
    loads = [r.load.load_per_core for r in records if r.load.load_per_core is not None]
    if loads and (load := statistics.median(loads)) >= BUSY_LOAD:
        yield finding("busy_machine", *names, load=load)


def _priority(names: Sequence[str], records: Records) -> Findings:
    """Without real-time priority the client may read late, and one kernel stamp covers all events of a read."""
    flags = [r.timings.realtime for r in records if r.timings.realtime is not None]
    without = flags.count(False)
    if without:
        yield finding("normal_priority", *names, n=without, of=len(flags))


def _estimates(records: Records) -> Findings:
    names = {r.backend for r in records if r.answer.tokens_estimated and not r.answer.error}
    if names:
        yield finding("tokens_estimated", *sorted(names))


def _smoke(records: Records) -> Findings:
    last = {r.backend: r for r in records if r.workload == "smoke"}
    for name, record in last.items():
        if record.judgement.faults:
            yield smoke_finding(name, record)


def smoke_finding(name: str, record: RequestRecord) -> Confound:
    """Return the finding about an answer to the smoke question that has faults."""
    faults = record.answer.fault or "; ".join(dict.fromkeys(record.judgement.faults.values()))
    return finding("smoke", name, faults=faults, answer=record.answer.text[:80])


# ---- one server: its answers


def _in_times(code: str, name: str, affected: Records, answers: Records, effect: str) -> Findings:
    """Report answers that change what a time measures.

    They are a confound, or a note where they are so few that the median over all answers is within 2.5 percentiles of the others'.
    """
    if affected:
        rare = len(affected) < RARE * len(answers)
        effect = "too few to change the median times" if rare else effect
        severity: Severity = "note" if rare else "confound"
        yield finding(
            code, name, severity=severity, n=len(affected), of=len(answers), effect=effect
        )


def _thinking(name: str, records: Records, config: BenchConfig) -> Findings:
    """Thinking that is shown, hidden, or uses up the whole answer although it is switched off."""
    off = [r for r in records if r.workload not in config.with_thinking and not r.answer.error]
    hidden = [r for r in off if r.answer.reasoning.strip()]
    # The text is read again: an incomplete answer fails the gate whatever it shows.
    leaks = [r for r in off if leaked(r.answer.text) and not r.answer.reasoning.strip()]
    effect = (
        "its TTFT is the time to the first thinking token, not to an answer (is the server's --reasoning-parser set? is "
        "thinking off in its template?)"
    )
    yield from _in_times("thinking_as_content", name, leaks, off, effect)
    effect = "its content TTFT includes that thinking"
    yield from _in_times("hidden_thinking", name, hidden, off, effect)
    empty = [
        r.answer.completion_tokens
        for r in off
        if not r.answer.text.strip()
        and not r.answer.tool_calls
        and (not r.answer.fault or r.answer.finish_reason == "length")
    ]
    lengths = [tokens for tokens in empty if tokens and tokens > 8]
    if lengths:
        tokens = round(statistics.median(lengths))
        yield finding("empty_after_thinking", name, tokens=tokens, n=len(lengths), of=len(off))


def _tool_parser(name: str, records: Records) -> Findings:
    """HTTP 400 on requests with tools, or calls in the text: the fault is the server's parser, not the model."""
    tools = [r for r in records if "tool_call" in r.judgement.checks]
    refused = sum(r.answer.status == 400 for r in tools)
    if refused:
        yield finding("tool_parser_missing", name, n=refused, of=len(tools))
    failed = [r for r in tools if not r.judgement.checks["tool_call"]]
    in_text = sum(r.judgement.checks.get("tool_call_raw", False) for r in failed)
    # No parser can read a call that was cut.
    complete = [r for r in failed if not r.answer.fault and not r.answer.tool_calls]
    unparsed = sum(has_call_markup(Answer(text=r.answer.text)) for r in complete)
    if in_text or unparsed:
        yield finding("tool_parser_fault", name, n=max(in_text, unparsed), of=len(tools))


def _errors(name: str, records: Records) -> Findings:
    errors = [str(r.answer.error)[:100] for r in records if r.answer.error]
    if not errors:
        return
    kinds = sorted(set(errors))
    reason = kinds[0] + (f", and {len(kinds) - 1} other kinds" if len(kinds) > 1 else "")
    code = "no_answers" if len(errors) == len(records) else "errors"
    yield finding(code, name, n=len(errors), of=len(records), reason=reason)
    unanswered = [r for r in records if r.answer.cause in ("hung", "not_sent")]
    if unanswered and code == "errors":
        prompt = f"{unanswered[0].workload}/{unanswered[0].case}"
        yield finding("hung", name, prompt=prompt, others=len(unanswered) - 1)


def _cut(name: str, records: Records) -> Findings:
    """Incomplete answers fail their gates: where they are many, the gates say nothing about the model."""
    judged = [r for r in records if r.judgement.checks and not r.answer.error]
    incomplete = [r for r in judged if r.answer.fault]
    cut = [r for r in incomplete if r.answer.finish_reason == "length"]
    ended = [r for r in incomplete if r.answer.finish_reason != "length"]
    remedies = {
        "cut_answers": (cut, "raise max_tokens of the workload"),
        "incomplete_answers": (ended, "its gates say nothing about the model"),
    }
    for code, (answers, remedy) in remedies.items():
        if answers:
            often = len(answers) >= MIN_CUT_SHARE * len(judged)
            severity: Severity = "confound" if often else "note"
            yield finding(
                code,
                name,
                severity=severity,
                n=len(answers),
                of=len(judged),
                reason=answers[0].answer.fault,
                effect=remedy if often else "they count as failed",
            )


# ---- one server: its times


def _slow_starts(name: str, records: Records) -> Findings:
    slow = [r for r in records if r.cold] + stalls(records)
    if slow:
        yield finding(
            "cold_start", name, n=len(slow), longest=max(r.timings.e2e_ms or 0 for r in slow) / 1000
        )


def is_slow(time_ms: float, usual_ms: float) -> bool:
    """Whether a time is ten times the usual one, and a second longer: not a steady state."""
    return time_ms > max(SLOW_FACTOR * usual_ms, usual_ms + SLOW_MS)


def stalls(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Return the requests whose first token was slow against their workload's median."""
    groups: dict[tuple, list[tuple[float, RequestRecord]]] = defaultdict(list)
    for record in records:
        first = record.timings.first_token_ms
        if first is not None and not record.warmup and not record.cold:
            groups[record.backend, record.workload, record.load.level, record.turn].append(
                (first, record)
            )
    slow = []
    for group in groups.values():
        median = statistics.median(first for first, _ in group)
        slow += [r for first, r in group if is_slow(first, median)]
    return slow


def impossible(record: RequestRecord) -> bool:
    """Whether an answer was stamped before its request was sent: the stamp, and so all its times, are wrong."""
    first = record.timings.first_event_ms
    sent = record.timings.sent_ms
    return first is not None and sent is not None and first < sent


def _stamps(name: str, records: Records) -> Findings:
    early = sum(map(impossible, records))
    if early:
        yield finding("stamp_fault", name, n=early, of=len(records))


def _clock(name: str, records: Records) -> Findings:
    """Our time per token against the server's own (llama.cpp sends it): the rest is network, client or queueing."""
    pairs = []
    for record in records:
        theirs = (record.timings.server_timings or {}).get("predicted_per_token_ms")
        if (
            record.timings.tpot_ms
            and isinstance(theirs, (int, float))
            and theirs
            and not record.answer.error
        ):
            pairs.append((record.timings.tpot_ms, theirs))
    if not pairs:
        return
    measured, reported = (statistics.median(side) for side in zip(*pairs, strict=True))
    if measured > CLOCK_FACTOR * reported and measured - reported >= CLOCK_MS:
        yield finding("client_overhead", name, measured=measured, reported=reported)


# ---- one server: events are not tokens


def tokens_per_event(rows: Iterable[RequestRecord]) -> tuple[float, int] | None:
    """Return (the server's tokens per event with text, number of events) over answers without tool calls; None below LEAST_EVENTS.

    The end-of-turn token, which no event has, is not counted. Calls are left out because servers send their syntax in pieces of
    their own.
    """
    tokens = events = 0
    for r in rows:
        own = r.tokens.token_events
        n = r.answer.completion_tokens
        if own and n and not (r.answer.tokens_estimated or r.answer.tool_calls or r.answer.error):
            tokens += max(0, n - (r.answer.finish_reason == "stop"))
            events += own
    return (tokens / events, events) if events >= LEAST_EVENTS and tokens else None


def _events(name: str, rows: Records) -> Findings:
    ratio, events = tokens_per_event(rows) or (1.0, 0)
    if not LEAST_RATIO <= ratio <= 1 / LEAST_RATIO:
        code = "merged_tokens" if ratio > 1 else "split_tokens"
        yield finding(code, name, ratio=ratio, inverse=1 / ratio, events=events, least=LEAST_RATIO)


# ---- prefix cache and depth


def _prefix_cache(name: str, rows: Records) -> Findings:
    for workload, own in _by_workload(r for r in rows if r.load.prefix and r.turn == 0).items():
        reported = [r for r in own if r.tokens.cached_tokens is not None and r.tokens.prompt_tokens]
        if not reported:
            if own[0].load.prefix == "hit":
                yield finding("prefix_cache_unproven", name, workload=workload)
            continue
        shares = [(r.tokens.cached_tokens or 0) / r.tokens.prompt_tokens for r in reported]
        hits = sum(share >= HIT_SHARE for share in shares)
        if own[0].load.prefix == "hit" and hits < HIT_SHARE * len(shares):
            figures = {
                "n": len(shares) - hits,
                "of": len(shares),
                "median": statistics.median(shares),
            }
            yield finding("prefix_cache_dropped", name, workload=workload, **figures)
        elif own[0].load.prefix == "miss" and hits:
            yield finding("prefix_cache_hit", name, workload=workload, n=hits, of=len(shares))


def _depth(name: str, rows: Records) -> Findings:
    for workload, own in _by_workload(
        r for r in rows if r.load.depth and r.tokens.prompt_tokens
    ).items():
        depth = own[0].load.depth or 0
        prompt = statistics.median(r.tokens.prompt_tokens for r in own)
        if prompt < DEPTH_SHARE * depth:
            yield finding("depth_not_reached", name, workload=workload, prompt=prompt, depth=depth)


def _by_workload(rows: Iterable[RequestRecord]) -> dict[str, list[RequestRecord]]:
    ordered = sorted(rows, key=lambda row: row.workload)
    return {
        name: list(group)
        for name, group in itertools.groupby(ordered, key=lambda row: row.workload)
    }


# ---- speculative decoding


def acceptance(rows: Iterable[RequestRecord]) -> tuple[float, float] | None:
    """Return (share of drafted tokens that were accepted, drafted tokens); None where nothing was drafted."""
    tokens = ((r.tokens.drafted_tokens, r.tokens.accepted_tokens) for r in rows)
    pairs = [
        (drafted, accepted) for drafted, accepted in tokens if drafted and accepted is not None
    ]
    drafted = sum(d for d, _ in pairs)
    return (sum(a for _, a in pairs) / drafted, drafted) if drafted else None


def _different_acceptance(by_side: Mapping[str, Records]) -> Findings:
    """Paired over prompts, Holm over workloads and pairs of sides."""
    tests = []
    for a, b in itertools.combinations(by_side, 2):
        left = _by_workload(by_side[a])
        right = _by_workload(by_side[b])
        for workload in sorted(left.keys() & right.keys()):
            x = acceptance(left[workload])
            y = acceptance(right[workload])
            if x is not None and y is not None:
                result = compare(
                    *(measured_values(side[workload], "acceptance") for side in (left, right))
                )
                tests.append(
                    (
                        a,
                        b,
                        result,
                        {"workload": workload, "x": x, "y": y, "prompts": result.n_prompts},
                    )
                )
    tests.sort(key=lambda t: t[:2])
    for (a, b, _, figures), p in zip(
        tests, holm([result.p for _, _, result, _ in tests]), strict=True
    ):
        if p is not None and p < LEVEL:
            yield finding("different_acceptance", a, b, p=p, **figures)


def _acceptance_falls(name: str, rows: Records) -> Findings:
    """Name the workloads whose acceptance is below that of the side's others: Mann-Whitney over prompts, Holm over workloads."""
    from scipy.stats import mannwhitneyu

    groups: dict[str, list[float]] = {}
    for workload, own in _by_workload(rows).items():
        prompts = measured_values(own, "acceptance")
        if len(prompts) >= LEAST_PROMPTS:
            groups[workload] = [statistics.fmean(values) for values in prompts.values()]
    if len(groups) < 2:
        return
    p_values = []
    others: dict[str, list[float]] = {}
    for workload, values in groups.items():
        rest = [x for other, found in groups.items() if other != workload for x in found]
        p_values.append(float(mannwhitneyu(values, rest, alternative="less").pvalue))
        others[workload] = rest
    for workload, p in zip(groups, holm(p_values), strict=True):
        if p is not None and p < LEVEL:
            values = groups[workload]
            rest = others[workload]
            means = {"own": statistics.fmean(values), "rest": statistics.fmean(rest)}
            yield finding(
                "acceptance_falls",
                name,
                workload=workload,
                p=p,
                n_own=len(values),
                n_rest=len(rest),
                **means,
            )
