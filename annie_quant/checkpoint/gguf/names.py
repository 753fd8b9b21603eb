"""How llama.cpp stores a model: tensor names, the order of DeltaNet's value heads, and changed values.

Source of the conventions: ggml-org/llama.cpp, conversion/qwen.py (Qwen3NextModel, _LinearAttentionVReorderBase,
_Qwen35MtpMixin) and src/models/qwen35.cpp. The family has the names (annie_quant.models).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from annie_quant import models
from annie_quant.checkpoint.gguf.settings import GgufSettings, written_families
from annie_quant.core.errors import CheckpointError
from annie_quant.models.family import DeltaNet, GGUFNames

FLOAT32 = ("_norm.weight", "ssm_conv1d.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
OMITTED = (".k_scale", ".v_scale", ".rotary_emb.inv_freq")  # not part of a text model's file


@dataclass(frozen=True)
class Heads:
    """DeltaNet's heads. On disk the value heads are grouped by key head; ggml repeats the key heads in turn (tiled).

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
        interleaved: dict[str, int] = {n: getattr(s, heads_field) for n, heads_field in family.gguf.interleaved.items()}
        return cls(family, family.gguf, family.deltanet, s.num_hidden_layers, heads, interleaved)

    def name(self, name: str) -> str | None:
        """Return llama.cpp's name of a tensor, or None for one that a text model's file omits (vision, KV scales)."""
        if self.family.in_vision(name) or name.endswith(OMITTED):
            return None
        short, first, top = models.short_name(name), 0, self.names.top
        if short.startswith(self.family.mtp):  # its layers follow the decoder's
            short, first = short.removeprefix(self.family.mtp), self.layers
            top = {k: f"blk.{self.layers}.{v}" for k, v in self.names.mtp.items()}
        if short in top:
            return top[short]
        inside = models.in_layer(short)
        experts = self.family.experts
        if experts and (expert := experts.split(short)):
            inside = f"{experts.module}.{expert[2]}.weight"
        if short.startswith("layers.") and inside in self.names.layer:
            return f"blk.{int(short.split('.')[1]) + first}.{self.names.layer[inside]}"
        raise CheckpointError(f"{name}: no such tensor in a {self.family.name} text model", written_families())

    def rows(self, name: str, count: int) -> np.ndarray | None:
        """Return the order of a tensor's `count` rows (first axis), or None where it does not change."""
        heads, inside = self.heads, _module(name)
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
        """Return whether a tensor is a convolution's weight [channels, 1, width], which llama.cpp stores as a matrix."""
        return self.deltanet is not None and _module(name) == self.deltanet.convolution

    def transform(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return a plain tensor as llama.cpp stores it: A = −exp(A_log), norms as (1 + w), heads tiled.

        float32 where the values change; else the dtype stays.
        """
        if self.is_convolution(name):
            array = array.reshape(array.shape[0], -1)
        rows, columns = self.rows(name, len(array)), self.columns(name)
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
    return dimensions < 2 or not stored.endswith(".weight") or stored.endswith(FLOAT32)
