"""search.json: everything that a search has tried."""

from __future__ import annotations

from typing import Literal

import msgspec

from annie_quant.schema.evaluation import GateTable, KLSummary, SameAnswers
from annie_quant.schema.reading import SCHEMA_VERSION, UPGRADES
from annie_quant.schema.statistics import PairedGate, PairedVerdict, PooledGates


class SearchNumerics(msgspec.Struct):
    """The part of an evaluation's NumericsResult that search.json keeps."""

    gates: GateTable
    kl: KLSummary | None
    kl_conversations: KLSummary | None
    paired: dict[str, PairedGate]
    same_answers: SameAnswers
    verbosity_ratio: float | None
    seconds: float
    pooled: PooledGates | None = None


class HardenedGate(msgspec.Struct):
    """[passes, n] of a gate before and after the hardened prompt, and of bf16 under it. restored: None where bf16 fails it too."""

    before: list[int]
    after: list[int]
    reference: list[int]
    restored: bool | None


class Hardened(msgspec.Struct):
    """The effect of a hardened prompt. gates: "W4A4 tool_call" → counts. reading: the conclusion."""

    gates: dict[str, HardenedGate]
    reading: str


class LabelScores(msgspec.Struct, rename={"original": "given"}):
    """Mean nats per token under bf16 of the answers as they are, and of the same answers shuffled among the questions."""

    original: float
    shuffled: float


class Labels(msgspec.Struct):
    """Whether the calibration answers belong to their questions (pipeline/search/label_check.py).

    verdict: "undecided" where the model does not distinguish the rows; "" in a search of version 0.1.0, which has only `belong`.
    """

    first: LabelScores
    last: LabelScores
    belong: bool
    verdict: Literal["belong", "shuffled", "undecided", ""] = ""


class Size9B(msgspec.Struct):
    """The strategy's result for Qwen3.5-9B, by count of its parameters."""

    size_bytes: int
    ceiling_tok_s: float


class CalibrationDraw(msgspec.Struct):
    """The strategy made from another random draw of the calibration rows. gates: numerics → gate → [passes, n]."""

    seed: int
    verdict: PairedVerdict
    gates: dict[str, dict[str, list[int]]]


class StrategyRow(msgspec.Struct, omit_defaults=True):
    """A tried strategy.

    path: its steps in order. why: reasons for not passing. explained: further findings. read_bytes: per decoded token;
    ceiling_tok_s: on a GB10. draws: further calibration draws. model_sha256: of the checkpoint (ModelFiles.sha256).
    loads: which servers load the checkpoint. error: why it could not be quantized.
    """

    strategy: str
    passed: bool
    outcome: str
    why: list[str]
    path: list[str]
    numerics: dict[str, SearchNumerics]
    error: str | None = None
    size_bytes: int | None = None
    bits_per_weight: float | None = None
    read_bytes: int | None = None
    ceiling_tok_s: float | None = None
    audit: str | None = None
    loads: list[str] | None = None
    hardened: Hardened | None = None
    explained: list[str] | None = None
    seconds: float | None = None
    of_9b: Size9B | None = None
    verdict: PairedVerdict | None = None
    model_sha256: str = ""
    draws: list[CalibrationDraw] = []


class SearchResult(msgspec.Struct):
    """chosen: the first strategy that passes every gate. stopped: why no strategy was tried. seconds: until the choice.

    seeds: calibration draws per strategy. version: of the package.
    """

    chosen: str | None
    stopped: str | None
    required: list[str]
    command: str
    where: str
    n: int
    notes: list[str]
    reference: GateTable
    labels: Labels | None
    strategies: list[StrategyRow]
    seconds: float
    seeds: int = 1
    schema_version: int = SCHEMA_VERSION
    version: str = ""


UPGRADES[SearchResult] = lambda document: None  # older ones have fewer fields, which all have defaults
