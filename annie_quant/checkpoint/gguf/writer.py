"""A Qwen3.5 folder as one GGUF file for llama.cpp: bf16, f16, NVFP4 as the folder has it, or K-quants from bf16.

NVFP4 codes and block scales are carried over bit for bit in ggml's layout; the tensor scale and the input scale go
into `.scale` and `.input_scale` beside the weight, as llama.cpp's own converter writes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from annie_quant import kquant, nvfp4
from annie_quant.checkpoint.gguf import names, vocabulary
from annie_quant.checkpoint.linears import Linear
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import need_room
from annie_quant.errors import CheckpointError, EnvironmentFault, UsageError, need

ARCH = "qwen35"
NVFP4_BLOCK = 64  # elements of one ggml NVFP4 block
PIECE_ELEMENTS = 1 << 24  # of a large tensor at a time, so that memory stays bounded
TYPES = ("BF16", "F16", "NVFP4", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K")
FILE_TYPES = {
    "BF16": "MOSTLY_BF16",
    "F16": "MOSTLY_F16",
    "NVFP4": "MOSTLY_NVFP4",
    "Q8_0": "MOSTLY_Q8_0",
    "Q4_K_M": "MOSTLY_Q4_K_M",
    "Q5_K_M": "MOSTLY_Q5_K_M",
    "Q6_K": "MOSTLY_Q6_K",
}
# By llama-quant.cpp the larger mixtures differ from Q4_K_M in what most tensors get. Q5_K has a fallback for rows that are
# no multiple of 256 (Q5_1) which is not written here.
LARGER: dict[str, dict[str, str | None]] = {
    "Q4_K_M": {},
    "Q5_K_M": {"Q4_K": "Q5_K", "Q5_0": None},
    "Q6_K": {"Q4_K": "Q6_K", "Q5_0": "Q8_0"},
}
MROPE_SECTIONS = [11, 11, 10, 0]  # Qwen3.5's, where config.json does not say


@dataclass(frozen=True)
class Entry:
    """One tensor of the file: its logical shape, ggml type, and its bytes, as arrays of rows in order."""

    name: str
    type: str
    shape: tuple[int, ...]
    load: Callable[[], Iterator[np.ndarray]]


def write(
    folder: ModelFolder,
    output: Path,
    type: str | None,
    linears: dict[str, Linear],
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> dict[str, Any]:
    """Write the file and return {"path", "type", "size_bytes", "tensors", "left_out", "dequantized"}.

    type: one of TYPES; None means NVFP4 where the folder has NVFP4 linears and BF16 where it has none.
    """
    gguf = need("gguf", "serve")
    quantized = any(linear.format == "nvfp4" for linear in linears.values())
    kind = (type or ("NVFP4" if quantized else "BF16")).upper()
    if kind not in TYPES:
        raise UsageError(f"{type!r} is no type that is written here", f"choose one of: {', '.join(TYPES)}")
    if kind == "NVFP4" and not quantized:
        raise UsageError(f"{folder.path} holds no NVFP4", "quantize it first: annie-quant quantize --strategy direct")
    if linears and kind not in ("NVFP4", "BF16", "F16"):
        raise UsageError(
            f"{kind} of {folder.path} would quantize what is quantized already",
            "give the bf16 checkpoint it was made from",
        )
    config = folder.text_config
    plan = Plan(folder, linears, kind, config)
    entries = list(plan.entries())
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
    except OSError as error:
        raise EnvironmentFault(
            f"{output.parent}: cannot be written to ({error.strerror})", "choose another --output"
        ) from None
    writer = gguf.GGUFWriter(part, ARCH)
    try:
        elements = sum(int(np.prod(e.shape, dtype=object)) for e in entries)
        add_metadata(writer, folder, config, kind, plan.mtp_layers, elements)
        vocabulary.add(writer, folder, int(config["vocab_size"]))
        need_room(output.parent, sum(size_of(gguf, e) for e in entries))
        for entry in entries:
            add_info(gguf, writer, entry)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            progress(write_data(writer, entry))
        writer.flush()
        os.fsync(writer.fout[0].fileno())
        writer.close()
        part.replace(output)
    finally:
        writer.close()
        part.unlink(missing_ok=True)
    return {
        "path": str(output),
        "type": kind,
        "size_bytes": output.stat().st_size,
        "tensors": len(entries),
        "left_out": plan.left_out,
        "dequantized": plan.dequantized,
    }


def size_of(gguf: Any, entry: Entry) -> int:
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[entry.type]]
    return int(np.prod(entry.shape, dtype=object)) // block * block_bytes


def add_info(gguf: Any, writer: Any, entry: Entry) -> None:
    kind = gguf.GGMLQuantizationType[entry.type]
    writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), size_of(gguf, entry), raw_dtype=kind)


def write_data(writer: Any, entry: Entry) -> int:
    """One tensor's bytes, piece by piece, aligned as the format wants it. Returns their number."""
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    size_bytes = 0
    for piece in entry.load():
        raw = np.ascontiguousarray(piece)
        file.write(raw.view(np.uint8).data)
        size_bytes += raw.nbytes
    writer.write_padding(file, size_bytes)
    return size_bytes


class Plan:
    """Which tensors go in, as what. `left_out` have no place; `dequantized` is NVFP4 that ggml cannot lay out."""

    def __init__(self, folder: ModelFolder, linears: dict[str, Linear], kind: str, config: dict[str, Any]) -> None:
        self.folder, self.linears, self.kind = folder, linears, kind
        self.layers = int(config["num_hidden_layers"])
        self.heads = names.Heads.of(config)
        if self.heads.key_dim != self.heads.value_dim:
            raise CheckpointError(
                f"linear_key_head_dim {self.heads.key_dim} and linear_value_head_dim {self.heads.value_dim} differ",
                "llama.cpp serves Qwen3.5 with equal ones only",
            )
        has_mtp = any(".mtp." in f".{name}" for name in folder)
        self.mtp_layers = int(config.get("mtp_num_hidden_layers") or 0) if has_mtp else 0
        self.tied = "lm_head.weight" not in folder and "lm_head" not in linears
        self.left_out: list[str] = []
        self.dequantized: list[str] = []

    def entries(self) -> Iterator[Entry]:
        aside = {name for linear in self.linears.values() for name in linear.tensors()}
        for linear in self.linears.values():
            yield from self.linear(linear)
        for name in self.folder:
            if name in aside:
                continue
            place = names.gguf_name(name, self.layers)
            if place is None:
                self.left_out.append(name)
                continue
            yield self.plain(name, place, self.folder.info(name).shape, partial(self.folder.tensor, name))

    def plain(self, name: str, place: str, shape: tuple[int, ...], read: Callable[[], np.ndarray]) -> Entry:
        """A tensor that is written as numbers or quantized here. Rows that keep their order go in pieces."""
        if name.endswith(".conv1d.weight"):
            shape = (shape[0], int(np.prod(shape[1:])))
        kind = self.type_of(place, shape)
        moved = self.heads.rows(name) is not None or len(shape) < 2
        step = max(1, shape[0] if moved else PIECE_ELEMENTS // shape[-1])

        def load() -> Iterator[np.ndarray]:
            array = read()
            for start in range(0, shape[0], step):
                piece = array if moved else array[start : start + step]
                yield encode(names.transform(name, piece, self.heads), kind, place)
                if name in self.folder and not moved:
                    self.folder.release(name, start * piece[0].nbytes, (start + len(piece)) * piece[0].nbytes)
            if name in self.folder:
                self.folder.release(name)

        return Entry(place, kind, shape, load)

    def repacked(self, linear: Linear) -> Iterator[np.ndarray]:
        yield nvfp4.to_ggml(tiled(linear, self.folder, self.heads))
        self.folder.release(linear.weight)

    def type_of(self, place: str, shape: tuple[int, ...]) -> str:
        if names.keeps_float32(place, len(shape)):
            return "F32"
        if self.kind in LARGER:
            layer = int(place.split(".")[1]) if place.startswith("blk.") else None
            kind = kquant.q4_k_m_type(place, layer, self.layers + self.mtp_layers, shape, self.tied)
            larger = LARGER[self.kind].get(kind, kind)
            if larger is None:
                raise CheckpointError(
                    f"{place}: rows of {shape[-1]}, {self.kind} wants multiples of 256", "use Q4_K_M or Q8_0"
                )
            return larger
        if self.kind == "Q8_0":
            return "Q8_0" if shape[-1] % 32 == 0 else "F16"
        return "F16" if self.kind == "F16" else "BF16"

    def linear(self, linear: Linear) -> Iterator[Entry]:
        name = f"{linear.name}.weight"
        place = names.gguf_name(name, self.layers)
        shape = linear.shape(self.folder)
        if place is None:
            self.left_out.append(linear.weight)
            return
        if linear.pre_quant:
            raise CheckpointError(
                f"{linear.pre_quant}: llama.cpp has no place for an activation scale (NVFP4_AWQ)",
                "make it plain NVFP4 first: annie-quant audit --repair",
            )
        if linear.format != "nvfp4" or self.kind != "NVFP4" or shape[1] % NVFP4_BLOCK:
            self.dequantized.append(linear.name)
            yield self.plain(name, place, shape, lambda: linear.dequantize(self.folder))
            return
        yield Entry(place, "NVFP4", shape, partial(self.repacked, linear))
        for suffix, scale in (
            (".scale", linear.tensor_scale(self.folder)),
            (".input_scale", linear.input_scale(self.folder)),
        ):
            if scale is not None and abs(float(scale) - 1.0) >= 1e-6:  # llama.cpp reads an absent scale as 1
                array = np.array([scale], np.float32)
                yield Entry(place.removesuffix(".weight") + suffix, "F32", (1,), partial(iter, [array]))


def tiled(linear: Linear, folder: ModelFolder, heads: names.Heads):
    """The codec's tensor of a linear with its rows or columns in llama.cpp's head order and 16 columns a block."""
    tensor = linear.load(folder)
    codes, scale, group = tensor.codes, tensor.block_scale, tensor.group
    if group != 16:
        scale = np.repeat(scale, group // 16, axis=1)
    rows, columns = heads.rows(linear.name + ".weight"), heads.columns(linear.name + ".weight")
    if rows is not None:
        codes, scale = codes[rows], scale[rows]
    if columns is not None:
        # whole blocks move: the head dimension is a multiple of 16
        if heads.value_dim % 16:
            raise CheckpointError(f"{linear.name}: heads of {heads.value_dim} columns split blocks of 16")
        codes = codes[:, columns[::2] // 2]
        scale = scale[:, columns[::16] // 16]
    return nvfp4.Tensor(np.ascontiguousarray(codes), np.ascontiguousarray(scale), tensor.tensor_scale, tensor.shape, 16)


def encode(array: np.ndarray, kind: str, name: str) -> np.ndarray:
    """An array as the bytes of one ggml type, in the array's shape where the type is a plain number."""
    if kind == "BF16":
        return array.astype(ml_dtypes.bfloat16, copy=False).view(np.uint16)
    if kind == "F16":
        half = array.astype(np.float16)
        if not np.isfinite(half).all():
            raise CheckpointError(f"{name}: values beyond float16's range", "use --type BF16")
        return half
    if kind == "F32":
        return array.astype(np.float32, copy=False)
    return kquant.quantize(np.ascontiguousarray(array.astype(np.float32)), kind)  # type: ignore[arg-type]


def add_metadata(
    writer: Any, folder: ModelFolder, config: dict[str, Any], kind: str, mtp_layers: int, elements: int
) -> None:
    """The keys that llama.cpp's converter writes for Qwen3.5, under its names."""
    gguf = need("gguf", "serve")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    heads = names.Heads.of(config)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(folder.path.resolve().name)
    writer.add_size_label(gguf.size_label(elements, 0, 0, 0))
    writer.add_block_count(int(config["num_hidden_layers"]) + mtp_layers)
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(int(config["num_attention_heads"]))
    writer.add_head_count_kv(int(config["num_key_value_heads"]))
    sections = [*rope.get("mrope_section", MROPE_SECTIONS), 0, 0, 0, 0][:4]
    writer.add_rope_dimension_sections([int(s) for s in sections])
    writer.add_rope_freq_base(float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))))
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
    writer.add_rope_dimension_count(int(head_dim * factor))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    writer.add_ssm_conv_kernel(int(config["linear_conv_kernel_dim"]))
    writer.add_ssm_state_size(heads.key_dim)
    writer.add_ssm_group_count(heads.keys)
    writer.add_ssm_time_step_rank(heads.values)
    writer.add_ssm_inner_size(heads.value_dim * heads.values)
    writer.add_full_attention_interval(int(config.get("full_attention_interval") or 4))
    if kinds := config.get("layer_types"):
        recurrent = [k == "linear_attention" for k in kinds] + [False] * mtp_layers
        writer.add_array(f"{ARCH}.attention.recurrent_layers", recurrent)
    if mtp_layers:
        writer.add_nextn_predict_layers(mtp_layers)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
