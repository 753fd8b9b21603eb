"""A GGUF file back into safetensors in ModelOpt's layout: NVFP4 bit for bit, other quantized types as bf16 numbers.

GGUF holds no config.json and no tokenizer.json, so a folder of the same model gives those, and the tensors' names and
shapes. What llama.cpp's conventions changed (head order, 1 + w, −exp A_log) is changed back.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from annie_quant.checkpoint import writer
from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.gguf import limits, names
from annie_quant.checkpoint.linears import is_linear
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import CheckpointError, need
from annie_quant.files import write_json


def open_gguf(path: Path) -> dict[str, Any]:
    """The file's tensors by name. Raises CheckpointError for what is no GGUF file."""
    gguf = need("gguf", "serve")
    limits.check(path)
    try:
        return {t.name: t for t in gguf.GGUFReader(path).tensors}
    except Exception as error:  # the package's reader raises whatever its parsing runs into
        raise CheckpointError(
            f"{path}: no GGUF file that can be read ({str(error)[:80]})", "convert it again"
        ) from None


def restore(
    path: Path, like: ModelFolder, target: Path, shard_bytes: int = writer.DEFAULT_SHARD_BYTES
) -> dict[str, Any]:
    """Write the folder and return {"path", "size_bytes", "tensors", "loss"}."""
    tensors = open_gguf(path)
    config = like.text_config
    heads, layers = names.Heads.of(config), int(config["num_hidden_layers"])
    plan: list[writer.Planned] = []
    formats: dict[str, str] = {}
    excluded, rounded, scaled = [], [], []
    for name, shape in plain_shapes(like).items():
        place = names.gguf_name(name, layers)
        if place is None:
            continue
        if place not in tensors:
            raise CheckpointError(f"{path}: {place} is missing", f"is {like.path} of the same model?")
        tensor, module = tensors[place], name.removesuffix(".weight")
        seen = tuple(int(n) for n in reversed(tensor.shape))
        if seen != (shape if len(shape) < 3 else (shape[0], int(np.prod(shape[1:])))):
            raise CheckpointError(
                f"{path}: {place} has shape {list(seen)}, {name} has {list(shape)}",
                f"is {like.path} of the same model?",
            )
        if tensor.tensor_type.name == "NVFP4":
            formats[module] = "nvfp4"
            plan += nvfp4_tensors(module, tensors, place, heads)
            scaled.append(f"{place.removesuffix('.weight')}.input_scale" in tensors)
            continue
        if tensor.tensor_type.name not in ("F32", "F16", "BF16"):
            rounded.append(place)
        plan.append(writer.Planned(name, "BF16", shape, partial(plain, name, tensor, shape, heads)))
        if is_linear(name, shape):
            excluded.append(module)
    writer.write(target, plan, shard_bytes)
    writer.carry(like, target)
    settings = {k: v for k, v in like.config.items() if k != "quantization_config"}
    if formats:
        inline, beside = modelopt.small_files(formats, sorted(excluded), 16, all(scaled))
        settings["quantization_config"] = inline
        for file, value in beside.items():
            write_json(target / file, value)
    write_json(target / "config.json", settings)
    loss = [f"{len(rounded)} quantized tensors became bf16 numbers"] if rounded else []
    size = sum(t.size_bytes for t in plan)
    return {"path": str(target), "size_bytes": size, "tensors": len(plan), "loss": loss}


def plain_shapes(like: ModelFolder) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's tensors as if nothing of it were quantized."""
    linears = modelopt.linears(like)
    owned = {t for x in linears.values() for t in x.tensors()}
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": x.shape(like) for n, x in linears.items()}
    return shapes | {n: like.info(n).shape for n in like if n not in owned}


def nvfp4_tensors(module: str, tensors: dict[str, Any], place: str, heads: names.Heads) -> list[writer.Planned]:
    """Codes and block scales with the heads in the checkpoint's order again, and the scales from beside the weight."""
    from annie_quant import nvfp4

    stem = place.removesuffix(".weight")
    packed = nvfp4.from_ggml(np.ascontiguousarray(tensors[place].data))
    codes, scale = np.asarray(packed.codes), np.asarray(packed.block_scale)
    rows, columns = heads.rows(f"{module}.weight"), heads.columns(f"{module}.weight")
    if rows is not None:
        back = np.argsort(rows)
        codes, scale = codes[back], scale[back]
    if columns is not None:
        back = np.argsort(columns)
        codes, scale = codes[:, back[::2] // 2], scale[:, back[::16] // 16]
    out = [writer.planned(f"{module}.weight", codes), writer.planned(f"{module}.weight_scale", scale)]
    for suffix, beside in (("weight_scale_2", ".scale"), ("input_scale", ".input_scale")):
        value = tensors.get(stem + beside)
        if value is not None or suffix == "weight_scale_2":  # llama.cpp leaves out a scale of 1
            number = np.float32(1) if value is None else np.float32(value.data[0])
            out.append(writer.planned(f"{module}.{suffix}", np.array(number, np.float32)))
    return out


def plain(name: str, tensor: Any, shape: tuple[int, ...], heads: names.Heads) -> np.ndarray:
    """One tensor's numbers with llama.cpp's changes undone, in bf16."""
    gguf = need("gguf", "serve")
    kind = tensor.tensor_type
    array = tensor.data if kind.name in ("F32", "F16") else gguf.quants.dequantize(tensor.data, kind)
    array = names.undo(name, np.asarray(array, np.float32), heads)
    return array.reshape(shape).astype(ml_dtypes.bfloat16)
