"""The products of a mixture's experts on a CUDA GPU, against the float64 oracle; controls: swapped experts, shifted offsets."""

from types import SimpleNamespace

import numpy as np
import pytest
from gemm_cases import grouped_products
from gemm_module import count_devices

gemm = pytest.importorskip("annie_quant.gemm")
torch = pytest.importorskip("torch")
from expert_tiles import align, products  # noqa: E402

COUNT = count_devices() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        COUNT == 0, reason="needs a CUDA GPU, torch with CUDA and annie_quant._gemm"
    ),
]
EXPERTS = 24
# [N, K] of the two products of a 35B-A3B's expert, and one with padded rows and columns
SHAPES = [(1024, 2048), (2048, 512), (528, 1008)]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def layer(request):
    from annie_quant.gemm import grouped

    grouped.register()
    n, k = request.param
    parts = [gemm.oracle.random_weight(n, k, seed) for seed in range(EXPERTS)]
    scales = [0.003 * (1 + i % 5) for i in range(EXPERTS)]
    stacked = [torch.from_numpy(np.stack(part)).cuda() for part in zip(*parts, strict=True)]
    weights = np.stack([gemm.oracle.dequantize(*p, s) for p, s in zip(parts, scales, strict=True)])
    return SimpleNamespace(
        prepared=grouped.prepare_experts(*stacked, scales), weights=weights, n=n, k=k
    )


def choice(tokens, top_k, seed=0):
    rng = np.random.default_rng(seed)
    weight = rng.pareto(1.0, EXPERTS) + 1e-3
    weight[7] = 0  # an expert without tokens
    rows = [
        rng.choice(EXPERTS, top_k, replace=False, p=weight / weight.sum()) for _ in range(tokens)
    ]
    return torch.from_numpy(np.array(rows)).cuda()


def inputs(tokens, k, dtype, seed=0):
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def ratio(layer, out, x, chosen, top_k):
    exact, magnitude = grouped_products(
        x.double().cpu().numpy(), layer.weights, chosen.cpu().numpy(), top_k
    )
    limit = gemm.oracle.bound(exact, magnitude, layer.k, str(x.dtype).removeprefix("torch."))
    return gemm.oracle.worst(out.double().cpu().numpy(), exact, limit)


def run(layer, x, aligned, top_k, tile):
    return products(x, *layer.prepared, aligned, top_k, tile)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 8), (2, 8), (16, 8), (70, 4), (300, 1)])
def test_each_pair_is_multiplied_by_its_expert(layer, dtype, tokens, top_k):
    from annie_quant.gemm import grouped

    chosen, x = choice(tokens, top_k), inputs(tokens, layer.k, dtype)
    best = grouped.plan_tokens(tokens * top_k, EXPERTS, top_k, layer.n, layer.k)
    for tile in {best, 8, 16, 32, 64}:
        aligned = align(chosen, EXPERTS, tile)
        assert ratio(layer, run(layer, x, aligned, top_k, tile), x, chosen, top_k) <= 1, tile
        swapped = aligned._replace(tile_experts=(aligned.tile_experts + 1) % EXPERTS)
        shifted = aligned._replace(sorted_pairs=aligned.sorted_pairs.roll(tile))
        for wrong in (swapped, shifted):
            assert ratio(layer, run(layer, x, wrong, top_k, tile), x, chosen, top_k) > 10, tile


def test_experts_of_other_ranks_and_rows_that_no_tile_has(layer):
    """-1 gives zeros, and neither NaN in other rows of x nor what memory had before reaches a result."""
    chosen, x = choice(9, 2), inputs(9, layer.k, torch.bfloat16)
    aligned = align(chosen, EXPERTS, 16)
    absent = int(chosen[4, 0])
    local = aligned._replace(
        tile_experts=torch.where(aligned.tile_experts == absent, -1, aligned.tile_experts)
    )
    out = run(layer, x, local, 2, 16).view(9, 2, -1)
    assert bool((out[chosen == absent] == 0).all()) and bool(
        (out[chosen != absent] != 0).any(-1).all()
    )
    poisoned = x.clone()
    poisoned[4] = float("nan")
    bad = run(layer, poisoned, aligned, 2, 16).view(9, 2, -1)
    others = torch.arange(9, device="cuda") != 4
    assert bool(bad[4].isnan().all()) and bool(
        (bad[others] == run(layer, x, aligned, 2, 16).view(9, 2, -1)[others]).all()
    )


def test_bits_repeat_and_a_cuda_graph_follows_new_choices(layer):
    """The grid is for the most tiles possible, so a captured launch serves any choice of the router."""
    chosen, x = choice(16, 8), inputs(16, layer.k, torch.bfloat16)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        first = run(layer, x, align(chosen, EXPERTS, 16), 8, 16)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = run(layer, x, align(chosen, EXPERTS, 16), 8, 16)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((out == first).all())
    chosen.copy_(choice(16, 8, seed=9))
    graph.replay()
    torch.cuda.synchronize()
    assert ratio(layer, out, x, chosen, 8) <= 1


def test_the_shared_memory_of_every_plan_is_there(layer):
    """Every number of tokens per tile that fits, with clusters."""
    from annie_quant.gemm.arrays import native

    chosen, x = choice(40, 4), inputs(40, layer.k, torch.bfloat16)
    shape = (160, EXPERTS, 4, layer.n, layer.k)
    results = {}
    for tile in (8, 16, 32, 64, 128):
        try:
            native().plan_grouped(shape, tile)
        except native().CudaError:
            continue
        aligned = align(chosen, EXPERTS, tile)
        results[tile] = run(layer, x, aligned, 4, tile)
        assert ratio(layer, results[tile], x, chosen, 4) <= 1
    assert {8, 16, 64} <= results.keys()
