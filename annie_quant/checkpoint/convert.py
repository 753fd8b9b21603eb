"""Convert a checkpoint to another dialect, or to 16-bit numbers.

Between dialects codes and block scales never change; names, global scales and settings do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import ml_dtypes
import msgspec
import numpy as np

from annie_quant import models
from annie_quant.checkpoint import dialects, settings_checks, writer
from annie_quant.checkpoint.linears import Linear, excluded_module, owned_tensors
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.staging import keep_inputs, source_key, staged
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.core.progress import SILENT, Progress

PLAIN = "bf16"
TARGETS = ("modelopt", "compressed-tensors", "gguf", PLAIN)
CHUNK_BYTES = 1 << 26  # of float32 numbers that are rounded at once
# Tensors that belong to a quantizer and not to the model; each dialect writes its own.
QUANTIZER = (
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".input_scale",
    ".weight_global_scale",
    ".input_global_scale",
    ".pre_quant_scale",
)


class Conversion(msgspec.Struct, omit_defaults=True):
    """The result of a conversion.

    path: of the folder or file.  size_bytes, tensors: of the weights.  loss: what the target cannot hold, one sentence
    each; empty where the conversion is exact.
    For GGUF only: type, and the names of tensors that it leaves out and of linears that it dequantized.
    """

    path: str
    size_bytes: int
    tensors: int
    loss: list[str]
    type: str | None = None
    left_out: list[str] | None = None
    dequantized: list[str] | None = None


def convert(
    src: str | os.PathLike,
    to: str,
    output: str | os.PathLike | None = None,
    type: str | None = None,
    shard_bytes: int = writer.DEFAULT_SHARD_BYTES,
    progress: Progress = SILENT,
    like: str | os.PathLike | None = None,
    force: bool = False,
) -> Conversion:
    """Write `src` in another dialect.

    src: a model folder, or a GGUF file (to modelopt).
    to: modelopt, compressed-tensors, gguf, or bf16 (a folder with plain weights).
    output: a folder, or a file for gguf; by default in the parent folder of `src`.
    type: for gguf BF16, F16, NVFP4, Q8_0, Q4_K_M, Q5_K_M, Q6_K.
    like: if `src` is a GGUF file, a folder of the same model for its config.json and tokenizer.
    force: replace an output that exists. An interrupted conversion to a folder resumes after its last complete
    shard.
    """
    if to not in TARGETS:
        raise UsageError(f"unknown dialect {to!r}", f"choose one of: {', '.join(TARGETS)}")
    if Path(src).is_file():
        return from_gguf(Path(src), to, output, shard_bytes, like, force)
    folder = ModelFolder(src)
    dialects.refuse_unread(folder)
    linears = dialects.linears(folder)
    if to == "gguf":
        return to_gguf(folder, linears, output, type, progress, force)
    if type:
        raise UsageError("--type is for GGUF", "leave it out, or use --to gguf")
    if not linears:
        raise CheckpointError(
            f"{folder.path}: nothing in it is quantized", "quantize it first: annie-quant quantize --strategy direct"
        )
    if to == PLAIN:
        return to_plain(folder, linears, output, shard_bytes, progress, force)
    return to_folder(folder, linears, to, output, shard_bytes, progress, force)


def from_gguf(
    path: Path, to: str, output: str | os.PathLike | None, shard_bytes: int, like: str | os.PathLike | None, force: bool
) -> Conversion:
    """Write a GGUF file as a folder in ModelOpt's layout."""
    from annie_quant.checkpoint.gguf import reader

    if to != "modelopt":
        raise UsageError(
            f"a GGUF file becomes a ModelOpt folder or a bf16 one, not {to}", "use --to modelopt or --to hf"
        )
    if like is None:
        raise UsageError(
            "a GGUF file holds no config.json and no tokenizer.json",
            "give a folder of the same model, --like DIR, or use --to hf, which makes them from the file",
        )
    target = Path(output or path.with_suffix(""))
    with staged(target, force=force, inputs=(path, like)) as part:
        restored = reader.restore(path, ModelFolder(like), part, shard_bytes)
    loss = [f"{len(restored.rounded)} quantized tensors became bf16 numbers"] if restored.rounded else []
    return Conversion(str(target), restored.size_bytes, restored.tensors, loss)


def to_gguf(
    folder: ModelFolder,
    linears: dict[str, Linear],
    output: str | os.PathLike | None,
    type: str | None,
    progress: Progress,
    force: bool,
) -> Conversion:
    """Write a folder as a GGUF file."""
    from annie_quant.checkpoint.gguf import writer

    kind = writer.type_of(type, folder, linears)
    target = Path(output) if output else folder.path.resolve().parent
    if target.is_dir():
        target = target / f"{folder.path.resolve().name}-{kind}.gguf"
    keep_inputs(target, folder.path.iterdir())
    if target.exists() and not force:
        raise UsageError(f"{target} exists", "choose another --output, or add --force")
    plan = writer.write(folder, target, kind, linears, progress)
    loss = [f"{len(plan.dequantized)} quantized linears became 16-bit numbers"] if plan.dequantized else []
    if type is None and kind == "BF16" and any(linear.format == "nvfp4" for linear in linears.values()):
        loss[0] += (
            f": llama.cpp does not compute NVFP4 in {plan.layout.names.architecture} (--type NVFP4 writes it for others)"
        )
    if plan.left_out:
        loss.append(f"{len(plan.left_out)} tensors are not part of a text model's file (vision, KV scales)")
    return Conversion(
        str(target), target.stat().st_size, len(plan.entries), loss, kind, plan.left_out, plan.dequantized
    )


def stored_format(linear: Linear, folder: ModelFolder) -> str:
    """Return a linear's format as dialects' settings name it: nvfp4, w4a16, fp8 or fp8_channel."""
    if linear.format == "nvfp4":
        return "nvfp4" if linear.input_global else "w4a16"
    return "fp8_channel" if linear.per_channel(folder) else "fp8"


def kv_scales(folder: ModelFolder, name: str, dialect: ModuleType) -> list[writer.Planned]:
    """Plan a scale of the KV cache as another dialect stores it."""
    layer, end = models.layer_of(name), name.rpartition(".")[2]
    if not layer or folder.info(name).elements != 1:
        return []  # the audit names it; not a scale of a layer
    return [dialect.kv_scale(layer, end, folder.tensor(name).astype(np.float32))]


def write_folder(
    folder: ModelFolder,
    plan: list[writer.Planned],
    settings: writer.Settings | None,
    to: str,
    output: str | os.PathLike | None,
    shard_bytes: int,
    progress: Progress,
    force: bool,
) -> tuple[Path, int]:
    """Write the planned tensors, the settings and the small files. Return the new folder, and the bytes of its shards."""
    target = Path(output) if output else folder.path.resolve().with_name(f"{folder.path.resolve().name}-{to}")
    key = {"to": to, "source": source_key(folder), "shard_bytes": shard_bytes}
    with staged(target, key, force, inputs=(folder.path,)) as part:
        shards = writer.write(part, plan, shard_bytes, progress, resume=True)
        size_bytes = sum(s.stat().st_size for s in shards)
        writer.copy_small_files(folder, part)
        writer.write_settings(part, folder.config, settings)
    return target, size_bytes


def to_plain(
    folder: ModelFolder,
    linears: dict[str, Linear],
    output: str | os.PathLike | None,
    shard_bytes: int,
    progress: Progress,
    force: bool,
) -> Conversion:
    """Write a folder whose quantized linears are bf16 numbers, the nearest to what they stand for."""

    def numbers(linear: Linear) -> Iterator[np.ndarray]:
        weight = linear.dequantize(folder)
        folder.release(linear.weight)
        rows = max(1, CHUNK_BYTES // max(1, weight[:1].nbytes))
        return (weight[i : i + rows].astype(ml_dtypes.bfloat16) for i in range(0, len(weight), rows))

    owned = owned_tensors(linears.values())
    rest = [n for n in folder if n not in owned and not n.endswith((*settings_checks.KV_ENDS, *QUANTIZER))]
    plan = [
        *(writer.Planned(f"{n}.weight", "BF16", x.shape(folder), partial(numbers, x)) for n, x in linears.items()),
        *(writer.Planned(n, folder.info(n).dtype, folder.info(n).shape, partial(folder.pieces, n)) for n in rest),
    ]
    target, size_bytes = write_folder(folder, plan, None, PLAIN, output, shard_bytes, progress, force)
    loss = [f"{len(linears)} quantized linears became bf16 numbers"]
    if scales := sum(n.endswith(settings_checks.KV_ENDS) for n in folder):
        loss.append(f"{scales} KV scales were dropped")
    return Conversion(str(target), size_bytes, len(plan), loss)


def to_folder(
    folder: ModelFolder,
    linears: dict[str, Linear],
    to: str,
    output: str | os.PathLike | None,
    shard_bytes: int,
    progress: Progress,
    force: bool,
) -> Conversion:
    """Write a folder in another dialect of safetensors."""
    blocks = next((x.name for x in linears.values() if x.block), None)
    if blocks:
        raise CheckpointError(
            f"{blocks}: {to} is not written with FP8 in blocks", f"annie-quant convert {folder.path} --to {PLAIN}"
        )
    awq = next((x.pre_quant for x in linears.values() if x.pre_quant), None)
    if awq:
        raise CheckpointError(
            f"{awq}: {to} has no activation scales (NVFP4_AWQ)", "make it plain NVFP4 first: annie-quant audit --repair"
        )
    dialect = dialects.find(to)
    groups = {x.group(folder) for x in linears.values() if x.format == "nvfp4"}
    if len(groups) > 1:
        raise CheckpointError(f"{folder.path}: linears differ in group size, {sorted(groups)}", "see annie-quant audit")
    config = dialects.config(folder)
    kv_cache, kv_names = config.kv_cache, settings_checks.scales_to_keep(folder, config)
    plan, dropped, excluded = [], [], []
    for x in linears.values():
        plan += dialect.tensors(x, folder)
    owned = owned_tensors(linears.values())
    for name in folder:
        info = folder.info(name)
        if name in owned:
            continue
        if name.endswith(settings_checks.KV_ENDS):
            plan += kv_scales(folder, name, dialect) if name in kv_names else []
            continue
        if name.endswith(QUANTIZER):
            dropped.append(name)
            continue
        if module := excluded_module(folder, name):
            excluded.append(module)
        plan.append(writer.Planned(name, info.dtype, info.shape, partial(folder.pieces, name)))
    lost_cast = kv_cache == "FP8" and to == "compressed-tensors" and not kv_names
    formats = {n: stored_format(x, folder) for n, x in linears.items()}
    settings = dialect.settings(formats, sorted(set(excluded)), next(iter(groups), 16), None if lost_cast else kv_cache)
    target, size_bytes = write_folder(folder, plan, settings, to, output, shard_bytes, progress, force)
    loss = (
        ["global scales are reciprocals: at most one unit in the last place of float32"]
        if any(x.reciprocal != (to == "compressed-tensors") for x in linears.values() if x.format == "nvfp4")
        else []
    )
    loss += [f"{len(dropped)} quantizer tensors were dropped: {', '.join(dropped[:3])}"] if dropped else []
    if lost_cast:  # its scheme would promise calibrated scales
        loss.append("the KV cache's cast to FP8 without scales: serve with --kv-cache-dtype fp8")
    return Conversion(str(target), size_bytes, len(plan), loss)
