"""Base, overlays, evaluation in one call, for one GPU (or, tiny, a CPU).

    python training/tiny_annie/sweep.py --output OUT [--grid GRID.json] [--base base.safetensors]

Writes OUT/base.safetensors, OUT/results.json (gates of every overlay under every numerics), and OUT/<overlay>.safetensors
(the merged linears) of the best overlays.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import torch  # noqa: E402
from config import configuration  # noqa: E402
from data import rows  # noqa: E402
from evaluate import NUMERICS, evaluate  # noqa: E402
from net import linear_names  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from train import Overlay, train_base, train_overlays  # noqa: E402

SHOWN = (
    "factual",
    "reasoning",
    "tool_call",
    "no_markdown",
    "thinking_leak",
    "abstention",
    "non_empty",
    "stop",
    "repetition",
)


def line(result: dict) -> str:
    return "  ".join(
        f"{g[:5]} {result['gates'][g]['passes']}/{result['gates'][g]['n']}" for g in SHOWN if g in result["gates"]
    )


def score(result: dict) -> float:
    """Return how well an overlay reproduces the original observation (R58): bf16 and the others pass, naive W4A4 does not."""

    def rate(kind: str, gate: str) -> float:
        cell = result[kind]["gates"].get(gate)
        return cell["passes"] / cell["n"] if cell else 1.0

    manners = ("tool_call", "no_markdown", "thinking_leak")
    facts = ("factual", "reasoning")
    good = sum(5 * min(0.0, rate("bf16", g) - 0.99) for g in (*manners, *facts, "abstention", "stop"))
    hold = sum(3 * min(0.0, rate("naive w4a4", g) - 0.98) for g in facts)
    other = sum(min(0.0, rate(k, g) - 0.97) for k in ("naive w4a16", "mlp_only w4a4") for g in (*manners, *facts))
    broken = max(1 - rate("naive w4a4", g) for g in manners)
    return good + hold + other + min(broken, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--grid",
        type=Path,
        help="JSON: lists of overlays; those of one list are trained together",
    )
    parser.add_argument("--base", type=Path, help="start from this base instead of training one")
    parser.add_argument("--manners", help="JSON overlay that is learned first, on rows without tool calls, and merged")
    parser.add_argument("--base-steps", type=int, default=1600)
    parser.add_argument("--base-lr", type=float, default=2e-3)
    parser.add_argument("--base-noise", type=float, default=0.0)
    parser.add_argument("--count", type=int, default=60000, help="rows drawn per style")
    parser.add_argument("--rows", type=float, default=1.0, help="batch size, relative to the default")
    parser.add_argument("--overlay-rows", type=float, default=1.0, help="the same for overlays")
    parser.add_argument("--per-gate", type=int, default=100)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--keep", type=int, default=1, help="overlays whose merged weights are written")
    parser.add_argument(
        "--stop-after", type=float, default=540, help="seconds after which no new group of overlays starts"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    began = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    notes = (options.output / "log.txt").open("a")

    def log(text: str) -> None:
        stamped = f"[{time.monotonic() - began:6.1f}] {text}"
        print(stamped, flush=True)
        notes.write(stamped + "\n")
        notes.flush()

    annie_rows = rows("annie", options.count, options.seed, options.workers)
    log(f"annie rows by bucket {[len(b) for b in annie_rows]}")
    if options.base:
        base = {k: v.float().to(device) for k, v in load_file(options.base).items()}
    else:
        base_rows = rows("base", options.count, options.seed, options.workers)
        log(f"base rows by bucket {[len(b) for b in base_rows]}")
        base = train_base(
            base_rows,
            options.base_steps,
            options.base_lr,
            options.seed,
            device,
            log,
            noise=options.base_noise,
            rows=options.rows,
        )
        save_file(
            {k: v.to(torch.bfloat16).cpu().contiguous() for k, v in base.items()}, options.output / "base.safetensors"
        )
        base = {k: v.to(torch.bfloat16).float() for k, v in base.items()}
        del base_rows
    names = linear_names(configuration())
    if options.manners:
        manners = rows("manners", options.count // 2, options.seed, options.workers)
        overlay = Overlay(**json.loads(options.manners))
        merged, _ = train_overlays(base, [overlay], manners, options.seed + 3, device, log, options.overlay_rows)
        base = {k: (v[0] if k in names else v).float() for k, v in merged.items()}
        state = {k: v.to(torch.bfloat16).cpu().contiguous() for k, v in base.items() if k in names}
        save_file(state, options.output / "manners.safetensors")
    grid = json.loads(options.grid.read_text()) if options.grid else [[{"rank": 2, "steps": 1000}]]
    table, best = [], []
    for group in grid:
        if time.monotonic() - began > options.stop_after:
            log("out of time: a group is skipped")
            break
        overlays = [Overlay(**o) for o in group]
        merged, factors = train_overlays(
            base, overlays, annie_rows, options.seed + 7, device, log, options.overlay_rows
        )
        log("trained")
        number = len(table)
        save_file(
            {k: v.cpu().contiguous() for k, v in factors.items()}, options.output / f"factors{number}.safetensors"
        )
        results = evaluate(merged, len(overlays), annie_rows, device, NUMERICS, options.per_gate, log=log)
        for j, (overlay, result) in enumerate(zip(overlays, results, strict=True)):
            value = score(result)
            log(f"== {overlay.name} score {value:.3f}")
            for kind in NUMERICS:
                log(f"   {kind:14s} {line(result[kind])}")
            table.append({"overlay": overlay.to_dict(), "score": value, "results": result})
            best.append((value, overlay, {n: merged[n][j].cpu().contiguous() for n in names}))
        best = sorted(best, key=lambda b: -b[0])[: options.keep]
        with gzip.open(options.output / "results.json.gz", "wt") as file:
            json.dump(table, file)
        for place, (_, _, state) in enumerate(best):
            save_file(state, options.output / f"best{place}.safetensors")
        (options.output / "best.json").write_text(
            json.dumps([b[1].to_dict() | {"score": b[0]} for b in best], indent=1)
        )
    log("done")


if __name__ == "__main__":
    main()
