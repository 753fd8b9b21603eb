"""Launch plans of W4A16 products, one type per path.

Fields are those of the path's struct in csrc/gemm, in their order.

A plan depends on the device and the shape. `Weight.plan` chooses one; `_replace` makes a variant of
it, which the launch checks. Shared memory and workspace are computed from the plan.
"""

from __future__ import annotations

from typing import NamedTuple


class SkinnyPlan(NamedTuple):
    """Up to 16 tokens: a block has all tokens and a share of the row tiles of 16 rows.

    cluster_size  blocks that share K
    warp_stages   pipeline stages of a warp, 1 or 2
    step_tiles    row tiles per step, 2 or 4
    """

    blocks: int
    cluster_size: int
    warp_stages: int
    step_tiles: int


class TiledPlan(NamedTuple):
    """Tiles of 256 rows x tile_tokens (`Tiles` in csrc/gemm/tiled.cuh: 16, 64 or 128) by mma.sync.

    cluster_size  blocks that share K
    stages        pipeline stages of a block
    """

    tile_tokens: int
    cluster_size: int
    stages: int


class GroupedPlan(NamedTuple):
    """Products of a mixture's experts in one launch: tiles of tile_tokens pairs of one expert.

    tile_tokens   8, 16 or 32: the few-token kernel; 64 or 128: tiles of 256 rows by mma.sync
    cluster_size  blocks that share K; 1 for up to 32 tokens
    stages        pipeline stages: 1 per warp for up to 32 tokens; else of a block
    step_tiles    row tiles per step: 2, or 4 for 16 tokens; 16 for tiles of 256 rows
    """

    tile_tokens: int
    cluster_size: int
    stages: int
    step_tiles: int


class WgmmaPlan(NamedTuple):
    """Tiles of tile_rows (256, 192 or 128) x tile_tokens (16, 32, 64 or 128) by wgmma.

    cluster_size    blocks that share K, 1 or 2
    stages          pipeline stages of a block
    stream_k_tiles  tiles that are computed stream-K: all blocks get equal shares of them along K
    permute_first   1 if a separate kernel permutes the activations, 0 if the blocks do it in place
    add_in_launch   1 if the blocks add the parts of stream-K tiles, 0 if a fix-up kernel does; needs permute_first
    """

    tile_tokens: int
    tile_rows: int
    blocks: int
    cluster_size: int
    stages: int
    stream_k_tiles: int
    permute_first: int
    add_in_launch: int = 0


Plan = SkinnyPlan | TiledPlan | WgmmaPlan
TYPES: dict[str, type[Plan]] = {"skinny": SkinnyPlan, "tiled": TiledPlan, "wgmma": WgmmaPlan}
PATHS = ("auto", *TYPES)


def path_of(plan: Plan) -> str:
    """Return the path's name. TypeError: `plan` is of none of the types."""
    for name, kind in TYPES.items():
        if isinstance(plan, kind):
            return name
    raise TypeError(
        f"plan is a {type(plan).__name__}; expected {', '.join(kind.__name__ for kind in TYPES.values())}"
    )
