"""Time the products of a mixture's experts: our grouped W4A16 kernel and vLLM's Marlin MoE on one GPU in one run.

    python tests/perf/expert_peers.py --output experts.json [--tokens 1,2,4,8,16,64,256,1024] [--model 35b] [--library FILE]

Both products of a layer (gate and up; down) of a 35B-A3B (256 experts, top 8, hidden size 2,048, intermediate size 512), with
random choices of the router, another one per launch, so that weights come from memory. A time is that of one launch in a CUDA
graph, the alignment made before; the kernels' graphs are replayed in turn. "ours" waits for the launch before, "ours_pdl" starts
while it ends, as the operator does. Results are compared first: a kernel whose result differs from the other's by 1e-2 of the norm
is not timed. Control: our kernel with the experts of two tiles swapped must differ.
Marlin is the operator moe_wna16_marlin_gemm of the installed vLLM (as in 0.26), or of its library file alone (vllm/_moe_C*.so).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from annie_quant.gemm import grouped, oracle
from annie_quant.gemm.arrays import native
from annie_quant.gemm.torch_op import BF16

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from expert_tiles import align
from stack_times import graph_of, replay_us

# experts, top_k, hidden size, intermediate size
MODELS = {"35b": (256, 8, 2048, 512), "30b": (128, 8, 2048, 768)}
COLD_BYTES, DIFFERENCE = 200 << 20, 1e-2
MARLIN_TILES = (8, 16, 32, 48, 64)  # vLLM takes the first that has fewer than .9 tiles per expert
FP4 = 0x2_0000_0001_0102  # vLLM's number of float4_e2m1f


def random_experts(experts: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    codes, scales = oracle.random_weight(experts * n, k, n + k)
    factors = [0.001 * (1 + e % 3) for e in range(experts)]
    of_scales = torch.from_numpy(scales).cuda().view(torch.float8_e4m3fn)
    return (
        torch.from_numpy(codes).cuda().view(experts, n, -1),
        of_scales.view(experts, n, -1),
        factors,
    )


def choose(tokens: int, experts: int, top_k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.rand(tokens, experts, device="cuda", generator=generator).topk(top_k).indices.int()


def marlin_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return codes uint8 [N, K/2] as int32 [K/16, 2 N]: tiles of 16 x 64, each lane's values of four 16 x 8 fragments together."""
    n, k = codes.shape[0], codes.shape[1] * 2
    values = torch.stack((codes & 15, codes >> 4), -1).view(n, k).t().int()
    rows = torch.tensor([0, 1, 8, 9], device=codes.device)
    lane = torch.arange(32, device=codes.device)[:, None, None, None]
    block = torch.arange(4, device=codes.device)[None, :, None, None]
    half = torch.arange(2, device=codes.device)[None, None, :, None]
    order = (16 * (rows + 2 * (lane % 4)) + lane // 4 + 8 * half + 256 * block).reshape(-1, 8)
    order = order[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    tiles = (
        values.reshape(k // 16, 16, n // 16, 16)
        .permute(0, 2, 1, 3)
        .reshape(-1, 1024)[:, order]
        .reshape(k // 16, -1)
    )
    shifts = torch.arange(0, 32, 4, device=codes.device, dtype=torch.int32)
    return (tiles.view(k // 16, -1, 8) << shifts).sum(-1, dtype=torch.int32)


def marlin_scales(scales: torch.Tensor, factor: float) -> torch.Tensor:
    """Return block scales [N, K/16] times `factor` as unsigned E5M3 bytes [K/16, N] in the order of Marlin's fragments."""
    n = scales.shape[0]
    order = torch.arange(64, device=scales.device).view(8, 8).t().flatten()
    rows = (
        scales.float().t().reshape(-1, 64)[:, order].reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1, n)
        * factor
    ).half() * 128
    rows[rows < 2] = 0
    return (rows.view(torch.int16) << 1).view(torch.float8_e4m3fn)[:, 1::2].contiguous()


class Marlin:
    """vLLM's Marlin MoE product over the same weights."""

    def __init__(
        self,
        weights: dict[str, tuple[torch.Tensor, torch.Tensor, list[float]]],
        library: Path | None,
    ) -> None:
        spec = None if library else importlib.util.find_spec("vllm")
        path = library or next(
            p for f in spec.submodule_search_locations for p in Path(f).glob("_moe_C*.so")
        )  # type: ignore[union-attr]
        torch.ops.load_library(str(path))
        self.weights = {}
        for name, (codes, scales, tensor_scales) in weights.items():
            factor = 2.0 ** int(torch.log2(448 / scales.float().max()).floor())
            factors = torch.tensor(tensor_scales, device="cuda") * 2.0**119 / factor
            of_codes = torch.stack([marlin_codes(c) for c in codes])
            self.weights[name] = (
                of_codes,
                torch.stack([marlin_scales(s, factor) for s in scales]),
                factors,
            )
        self.ones = torch.ones(1 << 20, device="cuda")  # the router's weights, which are not used
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        self.workspace = torch.zeros(4 * processors, dtype=torch.int32, device="cuda")

    def product(
        self,
        name: str,
        x: torch.Tensor,
        out: torch.Tensor,
        aligned: grouped.Alignment,
        tile: int,
        top_k: int,
    ) -> None:
        weight, scale, factor = self.weights[name]
        torch.ops._moe_C.moe_wna16_marlin_gemm(
            x, out, weight, None, scale, None, factor, None, None, None, self.workspace, *aligned,
            self.ones[: out.shape[0]], tile, top_k, False,
            FP4, x.shape[0], out.shape[1], x.shape[1], True, False, True, False, -1, -1, -1,
        )  # fmt: skip


def ours(
    weights: grouped.PreparedExperts,
    x: torch.Tensor,
    out: torch.Tensor,
    aligned: grouped.Alignment,
    tile: int,
    top_k: int,
    pdl: int,
) -> None:
    (experts, size), n, k = weights.packed.shape, weights.n, x.shape[1]
    plan = grouped.plan(0, out.shape[0], experts, top_k, n, k, tile)
    native().grouped(
        x.data_ptr(), k, weights.packed.data_ptr(), experts * size, weights.scales.data_ptr(), aligned.sorted_pairs.data_ptr(),
        aligned.tile_experts.data_ptr(), aligned.padded.data_ptr(), aligned.tile_experts.numel(), out.data_ptr(),
        (out.shape[0], experts, top_k, n, k), BF16, tuple(plan), pdl, torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def times(calls: dict[str, list[Callable[[], Any]]], repeats: int) -> dict[str, float]:
    """Return microseconds per launch: medians over rounds, in each of which every graph is replayed once."""
    graphs = {name: graph_of(several) for name, several in calls.items()}
    rounds: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(repeats + 1):
        names = list(graphs)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            rounds[name].append(replay_us(graphs[name], len(calls[name])))
    return {name: round(statistics.median(of_name[1:]), 2) for name, of_name in rounds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="35b")
    parser.add_argument("--tokens", default="1,2,4,8,16,64,256,1024")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--library", type=Path, help="vLLM's library of mixture kernels, without the rest of vLLM"
    )
    parser.add_argument("--go", type=Path, help="a file for whose appearance the timing waits")
    args = parser.parse_args()
    experts, top_k, hidden, width = MODELS[args.model]
    loaded = {
        "gate_up": random_experts(experts, 2 * width, hidden),
        "down": random_experts(experts, hidden, width),
    }
    prepared = {name: grouped.prepare_experts(*parts) for name, parts in loaded.items()}
    marlin = Marlin(loaded, args.library)
    while args.go and not args.go.exists():  # others may still use the GPU
        time.sleep(0.1)
    rows: list[dict[str, Any]] = []
    for tokens in map(int, args.tokens.split(",")):
        for name, n, k, per_row in (
            ("gate_up", 2 * width, hidden, top_k),
            ("down", hidden, width, 1),
        ):
            pairs = tokens * top_k
            x = torch.randn(pairs // per_row, k, device="cuda").bfloat16()
            out = torch.zeros(pairs, n, device="cuda", dtype=torch.bfloat16)
            tile = grouped.plan_tokens(pairs, experts, per_row, n, k)
            theirs = next((t for t in MARLIN_TILES if pairs / experts / t < 0.9), MARLIN_TILES[-1])
            per_launch = min(pairs, experts) * n * k * 9 // 16
            calls: dict[str, list[Callable[[], Any]]] = {"ours": [], "ours_pdl": [], "marlin": []}
            for seed in range(max(12, COLD_BYTES // per_launch)):
                chosen = choose(tokens, experts, top_k, seed)
                aligned = align(chosen, experts, tile)
                for pdl, kernel in enumerate(("ours", "ours_pdl")):
                    calls[kernel].append(
                        partial(ours, prepared[name], x, out, aligned, tile, per_row, pdl)
                    )
                of_theirs = align(chosen, experts, theirs)
                calls["marlin"].append(
                    partial(marlin.product, name, x, out, of_theirs, theirs, per_row)
                )
            results = []
            for kernel in calls:
                out.fill_(float("nan"))
                calls[kernel][0]()
                results.append(out.clone())
            aligned = align(choose(tokens, experts, top_k, 0), experts, tile)
            swapped = aligned._replace(tile_experts=aligned.tile_experts.roll(1))
            ours(prepared[name], x, out, swapped, tile, per_row, 0)
            row: dict[str, Any] = {
                "tokens": tokens,
                "product": name,
                "n": n,
                "k": k,
                "tile": tile,
                "marlin_tile": theirs,
            }
            row["difference"] = difference(results[0], results[2])
            row["control"] = difference(out, results[0])
            if row["difference"] <= DIFFERENCE < row["control"] and torch.equal(
                results[0], results[1]
            ):
                row["us"] = times(calls, args.repeats)
                row["ratio"], row["ratio_pdl"] = (
                    round(row["us"]["marlin"] / row["us"][o], 2) for o in ("ours", "ours_pdl")
                )
            rows.append(row)
            print(json.dumps(row), flush=True)
            args.output.write_text(
                json.dumps({"device": torch.cuda.get_device_name(), "rows": rows})
            )


if __name__ == "__main__":
    main()
