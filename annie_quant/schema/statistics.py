"""Gate results, metrics and paired comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from annie_quant.schema.limits import Count, Share

Outcome = Literal["pass", "fail", "undecided"]


class GateResult(msgspec.Struct, kw_only=True):
    """One gate over many answers.

    low, high: 95 % Wilson interval of the pass rate. rule: the pass rule as text. n_to_decide: how many answers would
    decide the gate at the observed rate; None where it is decided, or where no number would do. basis: what an answer is
    compared with: "reference" (the bf16 model's own answer), "label" (the expected answer of a workload) or "rule"
    (neither, a property of the text); "" in records of older versions.
    """

    passes: Count
    n: Count
    low: Share
    high: Share
    threshold: Share
    rule: str = ""
    verdict: Outcome = "undecided"
    n_to_decide: int | None = None
    title: str = ""
    advisory: bool = False
    basis: str = ""

    def __post_init__(self) -> None:
        if self.passes > self.n:
            raise ValueError(f"passes must be in 0..n, got {self.passes} of {self.n}")

    @property
    def rate(self) -> float:
        """Share of the answers that pass; 0 without answers."""
        return self.passes / self.n if self.n else 0.0


class SpeedGate(msgspec.Struct, kw_only=True):
    """The median of one metric against a limit; low and high: 95 % bootstrap interval of the median."""

    metric: str
    value: float
    low: float | None
    high: float | None
    n: int
    limit: float
    verdict: Outcome


class Metric(msgspec.Struct, frozen=True):
    """Definition of a metric (judge/metrics.py has the table).

    field: of a RequestRecord; one value per request, or a list of values. server_counted: needs the server's own token
    count, so records with an estimated count are left out. compared: compared between backends and shown in the report.
    in_verdict: a significant difference is named among the verdict's reasons. user_latency: a user notices it, so it
    counts as a gain or loss in the recommendation.
    """

    name: str
    field: str
    unit: str
    title: str
    better: Literal["lower", "higher", "neither"] = "lower"
    server_counted: bool = False
    compared: bool = True
    in_verdict: bool = False
    user_latency: bool = False

    @property
    def label(self) -> str:
        """Title and unit, as a table's header."""
        return f"{self.title}, {self.unit}"


class MetricSummary(msgspec.Struct, kw_only=True):
    """Percentiles and mean over all values; low and high: 95 % bootstrap interval of the median, prompts as units."""

    p50: float
    p90: float
    p99: float
    mean: float
    low: float | None
    high: float | None
    n: int
    n_prompts: int


class WorkloadSummary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The timed requests of one workload under one load: their number, and one summary per metric that has values."""

    n: int
    ttft_content_ms: MetricSummary | None = None
    ttft_reasoning_ms: MetricSummary | None = None
    ttft_tool_ms: MetricSummary | None = None
    first_byte_ms: MetricSummary | None = None
    itl_ms: MetricSummary | None = None
    tpot_ms: MetricSummary | None = None
    e2e_ms: MetricSummary | None = None
    decode_tok_s: MetricSummary | None = None
    completion_tokens: MetricSummary | None = None

    def metrics(self) -> Iterator[tuple[str, MetricSummary]]:
        """(name, summary) of each metric that has values."""
        for name in self.__struct_fields__[1:]:
            if (summary := getattr(self, name)) is not None:
                yield name, summary


class PairedResult(msgspec.Struct, kw_only=True):
    """Two sides over the same prompts. median_difference: of b - a; low and high: its 95 % bootstrap interval.

    p: two-sided; None for fewer than two prompts. n_to_decide: about how many prompts would show this difference.
    too_few: so few prompts that no difference could be significant.
    """

    n_prompts: int
    median_a: float | None = None
    median_b: float | None = None
    median_difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    test: str | None = None
    n_to_decide: int | None = None
    too_few: bool = False


class AdjustedResult(PairedResult, kw_only=True):
    """One of several paired results. p_holm: p after Holm's adjustment over all of them."""

    workload: str
    metric: str
    p_holm: float | None = None
    significant: bool = False


class Comparison(AdjustedResult, kw_only=True):
    """Two backends on one metric of one workload ("all": over all workloads)."""

    a: str
    b: str
