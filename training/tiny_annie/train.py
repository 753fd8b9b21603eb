"""Trains tiny-annie's base, and overlays on it, many at once, on one GPU.

The base is a full fine-tune. An overlay is a merged low-rank change of the base's linears, learned on the answers alone; the
forward uses the merged weights in bf16, as the checkpoint stores them. Every step is one CUDA graph per bucket.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from batches import Rows
from forward import (
    COMPILED,
    DEVICE,
    WORK,
    Forward,
    Weights,
    cosine,
    hidden_states,
    initial,
    linear_shapes,
    plain,
    stacked,
    working,
)

Log = Callable[[str], None]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# DeltaNet's two small gates, a mixture's router and its gate are not changed: NVFP4 recipes do not quantize them.
UNTOUCHED = ("in_proj_a", "in_proj_b", "mlp.gate", "mlp.shared_expert_gate")
BALANCE = 0.01  # weight of a mixture's load-balancing loss
DELTA = ("in_proj_qkv", "in_proj_z", "out_proj")
FULL = ("q_proj", "k_proj", "v_proj", "o_proj")
WHERE = {
    "all": (*DELTA, *FULL, "mlp"),
    "attention": (*DELTA, *FULL),
    "delta": DELTA,
    "full": FULL,
    "mlp": ("mlp",),
}


@dataclass(frozen=True)
class Overlay:
    """One training regime. where: which linears, a key of WHERE."""

    rank: int
    steps: int
    lr: float
    where: str = "all"
    seed: int = 0
    enough: float = 1.0  # a token that is as probable adds no loss

    @property
    def name(self) -> str:
        return f"{self.where}-r{self.rank}-s{self.steps}-lr{self.lr:g}-enough{self.enough:g}-seed{self.seed}"

    def touches(self, name: str) -> bool:
        return any(f".{part}" in name for part in WHERE[self.where])


class Graphs:
    """A training step as one CUDA graph per bucket; eager on a CPU."""

    def __init__(self, step: Step, rows: Rows, log: Log) -> None:
        self.step, self.rows, self.log = step, rows, log
        self.inputs = [
            (
                torch.zeros(b.rows, b.ids.shape[1], dtype=torch.long, device=DEVICE),
                torch.zeros(b.rows, b.ids.shape[1], device=DEVICE),
            )
            for b in rows.buckets
        ]
        self.graphs: dict[int, tuple[Any, torch.Tensor]] = {}
        self.pool: Any = None

    def __call__(self, k: int, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        own_ids, own_weight = self.inputs[k]
        own_ids.copy_(ids)
        own_weight.copy_(weight)
        if DEVICE != "cuda":
            return self.step(own_ids, own_weight)
        if k not in self.graphs:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.step(own_ids, own_weight)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                out = self.step(own_ids, own_weight)
            self.pool = self.pool or graph.pool()
            self.graphs[k] = (graph, out)
        graph, out = self.graphs[k]
        graph.replay()
        return out

    def prime(self, generator: torch.Generator) -> float:
        """Capture every bucket and return the mean seconds per step."""
        began, seconds = time.monotonic(), []
        for k in range(len(self.rows.buckets)):
            if self.rows.share[k] == 0:
                seconds.append(0.0)
                continue
            ids, weight = self.rows.batch(k, generator, 0.0)
            self(k, ids, weight)
            self.synchronize()
            start = time.monotonic()
            for _ in range(3):
                self(k, ids, weight)
            self.synchronize()
            seconds.append((time.monotonic() - start) / 3)
        mean = float(np.dot(seconds, self.rows.share))
        each = [round(1e3 * s) for s in seconds]
        self.log(
            f"captured in {time.monotonic() - began:.0f} s; ms per bucket {each}, mean {1e3 * mean:.1f}"
        )
        return mean

    @staticmethod
    def synchronize() -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def start(
        self,
        generator: torch.Generator,
        optimizer: torch.optim.Optimizer,
        seconds: float,
        steps: int,
    ) -> int:
        """Capture the steps and undo what that did to the optimizer. Returns `steps`, or if 0 how many fit into `seconds`."""
        began = time.monotonic()
        mean = self.prime(generator)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
        return steps or max(20, int((seconds - (time.monotonic() - began)) / mean))


def train_base(
    c: Any,
    rows: Rows,
    seconds: float,
    lr: float,
    seed: int,
    log: Log,
    steps: int = 0,
    prompt: float = 0.02,
    decay: float = 0.1,
    start: Weights | None = None,
    alone: int = 600,
    halfway: Callable[[Weights], None] | None = None,
) -> Weights:
    """Return the base, float32. seconds: for the steps, if `steps` is 0. alone: first steps on short rows and repeats.

    halfway: is called with the weights every 1,000 steps.
    """
    w = {k: v.float().to(DEVICE).clone() for k, v in start.items()} if start else initial(c, seed)
    parameters = [v.requires_grad_(True) for v in w.values()]
    rate = torch.zeros((), device=DEVICE)
    groups = [
        {"params": [v for v in parameters if v.dim() >= 2], "weight_decay": decay},
        {"params": [v for v in parameters if v.dim() < 2], "weight_decay": 0.0},
    ]
    on_gpu = DEVICE == "cuda"
    optimizer = torch.optim.AdamW(
        groups, lr=rate, betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu
    )
    rng, generator = np.random.default_rng(seed), torch.Generator(DEVICE).manual_seed(seed)
    none = torch.zeros(1, device=DEVICE)
    for p in parameters:
        p.grad = torch.zeros_like(p)

    def step(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for p in parameters:
            p.grad.zero_()
        half = working(w)
        model = Forward(c, half, plain(half))
        h = model.hidden_states(ids)
        total, count = COMPILED["cross_entropy"](h, half["lm_head.weight"], ids, weight, 1, none)
        loss = (total / count).sum()
        extra = BALANCE * COMPILED["imbalance"](c, model.routers, weight) if model.routers else 0.0
        (loss + extra).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        return loss.detach()

    run = Graphs(step, rows, log)
    steps = run.start(generator, optimizer, seconds, steps)
    log(f"base: {steps} steps")
    began = time.monotonic()
    vocabulary = c.vocab_size - 9  # without the special tokens and the tags, which come last
    for i in range(steps):
        rate.fill_(lr * cosine(i, steps, 100))
        k = int(rng.choice(len(rows.share), p=rows.share))
        k = min(k, 1) if i < alone else k
        again = k == 0 and rng.random() < (0.5 if i < alone else 0.04)
        loss = run(
            k,
            *(
                rows.repeats(k, generator, vocabulary)
                if again
                else rows.batch(k, generator, prompt)
            ),
        )
        if i % 250 == 0 or i == steps - 1 or i in (50, 100, 150):
            value = loss.item()
            kind = f"T={rows.buckets[k].ids.shape[1]}{' repeats' if again else ''}"
            log(f"base step {i} {kind} loss {value:.4f}, {time.monotonic() - began:.0f} s")
            if not math.isfinite(value):
                raise SystemExit("the loss is not finite")
            if halfway and i and i % 1000 == 0:
                halfway(w)
    return {k: v.detach() for k, v in w.items()}


def train_overlays(
    c: Any, base: Weights, rows: Rows, overlays: list[Overlay], log: Log, seed: int = 1
) -> tuple[Weights, dict[str, torch.Tensor]]:
    """Return the merged weights (linears [M, N, K], bf16) and their factors."""
    names = [n for n in linear_shapes(c) if not n.endswith(UNTOUCHED)]
    m, rank = len(overlays), max(o.rank for o in overlays)
    keep = torch.tensor([[float(r < o.rank) for r in range(rank)] for o in overlays], device=DEVICE)
    fixed = working({k: v.detach() for k, v in base.items()})
    generators = [torch.Generator().manual_seed(1000 * o.seed + 7) for o in overlays]
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    parameters: list[torch.Tensor] = []
    for n in names:
        outputs, inputs = base[n + ".weight"].shape
        a = torch.stack([torch.randn(rank, inputs, generator=g) for g in generators]).to(DEVICE)
        a = (a / math.sqrt(inputs) * keep[:, :, None]).requires_grad_(True)
        b = torch.zeros(m, outputs, rank, device=DEVICE, requires_grad=True)
        pairs[n] = (
            a,
            b,
            torch.tensor([float(o.touches(n)) for o in overlays], device=DEVICE)[:, None, None],
        )
        parameters += [a, b]
    first, second = (
        [torch.zeros_like(p) for p in parameters],
        [torch.zeros_like(p) for p in parameters],
    )
    rng, generator = np.random.default_rng(seed), torch.Generator(DEVICE).manual_seed(seed)
    rate = torch.zeros(m, 1, 1, device=DEVICE)
    least = torch.tensor([-math.log(o.enough) for o in overlays], device=DEVICE)
    unbias1, unbias2 = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
    many, losses = len(parameters), torch.zeros(m, device=DEVICE)
    for p in parameters:
        p.grad = torch.zeros_like(p)

    def merged() -> Weights:
        out = dict(fixed)
        for n in linear_shapes(c):
            key = n + ".weight"
            if n in pairs:
                a, b, on = pairs[n]
                out[key] = (fixed[key].float() + on * torch.bmm(b * keep[:, None, :], a)).to(WORK)
            else:
                out[key] = fixed[key].unsqueeze(0).expand(m, -1, -1)
        return out

    def step(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for p in parameters:
            p.grad.zero_()
        w, ids, weight = merged(), ids.repeat(m, 1), weight.repeat(m, 1)
        h = hidden_states(c, w, ids, stacked(w, m))
        total, count = COMPILED["cross_entropy"](h, w["lm_head.weight"], ids, weight, m, least)
        each = total / count
        each.sum().backward()
        with torch.no_grad():
            grads = [p.grad for p in parameters]
            norm = torch.stack([g.flatten(1).pow(2).sum(1) for g in grads]).sum(0).sqrt()
            shrink = (1 / norm.clamp(min=1.0))[:, None, None]
            torch._foreach_mul_(grads, [shrink] * many)
            torch._foreach_lerp_(first, grads, 0.1)
            torch._foreach_mul_(second, 0.98)
            torch._foreach_addcmul_(second, grads, grads, 0.02)
            root = torch._foreach_sqrt(torch._foreach_mul(second, [unbias2] * many))
            torch._foreach_add_(root, 1e-8)
            move = torch._foreach_div(first, root)
            torch._foreach_mul_(move, [rate * unbias1] * many)
            torch._foreach_sub_(parameters, move)
        losses.copy_(each.detach())
        return losses

    run = Graphs(step, rows, log)
    run.prime(generator)
    steps = [o.steps for o in overlays]
    total = max(steps)
    log(f"overlays: {total} steps")
    for x in first + second:
        x.zero_()
    with torch.no_grad():
        for _, b, _ in pairs.values():  # undo what capturing the steps changed
            b.zero_()
    began = time.monotonic()
    for i in range(total):
        rate.copy_(
            torch.tensor(
                [o.lr * cosine(i, s, 30) for o, s in zip(overlays, steps, strict=True)],
                device=DEVICE,
            )[:, None, None]
        )
        unbias1.fill_(1 / (1 - 0.9 ** (i + 1)))
        unbias2.fill_(1 / (1 - 0.98 ** (i + 1)))
        k = int(rng.choice(len(rows.share), p=rows.share))
        each = run(k, *rows.batch(k, generator, 0.0))
        if i % 200 == 0 or i == total - 1:
            log(
                f"overlay step {i} loss "
                + " ".join(f"{x:.3f}" for x in each.tolist())
                + f", {time.monotonic() - began:.0f} s"
            )
    with torch.no_grad():
        factors = {}
        for n, (a, b, on) in pairs.items():
            factors |= {
                f"{n}.a": a.detach() * keep[:, :, None],
                f"{n}.b": (b * on * keep[:, None, :]).detach(),
            }
        return merged(), factors
