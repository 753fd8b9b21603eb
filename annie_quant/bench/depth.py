"""Whether one backend loses against another only, or more, at a deep context.

The ratio of both sides' times for the same prompt is compared between depths: a difference that is the same at all depths is
the comparison's, one that grows is a separate finding. Depth is what the workload asked for (RequestRecord.depth), else the
server's count of prompt tokens, in steps of four.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from annie_quant.bench.noise import measured
from annie_quant.documents import Confound, RequestRecord
from annie_quant.judge.metrics import METRICS
from annie_quant.judge.statistics import LEVEL, holm, median_interval, paired

TESTED = ("tpot_ms", "ttft_content_ms")
LEAST_SHIFT = 0.02
LEAST_PROMPTS = 4  # on each side of a comparison of depths; two times four give p = 0.029 at best
STEP = 4  # between two groups of prompt lengths
FIRST = 1024  # tokens: shorter prompts are one group


@dataclass
class DepthRow:
    """How the ratio b / a at a depth differs from that of the shallowest prompts."""

    a: str
    b: str
    metric: str
    depth: int
    ratio: float
    low: float
    high: float
    shallow_depth: int
    shallow: float
    shallow_low: float
    shallow_high: float
    p: float
    n_prompts: int
    p_holm: float | None = None

    @property
    def growth(self) -> float:
        """Relative change of the ratio from shallow to deep prompts."""
        return self.ratio / self.shallow - 1


def depth_of(record: RequestRecord) -> int | None:
    """The depth of a request in tokens, rounded down to a group; None where it is unknown."""
    if record.depth is not None:
        return record.depth
    tokens = record.prompt_tokens
    if not tokens:
        return None
    return 0 if tokens < FIRST else FIRST * STEP ** int(math.log(tokens / FIRST, STEP))


def check(records: Sequence[RequestRecord], backends: Sequence[str], seed: int = 0) -> list[DepthRow]:
    """Compare each depth with the shallowest, for each pair of backends; records: all timed requests, one in flight is used."""
    rows = []
    groups: dict[str, dict[int, list[RequestRecord]]] = {name: defaultdict(list) for name in backends}
    for record in records:
        depth = depth_of(record)
        if record.alone and depth is not None and record.backend in groups:
            groups[record.backend][depth].append(record)
    for (a, b), metric in itertools.product(itertools.combinations(backends, 2), TESTED):
        rows += _compare(a, b, metric, groups[a], groups[b], seed)
    for row, p in zip(rows, holm([row.p for row in rows]), strict=True):
        row.p_holm = p
    return rows


Groups = Mapping[int, Sequence[RequestRecord]]


def _compare(a: str, b: str, metric: str, left: Groups, right: Groups, seed: int) -> list[DepthRow]:
    from scipy.stats import mannwhitneyu

    logs: dict[int, list[float]] = {}
    for depth in sorted(left.keys() & right.keys()):
        ratios = _log_ratios(measured(left[depth], metric), measured(right[depth], metric))
        if len(ratios) >= LEAST_PROMPTS:
            logs[depth] = ratios
    if len(logs) < 2:
        return []
    (shallow, base), *deeper = logs.items()
    short = _interval(base, seed)
    rows = []
    for depth, ratios in deeper:
        p = float(mannwhitneyu(ratios, base).pvalue)
        row = DepthRow(a, b, metric, depth, *_interval(ratios, seed), shallow, *short, p=p, n_prompts=len(ratios))
        rows.append(row)
    return rows


def _log_ratios(a: Mapping[Hashable, Sequence[float]], b: Mapping[Hashable, Sequence[float]]) -> list[float]:
    return [math.log(y / x) for x, y in paired(a, b) if x > 0 and y > 0]


def _interval(ratios: Sequence[float], seed: int) -> tuple[float, float, float]:
    """The median ratio with its 95 % interval."""
    low, high = median_interval(ratios, seed=seed)
    middle = statistics.median(ratios)
    return math.exp(middle), math.exp(middle if low is None else low), math.exp(middle if high is None else high)


def findings(rows: Sequence[DepthRow]) -> list[Confound]:
    """Return the deepest significant change of each pair and metric as a note."""
    deepest: dict[tuple[str, str, str], DepthRow] = {}
    for row in rows:
        if row.p_holm is not None and row.p_holm < LEVEL and abs(row.growth) >= LEAST_SHIFT:
            deepest[row.a, row.b, row.metric] = row
    return [_finding(row) for row in deepest.values()]


def _finding(row: DepthRow) -> Confound:
    slower = row.b if row.growth > 0 else row.a
    ratios = [row.ratio, row.low, row.high, row.shallow, row.shallow_low, row.shallow_high]
    if slower == row.a:
        ratios = [1 / x for x in (row.ratio, row.high, row.low, row.shallow, row.shallow_high, row.shallow_low)]
    deep, low, high, shallow, shallow_low, shallow_high = ratios
    other = row.a if slower == row.b else row.b
    only = shallow_low - LEAST_SHIFT <= 1 <= shallow_high + LEAST_SHIFT and abs(shallow - 1) < LEAST_SHIFT
    title = METRICS[row.metric].title
    message = (
        f"{slower} is {'slower only' if only else 'slower, relative to short prompts,'} at depth: {title} {deep - 1:+.1%} "
        f"[{low - 1:+.1%}, {high - 1:+.1%}] against {other} at {_tokens(row.depth)} tokens, {shallow - 1:+.1%} "
        f"[{shallow_low - 1:+.1%}, {shallow_high - 1:+.1%}] at {_tokens(row.shallow_depth)} (p {row.p_holm:.2g}, "
        f"{row.n_prompts} prompts)"
    )
    return Confound(code="slower_at_depth", severity="note", message=message, backends=[slower])


def _tokens(depth: int) -> str:
    return f"{depth // 1024}k" if depth >= 1024 else str(depth)
