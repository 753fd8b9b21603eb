"""A checkpoint against the bf16 checkpoint it was made from: the error of each tensor, and what was moved or changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from annie_quant.checkpoint import folding_check
from annie_quant.checkpoint.linears import Linear, is_linear
from annie_quant.checkpoint.shards import ModelFolder, ShardError

# NVFP4 on Gaussian weights: .095 by amax, .081 by the best search; Student-t and outliers stay under .13.
SUSPICIOUS_ERROR = 0.2
PIECE = 1 << 20  # elements that are looked at together


def compare_to_source(folder: ModelFolder, source: ModelFolder, linears: dict[str, Linear], result: Any) -> None:
    """Add `rel_l2` to the audit's rows, and findings where a tensor is not what the source says it should be."""
    rows = {row["name"]: row for row in result.tensors}
    factors: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    moved = {folding_check.layer_of(n) for n in changed_norms(folder, source)}
    for name, linear in linears.items():
        wanted = source_name(f"{name}.weight", source)
        if wanted is None:
            result.add("not_in_source", name, f"{name}.weight: the source has no such tensor")
            continue
        try:
            if linear.shape(folder) != source.info(wanted).shape:
                raise ShardError(
                    "source_shape",
                    f"{name}: {list(linear.shape(folder))} here, {list(source.info(wanted).shape)} in the source",
                    tensor=name,
                )
            ours, theirs = linear.dequantize(folder), source.tensor(wanted)
        except ShardError as error:
            if not any(f.code == error.code and f.tensor == (error.tensor or name) for f in result.findings):
                result.add(error.code, error.tensor or name, error.message)
            continue
        if any(f.code == "block_scale_nan" and f.tensor == linear.block_scale for f in result.findings):
            ours = np.where(np.isnan(ours), theirs.astype(np.float32), ours)  # named already; the rest is judged
        distance = rows[name]["rel_l2"] = rel_l2(ours, theirs)
        if not distance < SUSPICIOUS_ERROR or folding_check.layer_of(name) in moved:
            theirs = theirs.astype(np.float32)
            r, c = folding_check.fit(ours, theirs)
            if np.isfinite(distance) and rel_l2(ours, r[:, None] * theirs * c) < SUSPICIOUS_ERROR:
                factors[name] = (r, c)
            else:
                result.add("large_error", name, f"{name}: relative error {distance:.3g} against the source")
        folder.release(linear.weight)
        source.release(wanted)
    plain(folder, source, linears, factors, result)
    moved |= {folding_check.layer_of(n) for n in factors}
    folding_check.check(folder, source, factors, moved, source_name, result.add)


def plain(
    folder: ModelFolder,
    source: ModelFolder,
    linears: dict[str, Linear],
    factors: dict[str, tuple[np.ndarray, np.ndarray]],
    result: Any,
) -> None:
    """Tensors that are not quantized: equal to the source's, or scaled by a fold."""
    owned = {t for x in linears.values() for t in x.tensors()}
    for name in folder:
        wanted = source_name(name, source)
        if name in owned or wanted is None or folder.info(name).shape != source.info(wanted).shape:
            continue
        if same_bytes(folder, name, source, wanted):
            continue
        ours, theirs = folder.tensor(name).astype(np.float32), source.tensor(wanted).astype(np.float32)
        error = rel_l2(ours, theirs)
        if error < 2**-8:  # another 16-bit type, rounded
            continue
        if is_linear(name, ours.shape):
            r, c = folding_check.fit(ours, theirs)
            if rel_l2(ours, r[:, None] * theirs * c) < 0.02:
                factors[name.removesuffix(".weight")] = (r, c)
                continue
        if not name.endswith("norm.weight"):  # norms are judged with what reads them
            result.add(
                "differs_from_source", name, f"{name}: not quantized, and differs from the source by {error:.3g}"
            )


def changed_norms(folder: ModelFolder, source: ModelFolder) -> list[str]:
    """Norms of layers that are not the source's."""
    out = []
    for name in folder:
        wanted = source_name(name, source)
        if (
            name.endswith(("layernorm.weight", "linear_attn.norm.weight"))
            and wanted
            and rel_l2(folder.tensor(name).astype(np.float32), source.tensor(wanted).astype(np.float32)) >= 2**-8
        ):
            out.append(name)
    return out


def rel_l2(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Relative L2 distance, a piece at a time; NaN where `ours` holds NaN.

    float32 inside a piece, float64 between them: good to five digits, and it keeps up with the disk.
    """
    a, b = ours.reshape(-1), theirs.reshape(-1)
    distance = norm = 0.0
    for at in range(0, a.size, PIECE):
        piece = b[at : at + PIECE].astype(np.float32, copy=False)
        difference = a[at : at + PIECE] - piece
        distance += float(np.dot(difference, difference))
        norm += float(np.dot(piece, piece))
    return (distance / norm) ** 0.5 if norm else float(distance != 0)


def same_bytes(folder: ModelFolder, name: str, source: ModelFolder, wanted: str) -> bool:
    """Whether two tensors of one shape are equal to the byte, a piece at a time, without a copy of either."""
    if folder.info(name).dtype != source.info(wanted).dtype:
        return False
    pairs = zip(folder.pieces(name), source.pieces(wanted), strict=True)
    return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs)


def source_name(name: str, source: ModelFolder) -> str | None:
    """The source's name for a tensor: multimodal checkpoints put `language_model.` into it."""
    short = name.removeprefix("model.language_model.").removeprefix("model.")
    for candidate in (name, f"model.{short}", f"model.language_model.{short}"):
        if candidate in source:
            return candidate
    return None
