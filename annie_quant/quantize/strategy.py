"""The interface of a strategy: a value STRATEGY of type Strategy, in a file of strategies/, which plans a Job."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec

from annie_quant import nvfp4
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import source_key
from annie_quant.core.errors import UsageError
from annie_quant.core.files import sha256_file
from annie_quant.core.progress import Progress
from annie_quant.core.resume import KeyedJson, keyed_folder
from annie_quant.data.behaviours import GIVEN_MIXTURE, Mixture
from annie_quant.models.formats import BF16, NVFP4, Format

if TYPE_CHECKING:
    from annie_quant.quantize.frontier import Limits
    from annie_quant.quantize.plan import QuantizationPlan

SWEEP_TIME = 8.1  # exact sweep relative to amax, one thread (tests/perf/codec.md)
# Bytes of inputs of a block's last linear; where there are more, the block runs twice.
KEPT_INPUTS = 4 << 30
# Tokens of the answers that a trial scores, whose logits stay in memory, and of these answers with their prompts (held_out.py).
TRIAL_TOKENS = {"cpu": 1024, "cuda": 8192}
TRIAL_POSITIONS = {"cpu": 4096, "cuda": math.inf}
# Steps that tune norms, and tokens of one. More passes over the same answers learn these answers (norm_tuning.py).
TUNING_STEPS = {"cpu": 48, "cuda": 120}
TUNING_TOKENS = {"cpu": 1024, "cuda": 8192}
TUNING_PASSES = 4
# Numbers per token and column of the hidden states that the gradient of one layer needs; of the others it needs the input.
TUNING_NUMBERS = 60
FLOAT32_BYTES = 1 << 30  # smaller models are computed in float32
ALL_NVFP4 = {"mlp": NVFP4, "attention": NVFP4, "deltanet": NVFP4}
AnswerSource = Literal["own", "given"]
EngineName = Literal["own", "modelopt"]


def in_float32(weight_bytes: int, on_cpu: bool) -> bool:
    """Return whether a model is computed in float32 and not in bfloat16.

    On a processor without instructions for bfloat16 its products take 7 to 75 times as long as those of float32.
    """
    if weight_bytes >= FLOAT32_BYTES and on_cpu:
        import torch

        return not (
            torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
    return weight_bytes < FLOAT32_BYTES


class StrategyOptions(msgspec.Struct, frozen=True):
    """Settings of a strategy (--set NAME=VALUE); a strategy that has some defines a subclass with a described() type per field.

    MEASURED_WITHOUT: options that no measurement depends on.
    """

    MEASURED_WITHOUT: ClassVar[tuple[str, ...]] = ()


OptionsType = TypeVar("OptionsType", bound=StrategyOptions, covariant=True)


def described(text: str) -> msgspec.Meta:
    """Return the annotation of an option: a description for messages."""
    return msgspec.Meta(description=text)


class Method(StrategyOptions, frozen=True):
    """How GPTQ rounds; the options of the strategies that round by it."""

    damping: Annotated[
        float, described("added to the Hessian's diagonal, relative to its mean")
    ] = 0.05
    prompt: Annotated[float, described("weight of a prompt's token relative to a response's")] = 0.1
    norms: Annotated[
        bool | None,
        described("tune the norms after rounding (norm_tuning.py); default: by best, on a GPU"),
    ] = None


@dataclass(frozen=True)
class Job(Generic[OptionsType]):
    """The inputs of one quantization.

    model: folder of the bf16 checkpoint.
    output: folder to write into.
    calib_data: JSON lines of conversations, or None.
    calib_samples: conversations used at most.
    calib_tokens: tokens of a conversation that is used, at most; None: the model's context, or what memory allows.
    answers: "own": the model answers the conversations' prompts itself (own_answers.py); "given": the file's answers.
    mixture: how much an answer counts, by its behaviour.
    exclude: patterns of --exclude-layers.
    scale: rule by which block scales are chosen.
    options: the strategy's.
    seed: of random choices.
    work: folder with results that a killed run can use again; it is removed after success.
    """

    model: Path
    output: Path
    calib_data: Path | None = None
    calib_samples: int = 512
    calib_tokens: int | None = None
    answers: AnswerSource = "own"
    mixture: Mixture = GIVEN_MIXTURE
    exclude: tuple[str, ...] = ()
    scale: nvfp4.Scale = "amax"
    options: OptionsType = field(default_factory=StrategyOptions)  # type: ignore[assignment]
    seed: int = 0
    work: Path = Path(".work")

    @property
    def conversations(self) -> Path:
        """The file of conversations. Raises UsageError where the job has none."""
        if self.calib_data is None:
            raise UsageError(
                "this strategy needs conversations to calibrate with",
                "annie-quant data --persona annie --output calibration.jsonl, then --calib-data calibration.jsonl",
            )
        return self.calib_data

    def key(self) -> dict[str, object]:
        """Return the settings that must be equal for a rerun to use the measurements of an interrupted run."""
        options = msgspec.structs.asdict(self.options)
        for name in self.options.MEASURED_WITHOUT:
            del options[name]
        return {
            "layout": 2,  # of the stored layers (rounding.LayerResult)
            "model": source_key(ModelFolder(self.model)),
            "calib_data": sha256_of(self.calib_data),
            "settings": [
                self.calib_samples,
                self.calib_tokens,
                self.answers,
                self.mixture.key(),
                self.exclude,
                self.scale,
                options,
                self.seed,
            ],
        }

    def measurements(self, name: str) -> KeyedJson:
        """Return the file of measurements called `name`, which outlives a killed run with the same key."""
        self.work_folder()
        return KeyedJson(self.work / name, self.key())

    def work_folder(self) -> Path:
        """Return the work folder, emptied unless it was made with the same key."""
        return keyed_folder(self.work, self.key())


def sha256_of(file: Path | None) -> str | None:
    return None if file is None else sha256_file(file)


@dataclass(frozen=True)
class Cost:
    """What a strategy needs, for its place in a search and for estimates before it starts.

    rank: of strategies with equal bytes per token a search tries the lowest first, the cheapest to make.
    layerwise: one decoder layer is in memory at a time.
    passes: forward passes of the calibration text through the whole model, or their equivalent.
    held_out_look: the model is also rounded without some conversations, and judged on them. On a CPU, where trials have few
        tokens, `passes` does not hold for such a strategy.
    encode: time of the codec relative to plain rounding.
    column_feedback: Hessians are accumulated and factored, and each rounded column corrects those after it.
    bytes_per_layer_weight: memory where one layer is loaded, per weight of the layer.
    hessians: float32 matrices of the widest input.
    trials: some steps have the whole model in memory, and the rounded layers stay there (kl_trial.py).
    reads_answers: by default the whole model first answers the prompts (own_answers.py).
    kept_inputs: most bytes of a linear's inputs that are stored until it is rounded (layer_stages.py).
    tunes_norms: on a GPU the norms are tuned after rounding (norm_tuning.py).
    """

    rank: int
    layerwise: bool = False
    passes: float = 0.0
    held_out_look: bool = False
    encode: float = 1.0
    column_feedback: bool = False
    bytes_per_layer_weight: float = 4.0
    hessians: int = 0
    trials: bool = False
    reads_answers: bool = False
    kept_inputs: int = 0
    tunes_norms: bool = False


@dataclass(frozen=True)
class Strategy:
    """A way to quantize a checkpoint.

    formats: kind of module (annie_quant.models) → format, or average bits per weight where the strategy chooses formats;
        for size estimates. Other modules stay bf16.
    plan: decides formats, scales and weights. The plan is then written into job.output.
    options: type of its settings.
    write: writes the plan instead of plan.export.
    scale: rule by which block scales are chosen unless --scale is given.
    requires: packages of the `quantize` extra that it imports.
    resume_key: returns the settings that must be equal for an interrupted run's shards to be kept; None keeps no shards.
    conservative: a search tries it next when a checkpoint answers gibberish.
    limits: returns the limits of its options, or None where they state none.
    any_family: it takes a family that is not known, although it computes single layers of the known ones.
    recipe_option: where another library quantizes, the option that names its recipe; else "".
    modelopt_options: of the `modelopt` strategy, by which ModelOpt runs this recipe (--engine modelopt); empty where it has none.
    """

    name: str
    summary: str
    formats: Mapping[str, Format | float]
    cost: Cost
    plan: Callable[[Any, Progress], QuantizationPlan]
    options: type[StrategyOptions] = StrategyOptions
    write: Callable[[Any, QuantizationPlan, Progress], None] | None = None
    scale: nvfp4.Scale = "amax"
    requires: tuple[str, ...] = ("torch", "transformers")
    resume_key: Callable[[Any], dict[str, object]] | None = None
    limits: Callable[[Any], Limits | None] = lambda options: None
    conservative: bool = False
    any_family: bool = False
    recipe_option: str = ""
    modelopt_options: Mapping[str, object] = field(default_factory=dict)

    @property
    def external(self) -> bool:
        """Return whether another library quantizes, which chooses block scales and the KV cache itself."""
        return bool(self.recipe_option)

    @property
    def needs_family(self) -> bool:
        """Return whether it has to compute single decoder layers, which takes a family that is known (annie_quant.models)."""
        return self.cost.layerwise and self.cost.passes > 0 and not self.any_family

    def bits(self, kind: str) -> float:
        """Return the bits per weight of a kind of module."""
        stored = self.formats.get(kind, BF16)
        return stored.bits if isinstance(stored, Format) else stored

    def settings(self, values: Mapping[str, object]) -> StrategyOptions:
        """Return the options with the given values, which may be text. Raises UsageError for what they do not take."""
        descriptions = {}
        described = msgspec.inspect.type_info(self.options)
        assert isinstance(described, msgspec.inspect.StructType)
        for setting in described.fields:
            extra = getattr(setting.type, "extra_json_schema", None) or {}
            text = extra.get("description", "")
            descriptions[setting.name] = f"{text} (default {setting.default})"
        for name, value in values.items():
            if name not in descriptions:
                known = "; ".join(f"{n}: {text}" for n, text in descriptions.items())
                raise UsageError(
                    f"{self.name} has no setting {name!r}", f"it has: {known or 'none'}"
                )
            try:
                msgspec.convert({name: value}, self.options, strict=False)
            except msgspec.ValidationError as error:
                reason = str(error).partition(" - at ")[0].replace("`", "")
                raise UsageError(f"{name}={value}: {reason}", descriptions[name]) from None
        return msgspec.convert(values, self.options, strict=False)
