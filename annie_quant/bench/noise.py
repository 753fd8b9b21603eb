"""The noise floor of a run: how large a difference two identical servers would show (A/A of each side).

Every prompt that a backend answered more than once is an A/A measurement of it. Where each prompt is measured once, the plan
sends a tenth of them (BenchConfig.noise_share) a second time. The floor of a comparison is what 95 % of A/A comparisons with
its prompts and repeats stay below, from resampled residuals; tests/perf/bench_rules.py simulates how often equal sides exceed it.

Findings about what streams carry: several tokens per event, the acceptance of drafts, the prefix cache, and the depth.

Each of these makes two sides' times differ although both compute equally fast, or makes one figure mean something else.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from annie_quant.documents import Comparison, Confound, NoiseFloor, RequestRecord
from annie_quant.documents.results import Severity
from annie_quant.judge.metrics import COMPARED, metric_value
from annie_quant.judge.statistics import LEVEL, compare, holm, paired

CONFIDENCE = 0.95
RESAMPLES = 499
LEAST_RESIDUALS = 10  # of a workload; with fewer, those of all its side's workloads are used
SMOOTHED = 20_000
MOST_PROMPTS = 200  # resampled; the floor of more prompts is scaled by the square root

Values = Mapping[Hashable, Sequence[float]]


def measured(records: Iterable[RequestRecord], metric: str) -> dict[Hashable, list[float]]:
    """Return prompt → one value per request, in order: a list of values (ITL) counts as its median."""
    values: dict[Hashable, list[float]] = defaultdict(list)
    for record in records:
        value = metric_value(record, metric)
        if value is not None:
            values[record.prompt].append(statistics.median(value) if isinstance(value, list) else float(value))
    return values


def floors(
    records: Sequence[RequestRecord], labels: Mapping[str, Sequence[RequestRecord]], seed: int
) -> list[NoiseFloor]:
    """Return the floors of one backend, by label of workload and load, and by metric.

    records: all timed requests of the backend. labels: the same by label; "all" may be among them. A metric that was never
    measured twice has no floor.
    """
    rows = []
    for metric in COMPARED:
        everything = residuals(measured(records, metric).values())
        for label, own in labels.items():
            by_prompt = measured(own, metric)
            near = residuals(by_prompt.values())
            pool = near if len(near) >= LEAST_RESIDUALS else everything
            if len(pool) >= LEAST_RESIDUALS and by_prompt:
                rows.append(_floor(label, metric, by_prompt, pool, seed))
    return rows


def residuals(groups: Iterable[Sequence[float]]) -> list[float]:
    """Return the relative deviations of repeated measurements from their prompt's mean, without its loss of freedom."""
    rest = []
    for values in groups:
        mean = statistics.fmean(values)
        if len(values) > 1 and mean > 0:
            widen = (len(values) / (len(values) - 1)) ** 0.5
            rest += [(value - mean) / mean * widen for value in values]
    return rest


def _floor(label: str, metric: str, by_prompt: Values, pool: Sequence[float], seed: int) -> NoiseFloor:
    import numpy as np

    rng = np.random.default_rng(seed)
    smooth, widen = _smooth_pool(pool, rng)
    sizes = np.array([(statistics.median(v), len(v)) for v in by_prompt.values()])
    n = len(sizes)
    sizes = sizes[rng.permutation(n)[:MOST_PROMPTS]]
    repeats = int(np.median(sizes[:, 1]))
    draws = rng.choice(smooth, size=(RESAMPLES, len(sizes), 2, repeats))
    sides = np.median(draws, axis=3) * sizes[None, :, :1]
    differences = np.abs(np.median(sides[:, :, 1] - sides[:, :, 0], axis=1))
    scale = (len(sizes) / n) ** 0.5
    first, second = _halves(by_prompt, rng)
    again = compare(first, second, seed=seed)
    return NoiseFloor(
        workload=label,
        metric=metric,
        floor=float(np.quantile(differences, CONFIDENCE)) * scale * widen,
        n_prompts=n,
        n_repeated=len(paired(first, second)),
        difference=again.median_difference,
        low=again.low,
        high=again.high,
    )


def _smooth_pool(residual: Sequence[float], rng: Any) -> tuple[Any, float]:
    """Return SMOOTHED draws from a kernel estimate of the residuals with their variance, and the factor for few of them.

    Medians of a few discrete values would vary too little. The factor is Student's quantile over the normal one.
    """
    import numpy as np
    from scipy.stats import norm, t

    values = np.asarray(residual)
    width = 0.9 * len(values) ** -0.2  # Silverman's rule, in standard deviations
    draws = rng.choice(values, SMOOTHED) + rng.normal(0, width * values.std(), SMOOTHED)
    quantile = 0.5 + CONFIDENCE / 2
    return draws / (1 + width * width) ** 0.5, float(t.ppf(quantile, max(len(values) // 2, 1)) / norm.ppf(quantile))


def _halves(by_prompt: Values, rng: Any) -> tuple[dict[Hashable, list[float]], dict[Hashable, list[float]]]:
    """Deal the repeats of each prompt to two sides at random."""
    sides: tuple[dict[Hashable, list[float]], dict[Hashable, list[float]]] = {}, {}
    for prompt, values in by_prompt.items():
        if len(values) > 1:
            order = rng.permutation(len(values))
            for side, part in zip(sides, (order[: len(order) // 2], order[len(order) // 2 :]), strict=True):
                side[prompt] = [values[i] for i in part]
    return sides


def set_noise(comparisons: Iterable[Comparison], noise: Mapping[str, Sequence[NoiseFloor]]) -> None:
    """Set the noise of each comparison from the floors of its two sides, which are independent."""
    table = {(name, row.workload, row.metric): row.floor for name, rows in noise.items() for row in rows}
    for row in comparisons:
        own = [table.get((name, row.workload, row.metric)) for name in (row.a, row.b)]
        known = [floor for floor in own if floor is not None]
        if len(known) == 2:
            row.noise = (sum(floor**2 for floor in known) / 2) ** 0.5


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
            result = compare(*(measured(side[workload], "acceptance") for side in (left, right)))
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

    by_prompt = {w: measured(own, "acceptance") for w, own in _by_workload(rows).items()}
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
