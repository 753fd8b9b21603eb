"""A mixture's experts in the transformers runtime on a CUDA GPU: the grouped kernel, against dequantized weights in float32."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch: pip install annie-quant[quantize]")

from annie_quant.gemm import oracle  # noqa: E402
from annie_quant.offline import codec, nvfp4_linear  # noqa: E402
from annie_quant.offline.experts import Expert, SingleExperts  # noqa: E402
from annie_quant.offline.nvfp4_linear import NVFP4Linear  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not codec.has_kernels(), reason="needs a CUDA GPU and annie_quant._gemm"
    ),
]
EXPERTS, HIDDEN, WIDTH = 24, 2048, 512


def linear(n: int, k: int, seed: int) -> NVFP4Linear:
    new = NVFP4Linear(k, n, activations=False, device="cuda").requires_grad_(False)
    codes, scales = oracle.random_weight(n, k, seed)
    new.weight.copy_(torch.from_numpy(codes))
    new.weight_scale.view(torch.uint8).copy_(torch.from_numpy(scales))
    new.weight_scale_2.fill_(0.0003 * (1 + seed % 5))
    return new


@pytest.fixture(scope="module")
def layer() -> SingleExperts:
    """Return experts of a 35B-A3B's sizes, without the merged module that they usually come from."""
    experts = SingleExperts.__new__(SingleExperts)
    torch.nn.Module.__init__(experts)
    experts.rows, experts.count, experts.grouped, experts.act_fn = None, EXPERTS, None, torch.nn.SiLU()
    for e in range(EXPERTS):
        linears = {"gate_proj": linear(WIDTH, HIDDEN, 3 * e), "up_proj": linear(WIDTH, HIDDEN, 3 * e + 1),
                   "down_proj": linear(HIDDEN, WIDTH, 3 * e + 2)}  # fmt: skip
        experts.add_module(str(e), Expert(linears, torch.nn.SiLU()))
    return experts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 16, 300])
@torch.inference_mode()
def test_experts_in_one_launch_per_matrix(layer: SingleExperts, monkeypatch, tokens: int, dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator, device="cuda").to(dtype)
    chosen = torch.rand(tokens, EXPERTS, generator=generator, device="cuda").topk(8).indices
    weights = torch.rand(tokens, 8, generator=generator, device="cuda").softmax(-1)
    y = layer(x, chosen, weights)
    assert layer.grouped is not None and layer.grouped.prepared is not None
    exact = torch.zeros(tokens, HIDDEN, device="cuda")
    for e in range(EXPERTS):
        rows, place = torch.where(chosen == e)
        gate, up, down = (
            m.rows(0, m.out_features, torch.float32)
            for m in layer.get_submodule(str(e)).children()
            if isinstance(m, NVFP4Linear)
        )
        inner = (torch.nn.functional.silu(x[rows].float() @ gate.t()) * (x[rows].float() @ up.t())) @ down.t()
        exact.index_add_(0, rows, inner * weights[rows, place, None])

    def apart(other: torch.Tensor) -> float:
        return float((other.float() - exact).norm() / exact.norm())

    assert apart(y) < (0.01 if dtype == torch.bfloat16 else 0.002)
    assert apart(layer(x, (chosen + 1) % EXPERTS, weights)) > 0.1, "negative control: other experts"
    monkeypatch.setattr(nvfp4_linear, "can_use_kernels", lambda m: False)
    assert apart(layer(x, chosen, weights)) < 0.02, "one by one"


@torch.inference_mode()
def test_a_cuda_graph_follows_new_choices_without_waiting_for_the_gpu(layer: SingleExperts) -> None:
    x = torch.randn(4, HIDDEN, device="cuda").bfloat16()
    chosen, weights = torch.rand(4, EXPERTS, device="cuda").topk(8).indices, torch.full((4, 8), 0.125, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        layer(x, chosen, weights)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        y = layer(x, chosen, weights)
    chosen.copy_(torch.rand(4, EXPERTS, device="cuda").topk(8).indices)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, layer(x, chosen, weights))
