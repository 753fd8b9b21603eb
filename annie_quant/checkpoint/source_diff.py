"""Compare a checkpoint with the bf16 checkpoint it was made from: the error of each tensor, and what was changed."""

from __future__ import annotations

import numpy as np

from annie_quant import models
from annie_quant.checkpoint import folding_check
from annie_quant.checkpoint.linears import Linear, is_linear, owned_tensors
from annie_quant.checkpoint.shards import ModelFolder, ShardError
from annie_quant.documents import Audit

# NVFP4 on Gaussian weights: .095 by amax, .081 by the best search; Student-t and outliers stay under .13.
SUSPICIOUS_ERROR = 0.2
SAME_VALUES = 2**-8  # relative error of a tensor that was rounded to another 16-bit type
PLAIN_FOLD_ERROR = 0.02  # of an unquantized linear with folded scales, against the fit
PIECE = 1 << 20  # elements


def compare_to_source(folder: ModelFolder, source: ModelFolder, linears: dict[str, Linear], audit: Audit) -> None:
    """Set `rel_l2` in the audit's rows, and add findings where a tensor is not what the source makes of it."""
    rows = {row.name: row for row in audit.tensors}
    changed = {models.layer_of(n) for n in changed_norms(folder, source)}
    for name, linear in linears.items():
        original = source.find(f"{name}.weight")
        if original is None:
            audit.add("not_in_source", name, f"{name}.weight: the source has no such tensor")
            continue
        try:
            if linear.shape(folder) != source.info(original).shape:
                raise ShardError(
                    "source_shape",
                    f"{name}: {list(linear.shape(folder))} here, {list(source.info(original).shape)} in the source",
                    tensor=name,
                )
            ours, theirs = linear.dequantize(folder), source.tensor(original)
        except ShardError as error:
            if not audit.has(error.code, error.tensor or name):
                audit.add(error.code, error.tensor or name, error.message)
            continue
        if audit.has("block_scale_nan", linear.block_scale or ""):
            ours = np.where(np.isnan(ours), theirs.astype(np.float32), ours)  # a finding already: check the rest
        distance = rows[name].rel_l2 = rel_l2(ours, theirs)
        if not distance < SUSPICIOUS_ERROR:
            if is_scaled(ours, theirs, SUSPICIOUS_ERROR):
                changed.add(models.layer_of(name))
            else:
                audit.fault("large_error", name, f"relative error {distance:.3g} against the source")
        folder.release(linear.weight)
        source.release(original)
    changed |= compare_plain(folder, source, linears, audit)
    folding_check.check(folder, source, linears, changed, audit)


def is_scaled(ours: np.ndarray, theirs: np.ndarray, error: float) -> bool:
    """Return whether a matrix is the source's with scaled rows and columns, up to a relative error."""
    theirs = theirs.astype(np.float32)
    if not np.isfinite(ours).all():
        return False
    r, c = folding_check.fit(ours, theirs)
    return rel_l2(ours, r[:, None] * theirs * c) < error


def compare_plain(folder: ModelFolder, source: ModelFolder, linears: dict[str, Linear], audit: Audit) -> set[str]:
    """Compare the tensors that are not quantized: they equal the source's, or a fold scaled them.

    Returns the layers in which a fold may have scaled them.
    """
    owned, scaled = owned_tensors(linears.values()), set()
    biases = {f"{site.producer}.bias" for site in folder.family.inputs if site.fold == "rows"}
    norms = {f"{norm}.weight" for norm in folder.family.norms}
    for name in folder:
        original = source.find(name)
        if name in owned or original is None:
            continue
        if folder.info(name).shape != source.info(original).shape:
            check_shape(folder, name, source, original, audit)
            continue
        if folder.family.vision in name or same_bytes(folder, name, source, original):
            continue  # vision is compared byte for byte (auxiliary_checks)
        ours, theirs = folder.tensor(name).astype(np.float32), source.tensor(original).astype(np.float32)
        error = rel_l2(ours, theirs)
        if error < SAME_VALUES:
            continue
        inside = models.in_layer(name)
        # Norms and biases are checked together with the linears that read them.
        if inside in norms | biases or (
            inside and is_linear(name, ours.shape) and is_scaled(ours, theirs, PLAIN_FOLD_ERROR)
        ):
            scaled.add(models.layer_of(name))
        else:
            audit.fault("differs_from_source", name, f"not quantized, and differs from the source by {error:.3g}")
    return scaled


def check_shape(folder: ModelFolder, name: str, source: ModelFolder, original: str, audit: Audit) -> None:
    """Check that a tensor which is not quantized has as many elements as the source's; auxiliary_checks has the other parts."""
    ours, theirs = folder.info(name), source.info(original)
    if ours.elements != theirs.elements and not folder.family.is_auxiliary(name):
        audit.fault("source_shape", name, f"{list(ours.shape)} here, {list(theirs.shape)} in the source")


def changed_norms(folder: ModelFolder, source: ModelFolder) -> list[str]:
    """Return the norms before linears whose values are not the source's."""
    norms = {f"{norm}.weight" for norm in folder.family.norms}
    changed = []
    for name in folder:
        original = source.find(name) if models.in_layer(name) in norms else None
        if not original or folder.info(name).shape != source.info(original).shape:
            continue
        if rel_l2(_float32(folder, name), _float32(source, original)) >= SAME_VALUES:
            changed.append(name)
    return changed


def _float32(folder: ModelFolder, name: str) -> np.ndarray:
    return folder.tensor(name).astype(np.float32)


def rel_l2(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the relative L2 distance of two arrays; NaN where `ours` holds NaN.

    Pieces are summed in float32 and added up in float64: exact to five digits, and as fast as a disk reads.
    """
    a, b = ours.reshape(-1), theirs.reshape(-1)
    distance = norm = 0.0
    for start in range(0, a.size, PIECE):
        piece = b[start : start + PIECE].astype(np.float32, copy=False)
        difference = a[start : start + PIECE] - piece
        distance += float(np.dot(difference, difference))
        norm += float(np.dot(piece, piece))
    return (distance / norm) ** 0.5 if norm else float(distance != 0)


def same_bytes(folder: ModelFolder, name: str, source: ModelFolder, original: str) -> bool:
    """Return whether two tensors of one shape are equal byte for byte, without copying either."""
    if folder.info(name).dtype != source.info(original).dtype:
        return False
    pairs = zip(folder.pieces(name), source.pieces(original), strict=True)
    return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs)
