"""Compare a checkpoint with the bf16 checkpoint it was made from.

The error of each tensor, and unexpected changes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from annie_quant import models
from annie_quant.checkpoint.checks import fault, finding_of, folds
from annie_quant.checkpoint.linears import Linear, is_linear, weight_name
from annie_quant.checkpoint.shards import ModelFolder, ShardError, ValuesUnread
from annie_quant.documents import Finding

if TYPE_CHECKING:
    from annie_quant.checkpoint.dialects import QuantizedFolder

# NVFP4 on Gaussian weights: .095 by amax, .081 by the best search; Student-t and outliers stay
# under .13.
SUSPICIOUS_ERROR = 0.2
SAME_VALUES = 2**-8  # relative error of a tensor that was rounded to another 16-bit type
PLAIN_FOLD_ERROR = 0.02  # of an unquantized linear with folded scales, against the fit
# Largest change of a norm that is tuned, relative to its gain or to a tenth of the mean gain: 2 % (quantize/norm_tuning.py) and
# the rounding to 16 bits.
MAX_TUNED_CHANGE = 0.02 + 2**-7
PIECE = 1 << 20  # elements


@dataclass(frozen=True)
class SourceDifferences:
    """How a checkpoint's tensors differ from its source's.

    rel_l2: quantized linear → relative L2 error of its values.
    findings: tensors that do not follow from the source.
    scaled: layers in which scales were moved between tensors.
    tuned: norms that differ by what tuning may change.
    """

    rel_l2: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    scaled: set[str] = field(default_factory=set)
    tuned: list[str] = field(default_factory=list)


def source_differences(
    model: QuantizedFolder, source: ModelFolder, known: Collection[tuple[str, str]]
) -> SourceDifferences:
    """Compare each tensor with the source's. known: (code, tensor) of the findings so far."""
    folder = model.folder
    result = SourceDifferences()
    for linear in model.linears.values():
        # NaN is a finding already: the rest is compared.
        has_nan = ("block_scale_nan", linear.block_scale or "") in known
        try:
            distance, is_fold = compare_linear(folder, linear, source, has_nan)
        except ValuesUnread:
            continue
        except ShardError as error:
            finding = finding_of(error, linear.name)
            earlier = {(f.code, f.tensor) for f in result.findings}
            if (finding.code, finding.tensor) not in earlier.union(known):
                result.findings.append(finding)
            continue
        result.rel_l2[linear.name] = distance
        if is_fold:
            result.scaled.add(models.layer_of(linear.name))
        elif not distance < SUSPICIOUS_ERROR:
            problem = f"relative error {distance:.3g} against the source"
            result.findings.append(fault("large_error", linear.name, problem))
    plain = plain_differences(model, source)
    result.findings.extend(plain.findings)
    result.scaled.update(plain.scaled)
    result.tuned.extend(plain.tuned)
    result.findings.extend(folds.check(model, source, result.scaled))
    return result


def compare_linear(
    folder: ModelFolder, linear: Linear, source: ModelFolder, has_nan: bool
) -> tuple[float, bool]:
    """Return a quantized linear's relative error, and whether it is a fold.

    A fold is the source's weight with scaled rows and columns.

    has_nan: take the source's values where the linear's are NaN.
    Raises ShardError where the source has no such weight, or one of another shape, and ValuesUnread
    where only headers are here.
    """
    name = f"{linear.name}.weight"
    original = source.find(weight_name(source, linear.name))
    if original is None:
        raise ShardError(
            "not_in_source", f"{name}: the source has no such tensor", tensor=linear.name
        )
    shapes = list(linear.shape(folder)), list(source.info(original).shape)
    if shapes[0] != shapes[1]:
        message = f"{linear.name}: {shapes[0]} here, {shapes[1]} in the source"
        raise ShardError("source_shape", message, tensor=linear.name)
    theirs = source.tensor(original)
    ours = linear.dequantize(folder)
    if has_nan:
        ours = np.where(np.isnan(ours), theirs.astype(np.float32), ours)
    distance = rel_l2(ours, theirs)
    is_fold = not distance < SUSPICIOUS_ERROR and is_scaled(ours, theirs, SUSPICIOUS_ERROR)
    folder.release(linear.weight)
    source.release(original)
    return distance, is_fold


def is_scaled(ours: np.ndarray, theirs: np.ndarray, error: float) -> bool:
    """Return whether a matrix is the source's with scaled rows and columns, up to a relative error."""
    theirs = theirs.astype(np.float32)
    if not np.isfinite(ours).all():
        return False
    r, c = folds.fit(ours, theirs)
    return rel_l2(ours, r[:, None] * theirs * c) < error


def plain_differences(model: QuantizedFolder, source: ModelFolder) -> SourceDifferences:
    """Compare the tensors that are not quantized: they equal the source's, or a fold scaled them."""
    folder = model.folder
    family = model.folder.family
    result = SourceDifferences()
    biases = {f"{site.producer}.bias" for site in family.inputs if site.fold == "rows"}
    norms = {f"{norm}.weight" for norm in family.norms}
    for name in model.unowned:
        original = source.find(name)
        if original is None:
            continue
        here = folder.info(name)
        there = source.info(original)
        if here.shape != there.shape:
            if here.elements != there.elements and not family.is_auxiliary(name):
                problem = f"{list(here.shape)} here, {list(there.shape)} in the source"
                result.findings.append(fault("source_shape", name, problem))
            continue
        if family.in_vision(name) or equal_bytes(folder, name, source, original):
            continue  # vision is compared byte for byte (completeness.py)
        if folder.headers_only or source.headers_only:
            continue
        ours = float32(folder, name)
        theirs = float32(source, original)
        error = rel_l2(ours, theirs)
        if error < SAME_VALUES:
            continue
        inside = models.in_layer(name)
        is_tuned = is_tuned_norm(name, ours, theirs, int(family.adds_one(name)))
        if is_tuned:
            result.tuned.append(name)
        # Norms and biases are checked together with the linears that read them.
        checked = inside in norms | biases
        if checked or (
            inside and is_linear(name, ours.shape) and is_scaled(ours, theirs, PLAIN_FOLD_ERROR)
        ):
            result.scaled.add(models.layer_of(name))
        elif not is_tuned:
            problem = f"not quantized, and differs from the source by {error:.3g}"
            result.findings.append(fault("differs_from_source", name, problem))
    return result


def is_tuned_norm(name: str, ours: np.ndarray, theirs: np.ndarray, one: int) -> bool:
    """Return whether a tensor is a norm that differs from the source's by no more than tuning may change it.

    one: 1 for a norm that computes (1 + w) * x, else 0.
    """
    module = name.removesuffix(".weight")
    if "norm" not in module.rpartition(".")[2] or ours.ndim != 1:
        return False
    gain = np.abs(theirs + one)
    reference = np.maximum(gain, 0.1 * gain.mean())
    return bool((np.abs(ours - theirs) <= MAX_TUNED_CHANGE * reference).all())


def float32(folder: ModelFolder, name: str) -> np.ndarray:
    """Return a copy of a tensor in float32."""
    return folder.tensor(name).astype(np.float32)


def rel_l2(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the relative L2 distance of two arrays; NaN where `ours` holds NaN.

    Pieces are summed in float32 and added up in float64: exact to five digits, and as fast as a
    disk reads.
    """
    a = ours.reshape(-1)
    b = theirs.reshape(-1)
    distance = norm = 0.0
    for start in range(0, a.size, PIECE):
        piece = b[start : start + PIECE].astype(np.float32, copy=False)
        difference = a[start : start + PIECE] - piece
        distance += float(np.dot(difference, difference))
        norm += float(np.dot(piece, piece))
    return (distance / norm) ** 0.5 if norm else float(distance != 0)


def same_tensor(folder: ModelFolder, name: str, source: ModelFolder, original: str) -> bool:
    """Return whether two tensors have one shape, one type, and the same bytes."""
    return folder.info(name).shape == source.info(original).shape and equal_bytes(
        folder, name, source, original
    )


def equal_bytes(folder: ModelFolder, name: str, source: ModelFolder, original: str) -> bool:
    """Return whether two tensors of one shape are equal byte for byte, without copying either.

    Where only headers are here, tensors of one type count as equal.
    """
    if folder.info(name).dtype != source.info(original).dtype:
        return False
    if folder.headers_only or source.headers_only:
        return True
    pairs = zip(folder.pieces(name), source.pieces(original), strict=True)
    return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs)
