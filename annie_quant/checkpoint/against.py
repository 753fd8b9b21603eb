"""A checkpoint against the bf16 checkpoint it was made from: error of each tensor, and whether folds kept the function.

A fold moves a factor s of a linear's input columns into whatever produces that input. Fitting w' ~ diag(r) w diag(c)
to each linear brings r and c to light; then producer and consumer must cancel. Qwen3.5's norms compute (1 + w), so
the right fold is (1 + w)/s - 1; ModelOpt 0.47's AWQ export writes w/s.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from annie_quant.checkpoint.linears import Linear, is_linear
from annie_quant.checkpoint.shards import ModelFolder, ShardError

# NVFP4 on Gaussian weights: .095 by amax, .081 by the best search; Student-t and outliers stay under .13.
SUSPICIOUS_ERROR = 0.2
CANCELS = 0.05
PIECE = 1 << 22  # elements that are looked at together

# consumer linears of each producer, within a layer
NORM_FEEDS = {
    "input_layernorm": (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_a",
        "linear_attn.in_proj_b",
    ),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def compare_to_source(folder: ModelFolder, source: ModelFolder, linears: dict[str, Linear], result: Any) -> None:
    """Add `rel_l2` to the audit's rows, and findings where a tensor is not what the source says it should be."""
    rows = {row["name"]: row for row in result.tensors}
    factors: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    refolded = {n.rsplit(".", 2)[0] for n in changed_norms(folder, source)}
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
            ours, theirs = linear.dequantize(folder), source.tensor(wanted).astype(np.float32)
        except ShardError as error:
            if not any(f.code == error.code and f.tensor == (error.tensor or name) for f in result.findings):
                result.add(error.code, error.tensor or name, error.message)
            continue
        distance = rows[name]["rel_l2"] = rel_l2(ours, theirs)
        if not distance < SUSPICIOUS_ERROR or name.rsplit(".", 2)[0] in refolded:
            r, c = fit(ours, theirs)
            if np.isfinite(distance) and rel_l2(ours, r[:, None] * theirs * c) < SUSPICIOUS_ERROR:
                factors[name] = (r, c)
            else:
                result.add("large_error", name, f"{name}: relative error {distance:.3g} against the source")
        folder.release(linear.weight)
        source.release(wanted)
    plain(folder, source, linears, factors, result)
    folds(folder, source, factors, result)


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
        ours, theirs = folder.tensor(name), source.tensor(wanted)
        if same_bytes(ours, theirs):
            folder.release(name)
            source.release(wanted)
            continue
        ours, theirs = ours.astype(np.float32), theirs.astype(np.float32)
        error = rel_l2(ours, theirs)
        if error < 2**-8:  # another 16-bit type, rounded
            continue
        if is_linear(name, ours.shape):
            r, c = fit(ours, theirs)
            if rel_l2(ours, r[:, None] * theirs * c) < 0.02:
                factors[name.removesuffix(".weight")] = (r, c)
                continue
        if not name.endswith("norm.weight"):  # norms are judged with what reads them
            result.add(
                "differs_from_source", name, f"{name}: not quantized, and differs from the source by {error:.3g}"
            )


def folds(
    folder: ModelFolder, source: ModelFolder, factors: dict[str, tuple[np.ndarray, np.ndarray]], result: Any
) -> None:
    """Every scale that was moved must be taken back by its neighbour."""
    layers = sorted(
        {n.rsplit(".", 2)[0] for n in factors} | {n.rsplit(".", 2)[0] for n in changed_norms(folder, source)}
    )
    for layer in layers:
        for norm, readers in NORM_FEEDS.items():
            check_norm(folder, source, f"{layer}.{norm}.weight", [f"{layer}.{r}" for r in readers], factors, result)
        up, down = f"{layer}.mlp.up_proj", f"{layer}.mlp.down_proj"
        if up in factors or down in factors:
            size = folder_width(source, down)
            r = factors.get(up, (np.ones(size), None))[0]
            c = factors.get(down, (None, np.ones(size)))[1]
            if off(r * c, np.ones(size)) > CANCELS:
                result.add("fold_wrong", down, f"{down}: its input scale is not taken back by {up}'s rows")


def changed_norms(folder: ModelFolder, source: ModelFolder) -> list[str]:
    """Norms of layers whose bytes are not the source's, without `.weight` so that they split as modules do."""
    out = []
    for name in folder:
        wanted = source_name(name, source)
        if (
            name.endswith("layernorm.weight")
            and wanted
            and rel_l2(folder.tensor(name).astype(np.float32), source.tensor(wanted).astype(np.float32)) >= 2**-8
        ):
            out.append(name)
    return out


def check_norm(
    folder: ModelFolder,
    source: ModelFolder,
    norm: str,
    readers: list[str],
    factors: dict[str, tuple[np.ndarray, np.ndarray]],
    result: Any,
) -> None:
    """(1 + w') c = (1 + w) for every linear that reads the norm; names the norm that was folded as w/s."""
    wanted = source_name(norm, source)
    if norm not in folder or wanted is None:
        return
    ours, theirs = folder.tensor(norm).astype(np.float64), source.tensor(wanted).astype(np.float64)
    for reader in [r for r in readers if f"{r}.weight" in folder or r in factors]:
        c = factors[reader][1] if reader in factors else np.ones_like(theirs)
        if off((1 + ours) * c, 1 + theirs) <= CANCELS:
            continue
        if reader in factors and off(ours * c, theirs) <= CANCELS:
            result.add(
                "fold_plus_one", norm, f"{norm}: folded as w/s, and this norm computes (1 + w): (1 + w)/s - 1 is right"
            )
        else:
            result.add("fold_wrong", norm, f"{norm}: does not take back the input scale of {reader}")
        return


def fit(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and column factors r, c of ours ~ diag(r) theirs diag(c), by alternating least squares; median of r is 1."""
    c = np.ones(theirs.shape[1])
    r = np.ones(theirs.shape[0])
    for _ in range(4):
        scaled = theirs * r[:, None]
        c = safe(np.einsum("ij,ij->j", ours, scaled), np.einsum("ij,ij->j", scaled, scaled))
        scaled = theirs * c
        r = safe(np.einsum("ij,ij->i", ours, scaled), np.einsum("ij,ij->i", scaled, scaled))
    middle = np.median(r) or 1.0
    return r / middle, c * middle


def safe(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return np.divide(top, bottom, out=np.ones_like(top, dtype=np.float64), where=bottom > 0)


def off(a: np.ndarray, b: np.ndarray) -> float:
    """How far two vectors of gains are apart, relative to the second."""
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def rel_l2(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Relative L2 distance in float64, a piece at a time; NaN where `ours` holds NaN."""
    a, b = ours.reshape(-1), theirs.reshape(-1)
    distance = norm = 0.0
    for at in range(0, a.size, PIECE):
        piece = b[at : at + PIECE].astype(np.float64)
        difference = a[at : at + PIECE] - piece
        distance += float(difference @ difference)
        norm += float(piece @ piece)
    return (distance / norm) ** 0.5 if norm else float(distance != 0)


def same_bytes(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether two tensors of one shape are equal to the byte, without a copy of either."""
    if ours.dtype != theirs.dtype:
        return False
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (ours, theirs))
    return all(np.array_equal(a[at : at + PIECE], b[at : at + PIECE]) for at in range(0, a.size, PIECE))


def folder_width(source: ModelFolder, module: str) -> int:
    return source.info(source_name(f"{module}.weight", source) or "").shape[1]


def source_name(name: str, source: ModelFolder) -> str | None:
    """The source's name for a tensor: multimodal checkpoints put `language_model.` into it."""
    short = name.removeprefix("model.language_model.").removeprefix("model.")
    for candidate in (name, f"model.{short}", f"model.language_model.{short}"):
        if candidate in source:
            return candidate
    return None
