"""GGUF files for llama.cpp: plan the tensors of a file and their types, then write it.

NVFP4 codes and block scales are stored bit for bit in ggml's layout; the tensor scale and the input
scale are the tensors `.scale` and `.input_scale` of the weight, as llama.cpp's own converter writes
them. Tensors are streamed, so that a model larger than memory can be written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from annie_quant import kquant, nvfp4
from annie_quant.checkpoint.dialects import QuantizedFolder
from annie_quant.checkpoint.gguf import vocabulary
from annie_quant.checkpoint.gguf.layout import (
    GgufSettings,
    Heads,
    Layout,
    check_settings,
    keeps_float32,
    read_settings,
)
from annie_quant.checkpoint.gguf.reader import refuse_wrong_nvfp4
from annie_quant.checkpoint.linears import Linear
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import check_free_space
from annie_quant.core.errors import CheckpointError, UsageError, need
from annie_quant.core.files import check_writable, replacing
from annie_quant.core.progress import SILENT, ByteProgress, Progress

if TYPE_CHECKING:
    from gguf import GGUFWriter


NVFP4_BLOCK = 64  # elements of one ggml NVFP4 block
PIECE_ELEMENTS = 1 << 24  # of a large tensor at a time, so that memory stays bounded
GGUF_TYPES = ("BF16", "F16", "NVFP4", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K")
# In llama-quant.cpp the larger mixtures differ from Q4_K_M in the type of most tensors. Q5_K has a
# fallback for rows that are not a multiple of 256 (Q5_1), which is not written here.
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


def type_of(type: str | None, model: QuantizedFolder) -> str:
    """Return the GGUF type to write.

    type: None for NVFP4 where the folder has NVFP4 linears that llama.cpp computes, else BF16.
    """
    folder = model.folder
    names = folder.family.gguf
    if type is None:
        computes_nvfp4 = names is None or names.computes_nvfp4(folder)
        return "NVFP4" if model.nvfp4 and computes_nvfp4 else "BF16"
    kind = type.upper()
    if kind not in GGUF_TYPES:
        message = f"{type!r} is not a type that is written here"
        raise UsageError(message, f"choose one of: {', '.join(GGUF_TYPES)}")
    if kind == "NVFP4" and names:
        refuse_wrong_nvfp4(names, folder, folder.path)
    return kind


def plan_gguf(model: QuantizedFolder, kind: str) -> GgufPlan:
    """Plan the file of a model folder. kind: one of TYPES."""
    folder = model.folder
    if kind == "NVFP4" and not model.nvfp4:
        raise UsageError(
            f"{folder.path} holds no NVFP4",
            "quantize it first: annie-quant quantize --strategy direct",
        )
    if model.linears and kind not in ("NVFP4", "BF16", "F16"):
        message = f"{folder.path} is quantized already, {kind} needs unquantized weights"
        raise UsageError(message, "give the bf16 checkpoint it was made from")
    settings = read_settings(folder)
    check_settings(model, settings)
    layout = Layout.of(folder.family, settings)
    heads = layout.heads
    if heads and heads.key_dim != heads.value_dim:
        message = f"linear_key_head_dim {heads.key_dim} and linear_value_head_dim {heads.value_dim} differ"
        raise CheckpointError(message, "llama.cpp serves Qwen3.5 with equal ones only")
    has_mtp = any(map(folder.family.in_mtp, folder))
    plan = GgufPlan(
        model, kind, layout, settings, settings.mtp_num_hidden_layers or 1 if has_mtp else 0
    )
    plan.entries.extend(plan.tensors())
    factors = settings.frequency_factors()
    if factors is not None:
        plan.entries.append(
            GgufTensor("rope_freqs.weight", "F32", factors.shape, partial(iter, [factors]))
        )
    return plan


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

    model: QuantizedFolder
    kind: str
    layout: Layout
    settings: GgufSettings
    mtp_layers: int
    entries: list[GgufTensor] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    dequantized: list[str] = field(default_factory=list)
    weight_only: list[str] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """The number of llama.cpp's blocks, those of the MTP head included."""
        return self.layout.layers + self.mtp_layers

    def tensors(self) -> Iterator[GgufTensor]:
        """Yield the experts, the quantized linears and the other tensors.

        What is left out or becomes numbers is added to the plan's lists.
        """
        experts = self.layout.family.experts
        of_experts: list[str] = []
        others: list[str] = []
        for name in self.model.weights:
            (of_experts if experts and experts.split(name) else others).append(name)
        for stored, stack in expert_stacks(self.model.folder, self.layout, of_experts).items():
            yield from self._tensor(stored, stack, stacked=True)
        for name in others:
            stored_name = self.layout.name(name)
            if stored_name:
                yield from self._tensor(stored_name, [name])
            else:
                linear = self._linear(name)
                self.left_out.append(linear.weight if linear else name)

    def _linear(self, name: str) -> Linear | None:
        return self.model.linears.get(name.removesuffix(".weight"))

    def _tensor(
        self, stored: str, names: Sequence[str], stacked: bool = False
    ) -> Iterator[GgufTensor]:
        """Plan one tensor of the file and its scales.

        NVFP4 stays unchanged where ggml has its layout, and becomes numbers elsewhere.

        names: the tensors that it is made of, "MODULE.weight" for a quantized linear.
        stacked: they are the linears of all experts of a layer.
        """
        linears = list(filter(None, map(self._linear, names)))
        shapes = {self.model.shape(name) for name in names}
        check_stack(stored, names, linears, len(shapes))
        shape = shapes.pop()
        if self.layout.is_convolution(names[0]):
            shape = (shape[0], int(np.prod(shape[1:])))
        columns = shape[-1]
        if stacked:
            shape = (len(names), *shape)
        formats = {linear.format for linear in linears}
        to_nvfp4 = self.kind == "NVFP4"
        # A file with an NVFP4 head does not start without drafts (llama.cpp #27736).
        in_head = self.layout.family.in_mtp(names[0])
        if to_nvfp4 and formats == {"nvfp4"} and columns % NVFP4_BLOCK == 0 and not in_head:
            yield from self._nvfp4_tensors(stored, shape, linears, stacked)
            return
        self.dequantized.extend(x.name for x in linears)
        # ggml has no FP8. Q8_0 has its size, and 16-bit numbers would double the bytes of a token.
        is_short = formats == {"fp8"} or (in_head and formats == {"nvfp4"})
        to_q8_0 = to_nvfp4 and is_short and not stacked and columns % 32 == 0
        kind = "Q8_0" if to_q8_0 else self._type(stored, shape)
        yield GgufTensor(stored, kind, shape, partial(self._numbers, stored, kind, names))

    def _nvfp4_tensors(
        self, stored: str, shape: tuple[int, ...], linears: Sequence[Linear], stacked: bool
    ) -> Iterator[GgufTensor]:
        """Plan the blocks of NVFP4 linears, and their tensor and input scales."""
        if all(linear.input_global is None for linear in linears):
            self.weight_only.append(stored)
        yield GgufTensor(stored, "NVFP4", shape, lambda: map(self._blocks, linears))
        module = stored.removesuffix(".weight")
        kinds = {".scale": Linear.tensor_scale, ".input_scale": Linear.input_scale}
        for suffix, scale_of in kinds.items():
            scales = [scale_of(linear, self.model.folder) for linear in linears]
            values = np.array([s.multiplier if s else 1 for s in scales], np.float32)
            # The converter's tests; llama.cpp's default is 1.
            if not np.allclose(values, 1.0, rtol=1e-5 if stacked else 0.0, atol=1e-6):
                load = partial(iter, [values])
                yield GgufTensor(module + suffix, "F32", values.shape, load)

    def _type(self, stored: str, shape: tuple[int, ...]) -> str:
        """Return the ggml type of a tensor of plain numbers."""
        if keeps_float32(stored, len(shape)):
            return "F32"
        if self.kind in LARGER:
            layer = int(stored.split(".")[1]) if stored.startswith("blk.") else None
            tied = "lm_head.weight" not in self.model.folder and "lm_head" not in self.model.linears
            kind = kquant.q4_k_m_type(stored, layer, self.blocks, shape, tied)
            larger = LARGER[self.kind].get(kind, kind)
            if larger:
                return larger
            problem = f"{stored}: rows of {shape[-1]}, {self.kind} needs a multiple of 256"
            raise CheckpointError(problem, "use Q4_K_M or Q8_0")
        if self.kind == "Q8_0":
            return "Q8_0" if shape[-1] % 32 == 0 else "F16"
        return "F16" if self.kind == "F16" else "BF16"

    def _numbers(self, stored: str, kind: str, names: Sequence[str]) -> Iterator[np.ndarray]:
        """Yield the values of tensors in one ggml type.

        They come in pieces where the rows keep their order.
        """
        folder = self.model.folder
        for name in names:
            linear = self._linear(name)
            array = linear.dequantize(folder) if linear else folder.tensor(name)
            needs_all_rows = array.ndim < 2 or self.layout.rows(name, len(array)) is not None
            step = max(1, PIECE_ELEMENTS // max(1, array[:1].size))
            if needs_all_rows:
                step = max(1, len(array))
            for start in range(0, len(array), step):
                piece = array[start : start + step]
                yield encode_ggml(self.layout.transform(name, piece), kind, stored)
                if linear is None:
                    row_bytes = piece[0].nbytes
                    folder.release(name, start * row_bytes, (start + len(piece)) * row_bytes)
            folder.release(linear.weight if linear else name)

    def _blocks(self, linear: Linear) -> np.ndarray:
        """Return an NVFP4 linear as ggml's blocks, in llama.cpp's order of heads."""
        tensor = linear.load(self.model.folder)
        codes = tensor.codes
        scale = np.repeat(tensor.block_scale, tensor.group // 16, axis=1)
        name = f"{linear.name}.weight"
        rows = self.layout.rows(name, len(codes))
        columns = self.layout.columns(name)
        if rows is not None:
            codes = codes[rows]
            scale = scale[rows]
        if columns is not None:
            assert self.layout.heads is not None  # whose order the columns have
            value_dim = self.layout.heads.value_dim
            if value_dim % 16:
                problem = f"value heads of {value_dim} columns, expected a multiple of 16"
                raise CheckpointError(f"{linear.name}: {problem}")
            codes = codes[:, columns[::2] // 2]
            scale = scale[:, columns[::16] // 16]
        codes = np.ascontiguousarray(codes)
        scale = np.ascontiguousarray(scale)
        blocks = nvfp4.to_ggml(nvfp4.Tensor(codes, scale, tensor.tensor_scale, tensor.shape, 16))
        self.model.folder.release(linear.weight)
        return blocks


def encode_ggml(array: np.ndarray, kind: str, name: str) -> np.ndarray:
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


def expert_stacks(
    folder: ModelFolder, layout: Layout, names: Iterable[str]
) -> dict[str, list[str]]:
    """Return name in the file → the weights of all experts that it holds, in order.

    names: of weights of single experts, those inside merged tensors included.
    Raises CheckpointError where a layer has other experts than 0 to the configuration's number.
    """
    experts = layout.family.experts
    by_name: dict[str, dict[int, str]] = {}
    for name in names:
        expert = experts.split(name) if experts else None
        stored = layout.name(name)
        if expert and stored:
            by_name.setdefault(stored, {})[expert[1]] = name
    count = folder.text_config.get(experts.count) if experts else None
    result = {}
    for stored, weights in by_name.items():
        expected = count if isinstance(count, int) and count < 1 << 20 else len(weights)
        if sorted(weights) != list(range(expected)):
            problem = f"{stored}: {len(weights)} experts, and config.json has {count}"
            raise CheckpointError(problem, "annie-quant audit the checkpoint")
        result[stored] = [weights[number] for number in range(expected)]
    return result


def check_stack(stored: str, names: Sequence[str], linears: Sequence[Linear], shapes: int) -> None:
    """Raise CheckpointError for tensors that one tensor of the file cannot hold.

    shapes: how many different ones they have.
    """
    if linears and len(linears) < len(names):
        quantized = {f"{linear.name}.weight" for linear in linears}
        plain = next(name for name in names if name not in quantized)
        problem = f"{plain} is not quantized, and other experts of its layer are"
        raise CheckpointError(problem, "annie-quant audit")
    if shapes > 1:
        problem = f"{stored}: experts of {shapes} shapes"
        raise CheckpointError(problem, "annie-quant audit the checkpoint")
    awq = next((x.pre_quant for x in linears if x.pre_quant), None)
    if awq:
        problem = f"{awq}: llama.cpp has no activation scales (NVFP4_AWQ)"
        raise CheckpointError(problem, "make it plain NVFP4 first: annie-quant audit --repair")


# ---- writing

MROPE_SECTIONS = [11, 11, 10, 0]  # Qwen3.5's, for a config.json without them


def write_gguf(
    model: QuantizedFolder, output: Path, kind: str, progress: Progress = SILENT
) -> GgufPlan:
    """Write a model folder as one file, and return its plan. kind: one of TYPES."""
    gguf = need("gguf", "serve")
    plan = plan_gguf(model, kind)
    check_writable(output)
    with (
        replacing(output) as file,
        contextlib.closing(gguf.GGUFWriter(file.name, plan.layout.names.architecture)) as writer,
    ):
        add_metadata(writer, plan, model.folder.path.resolve().name)
        vocabulary.add(writer, model.folder, plan.settings.vocab_size)
        sizes = [size_of(tensor) for tensor in plan.entries]
        check_free_space(output.parent, sum(sizes))
        for tensor, size in zip(plan.entries, sizes, strict=True):
            raw_dtype = gguf.GGMLQuantizationType[tensor.type]
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=raw_dtype
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = ByteProgress(progress, sum(sizes))
        for tensor in plan.entries:
            done.add(write_data(writer, tensor))
        writer.flush()
    return plan


def size_of(tensor: GgufTensor) -> int:
    """Return the bytes of one tensor in the file."""
    gguf = need("gguf", "serve")
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.type]]
    return tensor.elements // block * block_bytes


def write_data(writer: GGUFWriter, tensor: GgufTensor) -> int:
    """Write one tensor's bytes, piece by piece, aligned as the format requires.

    Return their number.
    """
    assert writer.fout  # the header is written
    file = writer.fout[0]
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
    settings = plan.settings
    rope = plan.settings.rope
    head_dim = plan.settings.attention_head_dim
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_size_label(gguf.size_label(sum(e.elements for e in plan.entries), 0, 0, 0))
    writer.add_block_count(plan.blocks)
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    if settings.intermediate_size is not None:
        writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(settings.num_attention_heads)
    writer.add_head_count_kv(settings.num_key_value_heads)
    # transformers' defaults
    default_theta = 1_000_000.0 if plan.layout.names.window_pattern else 10_000.0
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
    if plan.layout.heads:
        add_hybrid_metadata(writer, plan, plan.layout.heads)
    if plan.layout.family.experts:
        add_expert_metadata(writer, settings)
    if plan.weight_only:  # llama.cpp may round the activations of the others to 4 bits
        writer.add_array("general.tensor_extra.name", sorted(plan.weight_only))
        writer.add_array("general.tensor_extra.prec_a4", [False] * len(plan.weight_only))
    if plan.mtp_layers:
        writer.add_nextn_predict_layers(plan.mtp_layers)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def add_hybrid_metadata(writer: GGUFWriter, plan: GgufPlan, heads: Heads) -> None:
    """Add the keys of a model with DeltaNet layers.

    Multimodal rotary embedding, heads, and which layers are recurrent.
    """
    settings = plan.settings
    rope = plan.settings.rope
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
    kinds = settings.layer_types
    if kinds:
        recurrent = [k == "linear_attention" for k in kinds] + [False] * plan.mtp_layers
        writer.add_array(f"{plan.layout.names.architecture}.attention.recurrent_layers", recurrent)


def add_expert_metadata(writer: GGUFWriter, settings: GgufSettings) -> None:
    """Add the keys of a mixture of experts."""
    assert (
        settings.num_experts and settings.num_experts_per_tok and settings.moe_intermediate_size
    )  # by read_settings
    writer.add_expert_count(settings.num_experts)
    writer.add_expert_used_count(settings.num_experts_per_tok)
    writer.add_expert_feed_forward_length(settings.moe_intermediate_size)
    if settings.shared_expert_intermediate_size is not None:
        writer.add_expert_shared_feed_forward_length(settings.shared_expert_intermediate_size)
