"""Findings about what a server did not compute, or computed for the first time: prefix cache, depth and lengths of prompts."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from annie_quant.bench.findings import finding
from annie_quant.bench.prefill import cold_lengths
from annie_quant.documents import Confound, Identity, RequestRecord

_Records = Sequence[RequestRecord]
_Findings = Iterator[Confound]

HIT_SHARE = 0.5  # of a prompt's tokens: at least this share is read from the cache in a hit, at most in a miss
# Of cached tokens of the same prompt, more than servers' blocks explain.
DIFFERENT_TOKENS = 32
DIFFERENT_SHARE = 0.1
MIN_DIFFERING_PROMPTS = 0.05  # share of the prompts of both sides
DEPTH_SHARE = 0.7  # of the depth that a workload aims at


def first_length_findings(name: str, records: _Records) -> _Findings:
    """Report first requests of a length that no warm-up had: kernels may have been compiled and tuned meanwhile."""
    factors = cold_lengths(records)
    if not factors:
        return
    lengths = ", ".join(f"{length:,}" for length in factors)
    known = [factor for factor in factors.values() if factor is not None]
    effect = (
        f"up to {max(known):.1f} times as slow as later ones" if known else "without later ones"
    )
    yield finding("cold_length", name, lengths=lengths, effect=effect)


def prefix_cache_findings(name: str, rows: _Records) -> _Findings:
    for workload, own in by_workload(r for r in rows if r.load.prefix and r.turn == 0).items():
        expects_hits = own[0].load.prefix == "hit"
        shares = []
        for r in own:
            if r.tokens.cached_tokens is not None and r.tokens.prompt_tokens:
                shares.append(r.tokens.cached_tokens / r.tokens.prompt_tokens)
        n = len(shares)
        hits = sum(share >= HIT_SHARE for share in shares)
        if not n and expects_hits:
            yield finding("prefix_cache_unproven", name, workload=workload)
        elif expects_hits and hits < HIT_SHARE * n:
            median = statistics.median(shares)
            counts = {"n": n - hits, "of": n, "median": median}
            yield finding("prefix_cache_dropped", name, workload=workload, **counts)
        elif own[0].load.prefix == "miss" and hits:
            yield finding(
                "prefix_cache_hit",
                name,
                workload=workload,
                n=hits,
                of=n,
            )


def different_caches(
    identities: Mapping[str, Identity], answered: Mapping[str, _Records]
) -> _Findings:
    """Two servers that take different parts of the same prompts from their caches compute different prompts."""
    for name, rows in answered.items():
        is_reused = any(r.turn or r.load.prefix for r in rows)
        if is_reused and not _cached_by_prompt(rows):
            yield finding("cache_unknown", name)
    for a, b in itertools.combinations(answered, 2):
        if identities[a].url and identities[a].url == identities[b].url:
            continue  # each finds in the cache what the other one has sent
        difference = cache_difference(answered[a], answered[b])
        if difference is not None:
            yield finding("different_cached", a, b, **asdict(difference))


@dataclass(frozen=True)
class CacheDifference:
    """Prompts of two sides of which other parts were cached.

    n, of: such prompts, and all that both sides have and report.
    workload, tokens, x, y: of the one that differs most: its tokens, and those cached on either side.
    """

    n: int
    of: int
    workload: str
    tokens: float
    x: float
    y: float


def cache_difference(left: _Records, right: _Records) -> CacheDifference | None:
    """Return how the cached tokens of two sides differ; None where they do in too few prompts to matter."""
    before = _cached_by_prompt(left)
    after = _cached_by_prompt(right)
    shared = before.keys() & after.keys()
    differing = []
    for prompt in shared:
        x, tokens = before[prompt]
        y, _ = after[prompt]
        if abs(x - y) > max(DIFFERENT_TOKENS, DIFFERENT_SHARE * tokens):
            differing.append((abs(x - y), x, y, tokens, prompt[0]))
    if len(differing) < max(1, MIN_DIFFERING_PROMPTS * len(shared)):
        return None
    _, x, y, tokens, workload = max(differing)
    return CacheDifference(len(differing), len(shared), workload, tokens, x, y)


def _cached_by_prompt(rows: _Records) -> dict[tuple[str, str, int], tuple[float, float]]:
    """Return prompt → medians of its cached and of all its tokens, without the prompts whose cached tokens are not known."""
    tokens: dict[tuple[str, str, int], list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        if row.tokens.cached_tokens is not None and row.tokens.prompt_tokens:
            tokens[row.prompt].append((row.tokens.cached_tokens, row.tokens.prompt_tokens))
    medians = {}
    for prompt, counts in tokens.items():
        cached, whole = zip(*counts, strict=True)
        medians[prompt] = (statistics.median(cached), statistics.median(whole))
    return medians


def depth_findings(name: str, rows: _Records) -> _Findings:
    deep = by_workload(r for r in rows if r.load.depth and r.tokens.prompt_tokens)
    for workload, own in deep.items():
        depth = own[0].load.depth or 0
        prompt = statistics.median(r.tokens.prompt_tokens for r in own)
        if prompt < DEPTH_SHARE * depth:
            yield finding(
                "depth_not_reached",
                name,
                workload=workload,
                prompt=prompt,
                depth=depth,
            )


def by_workload(rows: Iterable[RequestRecord]) -> dict[str, list[RequestRecord]]:
    groups: dict[str, list[RequestRecord]] = defaultdict(list)
    for row in rows:
        groups[row.workload].append(row)
    return dict(sorted(groups.items()))
