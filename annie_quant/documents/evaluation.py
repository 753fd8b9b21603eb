"""Evaluations without a server: eval/<name>.json, the sensitivity of layers, and search.json, which has one per strategy."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path

import msgspec

from annie_quant.core.files import finite
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents.checkpoint import PredictedFirstToken
from annie_quant.documents.drafts import DraftPrediction
from annie_quant.documents.reading import SCHEMA_VERSION, decode
from annie_quant.documents.statistics import GateResult, PairedGate, PairedVerdict, PooledGates

GateTable = dict[str, GateResult]  # by name, deciding gates first


class PromptOutcome(IntEnum):
    """The outcome of one gate for one answer.

    An uncounted one informs only, because the answer is not complete or by the workload's choice.
    """

    FAILS = 0
    PASSES = 1
    FAILS_UNCOUNTED = 2
    PASSES_UNCOUNTED = 3
    NOT_APPLICABLE = 4

    @classmethod
    def of(cls, passed: bool | None, counts: bool) -> PromptOutcome:
        """Return the outcome of an answer; passed: None where the gate does not apply."""
        if passed is None:
            return cls.NOT_APPLICABLE
        return cls(passed + (0 if counts else 2))

    @property
    def passed(self) -> bool:
        return self in (PromptOutcome.PASSES, PromptOutcome.PASSES_UNCOUNTED)

    @property
    def counts(self) -> bool:
        return self < PromptOutcome.FAILS_UNCOUNTED


_CHARACTERS = "01fp-"  # of the outcomes on disk, by their number


def encode_outcomes(outcomes: Iterable[PromptOutcome]) -> str:
    """Return the outcomes of a gate as a document stores them."""
    return "".join(_CHARACTERS[outcome] for outcome in outcomes)


def decode_outcomes(text: str) -> list[PromptOutcome]:
    """Return the stored outcomes of a gate; a character that none has does not apply."""
    known = (_CHARACTERS.find(character) for character in text)
    return [
        PromptOutcome(number) if number >= 0 else PromptOutcome.NOT_APPLICABLE for number in known
    ]


class KLFigures(msgspec.Struct):
    """KL divergence of the checkpoint from its reference over a set of tokens, with related figures.

    mean, median, p99, max: nats per token.
    same_top: share of tokens where both models have the same most likely token.
    flips: number of the other tokens.
    flips_predicted: the same, predicted from margins and noise (pair.py).
    delta_p_mean, delta_p_rms: change of the probability of the reference's token.
    margin_median: the reference's best minus second-best logit.
    noise_median: standard deviation of the logit errors.
    """

    n_tokens: int
    mean: float
    median: float
    p99: float
    max: float
    same_top: float
    flips: int
    flips_predicted: float
    perplexity: float
    perplexity_reference: float
    delta_p_mean: float
    delta_p_rms: float
    margin_median: float
    noise_median: float


class MarginBin(msgspec.Struct, rename={"low": "from", "high": "to"}):
    """Tokens whose margin in the reference is at least `low` and below `high` (None: no limit)."""

    low: float
    high: float | None
    n_tokens: int
    flips: int
    flips_predicted: float


class LayerKL(msgspec.Struct):
    """Mean KL divergence, in nats per token, with only this layer quantized."""

    layer: str
    kl: float


class KLSummary(KLFigures, kw_only=True, omit_defaults=True):
    """KLFigures of all tokens, per category and per token class.

    by_layer: present after a sensitivity measurement.
    decisions: of the tokens that decide about a call, its function, its arguments or the end
        (offline/prompts.py); None for plain text and in evaluations before 0.3.
    """

    by_category: dict[str, KLFigures] = {}
    by_class: dict[str, KLFigures] = {}
    margins: list[MarginBin] = []
    by_layer: list[LayerKL] = []
    decisions: KLFigures | None = None


class LayerDivergence(msgspec.Struct):
    """KL divergence with one set of layers quantized. The fields are those of KLFigures."""

    mean: float
    p99: float
    same_top: float
    flips: int
    n_tokens: int


class SensitivityKey(msgspec.Struct):
    """The inputs of a sensitivity measurement.

    answers: tokens per scored answer.
    """

    model_sha256: str
    reference_sha256: str
    numerics: str
    answers: list[int]


class Sensitivity(msgspec.Struct, omit_defaults=True):
    """KL divergence of a checkpoint by layer.

    all: of the whole checkpoint.
    alone: with one layer quantized.
    restored: with one layer restored.
    """

    model: str
    numerics: str
    key: SensitivityKey
    all: LayerDivergence | None = None
    alone: dict[str, LayerDivergence] = {}
    restored: dict[str, LayerDivergence] = {}


class SameAnswers(msgspec.Struct):
    """Answers with the same tokens as the reference's: `same` of `n`."""

    n: int
    same: int


class DifferingAnswer(msgspec.Struct):
    """An answer that differs from the reference's.

    failed: gates that the checkpoint's answer fails.
    """

    case: str
    agreed_tokens: int
    failed: list[str]
    text: str
    tool_calls: list[str]
    reference_text: str
    reference_tool_calls: list[str]


class SearchNumerics(msgspec.Struct, kw_only=True):
    """The part of a NumericsResult that search.json keeps.

    kl: over the reference's own answers; None without workloads.
    verbosity_ratio: tokens of the checkpoint's answers divided by tokens of the reference's.
    """

    gates: GateTable
    kl: KLSummary | None
    kl_conversations: KLSummary | None
    paired: dict[str, PairedGate]
    same_answers: SameAnswers
    verbosity_ratio: float | None
    seconds: float
    pooled: PooledGates | None = None


class NumericsResult(SearchNumerics, kw_only=True):
    """The checkpoint under one numerics.

    arithmetic, outcomes: as in Member.
    drafts: what those of the MTP head give, by workload; empty for a checkpoint without one.
    """

    kl_text: KLSummary | None
    perplexity: float | None
    perplexity_reference: float | None
    cases: list[DifferingAnswer]
    arithmetic: str = ""
    outcomes: dict[str, str] = {}
    drafts: dict[str, DraftPrediction] = {}


class Member(msgspec.Struct):
    """The checkpoint's answers in a further arithmetic of the ensemble of one numerics.

    arithmetic: a description.
    gates: over all prompts.
    paired: compared with the reference.
    outcomes: per gate the outcomes of the prompts of Evaluation.prompts (encode_outcomes): "1" and
        "0" where the answer passes or fails, "p" and "f" where that informs only, "-" where the
        gate does not apply to it.
    n_computed: number of answers computed in this arithmetic, without later turns of changed
        conversations; the others are certain.
    n_changed: number of answers that differ from those of the requested numerics.
    """

    arithmetic: str
    gates: GateTable
    paired: dict[str, PairedGate]
    outcomes: dict[str, str]
    n_computed: int
    n_changed: int
    pooled: PooledGates | None = None


class EnsembleFigures(msgspec.Struct):
    """The uncertainty of the answers under one numerics.

    noise: standard deviation of the change of a margin (best minus second-best logit) between the
        two arithmetics that compute every answer, from its median.
    n_uncertain: answers that a perturbation could change, of n (ensemble.py has the rule).
    """

    noise: float
    n_uncertain: int
    n: int


class EvaluatedWorkload(msgspec.Struct, omit_defaults=True):
    """A workload of an evaluation.

    sha256: of its file.
    n_cases: number of prompts that were evaluated.
    prompts_sha256: of the list of their judge.prompt_sha256.
    """

    sha256: str
    n_cases: int
    prompts_sha256: str = ""


class ModelFiles(msgspec.Struct, omit_defaults=True):
    """SHA-256 of the files that determine a model's answers; "" for a missing file.

    sha256: of the whole folder (checkpoint.shards.model_sha256). Versions up to 0.2 left out the
        vocabulary files next to tokenizer.json, chat_template.json and hf_quant_config.json.
    """

    sha256: str
    tokenizer: str = ""
    chat_template: str = ""
    generation_config: str = ""


class Evaluation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A checkpoint compared with its bf16 reference without a server.

    numerics: one entry per requested numerics.
    members: the further arithmetics of each ensemble, by "w4a4+bf16", "w4a4+perm1", "w4a4+cut16".
    prompts: by gate, names of the prompts of the workloads that name it, in the order of the
        characters of `outcomes` (in version 0.2.0 only those that the gate applies to in the
        reference's answer).
    reference_outcomes: the same characters for the bf16 reference.
    floor_outcomes: for its answers in a second arithmetic, of the gates that compare with its own
        answers.
    ensemble: by numerics.
    reference_drafts: the same of the reference.
    verdict: judge.decision.judge_evaluation; absent in evaluations of version 0.1.0.
    checkpoint_files, reference_files: None in evaluations of version 0.2.0.
    blocking: reasons that forbid the verdict "keeps", such as a broken export.
    evidence_sha256: digest of what the verdict is counted from (judge/evidence.py).
    rule: version of the rule that decided (judge.decision.RULE), 0 in evaluations of version 0.2.0
        and older.
    """

    schema_version: int
    version: str
    model: str
    reference: str
    reference_sha256: str
    dtype: str
    device: str
    workloads: dict[str, EvaluatedWorkload]
    n_answers: int
    n_conversation_answers: int
    n_text_tokens: int
    notes: list[str]
    reference_gates: GateTable
    numerics: dict[str, NumericsResult]
    seconds: float
    verdict: PairedVerdict | None = None
    prompts: dict[str, list[str]] = {}
    reference_outcomes: dict[str, str] = {}
    floor_outcomes: dict[str, str] = {}
    members: dict[str, Member] = {}
    ensemble: dict[str, EnsembleFigures] = {}
    reference_drafts: dict[str, DraftPrediction] = {}
    checkpoint_files: ModelFiles | None = None
    reference_files: ModelFiles | None = None
    blocking: list[str] = []
    evidence_sha256: str = ""
    rule: int = 0

    def outcomes(self) -> dict[str, dict[str, str]]:
        """Return the outcomes of all members, those of `numerics` first."""
        return {k: v.outcomes for k, v in self.numerics.items()} | {
            k: v.outcomes for k, v in self.members.items()
        }

    def to_dict(self) -> JsonObject:
        """Return the evaluation as a dict that JSON can hold: None for a figure that is not a number."""
        document: JsonObject = finite(msgspec.to_builtins(self))
        return document

    @classmethod
    def load(cls, path: Path) -> Evaluation:
        """Read an evaluation that was written from to_dict(); figures of a broken model may be NaN.

        Raises EnvironmentFault for a file of a newer version, or one that cannot be read.
        """
        return decode(
            cls, path, hint="annie-quant eval MODEL_DIR --reference BF16_DIR writes it again"
        )


class HardenedGate(msgspec.Struct):
    """[passes, n] of a gate without and with the hardened prompt, and of bf16 with it.

    restored: None where bf16 fails it too.
    """

    before: list[int]
    after: list[int]
    reference: list[int]
    restored: bool | None


class Hardened(msgspec.Struct):
    """The effect of a hardened prompt.

    gates: numerics and gate ("W4A4 tool_call") → counts.
    reading: the conclusion.
    """

    gates: dict[str, HardenedGate]
    reading: str


class CalibrationDraw(msgspec.Struct):
    """The strategy with another random draw of the calibration rows.

    gates: numerics → gate → [passes, n].
    """

    seed: int
    verdict: PairedVerdict
    gates: dict[str, dict[str, list[int]]]


class StrategyRow(msgspec.Struct, omit_defaults=True):
    """A tried strategy.

    incoherent: it failed the smoke question, which bf16 answers.
    path: its steps in order.
    why: reasons for not passing.
    explained: further findings.
    read_bytes: bytes of weights that one decoded token reads.
    predicted_tok_s: decode speed of one stream on a GB10 (checkpoint/decode_speed.py).
    predicted_first_token: time to the first token on a GB10 in vLLM (checkpoint/first_token.py).
    draws: further calibration draws.
    model_sha256: of the checkpoint (ModelFiles.sha256).
    loads: which servers load the checkpoint.
    error: why it could not be quantized.
    """

    strategy: str
    passed: bool
    outcome: str
    why: list[str]
    path: list[str]
    numerics: dict[str, SearchNumerics]
    error: str | None = None
    incoherent: bool = False
    size_bytes: int | None = None
    bits_per_weight: float | None = None
    read_bytes: int | None = None
    predicted_tok_s: float | None = None
    predicted_first_token: PredictedFirstToken | None = None
    audit: str | None = None
    loads: list[str] | None = None
    hardened: Hardened | None = None
    explained: list[str] | None = None
    seconds: float | None = None
    verdict: PairedVerdict | None = None
    model_sha256: str = ""
    draws: list[CalibrationDraw] = []


class SearchResult(msgspec.Struct):
    """The result of a search.

    chosen: the first strategy that passes every gate.
    stopped: why no strategy was tried.
    seconds: until the choice.
    seeds: calibration draws per strategy.
    version: of the package.
    """

    chosen: str | None
    stopped: str | None
    required: list[str]
    command: str
    where: str
    n: int
    notes: list[str]
    reference: GateTable
    strategies: list[StrategyRow]
    seconds: float
    seeds: int = 1
    schema_version: int = SCHEMA_VERSION
    version: str = ""
