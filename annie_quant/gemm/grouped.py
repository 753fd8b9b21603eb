"""The W4A16 products of a mixture's experts in one launch, as a torch operator.

torch.ops.annie_quant.nvfp4_experts_out.

    weights = prepare_experts(codes, block_scale, tensor_scales)        # [experts, N, K/2], [experts, N, K/16], one number each
    tokens = plan_tokens(pairs=x.shape[0] * top_k, experts, top_k, N, K)
    torch.ops.annie_quant.nvfp4_experts_out(out, x, *weights[:2], *alignment, top_k, tokens)     # out [pairs, N]

A pair is a token and one of its experts: pair p = token * top_k + i reads row p // top_k of x, and
writes row p of the result. The second product of an expert reads the first one's rows: there top_k
is 1. Rows of pairs that no tile has are left as they are.

The alignment has the form of vLLM's moe_align_block_size, pairs sorted by expert and padded to
whole tiles, int32 on the GPU; nothing of it is read back to the host, so the operator can be
captured in a CUDA graph:

    sorted_pairs  [tiles * tokens]: numbers of pairs; the number of pairs where a tile is not full
    tile_experts  [tiles]: the expert of each tile; any number from where `padded` ends; -1: another rank's
    padded        [1]: the entries of sorted_pairs that are used
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from annie_quant.core.errors import UsageError, need
from annie_quant.gemm import torch_op
from annie_quant.gemm.arrays import CurrentDevice, native
from annie_quant.gemm.plans import GroupedPlan
from annie_quant.gemm.torch_op import BF16, F16, Operator

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from typing_extensions import Unpack

EXPERTS_OUT_SCHEMA = (
    "(Tensor(a!) out, Tensor x, Tensor packed, Tensor scales, Tensor sorted_pairs, Tensor tile_experts, Tensor padded, "
    "int top_k, int tile_tokens) -> ()"
)
WHERE_POSSIBLE = -1  # programmatic dependence on the kernel before
# A repacked weight consists of chunks (kCols and kBlockTiles in csrc/gemm/fragments.cuh): columns of
# a chunk, and rows whose chunks are contiguous.
CHUNK_COLUMNS = 128
BLOCK_ROWS = 256


class PreparedExperts(NamedTuple):
    """The repacked weights [experts, n, k].

    packed: uint8 [experts, bytes]; scales: float32 [experts]; both on the GPU.
    """

    packed: Tensor
    scales: Tensor
    n: int


def prepare_experts(
    codes: Tensor, block_scale: Tensor, tensor_scales: Tensor | Sequence[float]
) -> PreparedExperts:
    """Repack the weights of all experts of a layer.

    They are CUDA tensors with a row per expert, as gemm.torch_op.prepare takes one.
    """
    torch = need("torch", "quantize")
    scales = torch.as_tensor(tensor_scales, dtype=torch.float32).to(codes.device)
    if not bool(((scales > 0) & scales.isfinite()).all()):
        raise UsageError(
            "a tensor scale of an expert is not a positive number", "annie-quant audit DIR"
        )
    experts, n, bytes_of_row = codes.shape
    # Whole blocks: the experts' bytes follow each other, as rows of one weight.
    if n % BLOCK_ROWS == 0 and bytes_of_row * 2 % CHUNK_COLUMNS == 0:
        packed = torch_op.prepare(codes.flatten(0, 1), block_scale.flatten(0, 1), 1.0).packed.view(
            experts, -1
        )
    else:
        packed = torch.stack(
            [torch_op.prepare(c, s, 1.0).packed for c, s in zip(codes, block_scale, strict=True)]
        )
    return PreparedExperts(packed, scales, n)


@functools.lru_cache(8192)
def plan(
    device: int | None, pairs: int, experts: int, top_k: int, n: int, k: int, tile_tokens: int = 0
) -> GroupedPlan:
    """Return the launch plan for tiles of this number of tokens, 0 for the best.

    UsageError: no kernel fits the shape.
    """
    module = native()
    try:
        with CurrentDevice(device):
            return GroupedPlan(*module.plan_grouped((pairs, experts, top_k, n, k), tile_tokens))
    except module.CudaError as error:
        tiles = f", tiles of {tile_tokens} tokens" if tile_tokens else ""
        raise UsageError(
            f"grouped W4A16 of {pairs} pairs, {experts} experts, N={n}, K={k}{tiles}: {error.args[0]}",
            "plan_tokens",
        ) from error


def plan_tokens(
    pairs: int, experts: int, top_k: int, n: int, k: int, device: int | None = None
) -> int:
    """Return the tokens per tile that suit a product, for `align` and the operator.

    8, 16, 32, 64 or 128.
    """
    return plan(device, pairs, experts, top_k, n, k).tile_tokens


# sorted_pairs, tile_experts and padded of the alignment; top_k; tile_tokens.
Routing = tuple["Tensor", "Tensor", "Tensor", int, int]


def write(
    out: Tensor, x: Tensor, packed: Tensor, scales: Tensor, *routing: Unpack[Routing]
) -> None:
    """Write the products of pairs that a tile has into their rows of `out`.

    out: contiguous [rows of x * top_k, n] in x's dtype.
    """
    import torch

    sorted_pairs, tile_experts, padded, top_k, tile_tokens = routing
    device = x.device.index
    kind = {torch.bfloat16: BF16, torch.float16: F16}.get(x.dtype)
    if kind is None or x.dim() != 2 or not x.is_cuda:
        raise UsageError(
            f"x is {x.dtype} {list(x.shape)} on {x.device}; expected float16 or bfloat16 [tokens, K] on a GPU"
        )
    pairs = x.shape[0] * top_k
    k = x.shape[1]
    experts = packed.shape[0]
    n = out.shape[-1]
    tiles = tile_experts.numel()
    check_operands(out, x, packed, scales, top_k)
    check_alignment(sorted_pairs, tile_experts, padded, tile_tokens, x.device)
    if pairs == 0:
        return
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    best = plan(device, pairs, experts, top_k, n, k, tile_tokens)  # the caller's alignment decides
    with CurrentDevice(None if torch._C._cuda_getDevice() == device else device):
        native().grouped(
            x.data_ptr(),
            x.stride(0),
            packed.data_ptr(),
            packed.numel(),
            scales.data_ptr(),
            sorted_pairs.data_ptr(),
            tile_experts.data_ptr(),
            padded.data_ptr(),
            tiles,
            out.data_ptr(),
            (pairs, experts, top_k, n, k),
            kind,
            tuple(best),
            WHERE_POSSIBLE,
            torch._C._cuda_getCurrentRawStream(device),
        )


def check_operands(out: Tensor, x: Tensor, packed: Tensor, scales: Tensor, top_k: int) -> None:
    """Raise UsageError for tensors that the kernel would overrun or take for others."""
    import torch

    if top_k < 1 or out.dim() != 2 or packed.dim() != 2:
        raise UsageError(
            f"top_k is {top_k}, out {list(out.shape)}, packed {list(packed.shape)}; expected a positive number, [pairs, N] and "
            "[experts, bytes]"
        )
    torch_op.check_operand("packed", packed, torch.uint8, x.device)
    torch_op.check_operand("scales", scales, torch.float32, x.device, packed.shape[0], align=4)
    torch_op.check_operand(
        "out", out, x.dtype, x.device, x.shape[0] * top_k * out.shape[1], align=4
    )
    start = x.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    if (
        start < out.data_ptr() + out.nbytes
        and out.data_ptr() < start + (last + 1) * x.element_size()
        and x.numel()
    ):
        raise UsageError("out and x overlap in memory", "torch.empty_like(out)")


def check_alignment(
    sorted_pairs: Tensor,
    tile_experts: Tensor,
    padded: Tensor,
    tile_tokens: int,
    device: torch.device,
) -> None:
    """Raise UsageError for arrays that the kernel would read beyond their ends or take for others."""
    import torch

    for name, array in (("sorted_pairs", sorted_pairs), ("tile_experts", tile_experts)):
        torch_op.check_operand(name, array, torch.int32, device, align=4)
    torch_op.check_operand("padded", padded, torch.int32, device, 1, align=4)
    if sorted_pairs.numel() < tile_experts.numel() * tile_tokens:
        raise UsageError(
            f"{tile_experts.numel()} tiles of {tile_tokens} need as many entries, and sorted_pairs has {sorted_pairs.numel()}",
            "align the pairs for tiles of tile_tokens",
        )


@functools.cache
def register() -> Operator:
    """Define the operator once and return it."""
    return torch_op.define("nvfp4_experts_out", EXPERTS_OUT_SCHEMA, write, lambda *arguments: None)
