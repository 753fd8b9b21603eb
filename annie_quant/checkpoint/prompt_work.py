"""What a prompt computes in a model: weights and bytes per kernel, attention, DeltaNet, head.

first_token.py predicts the time to the first token from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from annie_quant.checkpoint import dialects
from annie_quant.checkpoint.linears import HEAD, all_linears, read_struct, weight_name
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import AttentionShape
from annie_quant.models.formats import BF16, Format

Sizes = dict[str, tuple[float, float]]  # kernel → weights and bytes


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a model whose time does not depend on formats, and numbers of weights.

    attention: layers, heads, size of a head, window (0: none), per kind of attention.
    deltanet: layers, value heads.
    active_share: of a layer's experts, those that a token passes.
    linear_weights, head_weights, expert_weights: of all linears that every token passes, the head,
        and all experts; of a published model.
    """

    hidden: int
    layers: int
    attention: tuple[tuple[int, int, int, int], ...]
    deltanet: tuple[int, int] = (0, 0)
    active_share: float = 1.0
    linear_weights: int = 0
    head_weights: int = 0
    expert_weights: int = 0


@dataclass(frozen=True)
class PromptWork:
    """linears, experts: what tokens multiply, per kernel.  head_bytes: read once."""

    shape: ModelShape
    linears: Sizes
    head_bytes: float
    experts: Sizes = field(default_factory=dict)


def add(sizes: Sizes, kernel: str, weights: float, size: float) -> None:
    """Count one linear."""
    counted_weights, counted_bytes = sizes.get(kernel, (0.0, 0.0))
    sizes[kernel] = (counted_weights + weights, counted_bytes + size)


def kernel_of(name: str, server: str, in_blocks: bool = False) -> str:
    """Return the kernel that multiplies a format (models.formats) in a server's prompts.

    llama.cpp rounds the inputs of every NVFP4 linear, and vLLM runs FP8 in blocks by Marlin.
    """
    if name in ("nvfp4", "w4a16") and server == "llama.cpp":
        return "nvfp4"
    if name.startswith("fp8"):
        return "fp8_marlin" if in_blocks else "fp8"
    return "w4a4" if name == "nvfp4" else name


def _linears_of(
    folder: ModelFolder, server: str, planned: Mapping[str, Format] | None
) -> Iterator[tuple[str, str, float, float]]:
    """Yield module, kernel, weights and bytes of each linear."""
    stored = dialects.linears(folder)
    for module in dict.fromkeys([*stored, *all_linears(folder)]):
        linear = stored.get(module)
        if linear:
            size = sum(folder.info(name).size_bytes for name in linear.tensors())
            stored_format = linear.stored_format(folder)
            kernel = kernel_of(stored_format.name, server, linear.block is not None)
            yield module, kernel, math.prod(linear.shape(folder)), size
        else:
            chosen = (planned or {}).get(module, BF16)
            weights = folder.info(weight_name(folder, module)).elements
            yield module, kernel_of(chosen.name, server), weights, weights * chosen.bits / 8


def work_of(
    folder: ModelFolder,
    server: str = "vllm",
    planned: Mapping[str, Format] | None = None,
    leave_out: Collection[str] = (),
) -> PromptWork:
    """Return what a prompt computes in a model folder.

    planned: linear → format, of a bf16 model that will be quantized.
    leave_out: linears that are not counted; with the head among them its bytes are 0.
    """
    family = folder.family
    experts = family.experts
    linears: Sizes = {}
    routed: Sizes = {}
    head_bytes = 0.0
    for module, kernel, weights, size in _linears_of(folder, server, planned):
        if family.is_auxiliary(module) or module in leave_out:
            continue
        if family.kind_of(module) == "head":
            head_bytes = size
            continue
        is_expert = experts is not None and experts.contain(module)
        sizes = routed if is_expert else linears
        add(sizes, kernel, weights, size)
    tied_head = weight_name(folder, HEAD)
    if not head_bytes and tied_head in folder and HEAD not in leave_out:
        head_bytes = folder.info(tied_head).size_bytes
    return PromptWork(_shape_of(folder), linears, head_bytes, routed)


def _shape_of(folder: ModelFolder) -> ModelShape:
    shape = read_struct(AttentionShape, folder.text_config)
    heads = shape.num_attention_heads
    types = Counter(shape.types)
    attention = (
        (types["full_attention"], heads, shape.head_size, 0),
        (types["sliding_attention"], heads, shape.head_size, shape.sliding_window or 0),
    )
    return ModelShape(
        hidden=shape.hidden_size,
        layers=len(shape.types),
        attention=attention,
        deltanet=(types["linear_attention"], shape.linear_num_value_heads),
        active_share=folder.active_share,
    )
