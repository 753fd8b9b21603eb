"""Fold an activation scale s into the tensors that produce the activation, exactly.

A linear computes W x. With x' = x / s from its producer and W' = W diag(s) the result is the same, and both may be easier
to round. What produces an activation, and how it takes a scale, is in the family's description (annie_quant.models):
norms (ModelOpt 0.47 writes w / s where Qwen3.5's norms compute 1 + w), and the rows of a linear.
A norm's weight is stored in 16 bits, so the new weight is rounded first, and s is what it then divides by: the fold is
exact in what is stored. Linears that read the same activation and are not quantized take s, too.
"""

from __future__ import annotations

import torch

from annie_quant.models import Family, LinearInput

MAX_ROUNDING = 1.25  # an element whose rounded norm divides by more or less than s by this factor takes no scale


def shape_of_scale(site: LinearInput, s: torch.Tensor, producer: torch.Tensor) -> torch.Tensor:
    """Return s as it can be folded: heads that share a norm's weight get the geometric mean of their scales."""
    return s.reshape(-1, producer.numel()).log().mean(0).exp() if site.per_head else s


def fold(
    weights: dict[str, torch.Tensor], family: Family, site: LinearInput, s: torch.Tensor, stored: torch.dtype | None
) -> torch.Tensor:
    """Fold s (float32, of shape_of_scale) into `weights`, the layer's tensors in float32, in place.

    stored: the dtype that a norm is written in, or None where it is not rounded.
    Returns the scale that was folded, [K] of the linears.
    """
    name = f"{site.producer}.weight"
    producer = weights[name]
    if site.fold == "rows":
        weights[name] = producer / s[:, None]
        if (bias := f"{site.producer}.bias") in weights:
            weights[bias] = weights[bias] / s
    else:
        one = 1.0 if family.adds_one(name) else 0.0
        new = (producer + one) / s - one
        new = new if stored is None else new.to(stored).float()
        exact = (producer + one) / (new + one)
        valid = torch.isfinite(exact) & (exact > s / MAX_ROUNDING) & (exact < s * MAX_ROUNDING)
        weights[name] = torch.where(valid, new, producer)
        s = torch.where(valid, exact, torch.ones_like(s))
    for reader in site.linears:
        columns = weights[f"{reader}.weight"].shape[1]
        weights[f"{reader}.weight"] = weights[f"{reader}.weight"] * s.repeat(columns // len(s))
    return s.repeat(weights[f"{site.linears[0]}.weight"].shape[1] // len(s))
