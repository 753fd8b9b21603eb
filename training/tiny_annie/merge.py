"""The overlays that sweep.py stores, merged into weights."""

from __future__ import annotations

from forward import Weights


def only(overlays: dict[str, Weights], part: str) -> Weights:
    """Return the overlay whose name is `part`, or the only one whose name has `part` in it."""
    names = [part] if part in overlays else [name for name in overlays if part in name]
    if len(names) != 1:
        raise SystemExit(
            f"expected one overlay with {part!r} in its name, got {names or list(overlays)}"
        )
    return overlays[names[0]]


def merged(weights: Weights, factors: Weights) -> Weights:
    """Return the weights with an overlay added, bfloat16."""
    out = dict(weights)
    for name in sorted({key[:-2] for key in factors}):
        key, change = f"{name}.weight", factors[f"{name}.b"].float() @ factors[f"{name}.a"].float()
        out[key] = (weights[key].float() + change).bfloat16()
    return out
