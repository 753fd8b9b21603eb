"""Time the W4A16 kernels against cuBLAS bf16 on this GPU in one run: cold L2 by rotating buffers, CUDA graphs, medians.

    python tests/perf/bench_gemm.py --output out.json [--shapes 8192x8192,...] [--tokens 1,8,16,64] [--explore] [--seconds 60]
    python tests/perf/bench_gemm.py --output out.json --cells 17408x5120:64,17408x5120:256 --explore

A time is that of one launch in a graph of at least 20, the median of `--repeats` replays; each launch of a graph uses the next one
of enough copies of the weight that the L2 no longer has the first one. PDL is programmatic dependent launch: ours is measured with
and without, cuBLAS without. Plans with a workspace get one from torch, as the torch operator does; `own_us` is the time when each
launch allocates its own. Needs torch with CUDA; a result is printed only if it agrees with torch.

    --compare tests/perf/gemm.md   compare each time with that table; a cell fails if it is more than 10 % slower (the table's own
                                   uncertainty for the largest products) and more than 0.5 us
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import sys
import time
from functools import partial
from pathlib import Path

import torch

import annie_quant.gemm as gemm
from annie_quant.gemm.arrays import native

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from stack_times import graph_us

SHAPES = (
    "8192x8192 16384x8192 20480x7168 81920x8192 24576x4096 4096x12288 "
    "8192x4096 4096x4096 248320x4096 17408x5120 5120x17408"
)
TOKENS = "1,2,4,8,16,64,256,1024,4096"
COLD_BYTES = 400 << 20  # an H200's L2 is 60 MB


def cells_of(args: argparse.Namespace) -> list[tuple[int, int, list[int]]]:
    """Return (N, K, tokens) per weight: of `--cells` if it is given, otherwise of all pairs of `--shapes` and `--tokens`."""
    result: dict[tuple[int, int], list[int]] = {}
    pairs = [
        f"{shape}:{m}"
        for shape in args.shapes.replace(",", " ").split()
        for m in args.tokens.split(",")
    ]
    for cell in args.cells.replace(",", " ").split() or pairs:
        n, k, m = (int(v) for v in cell.replace("x", ":").split(":"))
        result.setdefault((n, k), []).append(m)
    return [(n, k, tokens) for (n, k), tokens in result.items()]


def timed(launches: list, repeats: int) -> float:
    """Return microseconds per launch of these callables in one graph: the median of `repeats` replays, after two untimed ones."""
    return graph_us(launches, repeats, untimed=2)


def rotated(copies: list, per_graph: int, call) -> list:
    return [partial(call, copies[i % len(copies)]) for i in range(per_graph)]


class Weights:
    """Enough copies of one random NVFP4 weight for a cold L2, and the first one's values as bf16 for the comparison."""

    def __init__(self, n: int, k: int) -> None:
        torch.manual_seed(n + k)
        self.n, self.k = n, k
        copies = max(2, -(-COLD_BYTES // (n * k * 9 // 16)))
        self.codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        self.scales = torch.randint(0x28, 0x48, (n, k // 16), dtype=torch.uint8, device="cuda")
        self.ours = [gemm.Weight(self.codes, self.scales, 0.01) for _ in range(copies)]
        self.cold = max(2, -(-COLD_BYTES // (n * k * 2)))
        self.bf16 = [
            torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(self.cold)
        ]

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
        table = torch.cat([table, -table])
        out = torch.empty(x.shape[0], self.n, device="cuda")
        for a in range(0, self.n, 8192):  # in slices, because the float32 weight may be large
            c = self.codes[a : a + 8192].long()
            w = torch.stack([table[c & 15], table[c >> 4]], -1).reshape(c.shape[0], self.k)
            s = self.scales[a : a + 8192].view(torch.float8_e4m3fn).float() * 0.01
            out[:, a : a + 8192] = x.double() @ (w * s.repeat_interleave(16, 1)).double().T
        return out


def difference(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Return the relative norm of the difference in the rows of `ref`, which are the first ones of `out`."""
    return float((out[: len(ref)].float() - ref).norm() / ref.norm())


def plans(weight: gemm.Weight, m: int) -> list[gemm.plans.Plan]:
    """Return all plans to try, the automatic ones first."""
    result = []
    for path in ("auto", "skinny", "tiled"):  # a path that does not fit raises
        with contextlib.suppress(Exception):
            result.append(weight.plan(m, path))
    chunks = -(-weight.k // 128)
    for tokens in (16, 32, 64, 128):
        if (tokens >= 2 * m and tokens > 16) or m > 8 * tokens:
            continue
        m_tiles = -(-m // tokens)
        every = -(-weight.n // 256) * m_tiles
        waves = -(-every // 132)
        ways = {
            (1, 256, -(-every // waves), 0),
            (1, 256, 132, every % 132),
            (1, 256, 132, every % 132 + 132),
        }
        # Shares of all tiles on fewer blocks, so that the parts of a tile are equal; and on all blocks.
        ways |= {(1, 256, blocks, every) for blocks in (132, 128, 120, 112, 96)}
        ways |= {(1, 256, 132 // every * every, every)} if every <= 66 else set()
        if tokens < 128:
            lower = -(-weight.n // 192) * m_tiles
            ways.add((1, 192, -(-lower // -(-lower // 132)), 0))
        for halves in (1, 2):
            tiles = -(-weight.n * halves // 256) * m_tiles
            if tiles <= 66 and chunks % halves == 0 and 16 * halves <= tokens < 128:
                ways.add((2, 256 // halves, tiles * 2, tiles))
        for (split, rows, blocks, stream_k_tiles), permuted in itertools.product(ways, (0, 1)):
            halves = 2 if rows == 128 else 1
            if (
                stream_k_tiles > every * halves
                or 0 < stream_k_tiles * chunks < blocks
                or permuted < (tokens == 128)
            ):
                continue
            reduce_bytes = (512 if halves == 1 else 768) * tokens if split > 1 else 0
            most = min(
                16,
                (232448 - 9216 - reduce_bytes - 4096 * permuted) // (18432 + tokens * 256 * halves),
            )
            for stages in {most, most - 2} - {0, 1}:
                result.append(
                    gemm.WgmmaPlan(tokens, rows, blocks, split, stages, stream_k_tiles, permuted)
                )
    return list(dict.fromkeys(result))


def peer(m: int, n: int, k: int, repeats: int) -> float:
    """Return microseconds of torch's 4-bit weight kernel (tinygemm: INT4, groups of 128, bf16 scales and zeros)."""
    size = n * k // 2 + n * (k // 128) * 4
    copies = max(2, -(-COLD_BYTES // size))
    per_graph = max(20 if m * n * k < 1 << 36 else 4, copies)
    weights = []
    for _ in range(copies):
        raw = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scales = torch.rand(k // 128, n, 2, device="cuda").to(torch.bfloat16)
        weights.append((torch.ops.aten._convert_weight_to_int4pack(raw, 8), scales))
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    return timed(
        rotated(
            weights, per_graph, lambda w: torch.ops.aten._weight_int4pack_mm(x, w[0], 128, w[1])
        ),
        repeats if m <= 256 else 5,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--cells", default="", help="NxK:M,... instead of --shapes and --tokens")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no measurement after that time"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--explore", action="store_true", help="also time other plans")
    parser.add_argument(
        "--peer", action="store_true", help="also time torch's own INT4 kernel (tinygemm)"
    )
    parser.add_argument("--output", default="")
    parser.add_argument(
        "--compare", default="", help="a table of earlier times, in microseconds without / with PDL"
    )
    args = parser.parse_args()
    info = native().device_info(0)
    print(
        f"{info['name']}, {info['sms']} SMs, driver {info['driver']}, torch {torch.__version__}",
        flush=True,
    )
    rows = [{"device": info, "ceilings": ceilings(args.repeats)}]
    print(json.dumps(rows[0]["ceilings"]), flush=True)
    args.end = time.monotonic() + args.seconds
    for n, k, tokens in cells_of(args):
        if time.monotonic() > args.end:
            print(f"{n}x{k}: left out, the time is over", flush=True)
            continue
        weights = Weights(n, k)
        for m in tokens:
            if m * n > 1 << 29:
                continue
            rows += measure(weights, m, args)
            if args.output:
                Path(args.output).write_text(json.dumps(rows))
        del weights
        torch.cuda.empty_cache()
    if args.compare and slower_than(args.compare, rows):
        sys.exit(1)


def slower_than(table: str, rows: list[dict]) -> int:
    """Print each time that differs by more than 5 % from the table's, and return how many are too slow."""
    text = Path(table).read_text()
    head = re.search(r"\| N x K \|(.*)\|\n", text)
    tokens = [int(v) for v in re.findall(r"M = (\d+)", head[1])]
    failed = compared = 0
    for row in rows[1:]:
        line = re.search(rf"\| {row['n']}x{row['k']} \|(.*)\|\n", text)
        cell = line[1].split("|")[tokens.index(row["m"])] if line and row["m"] in tokens else ""
        before = re.match(r" ([\d.]+) / ([\d.]+) \(([\d.]+) / ([\d.]+)x", cell)
        if not before or "us" not in row:
            continue
        for name, old, ratio in (("us", before[1], before[3]), ("pdl_us", before[2], before[4])):
            old, new, cublas = float(old), row[name], float(old) * float(ratio)
            compared += 1
            too_slow = new > 1.1 * old and new > old + 0.5
            failed += too_slow
            if too_slow or abs(new / old - 1) > 0.05:
                print(
                    f"{row['n']}x{row['k']} M={row['m']} {name}: {old} -> {new} ({new / old:.2f}x; cuBLAS {cublas:.1f} -> "
                    f"{row['cublas_us']}){'  TOO SLOW' if too_slow else ''}"
                )
    print(f"compared {compared} times with {table}: {failed} too slow")
    return failed


def ceilings(repeats: int) -> dict[str, float]:
    """Return TB/s of a device-to-device copy (read + write), and of reads of a large buffer and of the sizes of weights."""
    result = {}
    big = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    other = torch.empty_like(big)
    result["copy"] = 2 * big.numel() / timed([lambda: other.copy_(big)] * 2, repeats) / 1e6
    for size in (28_311_552, 37_748_736, 56_623_104, 1 << 30):
        at = range(0, (2 << 30) - size + 1, size)

        def read(a, size=size):
            big[a : a + size].view(torch.int32).amax()

        result[f"read {size / 1e6:.1f} MB, us"] = us = timed(
            rotated(list(at), max(20, len(at)), read), repeats
        )
        result[f"read {size / 1e6:.1f} MB"] = size / us / 1e6
    return {key: round(value, 3) for key, value in result.items()}


def host_us(launch, count: int = 200) -> float:
    """Return microseconds of the host per launch, without waiting for the kernels."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        launch()
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed / count * 1e6


def measure(weights: Weights, m: int, args) -> list[dict]:
    n, k = weights.n, weights.k
    xs = [torch.randn(m, k, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    per_graph = 20 if m * n * k < 1 << 36 else 4
    repeats = args.repeats if m * n * k < 1 << 36 else 10
    cublas = timed(
        rotated(
            weights.bf16, max(per_graph, weights.cold), lambda w: torch.mm(xs[0], w.T, out=out)
        ),
        repeats,
    )
    rows = []
    other = None
    if args.peer and n * k <= 1 << 28:
        try:
            other = round(peer(m, n, k, repeats), 2)
        except Exception as error:
            print(f"peer failed: {str(error)[:200]}", flush=True)
    first, ref = weights.ours[0], weights.reference(xs[0][:64])
    tried = plans(first, m) if args.explore else [first.plan(m)]
    for plan in tried:
        if time.monotonic() > args.end:
            print(f"{n}x{k} M={m}: the time is over", flush=True)
            break
        row = {
            "n": n,
            "k": k,
            "m": m,
            "plan": plan,
            "cublas_us": round(cublas, 2),
            "peer_us": other,
        }
        try:
            out.fill_(float("nan"))
            gemm.w4a16(xs[0], first, out, plan=plan)
            row["error"] = difference(out, ref)
            size = first.workspace_bytes(m, plan)
            buffer = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
            for name, pdl, memory in (
                ("", False, buffer),
                ("pdl_", True, buffer),
                ("own_", False, None),
            ):
                if name == "own_" and not size:
                    continue
                launches = rotated(
                    weights.ours,
                    max(per_graph, len(weights.ours)),
                    lambda w, plan=plan, pdl=pdl, memory=memory: gemm.w4a16(
                        xs[0], w, out, plan=plan, pdl=pdl, workspace=memory
                    ),
                )
                us = timed(launches, repeats)
                row[f"{name}us"], row[f"{name}speedup"] = round(us, 2), round(cublas / us, 3)
        except Exception as error:
            row["failed"] = str(error)[:80]
        if m * n * k < 1 << 32:  # larger ones fill the queue of launches
            row["launch_us"] = round(
                host_us(lambda plan=plan: gemm.w4a16(xs[0], first, out, plan=plan)), 2
            )
        rows.append(row)
        good = row.get("error", 1) < 5e-3
        print(
            f"{n}x{k} M={m} {plan} cublas {cublas:.1f} us, peer {other}, ours {row.get('us')} ({row.get('speedup')}x) "
            f"pdl {row.get('pdl_us')} ({row.get('pdl_speedup')}x) own workspace {row.get('own_us')} {'ok' if good else row}",
            flush=True,
        )
        if row.get("failed") and "illegal" in row["failed"]:
            sys.exit(1)
    return rows


if __name__ == "__main__":
    main()
