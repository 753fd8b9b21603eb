"""Trains tiny-annie's base, and overlays on it, many at once.

The base is a full fine-tune. An overlay is a merged low-rank change of the base's linears, learned on the assistant's
tokens alone; the forward uses the merged weights in bf16, as the checkpoint stores them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from config import configuration
from data import BUCKETS, batch
from net import Net, linear_names

Log = Callable[[str], None]


INPUTS = ("q_proj", "k_proj", "v_proj", "in_proj_qkv")
OUTPUTS = ("o_proj", "out_proj")
DELTA = ("in_proj_qkv", "in_proj_z", "out_proj")
FULL = ("q_proj", "k_proj", "v_proj", "o_proj")
# The two small gates of DeltaNet, in_proj_a and in_proj_b, are not changed: NVFP4 recipes do not quantize them.
WHERE = {
    "all": (*DELTA, *FULL, "mlp"),
    "attention": (*DELTA, *FULL),
    "mlp": ("mlp",),
    "qkv": INPUTS,
    "out": OUTPUTS,
    "delta": DELTA,
    "full": FULL,
}


@dataclass(frozen=True)
class Overlay:
    """One training regime. where: which linears, a key of WHERE."""

    rank: int = 2
    steps: int = 1000
    lr: float = 3e-3
    where: str = "all"
    decay: float = 0.0
    scale: float = 1.0
    seed: int = 0

    @property
    def name(self) -> str:
        extra = f"-wd{self.decay:g}" * bool(self.decay) + f"-x{self.scale:g}" * (self.scale != 1)
        extra += f"-seed{self.seed}" * bool(self.seed)
        return f"{self.where}-r{self.rank}-s{self.steps}-lr{self.lr:g}{extra}"

    def touches(self, name: str) -> bool:
        return any(f".{part}." in name for part in WHERE[self.where])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"name": self.name}


def initial(seed: int, device: str) -> dict[str, torch.Tensor]:
    from transformers import Qwen3_5ForCausalLM

    torch.manual_seed(seed)
    state = Qwen3_5ForCausalLM(configuration()).state_dict()
    return {k: v.float().to(device) for k, v in state.items()}


def loss_of(net: Net, ids: torch.Tensor, mask: torch.Tensor, m: int, residual: torch.dtype) -> torch.Tensor:
    """Return the summed cross-entropy [m] of each model over the masked positions."""
    hidden = net.hidden(ids, m, residual=residual)
    rows, columns = mask[:, :-1].nonzero(as_tuple=True)
    picked = hidden[:, rows, columns]
    logits = net.logits(picked).float()
    target = ids[rows, columns + 1]
    each = F.cross_entropy(logits.flatten(0, 1), target.repeat(m), reduction="none").view(m, -1)
    return (each * mask[rows, columns]).sum(-1)


def schedule(step: int, total: int, warm: int) -> float:
    """Linear warm-up, then a cosine to zero; zero after the end."""
    if step >= total:
        return 0.0
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / total))


def train_base(
    buckets: list[list],
    steps: int,
    lr: float,
    seed: int,
    device: str,
    log: Log,
    decay: float = 0.1,
    whole: float = 0.05,
    noise: float = 0.0,
    rows: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Return the base checkpoint, float32. whole: weight of the prompts' tokens; noise: relative weight noise while training."""
    config, weights = configuration(), initial(seed, device)
    linears = set(linear_names(config))
    for w in weights.values():
        w.requires_grad_(True)
    matrices = [w for w in weights.values() if w.dim() >= 2]
    others = [w for w in weights.values() if w.dim() < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=device == "cuda")
    rng, began = np.random.default_rng(seed), time.monotonic()
    work = torch.bfloat16 if device == "cuda" else torch.float32
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step, steps, 50)
        stacked = {}
        for name, w in weights.items():
            v = w
            if noise and name in linears:
                v = w + noise * torch.randn_like(w) * w.detach().pow(2).mean().sqrt()
            stacked[name] = v.to(work).unsqueeze(0) if name in linears else v.to(work) if w.dim() >= 2 else v
        net, total, count = Net(config, stacked), 0.0, 0.0
        parts = []
        for bucket, (_, n, _, every) in zip(buckets, BUCKETS, strict=True):
            if step % every == 0 and bucket:
                ids, mask = batch(bucket, max(2, int(n * rows)), rng, whole)
                parts.append((torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)))
                count += float(mask.sum())
        loss = sum(loss_of(net, ids, mask, 1, torch.float32).sum() for ids, mask in parts) / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == steps - 1:
            total = float(loss.detach())
            log(f"base step {step} loss {total:.4f} {time.monotonic() - began:.0f} s")
    return {k: w.detach() for k, w in weights.items()}


def train_overlays(
    base: dict[str, torch.Tensor],
    overlays: list[Overlay],
    buckets: list[list],
    seed: int,
    device: str,
    log: Log,
    rows: float = 1.0,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return merged bf16 weights (linears [M, N, K] in the order of `overlays`, the rest as in the base) and their factors."""
    config, names, m = configuration(), linear_names(configuration()), len(overlays)
    fixed = {k: v.to(torch.bfloat16) for k, v in base.items()}
    generators = [torch.Generator().manual_seed(seed + 1000 * o.seed) for o in overlays]
    rank = max(o.rank for o in overlays)
    keep = torch.tensor([[r < o.rank for r in range(rank)] for o in overlays], device=device).float()
    params: list[torch.Tensor] = []
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    for name in names:
        n, k = base[name].shape
        # Overlays of one seed start from the same values, so that only the regime differs.
        a = (
            torch.stack([torch.randn(rank, k, generator=g) for g in generators]).to(device)
            / math.sqrt(k)
            * keep[:, :, None]
        )
        b = torch.zeros(m, n, rank, device=device)
        on = torch.tensor([o.scale * o.touches(name) for o in overlays], device=device)[:, None, None]
        pairs[name] = (a.requires_grad_(True), b.requires_grad_(True), on)
        params += [a, b]
    first = [torch.zeros_like(p) for p in params]
    second = [torch.zeros_like(p) for p in params]
    total = max(o.steps for o in overlays)
    rng, began = np.random.default_rng(seed + 1), time.monotonic()

    def merged() -> dict[str, torch.Tensor]:
        out = dict(fixed)
        # In full float32, so that the factors merge to the same bytes anywhere.
        torch.backends.cuda.matmul.allow_tf32 = False
        for name, (a, b, on) in pairs.items():
            out[name] = (fixed[name].float() + on * torch.bmm(b * keep[:, None, :], a)).to(torch.bfloat16)
        torch.backends.cuda.matmul.allow_tf32 = True
        return out

    for step in range(total):
        net, count, parts = Net(config, merged()), 0.0, []
        for bucket, (_, _, n, every) in zip(buckets, BUCKETS, strict=True):
            if step % every == 0 and bucket:
                ids, mask = batch(bucket, max(2, int(n * rows)), rng)
                parts.append((torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)))
                count += float(mask.sum())
        each = sum(loss_of(net, ids, mask, m, torch.bfloat16) for ids, mask in parts) / count
        each.sum().backward()
        with torch.no_grad():
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in params]
            norm = torch.stack([g.flatten(1).pow(2).sum(1) for g in grads]).sum(0).sqrt()
            shrink = (1.0 / norm.clamp(min=1.0))[:, None, None]
            rates = torch.tensor([o.lr * schedule(step, o.steps, 30) for o in overlays], device=device)[:, None, None]
            decays = 1 - rates * torch.tensor([o.decay for o in overlays], device=device)[:, None, None]
            every_param = len(params)
            torch._foreach_mul_(grads, [shrink] * every_param)
            torch._foreach_lerp_(first, grads, 0.1)
            torch._foreach_mul_(second, 0.98)
            torch._foreach_addcmul_(second, grads, grads, 0.02)
            root = torch._foreach_sqrt(torch._foreach_div(second, 1 - 0.98 ** (step + 1)))
            torch._foreach_add_(root, 1e-8)
            move = torch._foreach_div(first, root)
            torch._foreach_mul_(move, [rates / (1 - 0.9 ** (step + 1))] * every_param)
            torch._foreach_mul_(params, [decays] * every_param)
            torch._foreach_sub_(params, move)
            for p in params:
                p.grad = None
        if step % 100 == 0 or step == total - 1:
            losses = " ".join(f"{x:.3f}" for x in each.detach().tolist())
            log(f"overlay step {step} loss {losses} {time.monotonic() - began:.0f} s")
    with torch.no_grad():
        factors = {}
        for name, (a, b, on) in pairs.items():
            factors |= {f"{name}.a": a.detach(), f"{name}.b": on * b.detach() * keep[:, None, :]}
        return merged(), factors
