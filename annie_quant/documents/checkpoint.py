"""Documents about a checkpoint: its audit, annie_quant.json (the record of its quantization), and how a server loaded it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType, field

from annie_quant.core.untrusted import JsonObject


class Finding(msgspec.Struct, frozen=True):
    """One fault.

    code: stable, for tests and scripts.
    tensor: the tensor or module.
    message: one sentence.
    """

    code: str
    tensor: str
    message: str


class TensorRow(msgspec.Struct, omit_defaults=True):
    """One quantized linear or one plain tensor.

    format: "nvfp4", "fp8", or safetensors' dtype of a plain tensor.
    shape: of the weight.
    group: columns per block scale.
    scale_min, scale_max: smallest and largest E4M3 byte of the block scales.
    blocks, zero_blocks: their number, and how many hold zeros only.
    tensor_scale, input_scale: multipliers; None for a linear without, unset for a plain tensor.
    rel_l2: relative error against the source.
    tuned: a norm that differs from the source's by what tuning may change (quantize/norm_tuning.py).
    """

    name: str
    format: str
    shape: list[int] | None = None
    group: int | None = None
    scale_min: int | None = None
    scale_max: int | None = None
    blocks: int | None = None
    zero_blocks: int | None = None
    tensor_scale: float | UnsetType | None = UNSET
    input_scale: float | UnsetType | None = UNSET
    rel_l2: float | None = None
    tuned: bool = False


Loads = Literal["yes", "no", "after", "unknown"]


class ServerSupport(msgspec.Struct):
    """Whether a server loads a checkpoint.

    loads: "after" means after the step in `note`.
    note: the step, a limit, or the reason why it does not load.
    """

    server: str
    loads: Loads
    note: str = ""

    def __str__(self) -> str:
        words = {"after": [], "unknown": ["not judged"]}.get(self.loads, [self.loads])
        return f"{self.server}: {', '.join([*words, *([self.note] if self.note else [])])}"


class AuditSummary(msgspec.Struct):
    """The contents of a checkpoint. Fields are None where the files could not be read.

    dialect: "plain", "modelopt", "compressed-tensors".
    quantized, unquantized: modules counted by the last two parts of their names.
    weights: number of weights.
    size_bytes: of all tensors.
    servers: which load it.
    loads: the same as text.
    mtp: number of tensors per format of the head for multi-token prediction ("15 BF16"), "missing",
        or None without a head.
    kv_cache: the format of the KV cache that the settings ask for, and what is known about servers
        with it; None for a cache in 16 bits.
    """

    dialect: str | None = None
    algorithm: str | None = None
    quantized: list[str] | None = None
    unquantized: list[str] | None = field(default=None, name="kept")
    weights: int | None = None
    size_bytes: int | None = None
    bits_per_weight: float | None = None
    bits_per_quantized_weight: float | None = None
    shards: int | None = None
    loads: list[str] = []
    servers: list[ServerSupport] = []
    mtp: str | None = None
    kv_cache: str | None = None


class RemoteRead(msgspec.Struct):
    """What an audit read of a checkpoint that is not on this machine: small files and headers.

    commit: of the repository; "" for an HTTP folder.
    size_bytes: of the checkpoint's files, as far as the server reports them.
    received_bytes: of answers of the server.
    not_checked: codes of findings that only the values of tensors show.
    """

    commit: str
    size_bytes: int
    received_bytes: int
    not_checked: list[str] = []


class TemplateFault(msgspec.Struct, frozen=True):
    """A fault or limit of a chat template.

    code: stable, for tests and scripts.
    message: one sentence.
    line: of the template; None where no single line is at fault.
    """

    code: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        line = f", line {self.line}" if self.line else ""
        return f"chat template{line}: {self.message}"


class TemplateLint(msgspec.Struct):
    """What a chat template does to conversations with tools.

    family, form: whose parsers of tool calls a server needs; "" where the form is not known.
    faults: an ordinary conversation becomes wrong without an error, or is refused.
    limits: properties of the call form, messages that are refused with an error, and costs.
    """

    family: str = ""
    form: str = ""
    faults: list[TemplateFault] = []
    limits: list[TemplateFault] = []


class Audit(msgspec.Struct):
    """The result of an audit. A checkpoint without faults has no finding.

    remote: None for a folder on this machine.
    template: the lint of its chat template, whose faults are no findings; None without a template.
    """

    path: str
    findings: list[Finding] = []
    summary: AuditSummary = field(default_factory=AuditSummary)
    tensors: list[TensorRow] = []
    remote: RemoteRead | None = None
    template: TemplateLint | None = None

    @property
    def ok(self) -> bool:
        return not self.findings

    def to_dict(self) -> JsonObject:
        """Return the result as JSON values, as `annie-quant audit --json` prints it."""
        fields: JsonObject = msgspec.to_builtins(self)
        return {"path": fields.pop("path"), "ok": self.ok, **fields}


RECIPE_FILE = "annie_quant.json"  # in every checkpoint that annie_quant makes


class HeldOut(msgspec.Struct):
    """The calibration conversations on which recipes are compared.

    tokens: of all answers.
    decisions: number of these tokens that decide about a call or the end.
    """

    conversations: int
    tokens: int
    decisions: int


class Ingredient(msgspec.Struct):
    """A tried ingredient of a recipe, and its held-out figures in nats per token.

    used: its divergence was less than that of the recipe before it by more than the noise.
    kl, decisions: mean KL as served, of all tokens and of the tokens that decide.
    kl_w4a16, decisions_w4a16: the same with no input rounded.
    change: of the sum of these figures, relative to the recipe before.
    noise: standard error of the change over conversations.
    """

    name: str
    used: bool
    kl: float
    decisions: float
    kl_w4a16: float
    decisions_w4a16: float
    change: float
    noise: float


class FrontierPoint(msgspec.Struct, kw_only=True):
    """A choice of formats, or with `measured` the whole of it evaluated.

    read_bytes: of weights per decoded token.
    size_bytes: of the checkpoint's tensors.
    tok_s: predicted, one stream.
    kl, decisions: mean KL on held-out answers in nats, of all tokens and of those that decide.
    flips: share of the tokens that decide whose most probable token is another one.
    formats: format → share of the weights that may be quantized; "bf16" for those that are not.
    head: format of the head.
    taken: the checkpoint has these formats.
    ttft_ms: predicted time to the first token; None where no prefill rate is known.
    """

    read_bytes: float
    size_bytes: float
    tok_s: float
    kl: float
    decisions: float
    flips: float
    formats: dict[str, float]
    head: str
    measured: bool = False
    taken: bool = False
    ttft_ms: float | None = None


class GroupCost(msgspec.Struct, kw_only=True):
    """What rounding a group's inputs to 4 bits costs and saves, next to 16-bit inputs.

    name: of its first linear.
    flops: share of the FLOPs of the linears that may be quantized.
    harm: in nats, KL of all tokens plus that of tokens that decide.
    saved_ms: of the time to the first token, where all other inputs have 16 bits.
    format: that was taken.
    """

    name: str
    flops: float
    harm: float
    saved_ms: float
    format: str

    @property
    def harm_per_ms(self) -> float:
        return self.harm / max(self.saved_ms, 1e-9)


class FormatPlan(msgspec.Struct):
    """How formats were chosen under limits of size, speed, time to the first token or loss.

    device: whose speed is predicted.
    reason: why the point was taken.
    points: some of the frontier by rising bytes, and those that were evaluated.
    prompt: whose time to the first token is predicted, and the server.
    groups: where the formats of inputs were chosen under a limit of that time.
    """

    device: str
    reason: str
    points: list[FrontierPoint]
    prompt: str = ""
    groups: list[GroupCost] = []


class Behaviour(msgspec.Struct, omit_defaults=True):
    """What some answers do (data/behaviours.py), such as "calls NAME", "declines" or "talk".

    answers: number of calibration answers that do it; "thinks" counts answers of all behaviours.
    gates: number of the gates' prompts that ask for it.
    logs: number of logged answers in the calibration file that do it.
    weight: how much one of these answers counts, 1 on average.
    """

    name: str
    answers: int = 0
    gates: int = 0
    logs: int = 0
    weight: float = 1.0


MAX_LISTED_WEIGHTS = 8  # in a line; of more, the extremes
MAX_LISTED_TOOLS = 4  # in a line; of more, their number and the extremes


def _counted(counts: Mapping[str, int]) -> str:
    """Return counts per behaviour as text, with the calls of many tools as one item."""
    calls = {name: n for name, n in counts.items() if name.startswith("calls ") and n}
    parts = [f"{n:,} {name}" for name, n in counts.items() if n and name not in calls]
    if len(calls) > MAX_LISTED_TOOLS:
        fewest = min(calls.values())
        most = max(calls.values())
        total = sum(calls.values())
        parts.insert(0, f"{total:,} calls of {len(calls)} tools ({fewest:,} to {most:,} each)")
    else:
        parts = [*(f"{n:,} {name}" for name, n in calls.items()), *parts]
    return ", ".join(parts) or "none"


class CalibrationUse(msgspec.Struct):
    """Which of the calibration conversations were used.

    conversations: number of those used, of `of`.
    tokens: of these conversations.
    computed: of these tokens, where a prefix that several conversations share counts once.
    longest: tokens of the longest one.
    limit: most tokens of a conversation.
    prefix: tokens of the prefix that saves the most, which `prefix_conversations` share.
    in_file: number of conversations in the file, of which --calib-samples takes `of`; 0 where it is
        not known.
    own_answers: answers that the model gave itself; 0 where the file's are used.
    given_answers: answers of the file that stayed, because the model would give them itself.
    endless_answers: answers of the file that stayed, because the model's own did not end.
    behaviours: what the answers that are used do, next to what gates ask for and logs show.
    left_out: why other conversations or answers were not used, with their number.
    """

    conversations: int
    of: int
    tokens: int
    computed: int
    longest: int
    limit: int
    prefix: int = 0
    prefix_conversations: int = 0
    in_file: int = 0
    own_answers: int = 0
    given_answers: int = 0
    endless_answers: int = 0
    behaviours: list[Behaviour] = []
    left_out: list[str] = []

    def line(self) -> str:
        """Return one line, such as "413 of 413 conversations, 1.02 M tokens, longest 12,411; prefix of 2,364 shared by 396"."""
        total = f"{self.tokens / 1e6:.2f} M" if self.tokens >= 1e6 else f"{self.tokens:,}"
        parts = [
            f"{self.conversations:,} of {self.of:,} conversations, {total} tokens, longest {self.longest:,}"
        ]
        if self.in_file > self.of:
            parts.append(f"--calib-samples {self.of:,} of {self.in_file:,} in the file")
        if self.prefix:
            parts.append(f"prefix of {self.prefix:,} shared by {self.prefix_conversations:,}")
        if self.own_answers:
            parts.append(f"{self.own_answers:,} answers are the model's own")
        if self.given_answers:
            parts.append(f"{self.given_answers:,} as given, which it would write itself")
        if self.endless_answers:
            parts.append(f"{self.endless_answers:,} as given, because its own does not end")
        if self.left_out:
            parts.append(f"left out: {', '.join(self.left_out)}")
        return "; ".join(parts)

    @property
    def n_answers(self) -> int:
        """Number of answers that are used."""
        return sum(row.answers for row in self.behaviours if row.name != "thinks")

    def behaviour_line(self) -> str:
        """Return what the answers do as one line, such as "320 calls lookup, 40 declines; the gates: 120 calls lookup"."""
        parts = [_counted({row.name: row.answers for row in self.behaviours})]
        for source in ("gates", "logs"):
            counts = {row.name: getattr(row, source) for row in self.behaviours}
            if any(counts.values()):
                parts.append(f"the {source}: {_counted(counts)}")
        weights = {row.name: row.weight for row in self.behaviours if row.answers}
        weights.pop("thinks", None)
        if all(weight == 1 for weight in weights.values()):
            return "; ".join(parts)
        if len(weights) > MAX_LISTED_WEIGHTS:
            low = min(weights.values())
            high = max(weights.values())
            parts.append(f"weights from {low:.2g} to {high:.2g}")
        else:
            named = [f"{name} {weight:.2g}" for name, weight in weights.items()]
            parts.append(f"weights: {', '.join(named)}")
        return "; ".join(parts)


class MergedAdapter(msgspec.Struct, kw_only=True):
    """A LoRA adapter that was merged into its base.

    name: of its folder.
    summary: its kind, rank and alpha in words.
    weights_sha256, config_sha256: of adapter_model.safetensors and adapter_config.json.
    base_sha256: of the model that it was merged into (checkpoint.shards.model_sha256).
    trained_on, trained_on_revision: the base that its settings name.
    tensors: number of its tensors; all of them were used.
    changed: number of the base's tensors that it changed.
    relative_change: kind of part → norm of the change relative to that of the base's weights.
    prompt_files: where tokenizer, chat template and generation settings come from.
    notes: what was noticed, one sentence each.
    """

    name: str
    summary: str
    weights_sha256: str
    config_sha256: str
    base_sha256: str
    trained_on: str | None
    trained_on_revision: str | None
    tensors: int
    changed: int
    relative_change: dict[str, float]
    prompt_files: str
    notes: list[str] = []

    def lines(self) -> list[str]:
        """Return what was merged, as text."""
        changes = ", ".join(f"{kind} {x:.3g}" for kind, x in self.relative_change.items())
        return [
            f"{self.name}: {self.summary}; {self.tensors} of {self.tensors} tensors used, "
            f"{self.changed} tensors of the base changed"
            + (f"; change relative to the base: {changes}" if changes else ""),
            self.prompt_files,
            *self.notes,
        ]


class AdapterRecord(msgspec.Struct, kw_only=True):
    """The part of annie_quant.json that a merge writes: the adapters, the first one first."""

    version: str = ""
    adapters: list[MergedAdapter] = []


class Recipe(msgspec.Struct):
    """How a checkpoint was made, without a path or a time, so that the same seed gives the same bytes.

    prompt_sha256: of the system prompts in the conversations.
    prompt_mismatch: a sentence where they are not the production prompt and that was allowed.
    kv_cache: format of the KV cache that the checkpoint asks for.
    held_out, ingredients: the comparison of recipes, in the order of the trials.
    frontier: the choice of formats under limits.
    calibration: which conversations were used; None where the strategy reads none.
    adapters: those that were merged into the base before it was quantized, the first one first.
    mixture: how much each behaviour of their answers counted (--mixture).
    """

    version: str
    strategy: str
    calib_data_sha256: str | None
    calib_samples: int
    exclude: list[str]
    scale: str
    options: dict[str, Any]
    seed: int
    prompt_sha256: list[str]
    prompt_mismatch: str | None
    kv_cache: str = "none"
    held_out: HeldOut | None = None
    ingredients: list[Ingredient] = []
    frontier: FormatPlan | None = None
    calibration: CalibrationUse | None = None
    adapters: list[MergedAdapter] = []
    mixture: str = "given"


# ---- decoding speed: a machine's measured rates, and a prediction for a model


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that decodes (a device file of `annie-quant doctor --measure`).

    name: of its GPU.
    read_bytes_s: bytes per second that one token's reads reach, not the data sheet's.
    layer_s: seconds of a decoder layer in which no memory is read: launches, and waiting between
        them.
    attention_s: seconds that an earlier token takes in a layer that sees all of them: fixed, and
        per element of a head; None: those of its bytes.
    step_s: least seconds of a token, which the server's host needs.
    prefill_tflop_s: kernel of a prompt's products (bf16, w4a16, fp8, w4a4) → measured rate.
    source: where they come from.
    """

    name: str
    read_bytes_s: float
    layer_s: float = 0.0
    attention_s: tuple[float, float] | None = None
    step_s: float = 0.0
    prefill_tflop_s: dict[str, float] = {}
    source: str = ""
    schema_version: int = 2


class PredictedSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted speed of one stream.

    read_bytes: per token, without a KV cache.  depth: earlier tokens.
    """

    device: str
    read_bytes: int
    tok_s: float
    depth: int = 0


class PredictedFirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted time to the first token (TTFT) of one stream.

    low_ms, high_ms: 90 % of the measured times that the predictor was tested on are within this
        interval, with their model left out of its fit; None on a device without measured times.
    """

    device: str
    server: str
    prompt_tokens: int
    cached_tokens: int
    ms: float
    low_ms: float | None = None
    high_ms: float | None = None


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """How vLLM loaded one model on one rank: a line of the file that ANNIE_QUANT_VLLM_REPORT names (ops/vllm_report.py).

    start: the same in all lines of one start of a server; rank: of the process; model: its class.
    linears: module → the class of its quantization method, then of its kernel where it has one.
    used: the checkpoint's tensors whose values were written into a parameter.
    unread: the checkpoint's tensors that were read and written nowhere.
    incomplete: parameters that were not written, or only in part.
    """

    start: str
    rank: int
    model: str
    vllm: str
    linears: dict[str, list[str]]
    used: list[str]
    unread: list[str]
    incomplete: list[str]
