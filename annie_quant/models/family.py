"""The description of a model family, and the naming rules that hold for all of them.

Names inside a decoder layer are written without the layer: "mlp.up_proj" is model.layers.3.mlp.up_proj in layer 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Any, Literal

TEXT_PREFIX = "model."
MULTIMODAL_PREFIX = "model.language_model."
# Every prefix in use before "layers.0." or "embed_tokens", the longest one first.
_PREFIXES = (MULTIMODAL_PREFIX, "language_model.model.", "language_model.", TEXT_PREFIX)
_LAYER = re.compile(r"(.*\blayers\.\d+)\.(.+)")
GGUF_MLP = {  # llama.cpp's names of a dense MLP's weights
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


@dataclass(frozen=True)
class Form:
    """One form of a family's checkpoints.

    class_name, model_type: as config.json names them.
    """

    class_name: str
    model_type: str


@dataclass(frozen=True)
class LinearInput:
    """An activation inside a decoder layer: which linears read it, and where a scale on it can be folded.

    linears: all read this activation.
    producer: the module whose weight w produces it.
    fold: how dividing the activation by s changes w. "norm": w / s, or (1 + w) / s - 1 where the norm adds one;
        "rows": every row divided by its element of s.
    per_head: the norm's weight is that of one head, shared by all of them.
    searched: whether the awq_lite strategy searches a scale for it.
    """

    linears: tuple[str, ...]
    producer: str
    fold: Literal["norm", "rows"]
    per_head: bool = False
    searched: bool = True


@dataclass(frozen=True)
class DeltaNet:
    """Tensors of a linear-attention layer whose value heads llama.cpp stores in another order.

    mixed: rows are all queries and keys, then the value heads.
    value_rows: rows are the value heads.
    per_head: one row or element per value head.
    output: columns are the value heads.
    log_decay: holds log(A), where minus infinity means no decay.
    convolution: [channels, 1, width].
    """

    mixed: tuple[str, ...]
    value_rows: tuple[str, ...]
    per_head: tuple[str, ...]
    output: str
    log_decay: str
    convolution: str


@dataclass(frozen=True, eq=False)
class Experts:
    """The routed experts of a mixture-of-experts layer, in either of the two ways that checkpoints store them.

    Per expert: "mlp.experts.7.gate_proj.weight" [out, in]. Merged: "mlp.experts.gate_up_proj" [experts, out, in], in
    which the rows of an expert are those of its linears in order; its name may end in ".weight".

    module: the experts inside a layer.
    merged: name of a merged tensor → the linears of one expert that it holds, all with the same number of rows.
    fused: the linears of one expert that servers merge into one matrix.
    router: the linear that chooses the experts, with one row per expert.
    count, width: the fields of config.json with the number of experts and the rows of an expert's first linears.
    active: the field of config.json with the number of experts that a token passes.
    count_saved: another name of `count`: transformers from 5 saves Qwen3 MoE with it.
    gguf: llama.cpp's names inside a block, for the linears (all experts in one tensor), the router and the shared expert.
    """

    module: str
    merged: Mapping[str, tuple[str, ...]]
    fused: tuple[str, ...]
    router: str
    count: str
    width: str
    active: str
    gguf: Mapping[str, str]
    count_saved: str = "num_local_experts"

    @property
    def inputs(self) -> tuple[tuple[str, ...], ...]:
        """The linears of one expert, grouped by the activation that they read."""
        return tuple(self.merged.values())

    @cached_property
    def linears(self) -> tuple[str, ...]:
        """The linears of one expert."""
        return tuple(linear for linears in self.merged.values() for linear in linears)

    def contain(self, name: str) -> bool:
        """Return whether a tensor or module belongs to one expert or to all."""
        return in_layer(name).startswith(f"{self.module}.")

    def split(self, name: str) -> tuple[str, int, str] | None:
        """Return the layer, the expert's number and its linear, of a tensor or module of one expert; None of any other.

        "model.layers.3.mlp.experts.7.up_proj.weight" → ("model.layers.3", 7, "up_proj").
        """
        layer, rest = _layer_and_rest(name)
        if not rest.startswith(f"{self.module}."):
            return None
        number, _, linear = rest[len(self.module) + 1 :].partition(".")
        linear = linear.partition(".")[0]
        valid = (
            number.isdecimal() and number.isascii() and len(number) < 7 and linear in self.linears
        )
        return (layer, int(number), linear) if valid else None

    def merged_part(self, name: str) -> tuple[str, str] | None:
        """Return the layer and the merged name of a tensor that holds all experts; None of any other.

        "model.layers.3.mlp.experts.gate_up_proj" → ("model.layers.3", "gate_up_proj").
        """
        layer = layer_of(name)
        rest = in_layer(name).removesuffix(".weight")
        part = rest.removeprefix(f"{self.module}.")
        return (layer, part) if rest != part and part in self.merged else None

    def with_count(self, config: Mapping[str, object]) -> dict[str, object]:
        """Return a text model's settings with the number of experts under the name `count`."""
        saved = {self.count: config[self.count_saved]} if self.count_saved in config else {}
        return saved | dict(config)

    def active_share(self, config: Mapping[str, object]) -> float:
        """Return the share of the experts that a token passes, by a text model's settings; 1 where they do not have it."""
        active = config.get(self.active)
        count = config.get(self.count)
        valid = isinstance(active, int) and isinstance(count, int) and 0 < active <= count
        return active / count if valid else 1.0  # type: ignore[operator]


@dataclass(frozen=True, eq=False)
class GGUFNames:
    """llama.cpp's names of a family.

    architecture: of the model.
    top: tensor outside of layers → its name.
    layer: tensor inside a layer → its name inside a block.
    mtp: tensor of the MTP head outside of its layers → its name inside the head's first block.
    interleaved: linear → the field of config.json with its number of heads. The rotary embedding rotates neighbouring elements
        of such a head, not one element of each half as in transformers; the rows of a head are stored in that order.
    window_pattern, window_rope_theta: constants of llama.cpp for a family with sliding windows: every layer of this number
        has full attention, and the others this rotary base.
    tensor_scales: whether llama.cpp's graph of the architecture multiplies by NVFP4's tensor scales. Other graphs compute
        with weights that are thousands of times too large, without an error (xllamacpp 2026.10).
    """

    architecture: str
    top: Mapping[str, str]
    layer: Mapping[str, str]
    mtp: Mapping[str, str]
    interleaved: Mapping[str, str] = field(default_factory=dict)
    window_pattern: int = 0
    window_rope_theta: float = 0.0
    tensor_scales: bool = True

    def computes_nvfp4(self, names: Iterable[str]) -> bool:
        """Return whether llama.cpp computes a model with these tensors in NVFP4.

        It needs tensor scales in the graph, and no biases in the MLP, which llama.cpp refuses
        (GGML_ASSERT in llama-graph.cpp, xllamacpp 2026.10).

        names: of a folder's tensors, or of a GGUF file's.
        """
        weights = (*GGUF_MLP, *GGUF_MLP.values())
        biases = tuple(weight.replace(".weight", ".bias") for weight in weights)
        return self.tensor_scales and not any(name.endswith(biases) for name in names)

    def with_experts(self, architecture: str, experts: Experts) -> GGUFNames:
        """Return the names of a mixture of the same layers, with experts instead of the dense MLP."""
        layer = {name: stored for name, stored in self.layer.items() if name not in GGUF_MLP}
        layer |= {f"{name}.weight": f"{stored}.weight" for name, stored in experts.gguf.items()}
        return replace(self, architecture=architecture, layer=layer)


@dataclass(frozen=True, eq=False)
class ModelSize:
    """The size and the shape of a published model, for estimates.

    label: its name.
    counts: kind of part → number of weights.
    layers: number of decoder layers.
    """

    label: str
    counts: Mapping[str, int]
    layers: int
    hidden_size: int
    intermediate_size: int


@dataclass(frozen=True, eq=False)
class Family:
    """The description of one family of models.

    name: for messages.
    text, multimodal: the forms of its checkpoints; multimodal is None for a family of text models.
    inputs: the activations that a decoder layer's linears read.
    fused: the name of a matrix that servers merge → the linears that it is made of. Their scales must be equal.
    kinds: kind of part → patterns of the linears inside a layer, for sizes; "head", "embedding" and "rest" are added.
    unquantized: patterns (fnmatch over the full module name) that no strategy quantizes by default.
    norms_add_one: whether the norms compute (1 + w) * x.
    plain_norms: those of them that compute w * x.
    position_axes: rows of the position ids that the rotary embedding takes (3 for multimodal RoPE).
    mtp_shapes: tensor of the MTP head outside of its layers → its shape in multiples of hidden_size.
    mtp: beginning of the names of the head for multi-token prediction, after the form's prefix.
    vision: substring of the names of the vision tower. Head and tower are loaded separately from the decoder.
    deltanet: the tensors of linear attention, or None for a family without.
    gguf: None where no GGUF file can be written.
    renamed_classes: field of a tokenizer's or processor's file → (transformers 4.57, transformers from 5.2).
    preprocessor_stub: preprocessor_config.json for a multimodal checkpoint that serves text only.
    published: short name → size of a published model.
    experts: the routed experts of a mixture, or None for a dense model.
    row_parallel: ends of the linears whose columns tensor parallelism divides among ranks.
    """

    name: str
    text: Form
    inputs: tuple[LinearInput, ...]
    fused: Mapping[str, tuple[str, ...]]
    kinds: Mapping[str, tuple[str, ...]]
    unquantized: tuple[str, ...]
    norms_add_one: bool = False
    plain_norms: tuple[str, ...] = ()
    multimodal: Form | None = None
    position_axes: int = 1
    mtp: str = "mtp."
    vision: str = "visual."
    mtp_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    deltanet: DeltaNet | None = None
    gguf: GGUFNames | None = None
    renamed_classes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    preprocessor_stub: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, ModelSize] = field(default_factory=dict)
    experts: Experts | None = None
    row_parallel: tuple[str, ...] = (".down_proj", ".o_proj", ".out_proj")

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms of the family's checkpoints, the text form first."""
        return (self.text,) if self.multimodal is None else (self.text, self.multimodal)

    @property
    def model_types(self) -> tuple[str, ...]:
        return tuple(form.model_type for form in self.forms)

    @property
    def norms(self) -> tuple[str, ...]:
        """Norms inside a layer that produce a linear's input."""
        return tuple(dict.fromkeys(i.producer for i in self.inputs if i.fold == "norm"))

    def adds_one(self, name: str) -> bool:
        """Return whether `name` is the weight of a norm that computes (1 + w) * x."""
        module = name.removesuffix(".weight")
        is_norm = "norm" in module.rpartition(".")[2]
        return self.norms_add_one and is_norm and not module.endswith(self.plain_norms)

    def in_mtp(self, name: str) -> bool:
        """Return whether a tensor or module belongs to the head for multi-token prediction."""
        return f".{self.mtp}" in f".{name}"

    def in_vision(self, name: str) -> bool:
        """Return whether a tensor or module belongs to the vision tower."""
        return self.vision in name

    def is_auxiliary(self, name: str) -> bool:
        """Return whether a tensor or module belongs to multi-token prediction or vision."""
        return self.in_vision(name) or self.in_mtp(name)

    def has_tensor(self, name: str) -> bool:
        """Return whether a model of this family has such a tensor, not quantized; True where the names are not known."""
        if self.gguf is None or self.in_vision(name) or name.endswith(".rotary_emb.inv_freq"):
            return True
        short = short_name(name)
        top = self.gguf.top
        if short.startswith(self.mtp):
            short = short.removeprefix(self.mtp)
            top = self.gguf.mtp
        if not short.startswith("layers."):
            return short in top
        inside = in_layer(short)
        experts = self.experts
        if experts and (experts.merged_part(short) or experts.split(short)):
            number = inside.removeprefix(f"{experts.module}.").partition(".")[0]
            return not number.isdecimal() or inside.endswith(".weight")
        return inside in self.gguf.layer

    def in_decoder(self, name: str) -> bool:
        """Return whether a tensor or module is in one of the decoder's layers."""
        return bool(layer_of(name)) and not self.is_auxiliary(name)

    def kind_of(self, name: str) -> str:
        """Return the kind of part that a tensor or module belongs to."""
        if "embed_tokens" in name:
            return "embedding"
        if "lm_head" in name:
            return "head"
        if not self.in_mtp(name):
            for kind, patterns in self.kinds.items():
                if any(fnmatchcase(name, f"*.{pattern}") for pattern in patterns):
                    return kind
        return "rest"

    def fused_groups(self, names: Iterable[str]) -> list[list[str]]:
        """Return those of the module `names` that servers merge into one matrix, in groups of at least two."""
        groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for name in sorted(names):
            if self.experts and (expert := self.experts.split(name)):
                if expert[2] in self.experts.fused:
                    groups.setdefault((name.rpartition(".")[0], self.experts.fused), []).append(
                        name
                    )
                continue
            for members in self.fused.values():
                member = next((m for m in members if f".{name}".endswith(f".{m}")), None)
                if member:
                    groups.setdefault((name[: -len(member)], members), []).append(name)
        return [group for group in groups.values() if len(group) > 1]

    def served_groups(self, names: Iterable[str]) -> list[list[str]]:
        """Return those of the module `names` that need one format: fused groups, and all experts of a layer.

        Servers run the experts of a layer as one grouped matrix product.
        """
        experts: dict[str, list[str]] = {}
        others = []
        for name in sorted(names):
            expert = self.experts.split(name) if self.experts else None
            if expert:
                experts.setdefault(expert[0], []).append(name)
            else:
                others.append(name)
        return [
            *self.fused_groups(others),
            *(group for group in experts.values() if len(group) > 1),
        ]

    def largest_of_input(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return module → the largest value of the linears whose activations servers round with one scale.

        That is the fused group, and for experts all experts of the layer: vLLM's grouped products take one scale for all,
        and ModelOpt 0.47 calibrates one. So an expert that saw no token gets the layer's, if `values` has it with any
        number below.
        """
        largest = self.largest_of_group(values)
        if self.experts is None:
            return largest
        tops: dict[tuple[str, tuple[str, ...]], float] = {}
        keys = {}
        for name in largest:
            expert = self.experts.split(name)
            if expert:
                keys[name] = (expert[0], next(i for i in self.experts.inputs if expert[2] in i))
                tops[keys[name]] = max(tops.get(keys[name], 0.0), largest[name])
        return largest | {name: tops[key] for name, key in keys.items()}

    def largest_of_group(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return module → the largest value of its fused group, or its own value outside of groups."""
        largest = dict(values)
        for group in self.fused_groups(values):
            largest |= dict.fromkeys(group, max(values[m] for m in group))
        return largest

    def in_form(self, name: str, multimodal: bool) -> str:
        """Return a decoder tensor's or module's name with the prefix of the multimodal or the text form."""
        if not name.startswith(TEXT_PREFIX) or self.in_vision(name):
            return name
        return (MULTIMODAL_PREFIX if multimodal else TEXT_PREFIX) + short_name(name)


def short_name(name: str) -> str:
    """Return a tensor's or module's name without the prefix of its form: "layers.0.mlp.up_proj"."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def aliases(name: str) -> tuple[str, ...]:
    """Return the names that a tensor or module may have in another form of the checkpoint, its own first."""
    short = short_name(name)
    return tuple(dict.fromkeys((name, TEXT_PREFIX + short, MULTIMODAL_PREFIX + short)))


def layer_of(name: str) -> str:
    """Return the layer of a tensor or module ("model.layers.3"), or "" outside of layers."""
    return _layer_and_rest(name)[0]


def attention_of(layer: str) -> str:
    """Return the name of a layer's attention with a KV cache ("model.layers.3.self_attn")."""
    return f"{layer}.self_attn"


ATTENTION_PREFIX = "self_attn."  # of a module's name inside its layer


def is_attention(name: str) -> bool:
    """Return whether a tensor or module is in a layer's attention with a KV cache."""
    return in_layer(name).startswith(ATTENTION_PREFIX)


def in_layer(name: str) -> str:
    """Return a name without its layer ("mlp.up_proj.weight"), or "" outside of layers."""
    return _layer_and_rest(name)[1]


@lru_cache(1 << 18)  # of all tensors of a large mixture of experts
def _layer_and_rest(name: str) -> tuple[str, str]:
    """Return the layer of a name and its rest, or two empty texts outside of layers."""
    match = _LAYER.fullmatch(name)
    return (match[1], match[2]) if match else ("", "")
