"""Aggregates of a run, and its verdict."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from annie_quant.schema.evaluation import GateTable, KLSummary, SameAnswers
from annie_quant.schema.limits import Count, Share
from annie_quant.schema.machine import Energy, MemoryBytes, MemoryGrowth, MemoryLevels
from annie_quant.schema.statistics import (
    Comparison,
    Drift,
    GateResult,
    NoiseFloor,
    PairedGate,
    PooledGates,
    SpeedGate,
    Standing,
    WorkloadSummary,
)

Severity = Literal["confound", "fault", "note"]


class Confound(msgspec.Struct, kw_only=True):
    """What limits the conclusions of a benchmark.

    severity: "confound" (the comparison does not show what it seems to), "fault" (of a server), "note".
    """

    code: str
    severity: Severity
    message: str
    backends: list[str] = []


class Roles(msgspec.Struct, kw_only=True, frozen=True):
    """Who is judged against whom (judge/decision/roles.py), by name of a backend or a model.

    candidate: what is judged. reference: the bf16 side that all others are compared with. incumbent: what the candidate would
    replace. assumed: candidate and incumbent follow from the order of the sides alone, so each is compared with the other.
    """

    candidate: str | None = None
    reference: str | None = None
    incumbent: str | None = None
    assumed: bool = False

    @property
    def names(self) -> list[str]:
        return [name for name in (self.candidate, self.reference, self.incumbent) if name is not None]


class Verbosity(msgspec.Struct, kw_only=True):
    """Answer length against the reference's answers to the same prompts: the median of the ratios."""

    reference: str
    ratio: float
    low: float | None
    high: float | None
    n_prompts: int


class ServedSide(msgspec.Struct, kw_only=True):
    """One backend's results. left_out_of_timings: failed, cold and stalled requests, and impossible stamps.

    format: of its weights ("BF16", "NVFP4", "Q4_K_M"), "" where it is unknown. judged_by: the backend that its gates are compared
    with (paired, pooled); None where there is none.
    """

    model: str | None = None
    runtime: str | None = None
    format: str = ""
    requests: int = 0
    errors: int = 0
    left_out_of_timings: int = 0
    gates: dict[str, GateResult] = {}
    judged_by: str | None = None
    paired: dict[str, PairedGate] = {}
    pooled: PooledGates | None = None
    speed_gates: dict[str, SpeedGate] = {}
    workloads: dict[str, WorkloadSummary] = {}
    verbosity: Verbosity | None = None
    memory_bytes: MemoryBytes | None = None
    memory: MemoryLevels | None = None
    memory_growth: MemoryGrowth | None = None
    energy: Energy | None = None


class TurnPoint(msgspec.Struct, kw_only=True):
    """Medians of one turn of the conversations; turn counts from 1. low, high: interval of ttft_content_ms."""

    turn: Annotated[int, Meta(ge=1, le=9999)]
    n: int
    ttft_content_ms: float | None = None
    low: float | None = None
    high: float | None = None
    e2e_ms: float | None = None


class Crossover(msgspec.Struct, kw_only=True):
    """The answer length in tokens at which two backends need the same time; None where one is always faster."""

    a: str
    b: str
    tokens: float | None
    faster_when_short: str
    faster_when_long: str


class ToolSurfacePoint(msgspec.Struct, kw_only=True):
    """Right calls with a number of tools on offer. worse: surely fewer than with the fewest tools (p after Holm)."""

    n_tools: Count
    passes: Count
    n: Count
    low: Share
    high: Share
    p: float = 1.0
    worse: bool = False


class ModelRow(msgspec.Struct, kw_only=True):
    """A model of the run: its format, its size on disk, where its files are, and their hash (ModelFiles.sha256)."""

    name: str
    label: str = ""
    format: str = ""
    size_bytes: int | None = None
    bits_per_weight: float | None = None
    checkpoint: str = ""
    gguf: str = ""
    model_sha256: str = ""


class OfflineSide(msgspec.Struct, kw_only=True):
    """A model under one numerics, evaluated without a server; eval/<model>.json has the whole evaluation."""

    gates: GateTable = {}
    paired: dict[str, PairedGate] = {}
    pooled: PooledGates | None = None
    kl: KLSummary | None = None
    kl_conversations: KLSummary | None = None
    kl_text: KLSummary | None = None
    perplexity: float | None = None
    perplexity_reference: float | None = None
    same_answers: SameAnswers | None = None
    verbosity_ratio: float | None = None


class Aggregates(msgspec.Struct, kw_only=True):
    """All results of a run: behind servers (from records.jsonl), and without one (models, offline).

    served and turns: by backend. offline: by model, then by numerics; members: the further arithmetics of its ensemble
    (Evaluation.members), in the same form. blocking: by model, reasons that forbid "keeps" (Evaluation.blocking).
    turn_ratio: TTFT of the last turn, relative to the first. noise: by backend.
    roles: None in a run of version 0.2.0 or older, whose roles followed from names and formats.
    """

    roles: Roles | None = None
    served: dict[str, ServedSide] = {}
    comparisons: list[Comparison] = []
    noise: dict[str, list[NoiseFloor]] = {}
    drift: list[Drift] = []
    turns: dict[str, list[TurnPoint]] = {}
    turn_ratio: dict[str, float] = {}
    crossover: list[Crossover] = []
    tool_surface: dict[str, list[ToolSurfacePoint]] = {}
    confounds: list[Confound] = []
    models: list[ModelRow] = []
    offline: dict[str, dict[str, OfflineSide]] = {}
    members: dict[str, dict[str, OfflineSide]] = {}
    blocking: dict[str, list[str]] = {}


class Verdict(msgspec.Struct, kw_only=True):
    """The outcome. passed: the candidate neither loses nor is fragile, and nothing confounds it. comparable: no confound.

    outcome: "keeps" only where `passed`; None in a run of version 0.1.0. rule: version of the rule that decided (roles.RULE), 0 in
    a run of version 0.2.0 or older. badge: the decision in a few words, with the recommendation.
    """

    rule: int = 0

    sentence: str = ""
    passed: bool = False
    outcome: Standing | None = None
    badge: str = ""
    candidate: str | None = None
    incumbent: str | None = None
    comparable: bool = False
    reasons: list[str] = []
    caveats: list[str] = []
