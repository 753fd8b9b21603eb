"""Time the products of a mixture's experts: our grouped W4A16 kernel and vLLM's Marlin MoE on one GPU in one run.

    python tests/perf/expert_peers.py --output experts.json [--tokens 1,2,4,8,16,64,256,1024] [--model 35b]

Both products of a layer (gate and up; down) of a 35B-A3B (256 experts, top 8, hidden size 2,048, intermediate size 512), with
random choices of the router, another one per launch, so that weights come from memory. A time is that of one launch in a CUDA
graph, the alignment made before. Results are compared first: a kernel whose result differs from the other's by 1e-2 of the norm is
not timed.
Control: our kernel with the experts of two tiles swapped must differ. Needs vLLM (moe_wna16_marlin_gemm, as in 0.26).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from annie_quant.gemm import grouped, oracle
from annie_quant.gemm.stack_times import graph_us

# experts, top_k, hidden size, intermediate size
MODELS = {"35b": (256, 8, 2048, 512), "30b": (128, 8, 2048, 768)}
CHOICES, DIFFERENCE = 12, 1e-2
MARLIN_TILES = (8, 16, 32, 48, 64)  # vLLM takes the first that has fewer than .9 tiles per expert


def random_experts(experts: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    codes, scales = oracle.random_weight(experts * n, k, n + k)
    factors = [0.001 * (1 + e % 3) for e in range(experts)]
    of_scales = torch.from_numpy(scales).cuda().view(torch.float8_e4m3fn)
    return torch.from_numpy(codes).cuda().view(experts, n, -1), of_scales.view(experts, n, -1), factors


def choose(tokens: int, experts: int, top_k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.rand(tokens, experts, device="cuda", generator=generator).topk(top_k).indices.int()


class Marlin:
    """vLLM's Marlin MoE product over the same weights."""

    def __init__(self, first: tuple, second: tuple, hidden: int, width: int) -> None:
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

        layer: Any = torch.nn.Module()
        layer.num_experts, layer.hidden_size, layer.intermediate_size_per_partition = len(first[2]), hidden, width
        layer.params_dtype = torch.bfloat16
        factors = [torch.tensor(f, device="cuda", dtype=torch.float32) for f in (first[2], second[2])]
        prepared = marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin(
            layer, first[0], first[1], factors[0], second[0], second[1], factors[1], is_act_and_mul=True
        )
        self.weights = {"gate_up": prepared[:3], "down": prepared[3:]}
        self.workspace = layer.workspace

    def align(self, chosen: torch.Tensor, experts: int) -> tuple:
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

        tile = next((t for t in MARLIN_TILES if chosen.numel() / experts / t < 0.9), MARLIN_TILES[-1])
        return (tile, *moe_align_block_size(chosen, tile, experts, None))

    def product(
        self, name: str, x: torch.Tensor, out: torch.Tensor, k: int, aligned: tuple, top_k: int
    ) -> torch.Tensor:
        import vllm._custom_ops as ops
        from vllm.scalar_type import scalar_types

        weight, scale, factor = self.weights[name]
        return ops.moe_wna16_marlin_gemm(
            x, out, weight, None, scale, None, factor, None, None, None, self.workspace, *aligned[1:],
            torch.ones(out.shape[0], device=x.device), moe_block_size=aligned[0], top_k=top_k, mul_topk_weights=False,
            b_q_type=scalar_types.float4_e2m1f, size_m=x.shape[0], size_n=out.shape[1], size_k=k, is_k_full=True,
            use_atomic_add=False, use_fp32_reduce=True, is_zp_float=False,
        )  # fmt: skip


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="35b")
    parser.add_argument("--tokens", default="1,2,4,8,16,64,256,1024")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--go", type=Path, help="a file for whose appearance the timing waits")
    args = parser.parse_args()
    experts, top_k, hidden, width = MODELS[args.model]
    first, second = random_experts(experts, 2 * width, hidden), random_experts(experts, hidden, width)
    grouped.register()
    ours = {"gate_up": grouped.prepare_experts(*first), "down": grouped.prepare_experts(*second)}
    marlin = Marlin(first, second, hidden, width)
    while args.go and not args.go.exists():  # others may still use the GPU
        time.sleep(0.1)
    rows: list[dict[str, Any]] = []
    for tokens in map(int, args.tokens.split(",")):
        for name, n, k, rows_per_pair in (("gate_up", 2 * width, hidden, top_k), ("down", hidden, width, 1)):
            x = torch.randn(tokens if name == "gate_up" else tokens * top_k, k, device="cuda").bfloat16()
            pairs = tokens * top_k
            tile = grouped.plan_tokens(pairs, experts, rows_per_pair, n, k)
            out, our_out = (torch.zeros(pairs, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            multiply = partial(torch.ops.annie_quant.nvfp4_experts_out, our_out, x, *ours[name][:2])
            calls: dict[str, list[Callable[[], Any]]] = {"ours": [], "marlin": []}
            for seed in range(CHOICES):
                chosen = choose(tokens, experts, top_k, seed)
                aligned = grouped.align(chosen, experts, tile)
                calls["ours"].append(partial(multiply, *aligned, rows_per_pair, tile))
                theirs = marlin.align(chosen, experts)
                calls["marlin"].append(partial(marlin.product, name, x, out, k, theirs, rows_per_pair))
            calls["ours"][0]()
            apart = difference(our_out, calls["marlin"][0]())
            calls["ours"][-1]()
            right = our_out.clone()
            multiply(*aligned._replace(tile_experts=aligned.tile_experts.roll(1)), rows_per_pair, tile)
            control = difference(our_out, right)
            row: dict[str, Any] = {"tokens": tokens, "product": name, "n": n, "k": k, "tile": tile, "difference": apart,
                                   "control": control}  # fmt: skip
            if apart <= DIFFERENCE < control:
                row["us"] = {kernel: round(graph_us(several, args.repeats), 2) for kernel, several in calls.items()}
                row["ratio"] = round(row["us"]["marlin"] / row["us"]["ours"], 3)
            rows.append(row)
            print(json.dumps(row), flush=True)
            args.output.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}))


if __name__ == "__main__":
    main()
