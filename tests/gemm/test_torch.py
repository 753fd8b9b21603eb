"""The torch operator and torch tensors on a CUDA GPU: torch.compile, CUDA graphs, the caller's stream."""

from types import SimpleNamespace

import numpy as np
import pytest
from gemm_module import count_devices

from annie_quant.core.errors import UsageError

gemm = pytest.importorskip("annie_quant.gemm")
torch = pytest.importorskip("torch")
COUNT = count_devices() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        COUNT == 0, reason="needs a CUDA GPU, torch with CUDA and annie_quant._gemm"
    ),
]
N, K = 528, 1024


@pytest.fixture(scope="module")
def layer():
    from annie_quant.gemm import torch_op

    torch_op.register()
    codes, scales = gemm.oracle.random_weight(N, K, 5)
    handle = torch_op.prepare(
        torch.from_numpy(codes).cuda(), torch.from_numpy(scales).cuda(), 0.0173
    )
    weight = gemm.oracle.dequantize(codes, scales, 0.0173)

    def forward(x):
        return torch.ops.annie_quant.nvfp4_linear(x, *handle)

    return SimpleNamespace(forward=forward, weight=weight, codes=codes, scales=scales)


def within(out, x, weight):
    exact, magnitude = gemm.oracle.linear(x.double().cpu().numpy(), weight)
    limit = gemm.oracle.bound(exact, magnitude, K, "bfloat16")
    return gemm.oracle.worst(out.double().cpu().numpy(), exact, limit) <= 1


def tokens(m, seed=0):
    return torch.randn(m, K, generator=torch.Generator().manual_seed(seed)).to(
        "cuda", torch.bfloat16
    )


@pytest.mark.parametrize("m", [1, 16, 64, 130])
def test_the_operator_is_correct_and_compiles_to_the_same_bits(layer, m):
    x = tokens(m)
    plain = layer.forward(x)
    assert within(plain, x, layer.weight)
    compiled = torch.compile(lambda x: layer.forward(x) + 1, backend="aot_eager", fullgraph=True)
    assert (compiled(x) == plain + 1).all()


@pytest.mark.parametrize("m", [1, 16, 64])
def test_the_operator_in_a_cuda_graph(layer, m):
    x, stream, graph = tokens(m), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        layer.forward(x)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = layer.forward(x)
    x.copy_(tokens(m, 1))
    graph.replay()
    torch.cuda.synchronize()
    assert (out == layer.forward(x)).all()
    assert within(out, x, layer.weight)


def test_opcheck(layer):
    from annie_quant.gemm import torch_op

    handle = torch_op.prepare(
        torch.from_numpy(layer.codes).cuda(), torch.from_numpy(layer.scales).cuda(), 1.0
    )
    torch.library.opcheck(torch.ops.annie_quant.nvfp4_linear.default, (tokens(3), *handle))


@pytest.mark.parametrize("m", [1, 16, 64, 300])
def test_a_graph_in_which_copies_and_memsets_stand_between_products(layer, m):
    """A launch that depended programmatically on such a node would make the graph invalid."""
    x, y, stream = (
        tokens(m),
        torch.empty(m, N, device="cuda", dtype=torch.bfloat16),
        torch.cuda.Stream(),
    )
    spare = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")

    def run():
        spare.zero_()
        y.copy_(layer.forward(x))
        z = layer.forward(x)
        mixed = (z @ z.t()) @ x
        return z, mixed, layer.forward(mixed)

    with torch.cuda.stream(stream):
        run()  # creates cuBLAS' handle of this stream, which a capture must not
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        z, mixed, again = run()
    for seed in (1, 2):
        x.copy_(tokens(m, seed))
        graph.replay()
        torch.cuda.synchronize()
        z_now = layer.forward(x)
        assert (y == z_now).all() and (z == z_now).all() and (again == layer.forward(mixed)).all()


def test_rows_that_a_kernel_cannot_read_are_copied(layer):
    x = tokens(4)
    expected = layer.forward(x)
    wide = torch.cat([x, x], 1)
    shifted = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(4, K)
    assert shifted.data_ptr() % 16
    for other in (
        wide[:, :K],
        wide[:, K:],
        shifted,
        x.t().contiguous().t(),
        x[:, None],
        torch.nn.functional.pad(x, (0, 4))[:, :K],
    ):
        assert (layer.forward(other).reshape(4, N) == expected).all()
    assert layer.forward(x[:0]).shape == (0, N)


def test_wrong_operands_are_refused(layer):
    from annie_quant.gemm import torch_op

    handle = torch_op.prepare(
        torch.from_numpy(layer.codes).cuda(), torch.from_numpy(layer.scales).cuda(), 1.0
    )
    operator = torch.ops.annie_quant.nvfp4_linear
    with pytest.raises(UsageError, match=r"float32.*expected float16 or bfloat16"):
        operator(tokens(2).float(), *handle)
    # another number of rows, of columns, and of columns in the same chunk of 128
    for x, n in ((tokens(2), N + 64), (tokens(2)[:, : K // 2], N), (tokens(2)[:, : K - 16], N)):
        with pytest.raises(RuntimeError, match="another shape"):
            operator(x, handle.packed, handle.tensor_scale, n)
    faulty = layer.scales.copy()
    faulty[7, 3] = 0xFF
    with pytest.raises(UsageError, match="row 7, block 3"):
        torch_op.prepare(torch.from_numpy(layer.codes).cuda(), torch.from_numpy(faulty).cuda(), 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_oracle_passes_and_finds_planted_faults(layer, dtype):
    from annie_quant.gemm import oracle, torch_op

    for n, k in ((N, K), (61, 1008)):
        codes, scales = gemm.oracle.random_weight(n, k, 3)
        codes, scales = (
            torch.from_numpy(codes).cuda(),
            torch.from_numpy(scales).cuda().view(torch.float8_e4m3fn),
        )
        for fault in (None, "nibbles", "scales", "fragment", "lane"):
            weight = torch_op.prepare(codes, scales, 0.01, fault=fault)
            worst = oracle.worst_error(weight, codes, scales, 0.01, dtype)
            assert worst <= 1 if fault is None else worst > 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.cpu(), "is on cpu"),
        (lambda x: x.float(), "dtype float32"),
        (lambda x: x[:, ::2], "shape"),
        (lambda x: torch.cat([x, x], 1)[:, ::2], "strides"),
        (lambda x: torch.cat([x, x], 1).flatten()[1 : 1 + 2 * K].view(2, K), "multiple of 16"),
        (lambda x: torch.nn.functional.pad(x, (0, 4))[:, :K], "multiple of 8 apart"),
    ],
)
def test_invalid_arrays_raise_before_a_launch(layer, change, message):
    weight = gemm.Weight(
        torch.from_numpy(layer.codes).cuda(), torch.from_numpy(layer.scales).cuda(), 1.0
    )
    out = torch.full((2, N), 7.0, dtype=torch.float32, device="cuda")
    with pytest.raises(UsageError, match=message):
        gemm.w4a16(change(tokens(2)), weight, out)
    torch.cuda.synchronize()
    assert (out == 7).all()
    assert np.isfinite(out.cpu().numpy()).all()
