"""Write a planned GGUF file for llama.cpp. Tensors are streamed, so that a model larger than memory can be written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from annie_quant.checkpoint.dialects import QuantizedFolder
from annie_quant.checkpoint.gguf import vocabulary
from annie_quant.checkpoint.gguf.names import Heads
from annie_quant.checkpoint.gguf.plan import GgufPlan, GgufTensor, plan_gguf
from annie_quant.checkpoint.gguf.settings import GgufSettings
from annie_quant.checkpoint.writer import need_room
from annie_quant.core.errors import EnvironmentFault, need
from annie_quant.core.progress import SILENT, ByteProgress, Progress

MROPE_SECTIONS = [11, 11, 10, 0]  # Qwen3.5's, for a config.json without them


def write_gguf(model: QuantizedFolder, output: Path, kind: str, progress: Progress = SILENT) -> GgufPlan:
    """Write a model folder as one file, and return what it holds. kind: one of plan.TYPES."""
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
        sizes = [size_of(gguf, tensor) for tensor in plan.entries]
        need_room(output.parent, sum(sizes))
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
        os.fsync(writer.fout[0].fileno())
        writer.close()
        part.replace(output)
    finally:
        writer.close()
        part.unlink(missing_ok=True)
    return plan


def size_of(gguf: Any, tensor: GgufTensor) -> int:
    """Return the bytes of one tensor in the file."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.type]]
    return tensor.elements // block * block_bytes


def write_data(writer: Any, tensor: GgufTensor) -> int:
    """Write one tensor's bytes, piece by piece, aligned as the format requires. Return their number."""
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    size_bytes = 0
    for piece in tensor.load():
        raw = np.ascontiguousarray(piece)
        file.write(raw.view(np.uint8).data)
        size_bytes += raw.nbytes
    writer.write_padding(file, size_bytes)
    return size_bytes


def add_metadata(writer: Any, plan: GgufPlan, name: str) -> None:
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


def add_hybrid_metadata(writer: Any, plan: GgufPlan, heads: Heads) -> None:
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


def add_expert_metadata(writer: Any, settings: GgufSettings) -> None:
    """Add the keys of a mixture of experts."""
    writer.add_expert_count(settings.num_experts)
    writer.add_expert_used_count(settings.num_experts_per_tok)
    writer.add_expert_feed_forward_length(settings.moe_intermediate_size)
    if settings.shared_expert_intermediate_size is not None:
        writer.add_expert_shared_feed_forward_length(settings.shared_expert_intermediate_size)
