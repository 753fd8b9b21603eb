"""Aggregates and verdict of a run, and its servers, machine and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from annie_quant.core.text import printable
from annie_quant.core.untrusted import limited
from annie_quant.documents.checkpoint import PredictedFirstToken, PredictedSpeed
from annie_quant.documents.drafts import DraftPrediction
from annie_quant.documents.evaluation import GateTable, KLSummary, SameAnswers
from annie_quant.documents.reading import Count, Digest, JsonScalar, Share, ShortText
from annie_quant.documents.statistics import (
    Comparison,
    GateResult,
    NoiseFloor,
    PairedGate,
    PooledGates,
    SpeedGate,
    Standing,
    WorkloadSummary,
)


class ModelMeta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sizes of a model as its server reports them."""

    n_params: int | float | None = None
    n_vocab: int | float | None = None
    n_embd: int | float | None = None
    n_ctx_train: int | float | None = None
    size: int | float | None = None
    vocab_type: int | float | None = None


class Identity(msgspec.Struct, kw_only=True):
    """What a server reports about itself, within the limits of the types.

    meta: facts from the caller.
    format: of the weights, from the caller, or from the model's file where it is on this machine
        (bench/backend.py).
    caveats: which facts could not be read, or were cut.
    """

    name: ShortText
    url: Annotated[str, Meta(max_length=2000)] = ""
    model: ShortText | None = None
    runtime: ShortText | None = None
    version: ShortText | None = None
    models_sha256: Digest | None = None
    model_meta: ModelMeta = field(default_factory=ModelMeta)
    chat_template_sha256: Digest | None = None
    sampling_defaults: Annotated[
        dict[ShortText, JsonScalar | list[ShortText]], Meta(max_length=100)
    ] = {}
    max_model_len: int | float | None = None
    format: ShortText | None = None
    meta: Annotated[dict[ShortText, JsonScalar], Meta(max_length=100)] = {}
    caveats: Annotated[list[ShortText], Meta(max_length=20)] = []


class MemoryFigures(msgspec.Struct, kw_only=True, frozen=True):
    """Memory of one server at one moment or at its peak; None where the figure cannot be read.

    process_rss_bytes: resident memory of the process and its children.
    system_used_bytes: MemTotal - MemAvailable, which on unified memory (DGX Spark) includes the
        GPU's share.
    gpu_process_bytes: NVML's figure for those processes.
    """

    process_rss_bytes: int | None = None
    system_used_bytes: int | None = None
    gpu_process_bytes: int | None = None


class MemoryLevels(msgspec.Struct, kw_only=True):
    """Memory of one server: idle, with one request, with five at once, and at the peak of the whole run."""

    idle: MemoryFigures
    one: MemoryFigures
    five: MemoryFigures
    peak: MemoryFigures | None = None


class MemoryBytes(msgspec.Struct, kw_only=True):
    """One figure per level for the report's table.

    source: the field of MemoryFigures that all are taken from.
    """

    idle: int | None = None
    one: int | None = None
    five: int | None = None
    peak: int | None = None
    source: str = ""

    @property
    def highest(self) -> int | None:
        """The highest figure that was measured, at any level; None without one."""
        return max(
            (level for level in (self.idle, self.one, self.five, self.peak) if level), default=None
        )


def limited_identity(fields: Mapping[str, Any]) -> Identity:
    """Return an Identity of what a server sent: long texts are cut, values of an unexpected type are left out."""
    limits = {"url": 2000, "models_sha256": 64, "chat_template_sha256": 64}
    names = (
        "name",
        "url",
        "model",
        "runtime",
        "version",
        "models_sha256",
        "chat_template_sha256",
        "format",
    )
    texts = {
        name: fields[name][: limits.get(name, 200)]
        for name in names
        if isinstance(fields.get(name), str)
    }
    sizes = _entries(fields.get("model_meta"))
    caveats = fields.get("caveats")
    known = {
        name: sizes[name] for name in ModelMeta.__struct_fields__ if _is_number(sizes.get(name))
    }
    length = limited(fields.get("max_model_len"))
    return Identity(
        **{"name": ""} | texts,
        model_meta=ModelMeta(**known),
        sampling_defaults=_entries(fields.get("sampling_defaults")),
        max_model_len=length if _is_number(length) else None,
        meta={
            key: value
            for key, value in _entries(fields.get("meta")).items()
            if not isinstance(value, list)
        },
        caveats=[printable(str(text), 200) for text in caveats[:20]]
        if isinstance(caveats, list)
        else [],
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _entries(value: object) -> dict[ShortText, Any]:
    """Return the first 100 entries of a mapping, each a scalar or a short list of texts."""
    entries: dict[str, Any] = {}
    for key, item in list(value.items())[:100] if isinstance(value, dict) else ():
        if isinstance(item, list):
            item = [str(part)[:200] for part in item[:100]]
        elif isinstance(item, (int, float)):
            item = limited(item)
        elif item is not None:
            item = str(item)[:1000]
        entries[str(key)[:200]] = item
    return entries


Severity = Literal["confound", "fault", "note"]


class Confound(msgspec.Struct, kw_only=True):
    """A limit of the conclusions of a benchmark.

    severity: "confound" (the comparison does not show what it seems to), "fault" (of a server),
        "note".
    """

    code: str
    severity: Severity
    message: str
    backends: list[str] = []


class Roles(msgspec.Struct, kw_only=True, frozen=True):
    """The roles of a comparison (judge/decision/roles.py), by name of a backend or a model.

    candidate: the side that is judged.
    reference: the bf16 side with which all others are compared.
    incumbent: the side that the candidate would replace.
    assumed: candidate and incumbent follow only from the order of the sides, so each is compared
        with the other.
    """

    candidate: str | None = None
    reference: str | None = None
    incumbent: str | None = None
    assumed: bool = False

    @property
    def names(self) -> list[str]:
        return [
            name for name in (self.candidate, self.reference, self.incumbent) if name is not None
        ]


class ServedSide(msgspec.Struct, kw_only=True):
    """One backend's results.

    left_out_of_timings: failed, cold and stalled requests, and impossible stamps.
    format: of its weights ("BF16", "NVFP4", "Q4_K_M"), "" where it is unknown.
    judged_by: the backend that its gates are compared with (paired, pooled); None where there is
        none.
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
    memory_bytes: MemoryBytes | None = None
    memory: MemoryLevels | None = None


class TurnPoint(msgspec.Struct, kw_only=True):
    """Medians of one turn of the conversations; turn counts from 1.

    low, high: interval of ttft_content_ms.
    prompt_tokens, cached_tokens: of the whole prompt, and of these from the prefix cache; None where
        the server does not report them.
    """

    turn: Annotated[int, Meta(ge=1, le=9999)]
    n: int
    ttft_content_ms: float | None = None
    low: float | None = None
    high: float | None = None
    e2e_ms: float | None = None
    prompt_tokens: float | None = None
    cached_tokens: float | None = None


# Of a prompt's beginning: computed, taken from the server's prefix cache, or not reported.
CacheState = Literal["cold", "cached", "unknown"]


class PrefillPoint(msgspec.Struct, kw_only=True):
    """Median time to the first token of prompts of about one length; low, high: its interval."""

    tokens: Count
    ms: float
    low: float | None = None
    high: float | None = None
    n_prompts: Count


class PrefillLine(msgspec.Struct, kw_only=True):
    """Time to the first token of any kind over computed prompt tokens (bench/prefill.py).

    n: requests.
    fewest_tokens, most_tokens: of its prompts. With an unknown cache these are all prompt tokens.
    ms_per_1000: its slope, per 1,000 computed tokens; low, high: 95 % interval. None where the
        prompts are too few or too alike.
    start_ms: the line at 0 tokens.
    """

    cache: CacheState
    n: Count
    n_prompts: Count
    fewest_tokens: Count
    most_tokens: Count
    ms_per_1000: float | None = None
    low: float | None = None
    high: float | None = None
    start_ms: float | None = None
    points: list[PrefillPoint] = []


class Crossover(msgspec.Struct, kw_only=True):
    """The answer length at which two backends take the same time.

    tokens: None where one backend is always faster.
    """

    a: str
    b: str
    tokens: float | None
    faster_when_short: str
    faster_when_long: str


class LadderPoint(msgspec.Struct, kw_only=True):
    """Right answers at one level of a ladder.

    level: tools on offer, tokens of context, malformed calls before the request, or step of a
        chain.
    passes: prompts that are right in all repeats (pass^k).
    low, high: their Wilson interval.
    rate: share of all answers that are right (pass^1).
    """

    level: Count
    passes: Count
    n: Count
    low: Share
    high: Share
    rate: Share


class Cliff(msgspec.Struct, kw_only=True):
    """The level from which answers are wrong (bench/cliffs.py).

    holds: the last level before it.
    earliest, latest: 95 % interval of `breaks`.
    """

    holds: Count
    breaks: Count
    earliest: Count
    latest: Count
    p: Share


class Ladder(msgspec.Struct, kw_only=True):
    """A backend's answers on one axis: tools, tokens, poisoned or steps.

    repeats: of each prompt, k of pass^k.
    """

    axis: ShortText
    repeats: Count
    points: list[LadderPoint]
    cliff: Cliff | None = None


class MachineSpan(msgspec.Struct, kw_only=True):
    """A time in which the machine was in another state than in most of the run.

    start_unix_s, end_unix_s: the samples before and after it.
    cause: what changed.
    """

    start_unix_s: float
    end_unix_s: float
    cause: ShortText


class MachineState(msgspec.Struct, kw_only=True):
    """The state of the client's machine over a run (bench/machine.py).

    probe: the piece of work that is timed.
    probe_ms: its median; low, high: 95 % interval.
    marked: requests that were marked invalid; left: those of them without a valid repeat.
    gpu_speed: what its GPU reads compared with a healthy one, or why that is not checked.
    slow_parts: parts of the run in which the GPU was slow.
    """

    probe: ShortText
    samples: Count
    probe_ms: float
    low: float | None = None
    high: float | None = None
    spans: list[MachineSpan] = []
    marked: Count = 0
    left: Count = 0
    gpu_speed: str = "not checked"
    slow_parts: list[str] = []


class ModelRow(msgspec.Struct, kw_only=True):
    """A model of the run: its format, its size on disk, the paths of its files, and their hash (ModelFiles.sha256).

    predicted: decode speed of one stream; None for a GGUF file.
    first_token: predicted time to the first token; None for a GGUF file or without a rate.
    """

    name: str
    label: str = ""
    format: str = ""
    size_bytes: int | None = None
    bits_per_weight: float | None = None
    predicted: PredictedSpeed | None = None
    first_token: PredictedFirstToken | None = None
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
    drafts: dict[str, DraftPrediction] = {}


class Aggregates(msgspec.Struct, kw_only=True):
    """All results of a run: behind servers (from records.jsonl), and without one (models, offline).

    served, turns: by backend.
    offline: by model, then by numerics.
    members: the further arithmetics of the ensemble (Evaluation.members), in the same form.
    blocking: by model, reasons that forbid "keeps" (Evaluation.blocking).
    noise, ladders: by backend.
    prefill: by backend, a line per state of the cache.
    machine: None in a run without samples of the machine.
    roles: None in a run of version 0.2.0 or older, whose roles followed from names and formats.
    """

    roles: Roles | None = None
    served: dict[str, ServedSide] = {}
    comparisons: list[Comparison] = []
    noise: dict[str, list[NoiseFloor]] = {}
    turns: dict[str, list[TurnPoint]] = {}
    crossover: list[Crossover] = []
    prefill: dict[str, list[PrefillLine]] = {}
    ladders: dict[str, list[Ladder]] = {}
    machine: MachineState | None = None
    confounds: list[Confound] = []
    models: list[ModelRow] = []
    offline: dict[str, dict[str, OfflineSide]] = {}
    members: dict[str, dict[str, OfflineSide]] = {}
    blocking: dict[str, list[str]] = {}


class Verdict(msgspec.Struct, kw_only=True):
    """The verdict of a run.

    passed: the candidate neither loses nor is fragile, and the run has no confound.
    comparable: the run has no confound.
    outcome: "keeps" only where `passed`; None in a run of version 0.1.0.
    rule: version of the rule that decided (rule.RULE), 0 in a run of version 0.2.0 or older.
    sentence: the verdict with what got worse.
    head: the lines below it: under which server, how sure, what to do next, what was not tested.
    badge: the verdict in one word.
    """

    rule: int = 0
    sentence: str = ""
    head: list[str] = []
    passed: bool = False
    outcome: Standing | None = None
    badge: str = ""
    candidate: str | None = None
    incumbent: str | None = None
    comparable: bool = False
    reasons: list[str] = []
    caveats: list[str] = []
