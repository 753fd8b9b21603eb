"""Time our W4A16 kernel and the NVFP4 kernels that vLLM has, Marlin and humming, on one GPU in one run.

    python tests/perf/kernel_peers.py --output peers.json --tokens 1,4,16,64,256,2048 --shapes 24576x4096,...

As bench_gemm.py: a graph of launches over enough copies of the weight that the L2 no longer has the first one, the median of
replays, every peer's result compared with ours before it is timed. Peers run through vLLM's own classes, ours through the torch
operator.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

COLD_BYTES = 200 << 20
SHAPES = "12288x4096,4096x4096,24576x4096,4096x12288,10240x4096,8192x8192"


def layer(codes: Any, scales: Any, scale: float) -> Any:
    """Return a module with vLLM's names for a linear's tensors."""
    result: Any = torch.nn.Module()
    result.weight = torch.nn.Parameter(codes.clone(), requires_grad=False)
    result.weight_scale = torch.nn.Parameter(scales.clone(), requires_grad=False)
    result.weight_global_scale = torch.nn.Parameter(torch.tensor(scale, device=codes.device), requires_grad=False)
    result.output_size_per_partition, result.input_size_per_partition = codes.shape[0], codes.shape[1] * 2
    result.output_partition_sizes = result.logical_widths = [codes.shape[0]]
    result.params_dtype = torch.bfloat16
    result.prefix, result.has_bias, result.bias = "", False, None
    return result


def graph_ms(calls: list[Any], repeats: int) -> float:
    """Return the median time of one call in a graph of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", default="1,4,16,64,256,2048")
    parser.add_argument("--peers", default="marlin,humming")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60, help="after --go")
    parser.add_argument("--go", type=Path, help="prepare, then time when this file appears")
    args = parser.parse_args()
    from vllm.config import VllmConfig, set_current_vllm_config

    from annie_quant.gemm import oracle, torch_op

    torch_op.register()
    tokens = [int(m) for m in args.tokens.split(",")]
    rows: list[dict[str, Any]] = []
    broken: set[str] = set()
    with set_current_vllm_config(VllmConfig()):
        kernels: dict[str, Any] = {}
        from vllm.model_executor.kernels.linear import NvFp4LinearLayerConfig
        from vllm.model_executor.kernels.linear.nvfp4.humming import HummingNvFp4LinearKernel
        from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel

        for name, kind in (("marlin", MarlinNvFp4LinearKernel), ("humming", HummingNvFp4LinearKernel)):
            if name in args.peers.split(","):
                kernels[name] = kind(NvFp4LinearLayerConfig())
        prepared = []
        for shape in args.shapes.split(","):
            n, k = (int(v) for v in shape.split("x"))
            host_codes, host_scales = oracle.random_weight(n, k, n + k)
            codes = torch.from_numpy(host_codes).cuda()
            scales = torch.from_numpy(host_scales).cuda().view(torch.float8_e4m3fn)
            copies = -(-COLD_BYTES // (n * k * 9 // 16))
            calls: dict[str, list[Any]] = {}
            weights = [torch_op.prepare(codes, scales, 0.002) for _ in range(copies)]
            calls["ours"] = [lambda x, w=w: torch.ops.annie_quant.nvfp4_linear(x, *w) for w in weights]
            x = torch.randn(max(tokens), k, device="cuda").to(torch.bfloat16)
            ours = calls["ours"][0](x[:16]).float()
            for name, kernel in kernels.items():
                if name in broken:
                    continue
                begin = time.monotonic()
                try:
                    layers = [layer(codes, scales, 0.002) for _ in range(copies)]
                    for each in layers:
                        kernel.process_weights_after_loading(each)
                    calls[name] = [lambda x, each=each, kernel=kernel: kernel.apply_weights(each, x) for each in layers]
                    for m in tokens:  # compiles what is compiled at the first call
                        theirs = calls[name][0](x[:m])
                    theirs = calls[name][0](x[:16]).float()
                    difference = ((theirs - ours).norm() / ours.norm()).item()
                    print(
                        f"{name} {shape}: prepared in {time.monotonic() - begin:.1f} s, differs by {difference:.1e}",
                        flush=True,
                    )
                except Exception as error:
                    broken.add(name)
                    calls.pop(name, None)
                    print(f"{name} does not run: {type(error).__name__}: {str(error)[:300]}", flush=True)
            prepared.append((n, k, x, calls))
    if args.go:
        while not args.go.exists():
            time.sleep(0.1)
    end = time.monotonic() + args.seconds
    for m in tokens:
        for n, k, x, calls in prepared:
            row: dict[str, Any] = {"n": n, "k": k, "m": m}
            for name, launches in calls.items():
                if time.monotonic() > end:
                    break
                several = [lambda call=call, m=m, x=x: call(x[:m]) for call in launches * -(-20 // len(launches))]
                try:
                    row[name] = round(1e3 * graph_ms(several, args.repeats), 2)
                except Exception as error:
                    row[name + "_error"] = f"{type(error).__name__}: {error}"[:200]
            rows.append(row)
            peers = "  ".join(
                f"{p} {row[p]} us ({row[p] / row['ours']:.2f}x)" for p in kernels if p in row and "ours" in row
            )
            print(f"{n}x{k} M={m}: ours {row.get('ours')} us  {peers}", flush=True)
            args.output.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
