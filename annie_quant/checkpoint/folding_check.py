"""Check that scales which were moved between tensors (AWQ, SmoothQuant) cancel, so that the model computes the same.

A fold divides what produces a linear's input by s and multiplies the linear's columns by s. Fitting
w' ~ diag(r) w diag(c) to each linear recovers both; a uniform factor may be part of r or of c, so the norm before the
linear decides which. Where a norm computes (1 + w) the right fold is (1 + w) / s - 1; ModelOpt 0.47's AWQ export writes
w / s for Qwen3.5 (modelopt/torch/export/quant_utils.py lists other models' norms only).
"""

from __future__ import annotations

import numpy as np

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.models import LinearInput
from annie_quant.schema import Audit

Factors = dict[str, tuple[np.ndarray, np.ndarray]]  # linear → row factors r, column factors c

MIN_COSINE = 0.9  # between a fitted column and the source's; 4-bit rounding alone leaves about .995
TOLERANCE = 0.025  # relative distance of gains; those fitted to rows of 4-bit weights are exact to about one percent


def fit(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return row and column factors r, c of ours ~ diag(r) theirs diag(c), by alternating least squares.

    The median of r is 1.
    """
    r, c = np.ones(theirs.shape[0]), np.ones(theirs.shape[1])
    for _ in range(4):
        scaled = theirs * r[:, None]
        c = ratio(np.einsum("ij,ij->j", ours, scaled), np.einsum("ij,ij->j", scaled, scaled))
        scaled = theirs * c
        r = ratio(np.einsum("ij,ij->i", ours, scaled), np.einsum("ij,ij->i", scaled, scaled))
    median = np.median(r) or 1.0
    return r / median, c * median


def certain(ours: np.ndarray, theirs: np.ndarray, r: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return fitted factors, NaN for rows and columns that 4-bit rounding left too little of to fit a factor.

    AWQ makes the columns of weak inputs so small that their blocks round them to zero.
    """
    scaled = r[:, None] * theirs * c
    out = []
    for axis, factors in ((1, r), (0, c)):
        product, norms = (ours * scaled).sum(axis), np.sqrt((ours**2).sum(axis) * (scaled**2).sum(axis))
        out.append(np.where((norms > 0) & (product >= MIN_COSINE * norms), factors, np.nan))
    return out[0], out[1]


def ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """Return top / bottom, and 1 where bottom is 0."""
    return np.divide(top, bottom, out=np.ones(len(top)), where=bottom > 0)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the distance of two arrays of gains, relative to the second; NaN stands for an unknown gain."""
    known = ~np.isnan(a)
    return float(np.linalg.norm((a - b)[known]) / max(float(np.linalg.norm(b[known])), 1e-30))


def uniform_factor(a: np.ndarray, b: np.ndarray) -> float:
    """Return the median factor between two vectors of gains."""
    known = ~np.isnan(a)
    return float(np.median(ratio((a * b)[known], (b * b)[known]))) if known.any() else 1.0


def check(folder: ModelFolder, source: ModelFolder, factors: Factors, layers: set[str], audit: Audit) -> None:
    """Add a finding for every moved scale that its neighbour does not cancel.

    factors: of the linears that are not the source's.  layers: names of the layers to check.
    """
    inputs = folder.family.inputs
    for layer in sorted(layers - {""}):
        rows: dict[str, np.ndarray] = {}
        for site in inputs:
            if site.fold == "norm":
                rows |= check_norm(folder, source, layer, site, factors, audit)
        for site in inputs:
            if site.fold == "rows":
                check_rows(source, layer, site, rows, factors, audit)
        for name, r in rows.items():
            if distance(r, np.ones_like(r)) > TOLERANCE:
                audit.fault(
                    "large_error",
                    name,
                    f"its rows are {np.nanmedian(r):.3g} times the source's, and nothing cancels that",
                )


def check_norm(
    folder: ModelFolder, source: ModelFolder, layer: str, site: LinearInput, factors: Factors, audit: Audit
) -> dict[str, np.ndarray]:
    """Check that norm gain times column factor equals the source's gain for every linear that reads the norm.

    Returns the row factors of the linears that do.
    """
    norm = f"{layer}.{site.producer}.weight"
    original = source.find(norm)
    if norm not in folder or original is None or folder.info(norm).shape != source.info(original).shape:
        return {}
    ours, theirs = folder.tensor(norm).astype(np.float64), source.tensor(original).astype(np.float64)
    one = 1.0 if folder.family.adds_one(norm) else 0.0
    rows = {}
    for reader in (f"{layer}.{name}" for name in site.linears):
        if site.per_head:
            columns = factors[reader][1] if reader in factors else np.ones_like(theirs)
            gain = (one + ours) * columns.reshape(-1, len(theirs))
            if distance(gain, np.broadcast_to(one + theirs, gain.shape)) <= TOLERANCE:
                continue
        elif reader in factors:
            r, c = factors[reader]
            uniform = uniform_factor((one + ours) * c, one + theirs)
            if distance((one + ours) * c / uniform, one + theirs) <= TOLERANCE:
                rows[reader] = r * uniform
                continue
            if one and distance(ours * c / uniform_factor(ours * c, theirs), theirs) <= TOLERANCE:
                audit.fault(
                    "fold_plus_one", norm, "folded as w/s, and this norm computes (1 + w), so (1 + w)/s - 1 is right"
                )
                return {}
        elif f"{reader}.weight" not in folder or distance(one + ours, one + theirs) <= TOLERANCE:
            continue
        audit.fault("fold_mismatch", norm, f"does not cancel the input scale of {reader}")
        return {}
    return rows


def check_rows(
    source: ModelFolder, layer: str, site: LinearInput, rows: dict[str, np.ndarray], factors: Factors, audit: Audit
) -> None:
    """Check that a producer's row factors cancel the column factors of the linear that reads them.

    Takes the producer out of `rows`.
    """
    producer = f"{layer}.{site.producer}"
    produced = rows.pop(producer, None)
    for consumer in (f"{layer}.{name}" for name in site.linears):
        columns = factors[consumer][1] if consumer in factors else None
        if produced is None and columns is None:
            continue
        gain = rows_as_columns(produced, consumer, source) * (1 if columns is None else columns)
        if distance(gain, np.ones_like(gain)) > TOLERANCE:
            audit.fault("fold_mismatch", consumer, f"its input scale is not cancelled by the rows of {producer}")


def rows_as_columns(rows: np.ndarray | None, consumer: str, source: ModelFolder) -> np.ndarray:
    """Return a producer's row factors as its consumer's columns: value heads are repeated for grouped queries."""
    width = source.info(source.find(f"{consumer}.weight") or "").shape[1]
    if rows is None:
        return np.ones(width)
    head = int(source.text_config.get("head_dim") or len(rows))
    if len(rows) == width or len(rows) % head:
        return rows
    return np.repeat(rows.reshape(-1, head), width // len(rows), axis=0).reshape(-1)
