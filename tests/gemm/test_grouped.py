"""The products of a mixture's experts without a GPU: the alignment, the plans, and the operator computed tile by tile in NumPy."""

from __future__ import annotations

import itertools

import emulated_gemm
import numpy as np
import pytest
from gemm_cases import grouped_products
from gemm_module import A100, DEVICES, module, needs_module

from annie_quant.core.errors import UsageError
from annie_quant.gemm import GroupedPlan, oracle

torch = pytest.importorskip(
    "torch", reason="the operator is torch's: pip install annie-quant[quantize]"
)
from expert_tiles import Alignment, align, products  # noqa: E402

from annie_quant.gemm import grouped  # noqa: E402

# pairs, experts, top_k, n, k: gate and up, and down, of a 35B-A3B; then small and odd ones
SHAPES = [
    *((t * 8, 256, 8, 1024, 2048) for t in (1, 2, 16, 128, 1024)), *((t * 8, 256, 1, 2048, 512) for t in (1, 16, 1024)),
    (2, 4, 2, 128, 256), (1, 1, 1, 1, 16), (30000, 8, 2, 40, 1008),
]  # fmt: skip


def choice(tokens: int, experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    """Return top_k different experts per token [tokens, top_k], some experts much more often than others."""
    rng = np.random.default_rng(seed)
    weight = rng.pareto(1.0, experts) + 1e-3
    rows = [
        rng.choice(experts, top_k, replace=False, p=weight / weight.sum()) for _ in range(tokens)
    ]
    return torch.from_numpy(np.array(rows, np.int64).reshape(tokens, top_k))


@pytest.mark.parametrize("tile", [8, 16, 64])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 256, 8), (3, 4, 2), (100, 8, 2), (257, 16, 1), (64, 1, 1)]
)
def test_every_pair_is_once_in_a_tile_of_its_expert(
    tokens: int, experts: int, top_k: int, tile: int
) -> None:
    chosen = choice(tokens, experts, top_k, seed=tokens)
    aligned = align(chosen, experts, tile)
    pairs, of_tile = tokens * top_k, aligned.tile_experts.tolist()
    used = int(aligned.padded)
    assert used % tile == 0 and aligned.sorted_pairs.numel() == len(of_tile) * tile >= used
    assert (aligned.sorted_pairs[used:] == pairs).all()
    in_tiles = []
    for i in range(used // tile):
        entries = aligned.sorted_pairs[i * tile : (i + 1) * tile].tolist()
        there = [p for p in entries if p < pairs]
        assert there and entries == there + [pairs] * (tile - len(there)), (
            "pairs come first in a tile"
        )
        assert {int(chosen.reshape(-1)[p]) for p in there} == {of_tile[i]}
        in_tiles += there
    assert sorted(in_tiles) == list(range(pairs))
    counts = np.bincount(chosen.reshape(-1).numpy(), minlength=experts)
    assert used == int((-(-counts // tile) * tile).sum()), "no tile more than needed"
    if module is not None:
        shape = (pairs, experts, top_k, 128, 256)
        plan = module.plan_grouped(shape, tile, DEVICES["H200"])
        assert module.grouped_needs(shape, plan, DEVICES["H200"])[1] == len(of_tile)


@needs_module
@pytest.mark.parametrize("device", DEVICES)
def test_every_plan_passes_the_check(device: str) -> None:
    """The best plan and the one for each number of tokens per tile; large tiles may need more memory than a GB10 has."""
    for shape, tile in itertools.product(SHAPES, (0, 8, 16, 32, 64, 128)):
        try:
            plan = GroupedPlan(*module.plan_grouped(shape, tile, DEVICES[device]))
        except module.CudaError:
            assert tile in (32, 128) and DEVICES[device][1] < 110_000
            continue
        shared, tiles = module.grouped_needs(shape, tuple(plan), DEVICES[device])
        assert 0 < shared <= DEVICES[device][1] and tiles >= 1
        assert plan.tile_tokens == tile or tile == 0
    few = GroupedPlan(*module.plan_grouped(SHAPES[0], 0, DEVICES[device]))
    assert few.tile_tokens == 8, "one token: a tile has one row of use"
    sizes = [
        module.plan_grouped((t * 8, 256, 8, 1024, 2048), 0, DEVICES[device])[0]
        for t in (1, 64, 256, 1024, 65536)
    ]
    assert sizes == sorted(sizes) and sizes[-1] > 8, "more tokens per expert, larger tiles"


@needs_module
def test_a_plan_that_cannot_run_is_refused_with_its_reason() -> None:
    good, shape = (16, 1, 1, 2), (64, 8, 2, 256, 512)
    module.grouped_needs(shape, good, DEVICES["H200"])
    for fields, reason in (
        ((48, 1, 1, 2), "tile_tokens"),
        ((16, 2, 1, 2), "cluster_size"),
        ((16, 1, 2, 2), "stages"),
        ((16, 1, 1, 8), "step_tiles"),
        ((8, 1, 1, 4), "step_tiles"),
        ((32, 1, 1, 4), "step_tiles"),
        ((64, 3, 4, 16), "cluster_size"),
        ((64, 8, 4, 16), "chunks"),
        ((64, 1, 4, 2), "step_tiles"),
        ((128, 1, 32, 16), "shared"),
    ):
        with pytest.raises(ValueError, match=reason):
            module.grouped_needs(shape, fields, DEVICES["H200"])
    for wrong in (
        (0, 8, 2, 256, 512),
        (64, 0, 2, 256, 512),
        (64, 8, 2, 256, 500),
        (64, 8, 65, 256, 512),
        (64, 8, 2, 0, 512),
    ):
        with pytest.raises(ValueError, match="shape"):
            module.grouped_needs(wrong, good, DEVICES["H200"])
    with pytest.raises(ValueError, match="compute capability"):
        module.grouped_needs(shape, (64, 1, 4, 16), A100)
    with pytest.raises(ValueError, match="multiple of 128"):
        module.grouped_needs((64, 8, 2, 256, 528), (16, 1, 1, 4), DEVICES["H200"])
    with pytest.raises(ValueError, match="too many tiles"):  # the kernel's divisions have 32 bits
        module.grouped_needs((1 << 28, 8, 2, 8192, 512), (8, 1, 1, 2), DEVICES["H200"])
    with pytest.raises(module.CudaError):
        module.plan_grouped(shape, 48, DEVICES["H200"])


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch):
    """Return the operator on a CPU, the prepared experts and their float64 weights [experts, N, K]."""
    emulated_gemm.install(monkeypatch)
    experts, n, k = 6, 40, 144
    parts = [oracle.random_weight(n, k, seed) for seed in range(experts)]
    scales = [0.01 * (i + 1) for i in range(experts)]
    stacked = (torch.from_numpy(np.stack(part)) for part in zip(*parts, strict=True))
    weights = np.stack(
        [oracle.dequantize(*part, scale) for part, scale in zip(parts, scales, strict=True)]
    )
    return grouped.prepare_experts(*stacked, scales), weights


def ratio(
    layer, x: torch.Tensor, chosen: torch.Tensor, top_k: int, aligned: Alignment, tile: int
) -> float:
    """Return the largest error in units of what rounding allows; above 1 is wrong."""
    prepared, weights = layer
    out = products(x, *prepared, aligned, top_k, tile)
    exact, magnitude = grouped_products(x.double().numpy(), weights, chosen.numpy(), top_k)
    return oracle.worst(
        out.double().numpy(), exact, oracle.bound(exact, magnitude, x.shape[1], "bfloat16")
    )


@pytest.mark.parametrize(
    ("tokens", "top_k", "tile"), [(1, 2, 16), (5, 2, 16), (90, 3, 64), (40, 1, 16)]
)
def test_the_operator_multiplies_each_pair_by_its_expert(
    layer, tokens: int, top_k: int, tile: int
) -> None:
    chosen = choice(tokens, 6, top_k, seed=3)
    x = torch.randn(tokens, 144, generator=torch.Generator().manual_seed(1)).bfloat16()
    aligned = align(chosen, 6, tile)
    assert ratio(layer, x, chosen, top_k, aligned, tile) <= 1
    # Negative controls: experts swapped, offsets shifted by a tile, the last tile left out, other weights.
    swapped = aligned._replace(tile_experts=(aligned.tile_experts + 1) % 6)
    shifted = aligned._replace(sorted_pairs=aligned.sorted_pairs.roll(tile))
    short = aligned._replace(padded=aligned.padded - tile)
    for wrong in (swapped, shifted, short):
        assert ratio(layer, x, chosen, top_k, wrong, tile) > 10, wrong
    prepared, weights = layer
    assert ratio((prepared, weights[::-1]), x, chosen, top_k, aligned, tile) > 10


def test_a_token_of_another_ranks_expert_gives_zeros(layer) -> None:
    """As vLLM marks them with expert parallelism: -1."""
    chosen = torch.tensor([[0, 1], [1, 2], [2, 3]])
    aligned = align(chosen, 6, 16)
    local = aligned._replace(
        tile_experts=torch.where(aligned.tile_experts == 1, -1, aligned.tile_experts)
    )
    x = torch.randn(3, 144, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = products(x, *layer[0], local, 2, 16)
    assert [bool(row.any()) for row in out] == [True, False, False, True, True, True]


def test_the_operator_can_be_traced(layer) -> None:
    aligned = align(choice(5, 6, 2), 6, 16)
    x = torch.randn(5, 144, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed, scales, n = layer[0]
    arguments = (x.new_zeros(10, n), x, packed, scales, *aligned, 2, 16)
    operator = torch.ops.annie_quant.nvfp4_experts_out.default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_an_alignment_that_would_be_read_beyond_its_end_is_refused() -> None:
    good = align(choice(5, 6, 2), 6, 16)
    grouped.check_alignment(*good, 16, good.padded.device)
    for name, wrong, tile in itertools.chain(
        [("sorted_pairs", good._replace(sorted_pairs=good.sorted_pairs.long()), 16)],
        [("padded", good._replace(padded=good.padded.float()), 16)],
        [("sorted_pairs has", good, 64)],
        [("sorted_pairs has", good._replace(sorted_pairs=good.sorted_pairs[:-1]), 16)],
        [("tile_experts", good._replace(tile_experts=good.tile_experts.repeat(2)[::2]), 16)],
    ):
        with pytest.raises(UsageError, match=name):
            grouped.check_alignment(*wrong, tile, good.padded.device)


def operands(**changes: object) -> dict:
    """Return operands of 5 tokens, 2 of 6 experts each, N=32, K=144."""
    good = {"out": torch.empty(10, 32, dtype=torch.bfloat16), "x": torch.empty(5, 144, dtype=torch.bfloat16),
            "packed": torch.empty(6, 2592, dtype=torch.uint8), "scales": torch.empty(6), "top_k": 2}  # fmt: skip
    return good | changes


SHARED = torch.empty(1440, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("scales is torch.float64", {"scales": torch.empty(6, dtype=torch.float64)}),
        ("scales is torch.float16", {"scales": torch.empty(6, dtype=torch.float16)}),
        ("scales .* on meta", {"scales": torch.empty(6, device="meta")}),
        ("scales .*expected 6 elements", {"scales": torch.empty(5)}),
        ("scales .*strides .2.", {"scales": torch.empty(12)[::2]}),
        ("packed is torch.int8", {"packed": torch.empty(6, 2592, dtype=torch.int8)}),
        ("packed .*multiple of 16 bytes", {"packed": torch.empty(6 * 2592 + 1, dtype=torch.uint8)[1:].view(6, 2592)}),
        ("packed .*contiguous", {"packed": torch.empty(2592, 6, dtype=torch.uint8).t()}),
        ("packed .2592.", {"packed": torch.empty(2592, dtype=torch.uint8)}),
        ("out is torch.float32", {"out": torch.empty(10, 32)}),
        ("out .*expected 160 elements", {"out": torch.empty(20, 16, dtype=torch.bfloat16)}),
        ("top_k is 0", {"top_k": 0}),
        ("out and x overlap", {"x": SHARED[:720].view(5, 144), "out": SHARED[704:1024].view(10, 32)}),
        ("out and x overlap", {"x": SHARED.view(5, 288)[:, :144], "out": SHARED[144:464].view(10, 32)}),
    ],
)  # fmt: skip
def test_operands_that_a_kernel_would_take_for_others_are_refused(
    message: str, changes: dict
) -> None:
    grouped.check_operands(**operands())
    grouped.check_operands(
        **operands(x=SHARED[:720].view(5, 144), out=SHARED[720:1040].view(10, 32))
    )
    with pytest.raises(UsageError, match=message):
        grouped.check_operands(**operands(**changes))
