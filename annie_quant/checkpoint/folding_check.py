"""Whether scales that were moved between tensors (AWQ, SmoothQuant) cancel, so that the function is the source's.

A fold divides what produces a linear's input by s and multiplies the linear's columns by s. Fitting
w' ~ diag(r) w diag(c) to each linear brings both to light; a uniform factor may stand in r or in c, so the norm before
a linear decides where it belongs. Qwen3.5's norms compute (1 + w): the right fold is (1 + w)/s - 1, and ModelOpt 0.47's
AWQ export writes w/s (modelopt/torch/export/quant_utils.py lists other models' norms only).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from annie_quant.checkpoint.shards import ModelFolder

Factors = dict[str, tuple[np.ndarray, np.ndarray]]  # linear → row factors r, column factors c
Find = Callable[[str, ModelFolder], "str | None"]
Add = Callable[[str, str, str], None]

CANCELS = 0.025  # relative distance of gains: fitted from rows of four-bit weights they are good to about one percent
NORM_FEEDS = {
    "input_layernorm": (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "linear_attn.in_proj_qkv", "linear_attn.in_proj_z",
        "linear_attn.in_proj_a", "linear_attn.in_proj_b",
    ),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}  # fmt: skip
# producer's rows → consumer's columns
PAIRS = (("mlp.up_proj", "mlp.down_proj"), ("self_attn.v_proj", "self_attn.o_proj"))


def layer_of(name: str) -> str:
    """The layer that a tensor or module belongs to ("model.layers.3"), or "" outside of layers."""
    match = re.match(r"(.*\blayers\.\d+)\.", name)
    return match[1] if match else ""


def fit(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and column factors r, c of ours ~ diag(r) theirs diag(c), by alternating least squares; median of r is 1."""
    r, c = np.ones(theirs.shape[0]), np.ones(theirs.shape[1])
    for _ in range(4):
        scaled = theirs * r[:, None]
        c = ratio(np.einsum("ij,ij->j", ours, scaled), np.einsum("ij,ij->j", scaled, scaled))
        scaled = theirs * c
        r = ratio(np.einsum("ij,ij->i", ours, scaled), np.einsum("ij,ij->i", scaled, scaled))
    middle = np.median(r) or 1.0
    return r / middle, c * middle


def ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """top / bottom, and 1 where nothing can be said."""
    return np.divide(top, bottom, out=np.ones(len(top)), where=bottom > 0)


def off(a: np.ndarray, b: np.ndarray) -> float:
    """How far two vectors of gains are apart, relative to the second."""
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def check(folder: ModelFolder, source: ModelFolder, factors: Factors, layers: set[str], find: Find, add: Add) -> None:
    """Every scale that was moved must be taken back by its neighbour; what does not cancel is named."""
    for layer in sorted(layers - {""}):
        rows: dict[str, np.ndarray] = {}
        for norm, readers in NORM_FEEDS.items():
            rows |= behind_norm(
                folder, source, f"{layer}.{norm}.weight", [f"{layer}.{r}" for r in readers], factors, find, add
            )
        behind_gated_norm(folder, source, layer, factors, find, add)
        for producer, consumer in ((f"{layer}.{a}", f"{layer}.{b}") for a, b in PAIRS):
            made = rows.pop(producer, None)
            taken = factors[consumer][1] if consumer in factors else None
            if made is None and taken is None:
                continue
            gain = over_heads(made, consumer, source, find) * (1 if taken is None else taken)
            if off(gain, np.ones_like(gain)) > CANCELS:
                add("fold_wrong", consumer, f"{consumer}: its input scale is not taken back by the rows of {producer}")
        for name, r in rows.items():
            if off(r, np.ones_like(r)) > CANCELS:
                add(
                    "large_error",
                    name,
                    f"{name}: its rows are {np.median(r):.3g} times the source's, and nothing takes that back",
                )


def over_heads(made: np.ndarray | None, consumer: str, source: ModelFolder, find: Find) -> np.ndarray:
    """A producer's row factors as its consumer's columns see them: value heads are repeated for grouped queries."""
    width = source.info(find(f"{consumer}.weight", source) or "").shape[1]
    if made is None:
        return np.ones(width)
    head = int(source.text_config.get("head_dim") or len(made))
    if len(made) == width or len(made) % head:
        return made
    return np.repeat(made.reshape(-1, head), width // len(made), axis=0).reshape(-1)


def behind_norm(
    folder: ModelFolder, source: ModelFolder, norm: str, readers: list[str], factors: Factors, find: Find, add: Add
) -> dict[str, np.ndarray]:
    """(1 + w') c must be (1 + w) for every linear that reads the norm. Returns the readers' row factors."""
    wanted = find(norm, source)
    if norm not in folder or wanted is None:
        return {}
    ours, theirs = folder.tensor(norm).astype(np.float64), source.tensor(wanted).astype(np.float64)
    rows = {}
    for reader in [r for r in readers if r in factors or f"{r}.weight" in folder]:
        r, c = factors.get(reader, (np.ones(1), np.ones_like(theirs)))
        uniform = middle((1 + ours) * c, 1 + theirs) if reader in factors else 1.0
        if off((1 + ours) * c / uniform, 1 + theirs) <= CANCELS:
            if reader in factors:
                rows[reader] = r * uniform
            continue
        if reader in factors and off(ours * c / middle(ours * c, theirs), theirs) <= CANCELS:
            add("fold_plus_one", norm, f"{norm}: folded as w/s, and this norm computes (1 + w): (1 + w)/s - 1 is right")
        else:
            add("fold_wrong", norm, f"{norm}: does not take back the input scale of {reader}")
        return {}
    return rows


def behind_gated_norm(
    folder: ModelFolder, source: ModelFolder, layer: str, factors: Factors, find: Find, add: Add
) -> None:
    """DeltaNet's gated norm is an ordinary one, shared by all value heads: w' c must be w in each."""
    norm, reader = f"{layer}.linear_attn.norm.weight", f"{layer}.linear_attn.out_proj"
    wanted = find(norm, source)
    if norm not in folder or wanted is None:
        return
    ours, theirs = folder.tensor(norm).astype(np.float64), source.tensor(wanted).astype(np.float64)
    c = factors[reader][1] if reader in factors else np.ones_like(theirs)
    heads = c.reshape(-1, len(theirs))
    if off(ours * heads, np.broadcast_to(theirs, heads.shape)) > CANCELS:
        add("fold_wrong", norm, f"{norm}: does not take back the input scale of {reader}")


def middle(a: np.ndarray, b: np.ndarray) -> float:
    """The uniform factor between two vectors of gains."""
    return float(np.median(ratio(a * b, b * b))) or 1.0
