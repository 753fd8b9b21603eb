"""Read a GGUF file back into safetensors in ModelOpt's layout: NVFP4 bit for bit, other quantized types as bf16 numbers.

GGUF holds no config.json and no tokenizer.json, so a folder of the same model gives those, and the tensors' names and
shapes. llama.cpp's changes of values and order are reversed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from annie_quant import nvfp4
from annie_quant.checkpoint import quantized_tensors, writer
from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.gguf import limits
from annie_quant.checkpoint.gguf.names import Layout
from annie_quant.checkpoint.linears import is_linear, owned_tensors
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError, need
from annie_quant.core.files import write_json

if TYPE_CHECKING:
    from gguf import ReaderTensor


def open_gguf(path: Path) -> dict[str, ReaderTensor]:
    """Return the file's tensors (gguf.ReaderTensor) by name. Raises CheckpointError for anything else than a GGUF file."""
    gguf = need("gguf", "serve")
    limits.check(path)
    try:
        return {t.name: t for t in gguf.GGUFReader(path).tensors}
    except Exception as error:  # the package's reader raises whatever its parsing runs into
        raise CheckpointError(
            f"{path}: not a GGUF file that can be read ({str(error)[:80]})", "convert it again"
        ) from None


@dataclass(frozen=True)
class Restored:
    """size_bytes, tensors: of the weights.  rounded: names in the file of quantized tensors that became bf16."""

    size_bytes: int
    tensors: int
    rounded: list[str]


def restore(path: Path, like: ModelFolder, target: Path, shard_bytes: int = writer.DEFAULT_SHARD_BYTES) -> Restored:
    """Write a GGUF file as a model folder.

    like: a folder of the same model, quantized or not.
    """
    tensors = open_gguf(path)
    layout = Layout.of(like)
    if like.family.experts:
        raise CheckpointError(
            f"{path}: the experts of a GGUF file are not read back", "convert or quantize the folder it was made from"
        )
    plan: list[writer.Planned] = []
    formats: dict[str, str] = {}
    excluded, rounded, weight_only = [], [], False
    for name, shape in plain_shapes(like).items():
        stored = layout.name(name)
        if stored is None:
            continue
        if stored not in tensors:
            raise CheckpointError(f"{path}: {stored} is missing", f"is {like.path} of the same model?")
        tensor, module = tensors[stored], name.removesuffix(".weight")
        stored_shape = tuple(int(n) for n in reversed(tensor.shape))
        if stored_shape != (shape if len(shape) < 3 else (shape[0], int(np.prod(shape[1:])))):
            raise CheckpointError(
                f"{path}: {stored} has shape {list(stored_shape)}, {name} has {list(shape)}",
                f"is {like.path} of the same model?",
            )
        if tensor.tensor_type.name == "NVFP4":
            input_scale = scalar(tensors, stored, ".input_scale")
            formats[module] = "nvfp4"
            weight_only |= input_scale is None
            plan += quantized_tensors.nvfp4_tensors(
                module,
                (stored_shape[0], stored_shape[1]),
                partial(unpack_blocks, tensor, name, layout),
                partial(scalar, tensors, stored, ".scale", np.float32(1)),
                input_scale=input_scale,
            )
            continue
        if tensor.tensor_type.name not in ("F32", "F16", "BF16"):
            rounded.append(stored)
        plan.append(writer.Planned(name, "BF16", shape, partial(plain, name, tensor, shape, layout)))
        if is_linear(name, shape):
            excluded.append(module)
    writer.write(target, plan, shard_bytes)
    writer.copy_small_files(like, target)
    config = {k: v for k, v in like.config.items() if k != "quantization_config"}
    if formats:
        formats = dict.fromkeys(formats, "w4a16") if weight_only else formats
        writer.write_settings(target, config, modelopt.settings(formats, sorted(excluded), 16))
    else:
        write_json(target / "config.json", config)
    return Restored(sum(t.size_bytes for t in plan), len(plan), rounded)


def plain_shapes(like: ModelFolder) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the model's tensors as if none was quantized."""
    linears = modelopt.linears(like)
    owned = owned_tensors(linears.values())
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": x.shape(like) for n, x in linears.items()}
    return shapes | {n: like.info(n).shape for n in like if n not in owned}


def unpack_blocks(tensor: ReaderTensor, name: str, layout: Layout) -> Iterator[nvfp4.Tensor]:
    """Yield codes and block scales of an NVFP4 tensor with the heads in the checkpoint's order."""
    packed = nvfp4.from_ggml(np.ascontiguousarray(tensor.data))
    rows, columns = layout.rows(name, len(packed.codes)), layout.columns(name)
    if rows is not None:
        order = np.argsort(rows)
        packed.codes, packed.block_scale = packed.codes[order], packed.block_scale[order]
    if columns is not None:
        order = np.argsort(columns)
        packed.codes = packed.codes[:, order[::2] // 2]
        packed.block_scale = packed.block_scale[:, order[::16] // 16]
    yield packed


def scalar(tensors: dict[str, ReaderTensor], stored: str, suffix: str, default: Any = None) -> Any:
    """Return a float32 that is stored next to a weight, or `default`: llama.cpp omits a scale of 1."""
    tensor = tensors.get(stored.removesuffix(".weight") + suffix)
    return default if tensor is None else np.float32(tensor.data[0])


def plain(name: str, tensor: ReaderTensor, shape: tuple[int, ...], layout: Layout) -> np.ndarray:
    """Return one tensor's numbers with llama.cpp's changes reversed, in bf16."""
    gguf = need("gguf", "serve")
    kind = tensor.tensor_type
    array = tensor.data if kind.name in ("F32", "F16") else gguf.quants.dequantize(tensor.data, kind)
    array = layout.undo(name, np.asarray(array, np.float32))
    return array.reshape(shape).astype(ml_dtypes.bfloat16)
