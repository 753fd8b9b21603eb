"""The size of a stored model and of its caches.

The one definition of bits per weight, and of the bytes of keys, values and states.

Bits per weight are 8 × the bytes of all tensors (with scales, without file headers) divided by the
number of weights that they
store: N × K for a quantized linear of N rows and K columns, none for its scales, and the elements
    of every other tensor.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from annie_quant.checkpoint import dialects
from annie_quant.checkpoint.gguf.reader import open_gguf
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import Linear, owned_tensors
from annie_quant.checkpoint.shards import ModelFolder

GGUF_SCALES = (".scale", ".input_scale")  # further tensors of an NVFP4 tensor


@dataclass(frozen=True)
class StoredSize:
    """The size of a stored model.

    size_bytes: of all tensors.
    weights: number of weights in them.
    quantized_bytes, quantized_weights: the same of the quantized linears alone.
    """

    size_bytes: int
    weights: int
    quantized_bytes: int = 0
    quantized_weights: int = 0

    @property
    def bits_per_weight(self) -> float:
        return bits(self.size_bytes, self.weights) or 0.0

    @property
    def bits_per_quantized_weight(self) -> float | None:
        return bits(self.quantized_bytes, self.quantized_weights)


def bits(size_bytes: int, weights: int) -> float | None:
    """Return bits per weight with three decimals; None where there are no weights."""
    return round(8 * size_bytes / weights, 3) if weights else None


def folder_size(folder: ModelFolder, linears: Mapping[str, Linear] | None = None) -> StoredSize:
    """Return the size of a model folder, from its headers.

    linears: its quantized linears, where they are known.
    """
    if linears is None:
        linears = dialects.linears(folder)
    owned = owned_tensors(linears.values())
    quantized_bytes = sum(folder.info(name).size_bytes for name in owned)
    quantized_weights = 0
    for linear in linears.values():
        with contextlib.suppress(ShardError):  # its shape is a finding of the audit
            quantized_weights += math.prod(linear.shape(folder))
    plain = sum(folder.info(name).elements for name in folder if name not in owned)
    return StoredSize(
        folder.weight_bytes, quantized_weights + plain, quantized_bytes, quantized_weights
    )


def is_tied(folder: ModelFolder) -> bool:
    """Return whether the embedding is also the head."""
    ties = folder.ties_embedding
    if ties is None:
        return not any(name.startswith("lm_head.") for name in folder)
    return bool(ties)


def bytes_per_token(folder: ModelFolder, bytes_of: Callable[[str], float] | None = None) -> int:
    """Return the bytes of weights that one decoded token reads.

    Of a mixture's experts only the share that a token passes.

    The vision tower and the MTP head are not read, and of an embedding that is not also the head
    only one row is.

    bytes_of: tensor name → bytes, where they are not those on disk.
    """
    family = folder.family
    tied = is_tied(folder)
    experts = family.experts
    share = folder.active_share
    read = 0.0
    for name in folder:
        if family.is_auxiliary(name) or (name.endswith("embed_tokens.weight") and not tied):
            continue
        routed = experts is not None and experts.contain(name)
        size = folder.info(name).size_bytes if bytes_of is None else bytes_of(name)
        read += size * (share if routed else 1.0)
    return round(read)


def gguf_size(path: Path) -> StoredSize:
    """Return the size of a GGUF file's tensors."""
    tensors = open_gguf(path)
    weights = sum(
        int(t.n_elements) for name, t in tensors.items() if not name.endswith(GGUF_SCALES)
    )
    return StoredSize(sum(int(t.n_bytes) for t in tensors.values()), weights)


# ---- caches


class AttentionShape(msgspec.Struct):
    """The fields of a text model's settings that decide the size of its caches.

    A field that is missing counts as 0.
    """

    num_hidden_layers: int = 0
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    max_position_embeddings: int | None = None
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_size: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0

    @property
    def types(self) -> list[str]:
        """The kind of attention of each decoder layer."""
        return self.layer_types or ["full_attention"] * self.num_hidden_layers

    @property
    def head_size(self) -> int:
        """The size of one attention head."""
        return self.head_dim or self.hidden_size // max(1, self.num_attention_heads)


@dataclass(frozen=True)
class Caches:
    """The caches of one conversation, in bytes.

    position: keys and values of a token, in the layers that see all of them.
    window_position, window: the same in the layers with a sliding window, and its tokens.
    state: DeltaNet's states, float32 [value heads, key dim, value dim] per layer.
    convolution: the columns that DeltaNet's convolutions keep, in 16 bits.
    attention: number of layers that see all tokens, and the size of a head.
    """

    position: int = 0
    window_position: int = 0
    window: int = 0
    state: int = 0
    convolution: int = 0
    attention: tuple[int, int] = (0, 0)

    def at(self, tokens: int) -> int:
        """Return the bytes of keys and values after this number of tokens."""
        return tokens * self.position + min(tokens, self.window) * self.window_position

    def stored(self, tokens: int) -> int:
        """Return the memory of all caches after this number of tokens."""
        return self.at(tokens) + self.state + self.convolution


def caches_of(shape: AttentionShape, element: int = 2) -> Caches:
    """Return the caches of a model. element: bytes of an element of keys and values."""
    heads = shape.num_key_value_heads or shape.num_attention_heads
    keys_values = 2 * heads * shape.head_size * element
    full, sliding, linear = (
        shape.types.count(f"{kind}_attention") for kind in ("full", "sliding", "linear")
    )
    values = shape.linear_num_value_heads * shape.linear_value_head_dim
    columns = 2 * shape.linear_num_key_heads * shape.linear_key_head_dim + values
    return Caches(
        position=full * keys_values,
        window_position=sliding * keys_values,
        window=shape.sliding_window or 0,
        state=linear * 4 * shape.linear_key_head_dim * values,
        convolution=linear * 2 * columns * shape.linear_conv_kernel_dim,
        attention=(full, shape.head_size),
    )
