"""Write a model folder as one GGUF file for llama.cpp: bf16, f16, NVFP4 as the folder has it, or K-quants from bf16.

NVFP4 codes and block scales are stored bit for bit in ggml's layout; the tensor scale and the input scale are the tensors
`.scale` and `.input_scale` of the weight, as llama.cpp's own converter writes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from annie_quant import kquant, nvfp4
from annie_quant.checkpoint.gguf import names, vocabulary
from annie_quant.checkpoint.gguf.names import Layout
from annie_quant.checkpoint.gguf.settings import Settings
from annie_quant.checkpoint.gguf.settings import read as read_settings
from annie_quant.checkpoint.linears import Linear, owned_tensors
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import need_room
from annie_quant.core.errors import CheckpointError, EnvironmentFault, UsageError, need
from annie_quant.core.progress import SILENT, ByteProgress, Progress

NVFP4_BLOCK = 64  # elements of one ggml NVFP4 block
PIECE_ELEMENTS = 1 << 24  # of a large tensor at a time, so that memory stays bounded
TYPES = ("BF16", "F16", "NVFP4", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K")
# In llama-quant.cpp the larger mixtures differ from Q4_K_M in the type of most tensors. Q5_K has a fallback for rows that
# are not a multiple of 256 (Q5_1), which is not written here.
LARGER: dict[str, dict[str, str | None]] = {
    "Q4_K_M": {},
    "Q5_K_M": {"Q4_K": "Q5_K", "Q5_0": None},
    "Q6_K": {"Q4_K": "Q6_K", "Q5_0": "Q8_0"},
}
MROPE_SECTIONS = [11, 11, 10, 0]  # Qwen3.5's, for a config.json without them


@dataclass(frozen=True)
class Entry:
    """One tensor of the file. shape: in elements.  load: yields its rows in order, as arrays of `type`'s bytes."""

    name: str
    type: str
    shape: tuple[int, ...]
    load: Callable[[], Iterator[np.ndarray]]

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape, dtype=object))


def type_of(type: str | None, folder: ModelFolder, linears: Mapping[str, Linear]) -> str:
    """Return the GGUF type to write: `type`, or NVFP4 where the folder has NVFP4 linears that llama.cpp serves, else BF16."""
    quantized = any(linear.format == "nvfp4" for linear in linears.values())
    family = folder.family.gguf
    computed = family is None or family.computes_nvfp4(folder)
    kind = (type or ("NVFP4" if quantized and computed else "BF16")).upper()
    if kind not in TYPES:
        raise UsageError(f"{type!r} is not a type that is written here", f"choose one of: {', '.join(TYPES)}")
    return kind


def write(
    folder: ModelFolder,
    output: Path,
    kind: str,
    linears: dict[str, Linear],
    progress: Progress = SILENT,
) -> Plan:
    """Write the file and return what it holds.

    kind: one of TYPES.
    """
    gguf = need("gguf", "serve")
    if kind == "NVFP4" and not any(linear.format == "nvfp4" for linear in linears.values()):
        raise UsageError(f"{folder.path} holds no NVFP4", "quantize it first: annie-quant quantize --strategy direct")
    if linears and kind not in ("NVFP4", "BF16", "F16"):
        raise UsageError(
            f"{folder.path} is quantized already, {kind} needs unquantized weights",
            "give the bf16 checkpoint it was made from",
        )
    plan = Plan(folder, linears, kind)
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
    except OSError as error:
        raise EnvironmentFault(
            f"{output.parent}: cannot be written to ({error.strerror})", "choose another --output"
        ) from None
    writer = gguf.GGUFWriter(part, plan.layout.names.architecture)
    try:
        add_metadata(writer, plan)
        vocabulary.add(writer, folder, plan.settings.vocab_size)
        size_bytes = sum(size_of(gguf, e) for e in plan.entries)
        need_room(output.parent, size_bytes)
        for entry in plan.entries:
            raw_dtype = gguf.GGMLQuantizationType[entry.type]
            writer.add_tensor_info(
                entry.name, entry.shape, np.dtype(np.float32), size_of(gguf, entry), raw_dtype=raw_dtype
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = ByteProgress(progress, size_bytes)
        for entry in plan.entries:
            done.add(write_data(writer, entry))
        writer.flush()
        os.fsync(writer.fout[0].fileno())
        writer.close()
        part.replace(output)
    finally:
        writer.close()
        part.unlink(missing_ok=True)
    return plan


def size_of(gguf: Any, entry: Entry) -> int:
    """Return the bytes of one tensor in the file."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[entry.type]]
    return entry.elements // block * block_bytes


def write_data(writer: Any, entry: Entry) -> int:
    """Write one tensor's bytes, piece by piece, aligned as the format requires. Return their number."""
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
    """Which tensors the file holds, in which type.

    left_out: tensors that a text model's file omits.  dequantized: quantized linears that ggml has no layout for.
    weight_only: the file's names of NVFP4 tensors whose activations stay in 16 bits.
    """

    def __init__(self, folder: ModelFolder, linears: dict[str, Linear], kind: str) -> None:
        self.folder, self.linears, self.kind = folder, linears, kind
        self.layout = names.Layout.of(folder)
        self.settings: Settings = read_settings(folder, linears)
        heads = self.layout.heads
        if heads and heads.key_dim != heads.value_dim:
            raise CheckpointError(
                f"linear_key_head_dim {heads.key_dim} and linear_value_head_dim {heads.value_dim} differ",
                "llama.cpp serves Qwen3.5 with equal ones only",
            )
        has_mtp = any(f".{folder.family.mtp}" in f".{name}" for name in folder)
        self.mtp_layers = self.settings.mtp_num_hidden_layers or 0 if has_mtp else 0
        self.tied = "lm_head.weight" not in folder and "lm_head" not in linears
        self.left_out: list[str] = []
        self.weight_only: list[str] = []
        self.dequantized: list[str] = []
        self.entries = list(self._entries())

    def _entries(self) -> Iterator[Entry]:
        owned = owned_tensors(self.linears.values())
        family = self.layout.family.experts
        weights = [x.weight for x in self.linears.values()] + [
            part for name in self.folder if name not in owned for part in self.folder.parts_of(name) or [name]
        ]
        of_experts = {n for n in weights if family and family.split(n)} if family else set()
        for stack in stacks(self.folder, self.layout, [n for n in weights if n in of_experts]):
            yield from self._stack(stack)
        for linear in self.linears.values():
            if linear.weight not in of_experts:
                yield from self._linear(linear)
        for name in self.folder:
            if name in owned or name in of_experts or self.folder.parts_of(name):
                continue
            stored = self.layout.name(name)
            if stored is None:
                self.left_out.append(name)
                continue
            yield self._plain(name, stored, self.folder.info(name).shape, partial(self.folder.tensor, name))
        if (factors := self.settings.frequency_factors()) is not None:
            yield Entry("rope_freqs.weight", "F32", factors.shape, partial(iter, [factors]))

    def _plain(self, name: str, stored: str, shape: tuple[int, ...], read: Callable[[], np.ndarray]) -> Entry:
        """Plan a tensor that is written as numbers or quantized here. Rows that keep their order go in pieces."""
        if self.layout.is_convolution(name):
            shape = (shape[0], int(np.prod(shape[1:])))
        kind = self._type(stored, shape)
        reordered = self.layout.rows(name, shape[0]) is not None or len(shape) < 2
        step = max(1, shape[0] if reordered else PIECE_ELEMENTS // shape[-1])

        def load() -> Iterator[np.ndarray]:
            array = read()
            for start in range(0, shape[0], step):
                piece = array if reordered else array[start : start + step]
                yield encode(self.layout.transform(name, piece), kind, stored)
                if name in self.folder and not reordered:
                    self.folder.release(name, start * piece[0].nbytes, (start + len(piece)) * piece[0].nbytes)
            if name in self.folder:
                self.folder.release(name)

        return Entry(stored, kind, shape, load)

    def _type(self, stored: str, shape: tuple[int, ...]) -> str:
        """Return the ggml type of an unquantized tensor."""
        if names.keeps_float32(stored, len(shape)):
            return "F32"
        if self.kind in LARGER:
            layer = int(stored.split(".")[1]) if stored.startswith("blk.") else None
            kind = kquant.q4_k_m_type(stored, layer, self.layout.layers + self.mtp_layers, shape, self.tied)
            larger = LARGER[self.kind].get(kind, kind)
            if larger is None:
                raise CheckpointError(
                    f"{stored}: rows of {shape[-1]}, {self.kind} needs a multiple of 256", "use Q4_K_M or Q8_0"
                )
            return larger
        if self.kind == "Q8_0":
            return "Q8_0" if shape[-1] % 32 == 0 else "F16"
        return "F16" if self.kind == "F16" else "BF16"

    def _linear(self, linear: Linear) -> Iterator[Entry]:
        """Plan a quantized linear: NVFP4 as it is where ggml has its layout, else as numbers."""
        name = f"{linear.name}.weight"
        stored = self.layout.name(name)
        shape = linear.shape(self.folder)
        if stored is None:
            self.left_out.append(linear.weight)
            return
        if linear.pre_quant:
            raise CheckpointError(
                f"{linear.pre_quant}: llama.cpp has no activation scales (NVFP4_AWQ)",
                "make it plain NVFP4 first: annie-quant audit --repair",
            )
        if linear.format != "nvfp4" or self.kind != "NVFP4" or shape[1] % NVFP4_BLOCK:
            self.dequantized.append(linear.name)
            yield self._plain(name, stored, shape, lambda: linear.dequantize(self.folder))
            return
        if linear.input_global is None:
            self.weight_only.append(stored)
        yield Entry(stored, "NVFP4", shape, partial(self._blocks, linear))
        for suffix, scale in (
            (".scale", linear.tensor_scale(self.folder)),
            (".input_scale", linear.input_scale(self.folder)),
        ):
            if scale is not None and abs(float(scale.multiplier) - 1.0) >= 1e-6:  # llama.cpp's default is 1
                array = np.array([scale.multiplier], np.float32)
                yield Entry(stored.removesuffix(".weight") + suffix, "F32", (1,), partial(iter, [array]))

    def _stack(self, stack: Stack) -> Iterator[Entry]:
        """Plan the experts of one layer and linear: NVFP4 as they are where ggml has their layout, else as numbers."""
        linears = stack.linears(self.linears)
        shapes: set[tuple[int, ...]] = {x.shape(self.folder) for x in linears}
        shapes = shapes or {self.folder.info(f"{m}.weight").shape for m in stack.modules}
        if len(shapes) > 1:
            raise CheckpointError(
                f"{stack.stored}: experts of {len(shapes)} shapes", "annie-quant audit the checkpoint"
            )
        shape = (len(stack.modules), *shapes.pop())
        if (
            self.kind == "NVFP4"
            and shape[2] % NVFP4_BLOCK == 0
            and linears
            and all(x.format == "nvfp4" for x in linears)
        ):
            if all(x.input_global is None for x in linears):
                self.weight_only.append(stack.stored)
            yield Entry(stack.stored, "NVFP4", shape, lambda: (part for x in linears for part in self._blocks(x)))
            for suffix, of in ((".scale", Linear.tensor_scale), (".input_scale", Linear.input_scale)):
                scales = [of(x, self.folder) for x in linears]
                values = np.array([1 if s is None else s.multiplier for s in scales], np.float32)
                if not np.allclose(values, 1.0, atol=1e-6):  # the converter's test; llama.cpp's default is 1
                    yield Entry(
                        stack.stored.removesuffix(".weight") + suffix, "F32", values.shape, partial(iter, [values])
                    )
            return
        kind = self._type(stack.stored, shape)
        self.dequantized += [x.name for x in linears]

        def load() -> Iterator[np.ndarray]:
            for module, linear in zip_longest(stack.modules, linears):
                name = f"{module}.weight"
                matrix = linear.dequantize(self.folder) if linear else self.folder.tensor(name)
                yield encode(matrix, kind, stack.stored)
                self.folder.release(linear.weight if linear else name)

        yield Entry(stack.stored, kind, shape, load)

    def _blocks(self, linear: Linear) -> Iterator[np.ndarray]:
        """Yield an NVFP4 linear as ggml's blocks, with llama.cpp's head order."""
        tensor = linear.load(self.folder)
        codes, scale = tensor.codes, tensor.block_scale
        if tensor.group != 16:
            scale = np.repeat(scale, tensor.group // 16, axis=1)
        name = f"{linear.name}.weight"
        rows, columns = self.layout.rows(name, len(codes)), self.layout.columns(name)
        if rows is not None:
            codes, scale = codes[rows], scale[rows]
        if columns is not None:
            assert self.layout.heads is not None  # whose order the columns have
            value_dim = self.layout.heads.value_dim
            if value_dim % 16:
                raise CheckpointError(f"{linear.name}: value heads of {value_dim} columns, expected a multiple of 16")
            codes, scale = codes[:, columns[::2] // 2], scale[:, columns[::16] // 16]
        yield nvfp4.to_ggml(
            nvfp4.Tensor(
                np.ascontiguousarray(codes), np.ascontiguousarray(scale), tensor.tensor_scale, tensor.shape, 16
            )
        )
        self.folder.release(linear.weight)


def encode(array: np.ndarray, kind: str, name: str) -> np.ndarray:
    """Return an array as the bytes of one ggml type, in the array's shape where the type is a plain number."""
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


def add_metadata(writer: Any, plan: Plan) -> None:
    """Add the keys that llama.cpp's converter writes, under its names."""
    gguf = need("gguf", "serve")
    settings, heads = plan.settings, plan.layout.heads
    rope, head_dim = settings.rope, settings.attention_head_dim
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(plan.folder.path.resolve().name)
    writer.add_size_label(gguf.size_label(sum(e.elements for e in plan.entries), 0, 0, 0))
    writer.add_block_count(plan.layout.layers + plan.mtp_layers)
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    if settings.intermediate_size is not None:
        writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(settings.num_attention_heads)
    writer.add_head_count_kv(settings.num_key_value_heads)
    default_theta = 1_000_000.0 if plan.layout.names.window_pattern else 10_000.0  # transformers' defaults
    writer.add_rope_freq_base(rope.rope_theta or settings.rope_theta or default_theta)
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
    if plan.layout.names.window_pattern and settings.sliding_window:
        writer.add_sliding_window(settings.sliding_window)
        if settings.final_logit_softcapping:
            writer.add_final_logit_softcapping(settings.final_logit_softcapping)
    if plan.layout.interleaved:
        writer.add_rope_dimension_count(head_dim)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{plan.kind}"])
    if heads:
        add_hybrid_metadata(writer, plan, heads)
    if plan.layout.family.experts:
        add_expert_metadata(writer, settings)
    if weight_only := sorted(plan.weight_only):  # llama.cpp may round the activations of the others to 4 bits
        writer.add_array("general.tensor_extra.name", weight_only)
        writer.add_array("general.tensor_extra.prec_a4", [False] * len(weight_only))
    if plan.mtp_layers:
        writer.add_nextn_predict_layers(plan.mtp_layers)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def add_hybrid_metadata(writer: Any, plan: Plan, heads: names.Heads) -> None:
    """Add the keys of a model with DeltaNet layers: multimodal rotary embedding, heads, and which layers are recurrent."""
    settings, rope = plan.settings, plan.settings.rope
    sections = MROPE_SECTIONS if rope.mrope_section is None else rope.mrope_section
    writer.add_rope_dimension_sections([*sections, 0, 0, 0, 0][:4])
    factor = rope.partial_rotary_factor or settings.partial_rotary_factor or 0.25
    writer.add_rope_dimension_count(int(settings.attention_head_dim * factor))
    writer.add_ssm_conv_kernel(settings.linear_conv_kernel_dim)
    writer.add_ssm_state_size(heads.key_dim)
    writer.add_ssm_group_count(heads.keys)
    writer.add_ssm_time_step_rank(heads.values)
    writer.add_ssm_inner_size(heads.value_dim * heads.values)
    writer.add_full_attention_interval(settings.full_attention_interval or 4)
    if kinds := settings.layer_types:
        recurrent = [k == "linear_attention" for k in kinds] + [False] * plan.mtp_layers
        writer.add_array(f"{plan.layout.names.architecture}.attention.recurrent_layers", recurrent)


def add_expert_metadata(writer: Any, settings: Settings) -> None:
    """Add the keys of a mixture of experts."""
    writer.add_expert_count(settings.num_experts)
    writer.add_expert_used_count(settings.num_experts_per_tok)
    writer.add_expert_feed_forward_length(settings.moe_intermediate_size)
    if settings.shared_expert_intermediate_size is not None:
        writer.add_expert_shared_feed_forward_length(settings.shared_expert_intermediate_size)


# ---- experts: llama.cpp has one tensor [experts, out, in] per linear, gate and up apart (conversion/qwen.py, Qwen2MoeModel)


@dataclass(frozen=True)
class Stack:
    """One tensor of the file. stored: its name.  modules: the linear of every expert, in order."""

    stored: str
    modules: list[str]

    def linears(self, linears: Mapping[str, Linear]) -> list[Linear]:
        """Return the quantized linears of all experts; [] where they are plain. Raises CheckpointError for a mixture."""
        quantized = [linears[m] for m in self.modules if m in linears]
        if quantized and len(quantized) < len(self.modules):
            plain = next(m for m in self.modules if m not in linears)
            raise CheckpointError(f"{plain} is not quantized, and other experts of its layer are", "annie-quant audit")
        return quantized


def stacks(folder: ModelFolder, layout: Layout, names: Iterable[str]) -> list[Stack]:
    """Return the tensors that hold the experts with these weights, in file order.

    names: of weights of single experts, those inside merged tensors included.
    Raises CheckpointError where a layer has other experts than 0 to the configuration's number.
    """
    experts = layout.family.experts
    by_name: dict[str, dict[int, str]] = {}
    for name in names:
        expert, stored = experts.split(name) if experts else None, layout.name(name)
        if expert and stored:
            by_name.setdefault(stored, {})[expert[1]] = name.removesuffix(".weight")
    count = folder.text_config.get(experts.count) if experts else None
    for stored, modules in by_name.items():
        if sorted(modules) != list(range(count if isinstance(count, int) and count < 1 << 20 else len(modules))):
            raise CheckpointError(
                f"{stored}: {len(modules)} experts, and config.json has {count}", "annie-quant audit the checkpoint"
            )
    return [Stack(stored, [m for _, m in sorted(modules.items())]) for stored, modules in by_name.items()]
