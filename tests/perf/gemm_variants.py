"""Time the planner's W4A16 plan, the one of before, sums in the launch (`add_in_launch`), and cuBLAS bf16, in one run on one GPU.

    ANNIE_QUANT_ONLY=_gemm,_nvfp4 ANNIE_QUANT_ARCHS=90a python3 setup.py -q build_ext --inplace
    PYTHONPATH=. python3 tests/perf/gemm_variants.py [--cells 17408x5120:64,...] [--output out.json]

`before` is the plan of BEFORE, where the planner had another one until sums in the launch were among its choices. Where the plan is
stream-K, `add` or `fix-up` is the same plan with the sums in the launch or with the fix-up kernel; the bits must be the same. Each
result is compared with float64 (relative norm) and repeated to the bit. Times: one CUDA graph per variant, without and with
programmatic dependent launch (PDL), with rotating weights (cold L2); the graphs of a cell are replayed in turn, so that the clock's
changes meet all of them; medians. An error of the GPU ends the run and names the variant and the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import annie_quant.gemm as gemm
from annie_quant.gemm.arrays import native
from annie_quant.gemm.plans import Plan, WgmmaPlan

SHAPES = "17408x5120 24576x4096 8192x8192 5120x17408 4096x12288 8192x4096"
TOKENS = (64, 32, 128, 256)
CELLS = 30  # by default
COLD_BYTES = 200 << 20
LIMIT = 4e-3  # of the relative norm; one rounding to bf16 gives 1.7e-3
Row = dict[str, object]
# By N, K and M: the planner's plan until sums in the launch were among its choices, where it has another one now.
BEFORE = {
    (17408, 5120, 64): WgmmaPlan(64, 256, 132, 1, 6, 68, 1),
    (17408, 5120, 32): WgmmaPlan(32, 256, 132, 1, 8, 68, 0),
    (24576, 4096, 128): WgmmaPlan(64, 192, 128, 1, 6, 0, 1),
    (24576, 4096, 256): WgmmaPlan(128, 256, 132, 1, 4, 192, 1),
    (8192, 8192, 256): WgmmaPlan(128, 256, 128, 1, 4, 64, 1),
    (17408, 5120, 48): WgmmaPlan(64, 256, 132, 1, 6, 68, 1),
    (24576, 4096, 96): WgmmaPlan(64, 192, 128, 1, 6, 0, 1),
    (17408, 5120, 192): WgmmaPlan(64, 256, 132, 1, 6, 204, 1),
    (5120, 17408, 192): WgmmaPlan(64, 256, 120, 2, 5, 60, 1),
    (17408, 5120, 384): WgmmaPlan(128, 256, 132, 1, 4, 204, 1),
    (8192, 8192, 384): WgmmaPlan(128, 256, 132, 1, 4, 96, 1),
    (8192, 4096, 384): WgmmaPlan(64, 192, 129, 1, 6, 0, 1),
    (5120, 17408, 512): WgmmaPlan(128, 256, 132, 1, 4, 80, 1),
    (4096, 12288, 512): WgmmaPlan(128, 256, 128, 1, 4, 64, 1),
}


class Weights:
    """Copies of one random weight, enough for a cold L2, as NVFP4 and as bf16."""

    def __init__(self, n: int, k: int) -> None:
        torch.manual_seed(n + k)
        self.n, self.k = n, k
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(0x28, 0x48, (n, k // 16), dtype=torch.uint8, device="cuda")
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
        table = torch.cat([table, -table])
        exact = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).reshape(
            n, k
        )
        exact = (
            exact * scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
        ).bfloat16()
        size = native().packed_bytes(n, k)
        memory = [
            torch.empty(size, dtype=torch.uint8, device="cuda")
            for _ in range(1 + COLD_BYTES // size)
        ]
        self.ours = [gemm.Weight(codes, scales, 0.01, memory=part) for part in memory]
        self.bf16 = [exact, *(exact.clone() for _ in range(COLD_BYTES // (n * k * 2)))]


def graph_of(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


@contextmanager
def step(name: str) -> Iterator[None]:
    """Wait for the GPU at the end, so that its error is that of this step."""
    try:
        yield
        torch.cuda.synchronize()
    except RuntimeError as error:  # _gemm's CudaError is one, too
        raise SystemExit(f"{name}: {str(error).splitlines()[0]}") from error


def plans_of(weight: gemm.Weight, m: int) -> dict[str, Plan]:
    """Return the planner's plan and those to compare it with, by name."""
    today = weight.plan(m)
    result: dict[str, Plan] = {"plan": today}
    if (weight.n, weight.k, m) in BEFORE:
        result["before"] = BEFORE[weight.n, weight.k, m]
    stream_k = isinstance(today, WgmmaPlan) and today.stream_k_tiles and today.cluster_size == 1
    if stream_k and today.tile_tokens > 16:
        name = "fix-up" if today.add_in_launch else "add"
        result[name] = today._replace(add_in_launch=1 - today.add_in_launch, permute_first=1)
    return result


def measure(weights: Weights, m: int, repeats: int) -> list[Row]:
    """Check and time the variants of one cell; return a row per variant, the first cuBLAS's."""
    n, k = weights.n, weights.k
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    reference = x[:64].double() @ weights.bf16[0].double().T * 0.01
    large = m * n * k >= 1 << 36
    plans = plans_of(weights.ours[0], m)
    # One for all, until the last replay: a graph has the workspace's address, but does not keep its memory.
    size = max(weights.ours[0].workspace_bytes(m, plan) for plan in plans.values())
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
    rows: list[Row] = []
    graphs: list[tuple[str, torch.cuda.CUDAGraph, int]] = []
    results: dict[str, torch.Tensor] = {}

    def add(name: str, plan: object, pdl: bool, copies: int, call: Callable[[int], object]) -> None:
        row: Row = {"n": n, "k": k, "m": m, "name": name, "plan": str(plan), "pdl": pdl}
        rows.append(row)
        full = f"{n}x{k} M={m} {name}{' pdl' if pdl else ''} {plan}"
        with step(f"{full}, single calls"):
            for i in range(4 if large else 20):
                out.fill_(float("nan"))
                call(i % copies)
                if i == 0:
                    results.setdefault(name, out.clone())
                if not torch.equal(out, results[name]):
                    row["failed"] = "the result does not repeat"
            row["error"] = float(
                (results[name][:64].double() - reference).norm() / reference.norm()
            )
        if not row["error"] < LIMIT:  # type: ignore[operator]
            row["failed"] = f"error {row['error']:.1e}"
        count = max(copies, 2 if large else 20)
        with step(f"{full}, capture"):
            graph = graph_of([lambda i=i: call(i % copies) for i in range(count)])
        with step(f"{full}, first replay"):  # loads code
            graph.replay()
        graphs.append((full, graph, count))

    more = {"beta": 0, "alpha": 0.01, "out": out}
    cublas = lambda i: torch.addmm(out, x, weights.bf16[i].T, **more)  # noqa: E731
    add("cuBLAS", "", False, len(weights.bf16), cublas)
    for name, plan in plans.items():
        for pdl in (False, True):
            call = lambda i, plan=plan, pdl=pdl: gemm.w4a16(  # noqa: E731
                x, weights.ours[i], out, plan=plan, pdl=pdl, workspace=workspace
            )
            add(name, plan, pdl, len(weights.ours), call)
    for name in {"add", "fix-up"} & set(results):
        if not torch.equal(results["plan"], results[name]):
            rows[-1]["failed"] = "bits differ from those of plan"
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(max(3, repeats // 3) if large else repeats):
        for place, (full, graph, count) in enumerate(graphs):
            with step(f"{full}, replay"):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
            times[place].append(begin.elapsed_time(end) * 1e3 / count)
    for row, values in zip(rows, times, strict=True):
        row["us"] = statistics.median(values)
    return rows


def line(rows: list[Row]) -> str:
    """Return a table's row: microseconds and speed-up over cuBLAS of each variant, without / with PDL; what failed; the plan."""
    by_name: dict[str, list[float]] = {}
    for row in rows:
        by_name.setdefault(str(row["name"]), []).append(float(row["us"]))  # type: ignore[arg-type]
    (cublas,) = by_name.pop("cuBLAS")
    cells = [
        f"{name} {a:.1f} / {b:.1f} ({cublas / a:.2f} / {cublas / b:.2f}x)"
        for name, (a, b) in by_name.items()
    ]
    failed = [f"FAILED {row['name']}: {row['failed']}" for row in rows if "failed" in row]
    head = f"| {rows[0]['n']}x{rows[0]['k']} | {rows[0]['m']} | {cublas:.1f} |"
    return f"{head} {'; '.join([*cells, *failed])} | {rows[1]['plan']} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cells = [f"{n}x{k}:{m}" for n, k, m in BEFORE] + [
        f"{s}:{m}" for m in TOKENS for s in SHAPES.split()
    ]
    default = " ".join([*dict.fromkeys(cells)][:CELLS])
    parser.add_argument("--cells", default=default, help="NxK:M,...")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=100, help="start no cell after that time")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    info = native().device_info(0)
    print(f"{info['name']}, {info['sms']} SMs, driver {info['driver']}, torch {torch.__version__}")
    print(
        "| N x K | M | cuBLAS us | us without / with PDL (x cuBLAS) | plan |\n|---|---|---|---|---|",
        flush=True,
    )
    weights: dict[tuple[int, int], Weights] = {}
    rows: list[Row] = []
    late: list[str] = []
    for cell in args.cells.replace(",", " ").split():
        if time.monotonic() > end:
            late.append(cell)
            continue
        n, k, m = (int(v) for v in cell.replace("x", ":").split(":"))
        if (n, k) not in weights:
            weights[n, k] = Weights(n, k)
        cell_rows = measure(weights[n, k], m, args.repeats)
        rows += cell_rows
        print(line(cell_rows), flush=True)
        torch.cuda.empty_cache()
        if args.output:
            args.output.write_text(json.dumps(rows))
    if late:
        print(f"not measured, the time was over: {','.join(late)}")
    if any("failed" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
