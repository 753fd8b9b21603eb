"""Convert a checkpoint to another dialect, to GGUF, or to 16-bit numbers.

Between dialects codes and block scales never change; names, global scales and settings do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np

from annie_quant import models
from annie_quant.checkpoint import adapters, dialects, writer
from annie_quant.checkpoint.checks.contents import read_input
from annie_quant.checkpoint.checks.settings import KV_ENDS, check_algorithm, scales_to_keep
from annie_quant.checkpoint.checks.tensors import scale_faults
from annie_quant.checkpoint.dialects import QuantizedFolder
from annie_quant.checkpoint.linears import QUANTIZER, Linear, excluded_module
from annie_quant.checkpoint.shards import INDEX, ModelFolder
from annie_quant.checkpoint.writer import Planned, QuantSettings
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.core.progress import SILENT, Progress

_UNQUANTIZED = "bf16"
TARGETS = (*dialects.WRITTEN, "gguf", _UNQUANTIZED)
_MAX_NAMES = 3  # that a line lists
FLOAT32_PIECE_BYTES = 1 << 26  # of float32 numbers that are rounded at once


class Conversion(msgspec.Struct, omit_defaults=True):
    """The result of a conversion.

    path: of the folder or file.
    size_bytes, tensors: of the weights.
    loss: what the target cannot store, one sentence each; empty where the conversion is exact.
    type: of a GGUF file.
    left_out: names of tensors and files of the source that are not in the result.
    dequantized: names of the linears that a GGUF file stores as 16-bit numbers, or in Q8_0 instead
        of FP8.
    notes: what was merged, and what was noticed, one sentence each.
    """

    path: str
    size_bytes: int
    tensors: int
    loss: list[str]
    type: str | None = None
    left_out: list[str] = []
    dequantized: list[str] | None = None
    notes: list[str] = []


@dataclass(frozen=True)
class ConversionOutput:
    """Where and how a conversion writes.

    path: a folder, or a file for gguf; None for the default in the parent folder of the source.
    shard_bytes: largest size of a shard.
    progress: receives the bytes that were written.
    force: replace an output that exists.
    """

    path: Path | None
    shard_bytes: int
    progress: Progress
    force: bool


def convert(
    src: str | os.PathLike,
    to: str,
    output: str | os.PathLike | None = None,
    type: str | None = None,
    shard_bytes: int = writer.DEFAULT_SHARD_BYTES,
    progress: Progress = SILENT,
    force: bool = False,
    adapter: str | os.PathLike | None = None,
) -> Conversion:
    """Write the model folder `src` in another dialect.

    to: modelopt, compressed-tensors, gguf, or bf16 (a folder with plain weights).
    output: a folder, or a file for gguf; by default in the parent folder of `src`.
    type: for gguf BF16, F16, NVFP4, Q8_0, Q4_K_M, Q5_K_M, Q6_K.
    shard_bytes: largest size of a shard.
    force: replace an output that exists. An interrupted conversion to a folder resumes after its
        last complete
    shard.
    adapter: folder of a LoRA adapter that is merged into `src`, the 16-bit base; only for bf16.
    """
    if to not in TARGETS:
        raise UsageError(f"unknown dialect {to!r}", f"choose one of: {', '.join(TARGETS)}")
    if adapter is not None:
        if to != _UNQUANTIZED or type:
            raise UsageError("an adapter is merged into a bf16 folder", "--to bf16")
        return merge_adapter(Path(src), Path(adapter), output, shard_bytes, progress, force)
    out = ConversionOutput(Path(output) if output else None, shard_bytes, progress, force)
    folder = ModelFolder(src)
    model = read_input(folder)
    if to != _UNQUANTIZED:
        check_algorithm(model)
    if to in ("gguf", _UNQUANTIZED):
        check_scales(model)
    if to == "gguf":
        return to_gguf(model, type, out)
    if type:
        raise UsageError("--type is for GGUF", "leave it out, or use --to gguf")
    if not model.linears:
        hint = "quantize it first: annie-quant quantize --strategy direct"
        raise CheckpointError(f"{folder.path}: nothing in it is quantized", hint)
    return to_plain(model, out) if to == _UNQUANTIZED else to_dialect(model, to, out)


# ---- model folders


def left_out_files(folder: ModelFolder) -> list[str]:
    """Return the files of weights, and the tensors outside of the index, that no command reads."""
    names = [f"{name} ({INDEX} does not list it in {file})" for name, file in folder.unlisted]
    return names + folder.left_out_files()


def left_out_line(left_out: list[str]) -> str:
    """Return the line that names what a command leaves out."""
    shown = ", ".join(left_out[:_MAX_NAMES])
    return f"Left out: {shown}" + (
        f", and {len(left_out) - _MAX_NAMES} more" if left_out[_MAX_NAMES:] else ""
    )


def write_folder(
    folder: ModelFolder,
    plan: list[Planned],
    settings: QuantSettings | None,
    to: str,
    loss: list[str],
    left_out: list[str],
    out: ConversionOutput,
) -> Conversion:
    """Write the planned tensors, the settings and the small files."""
    home = folder.path.resolve()
    target = out.path or home.with_name(f"{home.name}-{to}")
    key = {"to": to, "source": writer.source_key(folder), "shard_bytes": out.shard_bytes}
    with writer.staged(target, key, out.force, inputs=(folder.path,)) as part:
        shards = writer.write(part, plan, out.shard_bytes, out.progress, resume=True)
        size_bytes = sum(shard.stat().st_size for shard in shards)
        writer.copy_small_files(folder, part)
        writer.write_settings(part, folder.config, settings)
    left_out = left_out + left_out_files(folder)
    return Conversion(str(target), size_bytes, len(plan), loss, left_out=left_out)


def to_plain(model: QuantizedFolder, out: ConversionOutput) -> Conversion:
    """Write a folder whose quantized linears are bf16 numbers, rounded from their values."""
    folder = model.folder

    def numbers(linear: Linear) -> Iterator[np.ndarray]:
        weight = linear.dequantize(folder)
        folder.release(linear.weight)
        rows = max(1, FLOAT32_PIECE_BYTES // max(1, weight[:1].nbytes))
        for start in range(0, len(weight), rows):
            yield weight[start : start + rows].astype(ml_dtypes.bfloat16)

    plan = []
    for name, linear in model.linears.items():
        load = partial(numbers, linear)
        plan.append(Planned(f"{name}.weight", "BF16", linear.shape(folder), load))
    left_out = [name for name in model.unowned if name.endswith((*KV_ENDS, *QUANTIZER))]
    plan += [writer.copied(folder, name) for name in model.unowned if name not in left_out]
    loss = [f"{len(model.linears)} quantized linears became bf16 numbers"]
    scales = sum(name.endswith(KV_ENDS) for name in left_out)
    if scales:
        loss.append(f"{scales} KV scales were dropped")
    return write_folder(folder, plan, None, _UNQUANTIZED, loss, left_out, out)


def merge_adapter(
    base: Path,
    adapter: Path,
    output: str | os.PathLike | None,
    shard_bytes: int,
    progress: Progress,
    force: bool,
) -> Conversion:
    """Write a folder with an adapter merged into its base."""
    home = base.resolve()
    target = Path(output) if output else home.with_name(f"{home.name}-{adapter.resolve().name}")
    record = adapters.merge(base, adapter, target, shard_bytes, progress, force)
    merged = ModelFolder(target)
    left_out = left_out_files(ModelFolder(base))
    size_bytes = sum(shard.size_bytes for shard in merged.shards.values())
    tensors = len(merged.tensors)
    return Conversion(str(target), size_bytes, tensors, [], left_out=left_out, notes=record.lines())


def to_dialect(model: QuantizedFolder, to: str, out: ConversionOutput) -> Conversion:
    """Write a folder in another dialect of safetensors."""
    folder = model.folder
    config = model.config
    dialect = dialects.WRITTEN[to]
    group = check_convertible(model, to)
    kv_names = scales_to_keep(folder, config)
    per_head = [name for name in kv_names if folder.info(name).elements > 1]
    has_divisors = to == "compressed-tensors"
    kv_cache = config.kv_cache
    loss = []
    if per_head and not has_divisors:
        kv_names = []
        kv_cache = None
        loss.append(
            f"{len(per_head)} KV scales per head ({to} has one per layer): the copy names no KV cache format"
        )
    plan = []
    formats = {}
    for name, linear in model.linears.items():
        plan += dialect.tensors(linear, folder)
        formats[name] = linear.stored_format(folder)
    left_out = []
    excluded = set()
    for name in model.unowned:
        layer = models.layer_of(name)
        if name.endswith(KV_ENDS):
            if layer and name in kv_names:
                value = folder.tensor(name).astype(np.float32)
                plan.append(dialect.kv_scale(layer, name.rpartition(".")[2], value))
            else:
                left_out.append(name)
        elif name.endswith(QUANTIZER):
            left_out.append(name)
        else:
            excluded.add(excluded_module(folder, name))
            plan.append(writer.copied(folder, name))
    if any(linear.reciprocal != has_divisors for linear in model.nvfp4):
        loss.append("global scales are reciprocals: at most one unit in the last place of float32")
    # Without scales, the scheme of compressed-tensors would promise calibrated ones.
    if kv_cache == "FP8" and has_divisors and not kv_names:
        kv_cache = None
        loss.append("the KV cache's cast to FP8 without scales: serve with --kv-cache-dtype fp8")
    scheme = config.raw.get("kv_cache_scheme")
    if scheme and config.kv_cache is None:
        loss.append("the KV cache's format: only FP8 is written")
    modules = sorted(module for module in excluded if module)
    settings = dialect.settings(formats, modules, group, kv_cache)
    if per_head and has_divisors:
        settings.quantization_config["kv_cache_scheme"] = config.raw["kv_cache_scheme"]
    return write_folder(folder, plan, settings, to, loss, left_out, out)


def check_scales(model: QuantizedFolder) -> None:
    """Raise CheckpointError where a weight's tensor scale is not valid: its numbers would be zeros or infinite."""
    for linear in model.nvfp4:
        name = linear.global_scale
        scale = linear.tensor_scale(model.folder)
        for finding in scale_faults("tensor", name or linear.name, scale):
            raise CheckpointError(finding.message, f"annie-quant audit {model.folder.path}")


def check_convertible(model: QuantizedFolder, to: str) -> int:
    """Return the columns per block scale, 16 without NVFP4.

    Raises CheckpointError where the dialect `to` cannot hold a linear.
    """
    folder = model.folder
    linears = model.linears.values()
    for linear in linears:
        if linear.format == "fp8":
            linear.check_fp8_scale(folder)
    for linear in model.nvfp4:
        scales = folder.info(linear.block_scale) if linear.block_scale else None
        if scales is not None and scales.dtype != "F8_E4M3":
            message = f"{scales.name}: {scales.dtype}, expected F8_E4M3"
            raise CheckpointError(message, f"annie-quant audit {folder.path}")
    for linear in linears:
        if linear.block:
            message = f"{linear.name}: {to} is not written with FP8 in blocks"
            command = f"annie-quant convert {folder.path} --to {_UNQUANTIZED}"
            raise CheckpointError(message, command)
    for linear in linears:
        if linear.pre_quant:
            message = f"{linear.pre_quant}: {to} has no activation scales (NVFP4_AWQ)"
            raise CheckpointError(message, "make it plain NVFP4 first: annie-quant audit --repair")
    groups = {linear.group(folder) for linear in model.nvfp4}
    if len(groups) > 1:
        message = f"{folder.path}: linears differ in group size, {sorted(groups)}"
        raise CheckpointError(message, "see annie-quant audit")
    return groups.pop() if groups else 16


# ---- to GGUF


def to_gguf(model: QuantizedFolder, type: str | None, out: ConversionOutput) -> Conversion:
    """Write a folder as a GGUF file."""
    from annie_quant.checkpoint.gguf.writer import type_of, write_gguf

    kind = type_of(type, model)
    home = model.folder.path.resolve()
    target = out.path or home.parent
    if target.is_dir():
        target = target / f"{home.name}-{kind}.gguf"
    writer.check_inputs(target, model.folder.path.iterdir())
    if target.exists() and not out.force:
        raise UsageError(f"{target} exists", "choose another --output, or add --force")
    plan = write_gguf(model, target, kind, out.progress)
    eight_bit = sum(entry.type == "Q8_0" for entry in plan.entries) if kind == "NVFP4" else 0
    numbers = len(plan.dequantized) - eight_bit
    loss = []
    if numbers:
        loss.append(f"{numbers} quantized linears became 16-bit numbers")
    if eight_bit:
        reason = "which rounds them once more: llama.cpp has no FP8"
        loss.append(f"{eight_bit} FP8 linears became Q8_0, {reason}")
    if type is None and kind == "BF16" and model.nvfp4:
        architecture = plan.layout.names.architecture
        loss[0] += f": llama.cpp does not compute NVFP4 in {architecture}"
    if plan.left_out:
        reason = "are not part of a text model's file (vision, KV scales)"
        loss.append(f"{len(plan.left_out)} tensors {reason}")
    left_out = plan.left_out + left_out_files(model.folder)
    return Conversion(
        str(target),
        target.stat().st_size,
        len(plan.entries),
        loss,
        kind,
        left_out,
        plan.dequantized,
    )
