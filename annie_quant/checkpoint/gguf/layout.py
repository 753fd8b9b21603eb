"""How llama.cpp stores a model.

The settings that it needs, tensor names, the order of DeltaNet's value heads, changed values.

Source of the conventions: ggml-org/llama.cpp, conversion/qwen.py (Qwen3NextModel,
_LinearAttentionVReorderBase, _Qwen35MtpMixin) and src/models/qwen35.cpp. The family has the names
(annie_quant.models). Settings are checked against the tensors' shapes before anything is allocated:
a vocab_size of 10^9 in config.json would otherwise become a list of as many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from annie_quant import documents, models
from annie_quant.checkpoint.dialects import QuantizedFolder
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.models import qwen3_5
from annie_quant.models.family import DeltaNet, GGUFNames

PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0, le=1e12)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
REQUIRED_MIXTURE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
REQUIRED_HYBRID = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
ROPE_KINDS = ("default", "mrope", "linear", "llama3")
CONFIG_HINT = "copy config.json from the source checkpoint"


class Rope(msgspec.Struct):
    """Settings of the rotary embedding.

    full_attention, sliding_attention: those of one kind of layer, where they differ.
    """

    mrope_section: (
        Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=4)] | None
    ) = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Fraction | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: Positive = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: PositiveInt = 8192
    full_attention: Rope | None = None
    sliding_attention: Rope | None = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


class GgufSettings(msgspec.Struct):
    """Fields of a text model's settings, under their names in config.json.

    The linear_* fields are required of models with DeltaNet layers, and have no meaning for others.
    """

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: Annotated[int, Meta(ge=1, le=10_000)]
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: Annotated[float, Meta(gt=0, lt=1)]
    linear_num_key_heads: PositiveInt = 1
    linear_num_value_heads: PositiveInt = 1
    linear_key_head_dim: PositiveInt = 1
    linear_value_head_dim: PositiveInt = 1
    linear_conv_kernel_dim: PositiveInt = 1
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    num_experts: Annotated[int, Meta(ge=1, le=1 << 14)] | None = None
    num_experts_per_tok: Annotated[int, Meta(ge=1, le=1 << 14)] | None = None
    moe_intermediate_size: PositiveInt | None = None
    shared_expert_intermediate_size: PositiveInt | None = None
    full_attention_interval: PositiveInt | None = None
    layer_types: list[str] | None = None
    mtp_num_hidden_layers: Annotated[int, Meta(ge=0, le=1000)] | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Fraction | None = None
    sliding_window: PositiveInt | None = None
    rope_local_base_freq: Positive | None = None
    query_pre_attn_scalar: Positive | None = None
    final_logit_softcapping: Positive | None = None
    attn_logit_softcapping: Positive | None = None

    @property
    def attention_head_dim(self) -> int:
        return self.head_dim or max(1, self.hidden_size // self.num_attention_heads)

    @property
    def rope(self) -> Rope:
        rope = self.rope_parameters or self.rope_scaling or Rope()
        return rope.full_attention or rope

    def frequency_factors(self) -> np.ndarray | None:
        """Return the divisors of the rotary frequencies in Llama 3's scaling.

        They are float32 [head_dim / 2]; None without that scaling.

        Source: transformers' _compute_llama3_parameters.
        """
        rope = self.rope
        if rope.kind != "llama3":
            return None
        base = rope.rope_theta or self.rope_theta or 10_000.0
        width = self.attention_head_dim
        wavelengths = 2 * np.pi * base ** (np.arange(0, width, 2) / width)
        turns = rope.original_max_position_embeddings / wavelengths
        smooth = np.clip(
            (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1
        )
        return (1 / ((1 - smooth) / rope.factor + smooth)).astype(np.float32)


def written_families() -> str:
    """Return a hint that lists the families which are written as GGUF."""
    return f"GGUF is written for {', '.join(f.name for f in models.families() if f.gguf)}"


def read_settings(folder: ModelFolder) -> GgufSettings:
    """Return the settings.

    Raises CheckpointError for another family, and for a field that is missing or has another type.
    """
    where = f"{folder.path.name}/config.json"
    if folder.family.gguf is None:
        problem = (
            f"model_type {folder.text_config.get('model_type')!r} cannot be stored as GGUF here"
        )
        raise CheckpointError(f"{folder.path}: {problem}", written_families())
    if folder.family.deltanet:
        absent = next((f for f in REQUIRED_HYBRID if f not in folder.text_config), None)
        if absent:
            raise CheckpointError(f"{where}: {absent} is missing", CONFIG_HINT)
    return documents.convert(
        GgufSettings, folder.text_config, where, error=CheckpointError, hint=CONFIG_HINT
    )


def check_settings(model: QuantizedFolder, settings: GgufSettings) -> None:
    """Raise CheckpointError for settings that llama.cpp cannot compute with.

    Also for those that contradict the tensors.
    """
    folder = model.folder
    where = f"{folder.path.name}/config.json"
    if settings.rope.kind not in ROPE_KINDS:
        message = f"{where}: rotary scaling {settings.rope.kind[:40]!r} is not written"
        raise CheckpointError(
            f"{message}, expected one of: {', '.join(ROPE_KINDS)}",
            "convert it with llama.cpp's converter",
        )
    layers = settings.num_hidden_layers
    if settings.layer_types is not None and len(settings.layer_types) != layers:
        raise CheckpointError(
            f"{where}: {len(settings.layer_types)} layer_types for {layers} layers", CONFIG_HINT
        )
    if settings.linear_num_value_heads % settings.linear_num_key_heads:
        message = f"{where}: linear_num_value_heads {settings.linear_num_value_heads} is not a multiple of"
        raise CheckpointError(
            f"{message} linear_num_key_heads {settings.linear_num_key_heads}", CONFIG_HINT
        )
    check_windows(folder, settings, where)
    required = REQUIRED_MIXTURE if folder.family.experts else ("intermediate_size",)
    missing = next((field for field in required if getattr(settings, field) is None), None)
    if missing:
        raise CheckpointError(f"{where}: {missing} is missing", CONFIG_HINT)
    # Qwen3.5's layers include those of the dense families; a name that a model does not have is
    # never looked up.
    expected = qwen3_5.tensor_shapes(settings)
    expected |= {
        name.replace("_proj.weight", "_proj.bias"): (fields, shape[:1])
        for name, (fields, shape) in expected.items()
        if name.endswith("_proj.weight")
    }
    numbers = set()
    for name in model.weights:
        short = models.short_name(name)
        inside = models.in_layer(name)
        shape = model.shape(name)
        if folder.family.is_auxiliary(name):
            continue
        if short.startswith("layers."):
            number = short.split(".")[1]
            if not number.isdecimal() or int(number) >= layers:
                raise CheckpointError(
                    f"{where}: num_hidden_layers {layers}, and there is a tensor {name}",
                    CONFIG_HINT,
                )
            numbers.add(int(number))
        experts = folder.family.experts
        expert = experts.split(name) if experts and name.endswith(".weight") else None
        if experts and expert:
            inside = f"{experts.module}.{expert[2]}"
        fields, needed = expected.get(inside or short, ("", shape))
        if len(shape) != len(needed) or any(
            n is not None and n != s for n, s in zip(needed, shape, strict=True)
        ):
            raise CheckpointError(
                f"{where}: {fields} need {name} of shape {_text(needed)}, got {_text(shape)}",
                CONFIG_HINT,
            )
    if len(numbers) != layers:
        raise CheckpointError(
            f"{where}: num_hidden_layers {layers}, and {len(numbers)} layers have tensors",
            CONFIG_HINT,
        )


def check_windows(folder: ModelFolder, settings: GgufSettings, where: str) -> None:
    """Raise CheckpointError where a model with sliding windows differs from llama.cpp's constants."""
    names = folder.family.gguf
    kinds = settings.layer_types or []
    if names is None or not names.window_pattern:
        if "sliding_attention" in kinds:
            message = (
                f"{where}: layers with a sliding window are not written for {folder.family.name}"
            )
            raise CheckpointError(message, "serve it with vLLM")
        return
    pattern = [bool((i + 1) % names.window_pattern) for i in range(settings.num_hidden_layers)]
    local = settings.rope_parameters and settings.rope_parameters.sliding_attention
    theta = (
        (local.rope_theta if local else None)
        or settings.rope_local_base_freq
        or names.window_rope_theta
    )
    scale = settings.query_pre_attn_scalar or settings.attention_head_dim
    for differs, what in (
        (settings.sliding_window is None, "sliding_window (missing)"),
        (bool(kinds) and [k == "sliding_attention" for k in kinds] != pattern, "layer_types"),
        (theta != names.window_rope_theta, "the rotary base of sliding layers"),
        (scale != settings.attention_head_dim, "query_pre_attn_scalar"),
        (settings.attn_logit_softcapping is not None, "attn_logit_softcapping"),
    ):
        if differs:
            raise CheckpointError(
                f"{where}: {what} is not what llama.cpp computes {folder.family.name} with",
                CONFIG_HINT,
            )


def _text(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"


# ---- names, orders and values of tensors

_FLOAT32 = ("_norm.weight", "ssm_conv1d.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
OMITTED = (".k_scale", ".v_scale", ".rotary_emb.inv_freq")  # not part of a text model's file


@dataclass(frozen=True)
class Heads:
    """DeltaNet's heads.

    On disk the value heads are grouped by key head; ggml repeats the key heads in turn (tiled).

    keys, values: number of heads.
    key_dim, value_dim: elements per head.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int

    def order(self, width: int) -> np.ndarray:
        """Return the indices that change values * width entries from grouped to tiled order."""
        index = np.arange(self.values * width).reshape(self.keys, self.values // self.keys, width)
        return index.transpose(1, 0, 2).reshape(-1)


@dataclass(frozen=True)
class Layout:
    """One model's layout in a GGUF file.

    layers: number of decoder layers.
    deltanet, heads: None for a model without linear attention.
    interleaved: linear whose rows have llama.cpp's order → its number of heads.
    """

    family: models.Family
    names: GGUFNames
    deltanet: DeltaNet | None
    layers: int
    heads: Heads | None
    interleaved: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, family: models.Family, s: GgufSettings) -> Layout:
        """Return the layout of a model of a family that is written as GGUF, by its settings."""
        assert family.gguf is not None  # read_settings() refuses other families
        heads = None
        if family.deltanet:
            dims = s.linear_key_head_dim, s.linear_value_head_dim
            heads = Heads(s.linear_num_key_heads, s.linear_num_value_heads, *dims)
        interleaved: dict[str, int] = {
            n: getattr(s, heads_field) for n, heads_field in family.gguf.interleaved.items()
        }
        return cls(family, family.gguf, family.deltanet, s.num_hidden_layers, heads, interleaved)

    def name(self, name: str) -> str | None:
        """Return llama.cpp's name of a tensor, or None.

        None for one that a text model's file omits (vision, KV scales).
        """
        if self.family.in_vision(name) or name.endswith(OMITTED):
            return None
        short = models.short_name(name)
        first = 0
        top = self.names.top
        if short.startswith(self.family.mtp):  # its layers follow the decoder's
            short = short.removeprefix(self.family.mtp)
            first = self.layers
            top = {k: f"blk.{self.layers}.{v}" for k, v in self.names.mtp.items()}
        if short in top:
            return top[short]
        inside = models.in_layer(short)
        experts = self.family.experts
        expert = experts.split(short) if experts else None
        if experts and expert:
            inside = f"{experts.module}.{expert[2]}.weight"
        if short.startswith("layers.") and inside in self.names.layer:
            return f"blk.{int(short.split('.')[1]) + first}.{self.names.layer[inside]}"
        raise CheckpointError(
            f"{name}: no such tensor in a {self.family.name} text model", written_families()
        )

    def rows(self, name: str, count: int) -> np.ndarray | None:
        """Return the order of a tensor's `count` rows (first axis), or None.

        None where it does not change.
        """
        heads = self.heads
        inside = _module(name)
        if inside in self.interleaved:
            halves = np.arange(count).reshape(self.interleaved[inside], 2, -1)
            return halves.transpose(0, 2, 1).reshape(-1)
        if heads is None or self.deltanet is None or heads.keys == heads.values:
            return None
        if inside in self.deltanet.mixed:
            first = 2 * heads.keys * heads.key_dim  # queries and keys keep their order
            return np.concatenate([np.arange(first), first + heads.order(heads.value_dim)])
        if inside in self.deltanet.value_rows:
            return heads.order(heads.value_dim)
        return heads.order(1) if inside in self.deltanet.per_head else None

    def columns(self, name: str) -> np.ndarray | None:
        """Return the order of the output projection's columns, or None where it does not change."""
        heads = self.heads
        if heads is None or self.deltanet is None or heads.keys == heads.values:
            return None
        return heads.order(heads.value_dim) if _module(name) == self.deltanet.output else None

    def is_convolution(self, name: str) -> bool:
        """Return whether a tensor is a convolution's weight [channels, 1, width].

        llama.cpp stores it as a matrix.
        """
        return self.deltanet is not None and _module(name) == self.deltanet.convolution

    def transform(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return a plain tensor as llama.cpp stores it.

        A = −exp(A_log), norms as (1 + w), heads tiled.

        float32 where the values change; else the dtype stays.
        """
        if self.is_convolution(name):
            array = array.reshape(array.shape[0], -1)
        rows = self.rows(name, len(array))
        columns = self.columns(name)
        if rows is not None:
            array = array[rows]
        if columns is not None:
            array = array[:, columns]
        if models.is_log_decay(name):
            return -np.exp(array.astype(np.float64)).astype(np.float32)
        return array.astype(np.float32) + np.float32(1) if self.family.adds_one(name) else array


def _module(name: str) -> str:
    return models.in_layer(name).removesuffix(".weight").removesuffix(".bias")


def keeps_float32(stored: str, dimensions: int) -> bool:
    """Return whether llama.cpp takes a tensor only in float32. stored: its name in the file."""
    return dimensions < 2 or not stored.endswith(".weight") or stored.endswith(_FLOAT32)
