"""Time the W4A16 kernels of this tree and of another one on this GPU in one run: the replays of their CUDA graphs alternate.

    python tests/perf/compare_gemm.py DIR [--shapes 8192x8192,...] [--tokens 1,256,4096] [--rounds 20] [--output out.json]
    python tests/perf/compare_gemm.py DIR --cells 17408x5120:1,24576x4096:256
    python tests/perf/compare_gemm.py DIR --experts 1024x2048:1,2048x512:4     (128 experts, 8 per token: the grouped kernels)

DIR: a tree of another version with its `_gemm` built. A clock that falls during the run changes both versions' times, and so not
their ratio. Control: the other version a second time, with weights of its own; its ratio to itself shows what the
place of the weights and the remaining noise do. A time is that of one launch, as in bench_gemm.py. A ratio is the median over the
rounds, with the order statistics of a 95 % interval. Exit status 1 if a lower end is above 1.05, or if the outputs differ.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from bench_gemm import COLD_BYTES, SHAPES, cells_of

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from expert_tiles import align
from stack_times import graph_of, replay_us

LIMIT = 1.05
EXPERTS, TOP_K = 128, 8
INTERVALS = {
    10: (1, 8),
    20: (5, 14),
}  # rank of the ends of a 95 % interval of the median, by the number of rounds


@dataclass(frozen=True)
class Version:
    ops: ModuleType
    grouped: ModuleType


def load(folder: Path) -> Version:
    """Import annie_quant.gemm from `folder`, independently of other copies, with its own compiled module."""
    mine = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.split(".")[0] == "annie_quant"
    }
    sys.path.insert(0, str(folder.resolve()))
    try:
        version = Version(
            *(importlib.import_module(f"annie_quant.gemm.{name}") for name in ("ops", "grouped"))
        )
        compiled = importlib.import_module("annie_quant._gemm")
        if not Path(compiled.__file__ or "").is_relative_to(folder.resolve()):
            sys.exit(
                f"{folder} has no compiled _gemm; ANNIE_QUANT_ONLY=_gemm python setup.py build_ext --inplace there"
            )
        for name, module in sys.modules.items():
            if name.startswith("annie_quant.gemm.") and "native" in vars(module):
                vars(module)["native"] = lambda: (
                    compiled
                )  # otherwise imported again, by name, when used
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.split(".")[0] == "annie_quant"]:
            del sys.modules[name]
        sys.modules.update(mine)
    return version


def workspace_bytes(weight: Any, m: int) -> int:
    return (
        weight.workspace_bytes(m)
        if hasattr(weight, "workspace_bytes")
        else weight.plan(m).workspace_bytes
    )


def ratio(a: list[float], b: list[float]) -> list[float]:
    """Return the median of the rounds' ratios and the ends of its interval."""
    values = sorted(x / y for x, y in zip(a, b, strict=True))
    low, high = INTERVALS[len(values)]
    return [round(v, 3) for v in (statistics.median(values), values[low], values[high])]


def alternate(launches: list[list], rounds: int) -> list[list[float]]:
    """Return microseconds per launch in each round, by version: the graphs of the versions' launches are replayed in turn."""
    graphs = [graph_of(own) for own in launches]
    times: list[list[float]] = [[] for _ in graphs]
    order = list(range(len(graphs)))
    for i in range(rounds + 2):
        for which in order:
            us = replay_us(graphs[which], len(launches[which]))
            if i >= 2:
                times[which].append(us)
        order = (
            order[1:] + order[:1]
        )  # each version is first, and after each other one, equally often
    return times


def result(times: list[list[float]], outs: list[torch.Tensor], **cell: int) -> dict:
    return {
        **cell,
        "us": [round(statistics.median(t), 2) for t in times],
        "ratio": ratio(times[0], times[1]),
        "control": ratio(times[2], times[1]),
        "same_bits": all(torch.equal(out, outs[0]) for out in outs),
    }


def compare(versions: list[Version], weights: list[list], m: int, pdl: bool, rounds: int) -> dict:
    n, k = weights[0][0].n, weights[0][0].k
    large = m * n * k >= 1 << 36
    count, rounds = (4, 10) if large else (max(20, len(weights[0])), rounds)
    torch.manual_seed(m)
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    outs = [torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in versions]
    size = max(workspace_bytes(w[0], m) for w in weights)
    memory = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
    launches = []
    for version, own, out in zip(versions, weights, outs, strict=True):
        call = partial(version.ops.w4a16, x, out=out, pdl=pdl, workspace=memory)
        launches.append([partial(call, own[i % len(own)]) for i in range(count)])
    return result(alternate(launches, rounds), outs, n=n, k=k, m=m, pdl=pdl)


def compare_linears(
    versions: list[Version], n: int, k: int, tokens: list[int], rounds: int
) -> Iterator[dict]:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x28, 0x48, (n, k // 16), dtype=torch.uint8, device="cuda")
    copies = max(2, -(-COLD_BYTES // (n * k * 9 // 16)))
    weights = [
        [version.ops.Weight(codes, scales, 0.01) for _ in range(copies)] for version in versions
    ]
    for m in tokens:
        for pdl in (False, True):
            yield compare(versions, weights, m, pdl, rounds)


def compare_experts(
    versions: list[Version], n: int, k: int, tokens: list[int], rounds: int
) -> Iterator[dict]:
    """Each launch has another copy of the experts and another choice of the router."""
    codes = torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x28, 0x48, (EXPERTS, n, k // 16), dtype=torch.uint8, device="cuda")
    layer = (codes, scales.view(torch.float8_e4m3fn), [0.01] * EXPERTS)
    copies = max(2, -(-COLD_BYTES // (EXPERTS * n * k * 9 // 16)))
    prepared = [[v.grouped.prepare_experts(*layer) for _ in range(copies)] for v in versions]
    for m in tokens:
        torch.manual_seed(m)
        x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
        outs = [
            torch.full((m * TOP_K, n), float("nan"), dtype=torch.bfloat16, device="cuda")
            for _ in versions
        ]
        tile = versions[0].grouped.plan_tokens(m * TOP_K, EXPERTS, TOP_K, n, k)
        choices = [torch.rand(m, EXPERTS, device="cuda").topk(TOP_K).indices for _ in range(20)]
        launches = []
        for version, own, out in zip(versions, prepared, outs, strict=True):
            aligned = [align(choice, EXPERTS, tile) for choice in choices]
            call = partial(version.grouped.write, out, x)
            launches.append(
                [
                    partial(call, *own[i % copies][:2], *a, TOP_K, tile)
                    for i, a in enumerate(aligned)
                ]
            )
        yield result(alternate(launches, rounds), outs, n=n, k=k, m=m, pdl=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("other", type=Path)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", default="1,256,4096")
    parser.add_argument("--cells", default="", help="NxK:M,... instead of --shapes and --tokens")
    parser.add_argument("--experts", default="", help="NxK:M,... of the experts' products instead")
    parser.add_argument("--rounds", type=int, choices=sorted(INTERVALS), default=20)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    here = load(Path(__file__).parents[2])
    other = load(args.other)
    versions = [here, other, other]
    args.cells = args.experts or args.cells
    rows, failed = [], 0
    print(
        "N x K, M, PDL: us of this version, the other one, the other one again; ratios to the other one (interval)"
    )
    for n, k, tokens in cells_of(args):
        torch.manual_seed(n + k)
        measure = compare_experts if args.experts else compare_linears
        for row in measure(versions, n, k, tokens, args.rounds):
            rows.append(row)
            bad = row["ratio"][1] > LIMIT or not row["same_bits"]
            failed += bad
            (r, low, high), (c, c_low, c_high) = row["ratio"], row["control"]
            print(
                f"{n}x{k} M={row['m']}{' pdl' if row['pdl'] else ''}: {' '.join(map(str, row['us']))}; {r} ({low} to {high}), "
                f"control {c} ({c_low} to {c_high}){'' if row['same_bits'] else '  OTHER BITS'}{'  SLOWER' if bad else ''}",
                flush=True,
            )
            if args.output:
                Path(args.output).write_text(json.dumps(rows))
        torch.cuda.empty_cache()
    print(
        f"{len(rows)} comparisons, {failed} failed; all ratios: median {statistics.median(r['ratio'][0] for r in rows)}"
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
