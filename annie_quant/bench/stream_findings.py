"""Findings about what streams carry: several tokens per event, the acceptance of drafts, the prefix cache, and the depth.

Each of these makes two sides' times differ although both compute equally fast, or makes one figure mean something else.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from annie_quant.bench import noise
from annie_quant.judge.statistics import LEVEL, compare, holm
from annie_quant.schema import Confound, RequestRecord
from annie_quant.schema.results import Severity

Records = Sequence[RequestRecord]

LEAST_RATIO = 0.8  # of events per token, and of tokens per event
LEAST_EVENTS = 50  # of a side, before its ratio is judged
HIT_SHARE = (
    0.5  # of the depth that a workload aims at: at least this much is read from the cache in a hit, at most in a miss
)
DEPTH_SHARE = 0.7  # of the depth that a workload aims at
LEAST_PROMPTS = 5


def check(everyone: Sequence[str], measured: Records) -> list[Confound]:
    """Return all findings; measured: records without warm-ups."""
    good = [r for r in measured if not r.error]
    by_side = {name: [r for r in good if r.backend == name] for name in everyone}
    findings = [f for name, rows in by_side.items() for f in _one_side(name, rows)]
    return [*findings, *_different_acceptance(by_side)]


def _one_side(name: str, rows: Records) -> Iterator[Confound]:
    yield from _events(name, rows)
    yield from _prefix_cache(name, rows)
    yield from _depth(name, rows)
    yield from _acceptance_falls(name, rows)


def _finding(code: str, severity: Severity, message: str, *backends: str) -> Confound:
    return Confound(code=code, severity=severity, message=message, backends=list(backends))


# ---- chunks are not tokens


def tokens_per_event(rows: Iterable[RequestRecord]) -> tuple[float, int] | None:
    """Return (the server's tokens per event with text, number of events) over answers without tool calls; None below LEAST_EVENTS.

    The end-of-turn token, which no event has, is not counted. Calls are left out because servers send their syntax in pieces of
    their own.
    """
    tokens = events = 0
    for r in rows:
        if r.tokens_estimated or not r.token_events or not r.completion_tokens or r.tool_calls or r.error:
            continue
        tokens += max(0, r.completion_tokens - (r.finish_reason == "stop"))
        events += r.token_events
    return (tokens / events, events) if events >= LEAST_EVENTS and tokens else None


def _events(name: str, rows: Records) -> Iterator[Confound]:
    measured = tokens_per_event(rows)
    if measured is None:
        return
    ratio, events = measured
    if ratio > 1 / LEAST_RATIO:
        message = (
            f"{name} merges words: its {events} events carry {ratio:.2f} tokens each ({1 / ratio:.2f} events per token, "
            f"expected {LEAST_RATIO:g} or more), so ITL is between groups of tokens; compare ITL per token or TPOT"
        )
        yield _finding("merged_tokens", "confound", message, name)
    elif ratio < LEAST_RATIO:
        message = (
            f"{name} sends more events than tokens: {ratio:.2f} tokens per event in {events} events (expected {LEAST_RATIO:g} or "
            "more), so ITL is between pieces of tokens, or usage leaves tokens out; compare ITL per token or TPOT"
        )
        yield _finding("split_tokens", "note", message, name)


# ---- prefix cache and depth


def _prefix_cache(name: str, rows: Records) -> Iterator[Confound]:
    for workload, own in _by_workload(r for r in rows if r.prefix and r.turn == 0).items():
        reported = [r for r in own if r.cached_tokens is not None and r.prompt_tokens]
        if not reported:
            if own[0].prefix == "hit":
                message = (
                    f"{name} does not report cached tokens in {workload}: whether its prefix cache worked is not proven "
                    "(vLLM: --enable-prompt-tokens-details)"
                )
                yield _finding("prefix_cache_unproven", "note", message, name)
            continue
        shares = [(r.cached_tokens or 0) / r.prompt_tokens for r in reported]
        hits = sum(share >= HIT_SHARE for share in shares)
        if own[0].prefix == "hit" and hits < HIT_SHARE * len(shares):
            message = (
                f"{name} drops its prefix cache: in {workload} {len(shares) - hits} of {len(shares)} prompts that were sent before "
                f"had under half of their tokens cached (median {statistics.median(shares):.0%})"
            )
            yield _finding("prefix_cache_dropped", "fault", message, name)
        elif own[0].prefix == "miss" and hits:
            message = (
                f"{name} took {hits} of {len(shares)} prompts of {workload} from its prefix cache although each begins with a "
                "different text: their TTFT is not the time of a whole prefill"
            )
            yield _finding("prefix_cache_hit", "confound", message, name)


def _depth(name: str, rows: Records) -> Iterator[Confound]:
    for workload, own in _by_workload(r for r in rows if r.depth and r.prompt_tokens).items():
        depth, prompt = own[0].depth or 0, statistics.median(r.prompt_tokens for r in own)
        if prompt < DEPTH_SHARE * depth:
            message = (
                f"{name} read {prompt:.0f} tokens of a prompt of about {depth} in {workload}: its tokenizer needs fewer, or it "
                "cuts prompts to its context (Ollama: num_ctx)"
            )
            yield _finding("depth_not_reached", "note", message, name)


def _by_workload(rows: Iterable[RequestRecord]) -> dict[str, list[RequestRecord]]:
    groups: dict[str, list[RequestRecord]] = defaultdict(list)
    for row in rows:
        groups[row.workload].append(row)
    return dict(sorted(groups.items()))


# ---- speculative decoding


def acceptance(rows: Iterable[RequestRecord]) -> tuple[float, float] | None:
    """Return (share of drafted tokens that were accepted, drafted tokens); None where nothing was drafted."""
    pairs = [(r.drafted_tokens, r.accepted_tokens) for r in rows if r.drafted_tokens and r.accepted_tokens is not None]
    drafted = sum(d for d, _ in pairs)
    return (sum(a for _, a in pairs) / drafted, drafted) if drafted else None


def _different_acceptance(by_side: dict[str, list[RequestRecord]]) -> Iterator[Confound]:
    """Paired over prompts, Holm over workloads and pairs of sides."""
    tests = []
    for a, b in itertools.combinations(by_side, 2):
        left, right = _by_workload(by_side[a]), _by_workload(by_side[b])
        for workload in left.keys() & right.keys():
            rates = acceptance(left[workload]), acceptance(right[workload])
            if rates[0] is None or rates[1] is None:
                continue
            result = compare(*(noise.measured(side[workload], "acceptance") for side in (left, right)))
            tests.append((a, b, workload, rates[0], rates[1], result))
    tests.sort(key=lambda t: t[:3])
    for (a, b, workload, (x, drafted_a), (y, drafted_b), result), p in zip(
        tests, holm([t[5].p for t in tests]), strict=True
    ):
        if p is not None and p < LEVEL:
            message = (
                f"{a} and {b} accept drafts at different rates in {workload}: {x:.0%} of {drafted_a:.0f} and {y:.0%} of "
                f"{drafted_b:.0f} drafted tokens ({result.n_prompts} prompts, p = {p:.2g}): their decode speeds differ by that too"
            )
            yield _finding("different_acceptance", "note", message, a, b)


def _acceptance_falls(name: str, rows: Records) -> Iterator[Confound]:
    """Name the workloads whose acceptance is below that of the side's others: Mann-Whitney over prompts, Holm over workloads."""
    from scipy.stats import mannwhitneyu

    by_prompt = {w: noise.measured(own, "acceptance") for w, own in _by_workload(rows).items()}
    groups = {w: [statistics.fmean(values) for values in prompts.values()] for w, prompts in by_prompt.items()}
    groups = {workload: values for workload, values in groups.items() if len(values) >= LEAST_PROMPTS}
    if len(groups) < 2:
        return
    others = {w: [value for other, values in groups.items() if other != w for value in values] for w in groups}
    p_values = [float(mannwhitneyu(groups[w], others[w], alternative="less").pvalue) for w in groups]
    for workload, p in zip(groups, holm(p_values), strict=True):
        if p is not None and p < LEVEL:
            own, rest = groups[workload], others[workload]
            message = (
                f"{name} accepts fewer drafts in {workload} than in its other workloads: {statistics.fmean(own):.0%} and "
                f"{statistics.fmean(rest):.0%} (means of {len(own)} and {len(rest)} prompts, p = {p:.2g}): decode speed depends on "
                "the text"
            )
            yield _finding("acceptance_falls", "note", message, name)
