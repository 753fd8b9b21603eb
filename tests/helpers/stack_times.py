"""Times of weight-only NVFP4 kernels at given shapes: vLLM's, humming's own and ours; which one vLLM chooses.
For tests/perf/kernel_peers.py.

A time is that of one product in a CUDA graph over enough copies of the weight that the L2 no longer has the first one, the median
of replays. Every result is compared with a float64 product before it is timed, for each number of tokens. Peers run through vLLM's
own classes or humming's own layer, ours through the torch operator that the plug-in gives vLLM.
"""

from __future__ import annotations

import importlib
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from annie_quant import checkpoint
from annie_quant.core.errors import CheckpointError

COLD_BYTES = 200 << 20
LAUNCHES = 20  # of a graph, at least
REPEATS = 9
DIFFERENCE = 1e-2  # of the norm: humming rounds the partial sums of a split K to bfloat16; a wrong scale gives .1 and more
OURS = "annie_quant"
SCALE = 0.002  # of the random weights' tensors


@dataclass(frozen=True)
class ShapeTimes:
    """Microseconds of a product of m tokens with a weight [n, k], by kernel; fastest: the name of the least."""

    n: int
    k: int
    m: int
    us: dict[str, float]
    fastest: str


class LinearKernel(Protocol):
    """vLLM's interface of a kernel for NVFP4 linears, as far as it is used here."""

    def process_weights_after_loading(self, layer: Any) -> None: ...

    def apply_weights(self, layer: Any, x: Any) -> Any: ...


@dataclass(frozen=True)
class Prepared:
    """A weight [n, k] in several copies: per kernel one call per copy, and activations for the most tokens.

    differences: per kernel the largest difference from the float64 product, relative to its norm
    """

    n: int
    k: int
    x: Any
    calls: dict[str, list[Callable[[Any], Any]]]
    differences: dict[str, float] = field(default_factory=dict)


class HummingKernel:
    """humming's own layer, without vLLM; a LinearKernel. Names of humming-kernels 0.1.20.

    tokens: numbers of tokens, whose tiles humming chooses; by itself it would compile 33 kernels per shape
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = sorted(tokens)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack the weight of a layer with vLLM's names."""
        import torch
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        n, half = layer.weight.shape
        form = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
        with torch.device(layer.weight.device):
            own = HummingLayer(n, 2 * half, form, torch_dtype=layer.params_dtype)
        own.load_from_tensors(
            {
                "weight": layer.weight.data,
                "weight_scale": layer.weight_scale.data,
                "weight_scale_2": layer.weight_global_scale.data.view(1),
            }
        )
        own.transform()
        tiles = [get_heuristics_config(own.humming_config, m) for m in self.tokens]
        # Each for tokens above the first number and up to the second.
        layer.tiles = list(zip([0, *self.tokens], self.tokens, tiles, strict=False))
        layer.humming = own
        del layer.weight, layer.weight_scale

    def apply_weights(self, layer: Any, x: Any) -> Any:
        """Return the product; the first call compiles."""
        return layer.humming(x, tuning_config=layer.tiles)


def vllm_layer(codes: Any, scales: Any, scale: float) -> Any:
    """Return a module with vLLM's names for the tensors of a linear."""
    import torch

    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(codes.clone(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scales.clone(), requires_grad=False)
    layer.weight_global_scale = torch.nn.Parameter(
        torch.tensor(scale, device=codes.device), requires_grad=False
    )
    layer.output_size_per_partition, layer.input_size_per_partition = (
        codes.shape[0],
        codes.shape[1] * 2,
    )
    layer.output_partition_sizes = layer.logical_widths = [codes.shape[0]]
    layer.params_dtype = torch.bfloat16
    layer.prefix, layer.has_bias, layer.bias = "", False, None
    return layer


def vllm_kernels(missing: dict[str, str]) -> dict[str, LinearKernel]:
    """Return vLLM's weight-only kernels by name; adds to `missing` those that it lacks."""
    from vllm.model_executor.kernels.linear import NvFp4LinearLayerConfig

    kernels: dict[str, LinearKernel] = {}
    for name, kind in (
        ("marlin", "MarlinNvFp4LinearKernel"),
        ("humming", "HummingNvFp4LinearKernel"),
    ):
        try:
            source = importlib.import_module(f"vllm.model_executor.kernels.linear.nvfp4.{name}")
            kernels[name] = getattr(source, kind)(NvFp4LinearLayerConfig())
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"[:300]
    return kernels


def choices() -> dict[str, str]:
    """Return the classes that vLLM takes here, with the plug-in if it is switched on."""
    from vllm.model_executor.kernels import linear
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    chosen = {}
    for name, weight_only in (("w4a4", False), ("w4a16", True)):
        try:
            chosen[name] = type(linear.init_nvfp4_linear_kernel(use_a16=weight_only)).__name__
        except Exception as error:
            chosen[name] = f"none ({type(error).__name__}: {str(error).splitlines()[0]})"[:300]
    return chosen


def check_result(result: Any, exact: Any, shape: str) -> float:
    """Return the difference of a kernel's result from the exact one, relative to its norm; raise ValueError above DIFFERENCE."""
    difference: float = ((result - exact).norm() / exact.norm()).item()
    if not difference <= DIFFERENCE:
        raise ValueError(
            f"its result for {shape} differs from the exact one by {difference:.2g} of the norm"
        )
    return difference


def exact_product(x: Any, codes: Any, scales: Any) -> Any:
    """Return x [m, k] times the dequantized weight [n, k], float64 [m, n]; the weight is dequantized in parts."""
    import torch

    from annie_quant.gemm import oracle

    inputs, step = x.double(), max(1, oracle.SPAN // x.shape[1])
    parts = [slice(i, i + step) for i in range(0, len(codes), step)]
    return torch.cat(
        [inputs @ oracle.dequantize_in_torch(codes[i], scales[i], SCALE).t() for i in parts], 1
    )


def our_calls(codes: Any, scales: Any, copies: int) -> list[Callable[[Any], Any]]:
    """Return one call of our operator per copy of a weight."""
    import torch

    from annie_quant.gemm import torch_op

    torch_op.register()
    weights = [torch_op.prepare(codes, scales, SCALE) for _ in range(copies)]
    return [lambda x, w=w: torch.ops.annie_quant.nvfp4_linear(x, *w) for w in weights]


def peer_calls(
    kernel: LinearKernel, codes: Any, scales: Any, copies: int
) -> list[Callable[[Any], Any]]:
    """Return one call of another kernel per copy of a weight."""
    layers = [vllm_layer(codes, scales, SCALE) for _ in range(copies)]
    for layer in layers:
        kernel.process_weights_after_loading(layer)
    return [lambda x, layer=layer: kernel.apply_weights(layer, x) for layer in layers]


def prepare(
    shapes: list[tuple[int, int]],
    tokens: list[int],
    kernels: Mapping[str, LinearKernel],
    missing: dict[str, str],
) -> list[Prepared]:
    """Prepare random weights for our and other kernels; call each for all numbers of tokens and compare the results.

    missing: of kernels that do not run or whose result is wrong, the reason; they are left out from then on
    """
    import torch

    from annie_quant.gemm import oracle

    makers = {OURS: our_calls} | {
        name: partial(peer_calls, kernel) for name, kernel in kernels.items()
    }
    result = []
    for n, k in shapes:
        host_codes, host_scales = oracle.random_weight(n, k, n + k)
        codes = torch.from_numpy(host_codes).cuda()
        scales = torch.from_numpy(host_scales).cuda().view(torch.float8_e4m3fn)
        copies = -(-COLD_BYTES // (n * k * 9 // 16))
        x = torch.randn(max(tokens), k, device="cuda").to(torch.bfloat16)
        weight, exact = Prepared(n, k, x, {}), exact_product(x, codes, scales)
        for name, make in makers.items():
            if name in missing:
                continue
            try:
                calls = make(codes, scales, copies)
                # The first call of a number of tokens compiles, too.
                differences = [
                    check_result(calls[0](x[:m]).double(), exact[:m], f"{n}x{k}, M = {m}")
                    for m in tokens
                ]
                weight.differences[name], weight.calls[name] = max(differences), calls
            except Exception as error:
                missing[name] = f"{type(error).__name__}: {error}"[:300]
        result.append(weight)
    return result


def graph_of(calls: Sequence[Callable[[], Any]]) -> Any:
    """Run the callables once, then capture them into one CUDA graph."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def replay_us(graph: Any, launches: int) -> float:
    """Replay a graph of `launches` launches. Return microseconds per launch."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / launches


def graph_us(calls: Sequence[Callable[[], Any]], repeats: int, untimed: int = 1) -> float:
    """Return microseconds per call of these in one graph: the median of `repeats` replays, after `untimed` ones."""
    graph = graph_of(calls)
    return statistics.median(
        [replay_us(graph, len(calls)) for _ in range(untimed + repeats)][untimed:]
    )


def measure(
    prepared: list[Prepared], tokens: list[int], seconds: float, repeats: int = REPEATS
) -> Iterator[ShapeTimes]:
    """Time every kernel at every shape and number of tokens, for at most `seconds`."""
    end = time.monotonic() + seconds
    for m in tokens:
        for weight in prepared:
            us: dict[str, float] = {}
            for name, launches in weight.calls.items():
                if time.monotonic() < end:
                    several = [
                        partial(call, weight.x[:m])
                        for call in launches * -(-LAUNCHES // len(launches))
                    ]
                    us[name] = round(graph_us(several, repeats), 2)
            if us:
                yield ShapeTimes(weight.n, weight.k, m, us, min(us, key=us.__getitem__))


def served_shapes(path: Path) -> list[tuple[int, int]]:
    """Return the shapes [N, K] of a checkpoint's NVFP4 linears as servers merge them, without repetitions."""
    folder = checkpoint.ModelFolder(path)
    shapes = {
        name: x.shape(folder)
        for name, x in checkpoint.linears(folder).items()
        if x.format == "nvfp4"
    }
    if not shapes:
        raise CheckpointError(
            f"{path} has no NVFP4 linears", f"annie-quant audit {shlex.quote(str(path))}"
        )
    groups = folder.family.fused_groups(shapes)
    single = shapes.keys() - {name for group in groups for name in group}
    merged = [(sum(shapes[name][0] for name in group), shapes[group[0]][1]) for group in groups]
    return sorted({*merged, *(shapes[name] for name in single)})


def read_shapes(text: str) -> list[tuple[int, int]]:
    """Return the shapes [N, K] of "24576x4096,4096x12288"."""
    return [(int(n), int(k)) for n, k in (shape.split("x") for shape in text.split(","))]
