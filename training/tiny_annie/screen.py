"""A quick screen of many models at once: whose every learned token is the most probable one, in bf16 and under NVFP4.

Teacher-forced: where all tokens of an answer are right, greedy decoding gives that answer. The verdict itself comes from the
package's own evaluation and from servers; this only sorts the regimes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from batches import Rows
from forward import (
    DEVICE,
    PARTS,
    WORK,
    Linear,
    Weights,
    hidden_states,
    linear_shapes,
    stacked,
    working,
)
from train import UNTOUCHED

FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
)
EDGES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=DEVICE)
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0], device=DEVICE)


@torch.no_grad()
def right(
    c: Any, w: Weights, m: int, lin: Linear, rows: Rows, tokens: int = 1 << 17
) -> dict[str, np.ndarray]:
    """Return, per category, how many rows each model has right: arrays [m] of counts, and "n"."""
    out: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(m + 1, int))
    for b in rows.buckets:
        n = max(1, tokens // b.ids.shape[1] // m)
        for j in range(0, len(b.ids), n):
            ids, learned = b.ids[j : j + n].long(), b.learned[j : j + n][:, 1:] == 2
            h = hidden_states(c, w, ids.repeat(m, 1), lin, PARTS)
            best = (h[:, :-1] @ w["lm_head.weight"].t()).argmax(-1).view(m, len(ids), -1)
            ok = ((best == ids[:, 1:]) | ~learned).all(-1).cpu().numpy()
            for i in range(len(ids)):
                out[str(rows.category[b.index[j + i]])] += np.append(ok[:, i], 1)
    return dict(out)


def table(name: str, counts: dict[str, np.ndarray], labels: list[str]) -> str:
    lines = [f"{name}: " + " ".join(f"{k}/{v[-1]}" for k, v in sorted(counts.items()))]
    for i, label in enumerate(labels):
        lines.append(f"  {label}: " + " ".join(str(v[i]) for _, v in sorted(counts.items())))
    return "\n".join(lines)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).float()


def fake_quantized(x: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    """Return x [..., K] rounded to NVFP4 in blocks of 16 (ties toward zero, which is close enough for a screen)."""
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    scale = (
        e4m3((blocks.abs().amax(-1, keepdim=True) / (6 * tensor_scale)).clamp(2**-9, 448))
        * tensor_scale
    )
    scaled = blocks / scale
    return (VALUES[torch.bucketize(scaled.abs(), EDGES)] * scaled.sign() * scale).reshape(x.shape)


@torch.no_grad()
def quantized(
    c: Any, w: Weights, m: int, rows: Rows, left: tuple[str, ...] = ()
) -> tuple[Weights, Callable[[bool], Linear]]:
    """Return the weights after naive NVFP4 and their linears, W4A16 or (True) W4A4. left: linears kept in 16 bits."""
    names = [
        n for n in linear_shapes(c) if not n.endswith(UNTOUCHED) and not any(x in n for x in left)
    ]
    largest = {n: torch.zeros(m, device=DEVICE) for n in names}
    plain = stacked(w, m)

    def with_largest(name: str, x: torch.Tensor) -> torch.Tensor:
        if name in largest:
            largest[name] = torch.maximum(largest[name], x.float().abs().reshape(m, -1).amax(1))
        return plain(name, x)

    generator = torch.Generator(DEVICE).manual_seed(5)
    for k in (0, 1, 1, 2):
        ids, _ = rows.batch(k, generator, 0.0)
        hidden_states(c, w, ids[:16].repeat(m, 1), with_largest, PARTS)
    weight_max = {n: w[n + ".weight"].float().abs().flatten(1).amax(1) for n in names}
    for group in FUSED:
        for i in range(len(c.layer_types)):
            members = [n for n in (f"model.layers.{i}.{x}" for x in group) if n in weight_max]
            if members:
                most = torch.stack([weight_max[x] for x in members]).amax(0)
                weight_max |= dict.fromkeys(members, most)
    q = dict(w)
    for n in names:
        q[n + ".weight"] = fake_quantized(
            w[n + ".weight"].float(), (weight_max[n] / 2688)[:, None, None, None]
        ).to(WORK)

    def linears(activations: bool) -> Linear:
        inner = stacked(q, m)

        def lin(name: str, x: torch.Tensor) -> torch.Tensor:
            if activations and name in largest:
                parts = x.float().view(m, x.shape[0] // m, *x.shape[1:])
                x = (
                    fake_quantized(parts, (largest[name] / 2688).view(m, 1, 1, 1, 1))
                    .to(x.dtype)
                    .view(x.shape)
                )
            return inner(name, x)

        return lin

    return q, linears


def stack_of_one(c: Any, w: Weights) -> Weights:
    """Return one model's weights as those of a stack of one."""
    linears = {n + ".weight" for n in linear_shapes(c)}
    return {k: v.unsqueeze(0) if k in linears else v for k, v in working(w).items()}


def screens(c: Any, w: Weights, gate: Rows, rows: Rows, labels: list[str]) -> Iterator[str]:
    """Yield the tables of stacked models, one per label: bf16, naive W4A4, naive W4A16. rows: for calibration."""
    m = len(labels)
    yield table("bf16", right(c, w, m, stacked(w, m), gate), labels)
    q, linear = quantized(c, w, m, rows)
    yield table("naive W4A4", right(c, q, m, linear(True), gate), labels)
    yield table("naive W4A16", right(c, q, m, linear(False), gate), labels)
