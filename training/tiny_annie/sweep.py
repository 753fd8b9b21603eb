"""One GPU run: the base, or overlays on it, with the screen of each.

    python training/tiny_annie/sweep.py --data DIR --output DIR --seconds 400 [--base FILE] [--manners 1200] [--overlays GRID.json]

Without --base the base is trained (base.pt). With --manners an overlay of rank 8 first learns every answer but tool calls, and
is merged (manners.pt). With --overlays every regime of the grid is trained on what there is then (overlays.pt).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from batches import Rows, Words
from forward import DEVICE, Shape, Weights, linear_shapes, stacked
from screen import right, screens, stack_of_one, table
from train import Overlay, train_base, train_overlays

BEGAN = time.monotonic()
CALL = Shape.vocab_size - 6  # the token <tool_call>, the first of tokenizer.MARKS


def log(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:.0f} s] {text}", flush=True)


def stored(w: Weights) -> Weights:
    return {
        k: (v.detach().bfloat16() if v.dim() >= 2 else v.detach().float()).cpu().clone()
        for k, v in w.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=400, help="of the base's training, compilation included"
    )
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=65536, help="per step of the base")
    parser.add_argument("--overlay-tokens", type=int, default=6528, help="per step and overlay")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--more", action="store_true", help="train --base further")
    parser.add_argument(
        "--manners",
        type=int,
        default=0,
        help="steps of an overlay without tool calls, merged first",
    )
    parser.add_argument("--overlays", type=Path)
    a = parser.parse_args()
    if a.more and not a.base:
        parser.error("--more needs --base")
    if a.manners and not a.overlays:
        parser.error("--manners needs --overlays")
    if a.base and not (a.more or a.overlays):
        parser.error("nothing to train: with --base, --more or --overlays is needed")
    torch.set_float32_matmul_precision("high")
    a.output.mkdir(parents=True, exist_ok=True)
    c, words = Shape(), Words(a.data / "words.npz")
    linears = {n + ".weight" for n in linear_shapes(c)}
    base = torch.load(a.base, weights_only=True) if a.base else None
    if base is None or a.more:
        rows = Rows(a.data / "base.npz", a.tokens, words)
        log("rows are on the device")
        alone = 0 if base else 600
        base = train_base(c, rows, a.seconds, a.lr, a.seed, log, a.steps, start=base, alone=alone)
        torch.save(stored(base), a.output / "base.pt")
        del rows
        one, own_style = stack_of_one(c, stored_on(base)), Rows(a.data / "gate_base.npz", 1)
        log(table("base, its own style", right(c, one, 1, stacked(one, 1), own_style), ["bf16"]))
    if not a.overlays:
        return
    base = stored_on(base)
    overlays = [Overlay(**o) for o in json.loads(a.overlays.read_text())]
    rows, gate, m = (
        Rows(a.data / "tuned.npz", a.overlay_tokens, words),
        Rows(a.data / "gate.npz", 1),
        len(overlays),
    )
    if a.manners:
        # As many copies as there are overlays, so that one compilation serves both.
        first = [Overlay(8, a.manners, 1.5e-3)] * m
        plain = Rows(a.data / "tuned.npz", a.overlay_tokens, words, without=CALL)
        w, _ = train_overlays(c, base, plain, first, log)
        base = stored_on({k: v[0] if k in linears else v for k, v in w.items()})
        torch.save(stored(base), a.output / "manners.pt")
        del plain, w
    w, factors = train_overlays(c, base, rows, overlays, log)
    saved = {
        o.name: {k: factor(k, v[i], o) for k, v in factors.items() if o.touches(k)}
        for i, o in enumerate(overlays)
    }
    torch.save(saved, a.output / "overlays.pt")
    for text in screens(c, w, gate, rows, [o.name for o in overlays]):
        log(text)
    log("done")


def factor(name: str, x: torch.Tensor, overlay: Overlay) -> torch.Tensor:
    """Return a factor, float16, cut to the overlay's rank: a [rank, inputs] or b [outputs, rank]."""
    return (x[: overlay.rank] if name.endswith(".a") else x[:, : overlay.rank]).half().cpu().clone()


def stored_on(w: Weights) -> Weights:
    return {k: v.float().to(DEVICE) for k, v in stored(w).items()}


if __name__ == "__main__":
    main()
