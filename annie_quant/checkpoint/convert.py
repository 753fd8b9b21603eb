"""From one dialect to another: the codes and block scales never change, only names, scales' form and settings do."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from annie_quant.checkpoint import dialects, writer
from annie_quant.checkpoint.linears import Linear, is_linear
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.staging import fingerprint, staged
from annie_quant.errors import CheckpointError, UsageError
from annie_quant.files import write_json

TARGETS = ("modelopt", "compressed-tensors", "gguf")
# Tensors that belong to a quantizer and not to the model; a dialect writes its own.
QUANTIZER = (
    ".k_scale",
    ".v_scale",
    ".weight_scale",
    ".weight_scale_2",
    ".input_scale",
    ".weight_global_scale",
    ".input_global_scale",
    ".pre_quant_scale",
)


def convert(
    src: str | os.PathLike,
    to: str,
    output: str | os.PathLike | None = None,
    type: str | None = None,
    shard_bytes: int = writer.DEFAULT_SHARD_BYTES,
    progress: Callable[[int], None] = lambda size_bytes: None,
    like: str | os.PathLike | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Write `src` in another dialect and return {"path", "size_bytes", …, "loss"}.

    to: modelopt, compressed-tensors, gguf.  type: for gguf BF16, F16, NVFP4, Q8_0, Q4_K_M, Q5_K_M, Q6_K.  output: a folder, or a
    file for gguf; beside `src` by default. src may be a GGUF file (to modelopt); `like` is then a folder of the same
    model, for its config.json and tokenizer. `loss` says in words what the target cannot hold; empty where it is exact.
    force: replace an output folder that exists. A stopped conversion to a folder goes on from its last whole shard.
    """
    if to not in TARGETS:
        raise UsageError(f"there is no dialect called {to!r}", f"choose one of: {', '.join(TARGETS)}")
    if Path(src).is_file():
        return from_file(Path(src), to, output, shard_bytes, like, force)
    folder = ModelFolder(src)
    linears = dialects.linears(folder)
    if to == "gguf":
        return to_gguf(folder, linears, output, type, progress)
    if type:
        raise UsageError("--type is for GGUF", "leave it out, or use --to gguf")
    return to_folder(folder, linears, to, output, shard_bytes, progress, force)


def from_file(
    path: Path, to: str, output: str | os.PathLike | None, shard_bytes: int, like: str | os.PathLike | None, force: bool
) -> dict[str, Any]:
    """A GGUF file as a ModelOpt folder."""
    from annie_quant.checkpoint.gguf import reader

    if to != "modelopt":
        raise UsageError(f"a GGUF file becomes a ModelOpt folder, not {to}", "use --to modelopt, then convert that")
    if like is None:
        raise UsageError(
            "a GGUF file holds no config.json and no tokenizer.json", "give a folder of the same model: --like DIR"
        )
    with staged(output or path.with_suffix(""), force=force) as target:
        result = reader.restore(path, ModelFolder(like), target, shard_bytes)
    return result | {"path": str(output or path.with_suffix(""))}


def to_gguf(
    folder: ModelFolder,
    linears: dict[str, Linear],
    output: str | os.PathLike | None,
    type: str | None,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    from annie_quant.checkpoint.gguf import writer

    kind = (type or ("NVFP4" if any(x.format == "nvfp4" for x in linears.values()) else "BF16")).upper()
    target = Path(output) if output else folder.path.resolve().parent
    if target.is_dir():
        target = target / f"{folder.path.resolve().name}-{kind}.gguf"
    result = writer.write(folder, target, type, linears, progress)
    loss = [f"{len(result['dequantized'])} quantized linears became 16-bit numbers"] if result["dequantized"] else []
    loss += (
        [f"{len(result['left_out'])} tensors have no place in a text model's file (vision, KV scales)"]
        if result["left_out"]
        else []
    )
    return result | {"loss": loss}


def to_folder(
    folder: ModelFolder,
    linears: dict[str, Linear],
    to: str,
    output: str | os.PathLike | None,
    shard_bytes: int,
    progress: Callable[[int], None],
    force: bool,
) -> dict[str, Any]:
    """The folder in another dialect of safetensors."""
    if not linears:
        raise CheckpointError(
            f"{folder.path}: nothing in it is quantized", "quantize it first: annie-quant quantize --strategy direct"
        )
    awq = next((x.pre_quant for x in linears.values() if x.pre_quant), None)
    if awq:
        raise CheckpointError(
            f"{awq}: an activation scale (NVFP4_AWQ) has no place in {to}",
            "make it plain NVFP4 first: annie-quant audit --repair",
        )
    dialect = dialects.find(to)
    target = Path(output) if output else folder.path.resolve().with_name(f"{folder.path.resolve().name}-{to}")
    if target.resolve() == folder.path.resolve():
        raise UsageError(f"{target} is the source itself", "choose another --output")
    formats = {n: "w4a16" if x.format == "nvfp4" and not x.input_global else x.format for n, x in linears.items()}
    groups = {x.group(folder) for x in linears.values() if x.format == "nvfp4"}
    if len(groups) > 1:
        raise CheckpointError(f"{folder.path}: linears differ in group size, {sorted(groups)}", "see annie-quant audit")
    plan, dropped, excluded = [], [], []
    owned = {t for x in linears.values() for t in x.tensors()}
    for x in linears.values():
        plan += dialect.tensors(x, folder)
    for name in folder:
        info = folder.info(name)
        if name in owned:
            continue
        if name.endswith(QUANTIZER):
            dropped.append(name)
            continue
        if is_linear(name, info.shape):
            excluded.append(name.removesuffix(".weight"))
        plan.append(writer.Planned(name, info.dtype, info.shape, partial(folder.pieces, name)))
    inline, beside = dialect.small_files(formats, sorted(excluded), next(iter(groups), 16), with_input=True)
    stamp = {"to": to, "source": fingerprint(folder), "shard_bytes": shard_bytes}
    with staged(target, stamp, force) as part:
        shards = writer.write(part, plan, shard_bytes, progress=progress, resume=True)
        size_bytes = sum(s.stat().st_size for s in shards)
        writer.carry(folder, part)
        for file, value in beside.items():
            write_json(part / file, value)
        write_json(part / "config.json", {**folder.config, "quantization_config": inline})
    loss = (
        ["global scales are reciprocals: at most one unit in the last place of float32"]
        if any(x.reciprocal != (to == "compressed-tensors") for x in linears.values() if x.format == "nvfp4")
        else []
    )
    loss += [f"{len(dropped)} quantizer tensors have no place: {', '.join(dropped[:3])}"] if dropped else []
    return {
        "path": str(target),
        "size_bytes": size_bytes,
        "tensors": len(plan),
        "loss": loss,
    }
