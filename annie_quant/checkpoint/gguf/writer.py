"""GGUF files for llama.cpp: plan the tensors of a file and their types, then write it.

NVFP4 codes and block scales are stored bit for bit in ggml's layout; the tensor scale and the input scale are the tensors
`.scale` and `.input_scale` of the weight, as llama.cpp's own converter writes them. Tensors are streamed, so that a model
larger than memory can be written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from annie_quant import kquant, nvfp4
from annie_quant.checkpoint.dialects import QuantizedFolder
from annie_quant.checkpoint.gguf import vocabulary
from annie_quant.checkpoint.gguf.names import Heads, Layout, keeps_float32
from annie_quant.checkpoint.gguf.settings import GgufSettings, check_settings, read_settings
from annie_quant.checkpoint.linears import Linear
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import check_free_space
from annie_quant.core.errors import CheckpointError, EnvironmentFault, UsageError, need
from annie_quant.core.progress import SILENT, ByteProgress, Progress

if TYPE_CHECKING:
    from io import BufferedWriter

    from gguf import GGUFWriter


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


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file.

    type: ggml's name of its type.
    shape: in elements.
    load: yields its rows in order, as arrays of the type's bytes.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    load: Callable[[], Iterator[np.ndarray]]

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape, dtype=object))


@dataclass(frozen=True)
class GgufPlan:
    """A GGUF file.

    kind: the file's type, one of TYPES.
    mtp_layers: number of layers of the MTP head, which follow the decoder's.
    entries: its tensors.
    left_out: tensors of the folder that a text model's file omits.
    dequantized: quantized linears that ggml has no layout for.
    weight_only: the file's names of NVFP4 tensors whose activations stay in 16 bits.
    """

    kind: str
    layout: Layout
    settings: GgufSettings
    mtp_layers: int
    entries: list[GgufTensor]
    left_out: list[str]
    dequantized: list[str]
    weight_only: list[str]


def type_of(type: str | None, model: QuantizedFolder) -> str:
    """Return the GGUF type to write: `type`, or NVFP4 where the folder has NVFP4 linears that llama.cpp serves, else BF16."""
    family = model.folder.family.gguf
    computed = family is None or family.computes_nvfp4(model.folder)
    kind = (type or ("NVFP4" if has_nvfp4(model) and computed else "BF16")).upper()
    if kind not in TYPES:
        raise UsageError(f"{type!r} is not a type that is written here", f"choose one of: {', '.join(TYPES)}")
    return kind


def has_nvfp4(model: QuantizedFolder) -> bool:
    return any(linear.format == "nvfp4" for linear in model.linears.values())


def plan_gguf(model: QuantizedFolder, kind: str) -> GgufPlan:
    """Plan the file of a model folder. kind: one of TYPES."""
    folder = model.folder
    if kind == "NVFP4" and not has_nvfp4(model):
        raise UsageError(f"{folder.path} holds no NVFP4", "quantize it first: annie-quant quantize --strategy direct")
    if model.linears and kind not in ("NVFP4", "BF16", "F16"):
        raise UsageError(
            f"{folder.path} is quantized already, {kind} needs unquantized weights",
            "give the bf16 checkpoint it was made from",
        )
    settings = read_settings(folder)
    check_settings(folder, settings, model.linears)
    layout = Layout.of(folder.family, settings)
    heads = layout.heads
    if heads and heads.key_dim != heads.value_dim:
        raise CheckpointError(
            f"linear_key_head_dim {heads.key_dim} and linear_value_head_dim {heads.value_dim} differ",
            "llama.cpp serves Qwen3.5 with equal ones only",
        )
    has_mtp = any(map(folder.family.in_mtp, folder))
    mtp_layers = settings.mtp_num_hidden_layers or 0 if has_mtp else 0
    planner = _GgufPlanner(model, kind, layout, layout.layers + mtp_layers)
    entries = list(planner.entries())
    if (factors := settings.frequency_factors()) is not None:
        entries.append(GgufTensor("rope_freqs.weight", "F32", factors.shape, partial(iter, [factors])))
    lists = planner.left_out, planner.dequantized, planner.weight_only
    return GgufPlan(kind, layout, settings, mtp_layers, entries, *lists)


@dataclass(frozen=True)
class _GgufPlanner:
    """Collects the tensors of one file. blocks: number of llama.cpp's blocks, those of the MTP head included."""

    model: QuantizedFolder
    kind: str
    layout: Layout
    blocks: int
    left_out: list[str] = field(default_factory=list)
    dequantized: list[str] = field(default_factory=list)
    weight_only: list[str] = field(default_factory=list)

    @property
    def folder(self) -> ModelFolder:
        return self.model.folder

    def entries(self) -> Iterator[GgufTensor]:
        """Yield the experts, the quantized linears and the other tensors."""
        folder, linears, experts = self.folder, self.model.linears, self.layout.family.experts
        weights = [x.weight for x in linears.values()]
        weights += [part for name in self.model.unowned for part in folder.parts_of(name) or [name]]
        of_experts = {n for n in weights if experts and experts.split(n)}
        for stack in stacks(folder, self.layout, [n for n in weights if n in of_experts]):
            yield from self._stack(stack)
        for linear in linears.values():
            if linear.weight not in of_experts:
                yield from self._linear(linear)
        for name in self.model.unowned:
            if name in of_experts or folder.parts_of(name):
                continue
            stored = self.layout.name(name)
            if stored is None:
                self.left_out.append(name)
            else:
                yield self._plain(name, stored, folder.info(name).shape, partial(folder.tensor, name))

    def _plain(
        self, name: str, stored: str, shape: tuple[int, ...], read: Callable[[], np.ndarray], kind: str = ""
    ) -> GgufTensor:
        """Plan a tensor that is written as numbers or quantized here, in pieces where its rows keep their order.

        kind: its type, by default that of an unquantized tensor.
        """
        if self.layout.is_convolution(name):
            shape = (shape[0], int(np.prod(shape[1:])))
        kind = kind or self._type(stored, shape)
        reordered = self.layout.rows(name, shape[0]) is not None or len(shape) < 2
        step = max(1, shape[0] if reordered else PIECE_ELEMENTS // shape[-1])

        def load() -> Iterator[np.ndarray]:
            array = read()
            # A quantized linear's numbers have other bytes than the codes under its name.
            row_bytes = self.folder.info(name).size_bytes // shape[0] if name in self.folder else 0
            for start in range(0, shape[0], step):
                piece = array if reordered else array[start : start + step]
                yield encode(self.layout.transform(name, piece), kind, stored)
                if name in self.folder and not reordered:
                    self.folder.release(name, start * row_bytes, (start + len(piece)) * row_bytes)
            if name in self.folder:
                self.folder.release(name)

        return GgufTensor(stored, kind, shape, load)

    def _type(self, stored: str, shape: tuple[int, ...]) -> str:
        """Return the ggml type of an unquantized tensor."""
        if keeps_float32(stored, len(shape)):
            return "F32"
        if self.kind in LARGER:
            layer = int(stored.split(".")[1]) if stored.startswith("blk.") else None
            tied = "lm_head.weight" not in self.folder and "lm_head" not in self.model.linears
            kind = kquant.q4_k_m_type(stored, layer, self.blocks, shape, tied)
            larger = LARGER[self.kind].get(kind, kind)
            if larger is None:
                raise CheckpointError(
                    f"{stored}: rows of {shape[-1]}, {self.kind} needs a multiple of 256", "use Q4_K_M or Q8_0"
                )
            return larger
        if self.kind == "Q8_0":
            return "Q8_0" if shape[-1] % 32 == 0 else "F16"
        return "F16" if self.kind == "F16" else "BF16"

    def _linear(self, linear: Linear) -> Iterator[GgufTensor]:
        """Plan a quantized linear: NVFP4 unchanged where ggml has its layout, else numbers."""
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
            # ggml has no FP8. Q8_0 has its size, and 16-bit numbers would double the bytes of a token.
            eight_bit = linear.format == "fp8" and self.kind == "NVFP4" and shape[1] % 32 == 0
            kind = "Q8_0" if eight_bit else ""
            yield self._plain(name, stored, shape, lambda: linear.dequantize(self.folder), kind)
            return
        if linear.input_global is None:
            self.weight_only.append(stored)
        yield GgufTensor(stored, "NVFP4", shape, partial(self._blocks, linear))
        for suffix, scale in (
            (".scale", linear.tensor_scale(self.folder)),
            (".input_scale", linear.input_scale(self.folder)),
        ):
            if scale is not None and abs(float(scale.multiplier) - 1.0) >= 1e-6:  # llama.cpp's default is 1
                array = np.array([scale.multiplier], np.float32)
                yield GgufTensor(stored.removesuffix(".weight") + suffix, "F32", (1,), partial(iter, [array]))

    def _stack(self, stack: Stack) -> Iterator[GgufTensor]:
        """Plan the experts of one layer and linear: NVFP4 unchanged where ggml has their layout, else numbers."""
        linears = stack.linears(self.model.linears)
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
            yield GgufTensor(stack.stored, "NVFP4", shape, lambda: (part for x in linears for part in self._blocks(x)))
            for suffix, of in ((".scale", Linear.tensor_scale), (".input_scale", Linear.input_scale)):
                scales = [of(x, self.folder) for x in linears]
                values = np.array([1 if s is None else s.multiplier for s in scales], np.float32)
                if not np.allclose(values, 1.0, atol=1e-6):  # the converter's test; llama.cpp's default is 1
                    yield GgufTensor(
                        stack.stored.removesuffix(".weight") + suffix, "F32", values.shape, partial(iter, [values])
                    )
            return
        kind = self._type(stack.stored, shape)
        self.dequantized.extend(x.name for x in linears)

        def load() -> Iterator[np.ndarray]:
            for module, linear in zip_longest(stack.modules, linears):
                name = f"{module}.weight"
                matrix = linear.dequantize(self.folder) if linear else self.folder.tensor(name)
                yield encode(matrix, kind, stack.stored)
                self.folder.release(linear.weight if linear else name)

        yield GgufTensor(stack.stored, kind, shape, load)

    def _blocks(self, linear: Linear) -> Iterator[np.ndarray]:
        """Yield an NVFP4 linear as ggml's blocks, in llama.cpp's order of heads."""
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
    """Return an array as the bytes of one ggml type, in the same shape for a type of plain numbers."""
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


# ---- writing

MROPE_SECTIONS = [11, 11, 10, 0]  # Qwen3.5's, for a config.json without them


def write_gguf(model: QuantizedFolder, output: Path, kind: str, progress: Progress = SILENT) -> GgufPlan:
    """Write a model folder as one file, and return its plan. kind: one of TYPES."""
    gguf = need("gguf", "serve")
    plan = plan_gguf(model, kind)
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
        add_metadata(writer, plan, model.folder.path.resolve().name)
        vocabulary.add(writer, model.folder, plan.settings.vocab_size)
        sizes = [size_of(tensor) for tensor in plan.entries]
        check_free_space(output.parent, sum(sizes))
        for tensor, size in zip(plan.entries, sizes, strict=True):
            raw_dtype = gguf.GGMLQuantizationType[tensor.type]
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=raw_dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = ByteProgress(progress, sum(sizes))
        for tensor in plan.entries:
            done.add(write_data(writer, tensor))
        writer.flush()
        os.fsync(data_file(writer).fileno())
        writer.close()
        part.replace(output)
    finally:
        writer.close()
        part.unlink(missing_ok=True)
    return plan


def size_of(tensor: GgufTensor) -> int:
    """Return the bytes of one tensor in the file."""
    gguf = need("gguf", "serve")
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.type]]
    return tensor.elements // block * block_bytes


def data_file(writer: GGUFWriter) -> BufferedWriter:
    """Return the file of a writer whose header is written."""
    assert writer.fout
    return writer.fout[0]


def write_data(writer: GGUFWriter, tensor: GgufTensor) -> int:
    """Write one tensor's bytes, piece by piece, aligned as the format requires. Return their number."""
    file = data_file(writer)
    writer.write_padding(file, file.tell())
    size_bytes = 0
    for piece in tensor.load():
        raw = np.ascontiguousarray(piece)
        file.write(raw.view(np.uint8).data)
        size_bytes += raw.nbytes
    writer.write_padding(file, size_bytes)
    return size_bytes


def add_metadata(writer: GGUFWriter, plan: GgufPlan, name: str) -> None:
    """Add the keys that llama.cpp's converter writes, under its names."""
    gguf = need("gguf", "serve")
    settings, heads = plan.settings, plan.layout.heads
    rope, head_dim = settings.rope, settings.attention_head_dim
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
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


def add_hybrid_metadata(writer: GGUFWriter, plan: GgufPlan, heads: Heads) -> None:
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


def add_expert_metadata(writer: GGUFWriter, settings: GgufSettings) -> None:
    """Add the keys of a mixture of experts."""
    assert settings.num_experts and settings.num_experts_per_tok and settings.moe_intermediate_size  # by read_settings
    writer.add_expert_count(settings.num_experts)
    writer.add_expert_used_count(settings.num_experts_per_tok)
    writer.add_expert_feed_forward_length(settings.moe_intermediate_size)
    if settings.shared_expert_intermediate_size is not None:
        writer.add_expert_shared_feed_forward_length(settings.shared_expert_intermediate_size)
