"""What a strategy is: one value of this type, named STRATEGY, in a file of strategies/."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from annie_quant import nvfp4
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import Progress
from annie_quant.quantize.formats import BITS, NVFP4, PLAIN_BITS

if TYPE_CHECKING:
    from annie_quant.quantize.job import Job

SWEEP_TIME = 8.1  # exact sweep relative to amax, one thread (tests/perf/codec.md)
KEPT_INPUTS = 4 << 30  # bytes of inputs of a block's last linear; where there are more, the block runs twice
FLOAT32_BYTES = 1 << 30  # models up to this size are computed in float32, one layer at a time
ALL_NVFP4 = {"mlp": NVFP4, "attention": NVFP4, "deltanet": NVFP4}


@dataclass(frozen=True)
class Option:
    """A setting of one strategy (--set NAME=VALUE). A value takes the type of the default."""

    default: Any
    help: str
    choices: tuple[Any, ...] = ()

    def parse(self, name: str, value: Any) -> Any:
        try:
            parsed = type(self.default)(value)
        except ValueError:
            raise UsageError(f"{name}={value}: expected a value such as {self.default!r}", self.help) from None
        if self.choices and parsed not in self.choices:
            raise UsageError(f"{name}={value}", f"choose {' or '.join(map(str, self.choices))}")
        return parsed


ACTIVATIONS = Option(4, "bits of the activations: 4 (W4A4) or 16 (only weights are quantized)", (4, 16))


@dataclass(frozen=True)
class Cost:
    """What a strategy needs, for its place in a search and for estimates before it starts.

    rank: a search tries lower ranks first: cheapest to serve, then cheapest to make.
    layerwise: one decoder layer is in memory at a time.
    passes: forward passes of the calibration text through the whole model, or their equivalent.
    encode: time of the codec relative to plain rounding.
    column_feedback: Hessians are accumulated and factored, and each rounded column corrects those after it.
    bytes_per_weight: memory where the whole model is loaded.
    bytes_per_layer_weight, hidden_copies, hessians: memory where one layer is loaded: per weight of the layer, copies of the
        text's hidden states (by default a layer's inputs, outputs and gathered inputs), and float32 matrices of the widest input.
    keeps_results: the rounded layers stay in memory until the last one is rounded.
    whole_model: options → bytes per weight of a step with the whole model, after the layers; 0 without such a step.
    kept_inputs: most bytes of a linear's inputs that are stored until it is rounded (layer_stages.py).
    """

    rank: int
    layerwise: bool = False
    passes: float = 0.0
    encode: float = 1.0
    column_feedback: bool = False
    bytes_per_weight: float = 2.0
    bytes_per_layer_weight: float = 4.0
    hidden_copies: int = 3
    hessians: int = 0
    keeps_results: bool = False
    whole_model: Callable[[Mapping[str, Any]], float] = lambda options: 0.0
    kept_inputs: int = 0


@dataclass(frozen=True)
class Strategy:
    """A way to quantize a checkpoint.

    formats: kind of part (annie_quant.models) → format, or average bits per weight where the strategy chooses formats;
        for size estimates. Other parts stay bf16.
    quantize: writes the quantized checkpoint into job.output.
    options: its own settings, which it reads from job.options.
    scale: how block scales are chosen unless --scale is given.
    requires: packages of the `quantize` extra that it imports.
    resume_key: returns what must be equal for an interrupted run's shards to be kept; None keeps none.
    conservative: a search tries it next when a checkpoint answers gibberish.
    kv_cache: format of the KV cache that the checkpoint asks for unless --kv-cache is given.
    any_family: it takes a family that is not known, although it computes single layers of the known ones.
    searched: whether a search over all strategies tries it. A vendor's recipe is tried by name.
    """

    name: str
    summary: str
    formats: Mapping[str, str | float]
    cost: Cost
    quantize: Callable[[Job, Progress], None]
    options: Mapping[str, Option] = field(default_factory=dict)
    scale: nvfp4.Scale = "amax"
    requires: tuple[str, ...] = ("torch", "transformers")
    resume_key: Callable[[Job], dict[str, object]] | None = None
    conservative: bool = False
    kv_cache: str = "none"
    any_family: bool = False
    searched: bool = True

    @property
    def needs_family(self) -> bool:
        """Return whether it has to compute single decoder layers, which takes a family that is known (annie_quant.models)."""
        return self.cost.layerwise and self.cost.passes > 0 and not self.any_family

    def bits(self, kind: str) -> float:
        """Return the bits per weight of a kind of part."""
        stored = self.formats.get(kind, PLAIN_BITS)
        return BITS[stored] if isinstance(stored, str) else stored

    def settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return every option with its value, by default its default. Raises UsageError for an unknown name."""
        for name in values:
            if name not in self.options:
                known = "; ".join(f"{n} (default {o.default!r}): {o.help}" for n, o in self.options.items())
                raise UsageError(f"{self.name} has no setting {name!r}", f"it has: {known or 'none'}")
        return {n: o.parse(n, values[n]) if n in values else o.default for n, o in self.options.items()}
