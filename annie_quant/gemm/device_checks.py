"""What a GPU has for our kernels: machine code, shared memory, and right products of a mixture's experts in one launch.

Without torch: its operator (gemm.grouped) calls the same launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from annie_quant.gemm import oracle
from annie_quant.gemm.arrays import CODES, DeviceArray, native, to_device, view
from annie_quant.gemm.grouped import BLOCK_ROWS, WHERE_POSSIBLE
from annie_quant.gemm.ops import Weight

Limits = tuple[int, int, int, bool, bool]  # of _gemm: SMs, shared memory per block, major capability, wgmma, native FP4
SPARK = (48, 101376, 12, False, True)  # of a GB10
SHAPES = ((24576, 4096), (4096, 12288), (8192, 4096), (248320, 4096))  # [N, K] of a 9B, its head last
TOKENS = (1, 8, 16, 64, 256, 4096)
EXPERTS, TOP_K, K = 6, 2, 512
EXPERT_TOKENS = (1, 19, 150)  # each of the launch's tile sizes for few tokens, and larger ones


def machine_code(architectures: str, capability: str) -> tuple[bool | None, str]:
    """Return whether the module has native FP4 code for a GPU of SM12x, and in words; None on other GPUs, which cannot run it.

    architectures: of _gemm.ARCHS; capability: of the GPU, as "12.1".
    """
    built = [a for a in architectures.split(",") if a.startswith("12")]
    listed = f"built for {', '.join(built) or 'no SM12x'}"
    if not capability.startswith("12."):
        return None, f"{listed}; not run: this GPU is {capability}"
    exact = capability.replace(".", "")
    return any(a.startswith((exact, "120f")) for a in built), listed


def largest_need(limits: Limits) -> int:
    """Return the most shared memory per block of the plans for a 9B's products. Raises CudaError where a product has none."""
    module, most = native(), 0
    for n, k in SHAPES:
        for m in TOKENS:
            path, fields = module.plan(m, n, k, "auto", limits)
            most = max(most, module.plan_needs(m, n, k, path, fields, limits)[0])
    for pairs in TOKENS:
        shape = (pairs * 8, 256, 8, 1024, 2048)
        most = max(most, module.grouped_needs(shape, module.plan_grouped(shape, 0, limits), limits)[0])
    return most


class Tiles(NamedTuple):
    """Pairs of a token and an expert sorted by expert, in tiles that are filled with the number of pairs; int32."""

    sorted_pairs: np.ndarray
    tile_experts: np.ndarray
    padded: np.ndarray


def tiles(chosen: np.ndarray, tile_tokens: int) -> Tiles:
    """Return the tiles of a router's choice, int [tokens, top_k]."""
    of_pair = chosen.reshape(-1)
    blocks, experts = [], []
    for expert in np.unique(of_pair):
        pairs = np.flatnonzero(of_pair == expert)
        count = -(-len(pairs) // tile_tokens)
        blocks.append(np.pad(pairs, (0, count * tile_tokens - len(pairs)), constant_values=of_pair.size))
        experts += [int(expert)] * count
    used = np.concatenate(blocks).astype(np.int32)
    return Tiles(used, np.array(experts, np.int32), np.array([used.size], np.int32))


def experts_error(tokens: int, swaps: bool = False) -> float:
    """Return the largest error of one launch over all experts in units of its bound. swaps: with the tiles' experts shifted."""
    from ml_dtypes import bfloat16

    rng = np.random.default_rng(tokens)
    codes, scales = oracle.random_weight(EXPERTS * BLOCK_ROWS, K, tokens)
    tensor_scales = (0.003 * (1 + np.arange(EXPERTS))).astype(np.float32)
    x = rng.standard_normal((tokens, K)).astype(bfloat16)
    chosen = np.array([rng.choice(EXPERTS, TOP_K, replace=False) for _ in range(tokens)])
    out = launch(codes, scales, tensor_scales, x, chosen, swaps)
    weights = oracle.dequantize(codes, scales).reshape(EXPERTS, BLOCK_ROWS, K) * tensor_scales[:, None, None].astype(
        np.float64
    )
    worst = 0.0
    for pair, expert in enumerate(chosen.reshape(-1)):
        exact, magnitude = oracle.linear(x[pair // TOP_K], weights[expert])
        worst = max(worst, oracle.worst(out[pair], exact, oracle.bound(exact, magnitude, K, "bfloat16")))
    return worst


def launch(
    codes: np.ndarray, scales: np.ndarray, tensor_scales: np.ndarray, x: np.ndarray, chosen: np.ndarray, swaps: bool
) -> np.ndarray:
    """Return the products [pairs, N] of the GPU."""
    module = native()
    weight = Weight(to_device(codes), to_device(scales), 1.0)  # rows of experts in blocks follow each other
    packed = view(weight.packed, "weight")
    shape = (chosen.size, EXPERTS, TOP_K, BLOCK_ROWS, K)
    plan = module.plan_grouped(shape, 0)
    layout = tiles(chosen, plan[0])
    if swaps:
        layout = layout._replace(tile_experts=(layout.tile_experts + 1) % EXPERTS)
    arrays = [to_device(np.ascontiguousarray(a).view(np.uint8)) for a in (tensor_scales, *layout)]
    out = DeviceArray((chosen.size, BLOCK_ROWS), "bfloat16").fill(0xFF)
    on_device = to_device(x)
    module.grouped(
        on_device.ptr, K, packed.ptr, packed.shape[0], *(a.ptr for a in arrays), len(layout.tile_experts), out.ptr,
        shape, CODES["bfloat16"], tuple(plan), WHERE_POSSIBLE, 0,
    )  # fmt: skip
    return out.host()


def checks(info: Mapping[str, int | str]) -> Iterator[tuple[str, bool, str]]:
    """Yield (name, whether it is right, detail). info: of _gemm.device_info."""
    module = native()
    capability = f"{info['major']}.{info['minor']}"
    present, detail = machine_code(module.ARCHS, capability)
    if present is not None:
        yield f"machine code for {capability}", present and module.limits()[4], detail
    try:
        need = largest_need(module.limits())
        yield "shared memory", need <= int(info["smem_block"]), f"{need} of {info['smem_block']} bytes per block"
    except module.CudaError as error:
        yield "shared memory", False, str(error.args[0])
    for tokens in EXPERT_TOKENS:
        worst = experts_error(tokens)
        yield f"W4A16 experts, {tokens} tokens", worst <= 1, f"{worst:.3f} of the fp32 bound"
    worst = experts_error(EXPERT_TOKENS[1], swaps=True)
    yield "negative control experts swapped", worst > 1, f"planted fault found at {worst:.0f} times the bound"
