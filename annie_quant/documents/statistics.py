"""Types of the figures in run.json and evaluations: gate results, metrics, paired comparisons."""

from __future__ import annotations

from typing import Literal

import msgspec

from annie_quant.documents.reading import Count, Share

Outcome = Literal["pass", "fail", "undecided"]
GateVerdict = Literal[
    "keeps", "loses", "undecided"
]  # of one gate, or of all gates under one arithmetic
Standing = Literal["keeps", "loses", "undecided", "fragile"]  # over several arithmetics


class PairedCounts(msgspec.Struct):
    """Outcomes of the prompts that both a checkpoint and its reference answered (judge/decision/rule.py has the rule).

    lost, won: answers that pass only in the reference, only in the checkpoint.
    p_holm: p adjusted over the gates: by Hommel's method since rule 5, by Hochberg's under rule 4,
        by Holm's before.
    difference: (won - lost) / n.
    low, high: its 90 % score interval, so each bound has an error of 5 %.
    """

    n: Count
    lost: Count
    won: Count
    p: float = 1.0
    p_holm: float | None = None
    difference: float = 0.0
    low: float = -1.0
    high: float = 1.0
    verdict: GateVerdict = "undecided"


class PairedGate(PairedCounts):
    """One gate.

    p: McNemar's mid-p towards a loss, until rule 4 the exact p (of a gate that compares with the
        reference's own answer: the exact binomial test of a loss above the margin).
    margin: the loss that is accepted.
    n_to_decide: number of prompts that would decide at the observed rates; None where it is
        decided, or no number would do.
    detectable: the smallest true loss that n prompts find in 80 % of runs.
    passed: answers of the reference that show what the gate checks; None in files of version 0.2
        and older.
    """

    margin: float = 0.05
    n_to_decide: int | None = None
    detectable: float | None = None
    passed: Count | None = None

    def __post_init__(self) -> None:
        if self.lost + self.won > self.n or (self.passed or 0) > self.n:
            raise ValueError(
                f"of {self.n} prompts {self.lost} are lost, {self.won} won and {self.passed} passed"
            )


class PooledGates(PairedCounts, kw_only=True):
    """All deciding gates together, by answer: an answer is right if it passes each of its gates.

    The counts are of right answers.

    p_sum, p_largest, p_fisher: McNemar's exact p of right answers, and sign-flip permutation tests
        (all gates of an answer flip together) of the largest loss of a gate and of Fisher's
        combination of the gates.
    p: the chance of a smallest of the three as small as this under the same sign flips; until rule
        4 three times the smallest.
    """

    p_sum: float = 1.0
    p_largest: float = 1.0
    p_fisher: float = 1.0


class MemberVerdict(msgspec.Struct, kw_only=True):
    """All gates under one arithmetic, or behind one server.

    loses, undecided: names of gates; "all" is the pooled verdict.
    """

    verdict: GateVerdict
    loses: list[str] = []
    undecided: list[str] = []


class PairedVerdict(msgspec.Struct, kw_only=True):
    """The decision about a checkpoint.

    members: by numerics.
    profiles: the verdict of each numerics profile, over its further arithmetics (NAME+...).
    sentence: the decision as text.
    head: the lines below it: under which server, how sure, what to do next, what was not tested.
    reasons: one line per gate that is lost or undecided.
    coverage: behaviour → answers of the reference that show it (judge/pairing.py).
    not_tested: labelled gates that the reference passes too rarely, with their counts, and
        behaviours that have too few answers.
    """

    verdict: Standing = "undecided"
    sentence: str = ""
    head: list[str] = []
    reasons: list[str] = []
    profiles: dict[str, Standing] = {}
    members: dict[str, MemberVerdict] = {}
    coverage: dict[str, int] = {}
    not_tested: list[str] = []


class GateResult(msgspec.Struct, kw_only=True):
    """One gate over many answers.

    low, high: 95 % Wilson interval of the pass rate.
    verdict: pass where the gate keeps what the reference has, fail where it loses it (paired);
        without a reference it is `meets`.
    rule: that rule as text.
    n_to_decide: number of answers that would decide it at the observed rate; None where it is
        decided, or no number would do.
    requirement, meets: the absolute requirement (docs/requirements.md), "" where there is none, and
        whether it is met; it never decides where there is a reference. A result of version 0.1.0
        has neither, and its verdict is the absolute one.
    basis: what an answer is compared with: "reference" (the bf16 model's own answer), "label" (the
        expected answer of a workload) or "rule" (neither, a property of the text); "" in records of
        older versions.
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
    requirement: str = ""
    meets: Outcome | None = None

    def __post_init__(self) -> None:
        if self.passes > self.n:
            raise ValueError(f"passes must be in 0..n, got {self.passes} of {self.n}")

    @property
    def rate(self) -> float:
        """Share of the answers that pass; 0 without answers."""
        return self.passes / self.n if self.n else 0.0

    @property
    def absolute_verdict(self) -> Outcome:
        """The verdict without a reference: `meets`, or `verdict` where only that was stored."""
        return self.verdict if self.meets is None else self.meets


LimitedMetric = Literal["ttft_content_ms", "decode_tok_s"]


class SpeedGate(msgspec.Struct, kw_only=True):
    """The median of one metric against a limit.

    low, high: 95 % bootstrap interval of the median.
    """

    metric: LimitedMetric
    value: float
    low: float | None
    high: float | None
    n: int
    limit: float
    verdict: Outcome


class MetricSummary(msgspec.Struct, kw_only=True):
    """Percentiles and mean over all values.

    low, high: 95 % bootstrap interval of the median, prompts as units.
    """

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
    itl_token_ms: MetricSummary | None = None
    tpot_ms: MetricSummary | None = None
    e2e_ms: MetricSummary | None = None
    decode_tok_s: MetricSummary | None = None
    completion_tokens: MetricSummary | None = None
    acceptance: MetricSummary | None = None


class PairedResult(msgspec.Struct, kw_only=True):
    """Two sides over the same prompts.

    median_difference: of b - a.
    low, high: its 95 % bootstrap interval.
    p: two-sided; None for fewer than two prompts.
    n_to_decide: approximate number of prompts that would show this difference.
    too_few: no difference could be significant with so few prompts.
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
    """One of several paired results.

    p_holm: p after Holm's adjustment over all of them.
    """

    workload: str
    metric: str
    p_holm: float | None = None
    significant: bool = False


class Comparison(AdjustedResult, kw_only=True):
    """Two backends on one metric of one workload ("all": over all workloads).

    noise: the median difference that 95 % of comparisons of two equal servers would stay below
        (bench/noise.py), from both
    sides' A/A measurements; None where nothing was measured twice.
    """

    a: str
    b: str
    noise: float | None = None


class NoiseFloor(msgspec.Struct, kw_only=True):
    """The noise of one backend on one metric of one workload: the difference below which 95 % of A/A comparisons stay.

    difference: the median difference of the prompts that were measured more than once (n_repeated),
        with their repeats assigned to two sides at random.
    low, high: its 95 % bootstrap interval.
    """

    workload: str
    metric: str
    floor: float
    n_prompts: int
    n_repeated: int
    difference: float | None = None
    low: float | None = None
    high: float | None = None
