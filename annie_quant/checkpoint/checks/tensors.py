"""Check single tensors, and the linears that servers merge into one matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from annie_quant import models, nvfp4
from annie_quant.checkpoint.checks import fault, finding_of
from annie_quant.checkpoint.header import ShardError, TensorInfo
from annie_quant.checkpoint.linears import (
    COLUMNS_PER_RANK,
    LARGEST_SCALE,
    Linear,
    QuantConfig,
    TensorScale,
    is_linear,
)
from annie_quant.checkpoint.shards import ModelFolder, ValuesUnread
from annie_quant.documents import Finding, TensorRow

if TYPE_CHECKING:
    from annie_quant.checkpoint.dialects import QuantizedFolder

CODES_PIECE_BYTES = 1 << 24
# Smaller bytes are subnormal (below 2^-6): they have fewer bits, and vLLM's Marlin kernels read
# them as 0 (#34577, #37502).
SMALLEST_NORMAL = 0x08
SUBNORMAL_SHARE = 0.01  # of the blocks with values; weights normally have a few such blocks
QUANTIZED_SUFFIXES = (
    ".weight_scale",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_packed",
    ".pre_quant_scale",
    ".weight_scale_inv",
)
# Mask of the exponent bits of the unquantized types, and the unsigned type of their size.
EXPONENTS = {
    "F32": (np.uint32, 0x7F800000),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}


def inspect_linear(model: QuantizedFolder, x: Linear) -> tuple[TensorRow, list[Finding]]:
    """Return the row of one quantized linear, and its faults."""
    folder = model.folder
    row = TensorRow(x.name, x.format)
    findings: list[Finding] = []
    is_nvfp4 = x.format == "nvfp4"
    try:
        row.shape = list(x.shape(folder))
        if is_nvfp4:
            scales = folder.info(x.block_scale or f"{x.name}.weight_scale")
            row.group = x.group(folder) if scales.dtype == "F8_E4M3" else None
            findings += layout_faults(model.config, scales, row.group)
            if row.group is not None and row.group % 16 == 0:
                findings += column_faults(x, row.shape[1])
                if not folder.headers_only:
                    counts = count_blocks(folder, x, row.group)
                    row.scale_min = counts.scale_min
                    row.scale_max = counts.scale_max
                    row.zero_blocks = counts.empty
                    row.blocks = counts.blocks
                    findings += block_faults(counts, x, scales.name)
        if x.global_scale:
            tensor_scale = x.tensor_scale(folder)
            row.tensor_scale = float(tensor_scale.multiplier)
            findings += scale_faults("tensor", x.global_scale, tensor_scale)
    except ValuesUnread:
        pass  # its layout is checked
    except ShardError as error:
        return row, [*findings, finding_of(error, x.name)]
    if is_nvfp4 and x.global_scale is None:
        findings.append(fault("tensor_scale_missing", x.name, f"{x.weight} has no tensor scale"))
    if x.format == "fp8":
        findings += fp8_faults(folder, x)
    try:
        input_scale = x.input_scale(folder)
        if input_scale:
            row.input_scale = float(input_scale.multiplier)
            findings += scale_faults("input", x.input_global or "", input_scale)
    except ValuesUnread:
        pass
    except ShardError as error:
        findings.append(finding_of(error, x.name))
    rounds_inputs = model.config.algo_of(x.name) in ("NVFP4", "NVFP4_AWQ")
    if is_nvfp4 and x.input_global is None and rounds_inputs:
        problem = f"no input scale, and {model.config.algo} quantizes activations"
        findings.append(fault("input_scale_missing", x.name, problem))
    if x.pre_quant:
        servers = "vLLM does not load it and other servers ignore it"
        problem = f"an activation scale of NVFP4_AWQ; {servers}"
        findings.append(fault("pre_quant_scale", x.pre_quant, problem))
    return row, findings


def scale_faults(kind: str, name: str, scale: TensorScale) -> Iterator[Finding]:
    """Check that a multiplier is positive and finite, and not a divisor. kind: "tensor" or "input"."""
    value = float(scale.multiplier)
    stored = float(scale.value)
    if not nvfp4.is_factor(value):
        problem = "zero" if stored == 0 else "not a positive finite number"
        applies = "divides" if scale.reciprocal else "multiplies"
        scaled = "activation" if kind == "input" else "weight"
        yield fault(f"{kind}_scale_bad", name, f"{stored}, {problem}; it {applies} every {scaled}")
    elif value > LARGEST_SCALE[kind]:
        yield fault(
            f"{kind}_scale_inverted",
            name,
            f"{value:.6g} is too large for a multiplier; is it a divisor?",
        )


def layout_faults(config: QuantConfig, scales: TensorInfo, group: int | None) -> Iterator[Finding]:
    """Check the type and the number of block scales.

    group: columns per scale; None for another type than E4M3.
    """
    if group is None:
        yield fault("scale_dtype", scales.name, f"{scales.dtype}, expected F8_E4M3")
    elif group % 16:
        yield fault(
            "group_size",
            scales.name,
            f"one scale for {group} columns, expected a multiple of 16 columns",
        )
    elif config.group and config.group != group:
        problem = (
            f"one scale for {group} columns, and the configuration has group_size {config.group}"
        )
        yield fault("group_size", scales.name, problem)


@dataclass
class BlockCounts:
    """The block scales of one NVFP4 linear.

    blocks: number of block scales.
    nan, negative: scales that are NaN, or negative.
    zero, small: scales of blocks with values that are 0, or below 2^-6.
    empty: blocks without values.
    scale_min, scale_max: smallest and largest E4M3 byte, without its sign.
    """

    blocks: int
    nan: int
    negative: int
    scale_min: int
    scale_max: int
    zero: int = 0
    small: int = 0
    empty: int = 0


def count_blocks(folder: ModelFolder, x: Linear, group: int) -> BlockCounts:
    """Count the block scales of an NVFP4 linear by fault."""
    codes = folder.tensor(x.weight)
    scales = folder.tensor(x.block_scale or "").view(np.uint8)
    magnitude = scales & nvfp4.E4M3_MAGNITUDE
    nan, negative = nvfp4.invalid_scales(scales)
    counts = BlockCounts(
        blocks=scales.size,
        nan=nan,
        negative=negative,
        scale_min=int(magnitude.min(initial=nvfp4.E4M3_NAN)),
        scale_max=int(magnitude.max(initial=0)),
    )
    # Temporary arrays stay small.
    step = max(1, CODES_PIECE_BYTES // max(1, codes[:1].nbytes))
    for start in range(0, len(codes), step):
        filled = filled_blocks(codes[start : start + step], group)
        piece = magnitude[start : start + step]
        counts.zero += int((filled & (piece == 0)).sum())
        counts.small += int((filled & (piece > 0) & (piece < SMALLEST_NORMAL)).sum())
        counts.empty += int((~filled).sum())
    folder.release(x.weight)
    folder.release(x.block_scale or "")
    return counts


def filled_blocks(codes: np.ndarray, group: int) -> np.ndarray:
    """Return which blocks have a value other than 0: bool [N, K/group]. codes: uint8 [N, K/2]."""
    return np.bitwise_and(codes, 0x77).reshape(len(codes), -1, group // 2).any(axis=2)


def column_faults(x: Linear, columns: int) -> Iterator[Finding]:
    """Check that the columns of an NVFP4 linear are as many as vLLM can read."""
    if columns % COLUMNS_PER_RANK:
        problem = f"{columns} columns, not a multiple of {COLUMNS_PER_RANK}; vLLM reads wrong block scales (#48898)"
        yield fault("columns_per_rank", x.name, problem)


def block_faults(counts: BlockCounts, x: Linear, scales: str) -> Iterator[Finding]:
    """Yield the faults of block scales and codes. scales: the name of the block scales."""
    underflow = (
        "are below 2^-6, which vLLM's Marlin kernels read as 0; is the tensor scale too large?"
    )
    for code, n, most, problem in (
        ("block_scale_nan", counts.nan, 0, "are NaN"),
        ("block_scale_negative", counts.negative, 0, "are negative"),
        ("block_scale_zero", counts.zero, 0, "are 0 where the block has values"),
        (
            "block_scale_underflow",
            counts.small,
            SUBNORMAL_SHARE * (counts.blocks - counts.empty),
            underflow,
        ),
    ):
        if n > most:
            yield fault(code, scales, f"{n} of {counts.blocks} block scales {problem}")
    if counts.empty == counts.blocks and counts.blocks:
        yield fault("all_zero", x.weight, "every weight is 0")


def fp8_faults(folder: ModelFolder, x: Linear) -> Iterator[Finding]:
    """Check codes and scales of an FP8 linear.

    One scale for the tensor, per row ([out] or [out, 1]) or per block.
    """
    if x.block_scale is None:
        missing = "weight_scale_inv" if x.block else "weight_scale"
        yield fault("fp8_scale_missing", x.name, f"{x.weight} is in FP8 and has no {missing}")
        return
    info = folder.info(x.block_scale)
    try:
        x.check_fp8_scale(folder)
    except ShardError as error:
        yield finding_of(error)
        return
    if info.dtype not in EXPONENTS:
        yield fault("scale_dtype", info.name, f"{info.dtype}, expected F32")
        return
    if folder.headers_only:
        return
    scale = folder.tensor(info.name).astype(np.float32).reshape(-1)
    invalid = int((~(np.isfinite(scale) & (scale > 0))).sum())
    if invalid:
        yield fault(
            "fp8_scale_bad", info.name, f"{invalid} of {scale.size} scales are not positive numbers"
        )
    magnitudes = (piece.view(np.uint8) & nvfp4.E4M3_MAGNITUDE for piece in folder.pieces(x.weight))
    nan = sum(int((magnitude == nvfp4.E4M3_NAN).sum()) for magnitude in magnitudes)
    if nan:
        yield fault(
            "fp8_code_nan", x.weight, f"{nan} of {folder.info(x.weight).elements} codes are NaN"
        )


def inspect_plain(folder: ModelFolder, name: str) -> tuple[TensorRow, list[Finding]]:
    """Return the row of a tensor that is not part of a quantized linear, and its faults."""
    info = folder.info(name)
    row = TensorRow(name, info.dtype, list(info.shape))
    findings: list[Finding] = []
    is_scale = name.endswith(QUANTIZED_SUFFIXES)  # an orphan, which is a finding already
    if is_scale or not info.elements or info.dtype not in EXPONENTS or folder.headers_only:
        return row, findings
    not_finite, nonzero = count_values(folder, info)
    if not_finite:
        findings.append(
            fault("not_finite", name, f"{not_finite} of {info.elements} values are NaN or infinite")
        )
    if not nonzero and is_linear(name, info.shape):
        findings.append(fault("all_zero", name, "every weight is 0"))
    return row, findings


def count_values(folder: ModelFolder, info: TensorInfo) -> tuple[int, int]:
    """Return how many values of a plain tensor are not finite, and how many are not 0."""
    unsigned, mask = EXPONENTS[info.dtype]
    exponent = unsigned(mask)
    minus_infinity = exponent | unsigned(1 << (8 * exponent.itemsize - 1))
    # transformers' initialisation of DeltaNet computes log(0) here; minus infinity means no decay.
    may_be_minus_infinity = models.is_log_decay(info.name)
    not_finite = nonzero = 0
    for piece in folder.pieces(info.name):
        bits = piece.view(unsigned)
        not_finite += int(((bits & exponent) == exponent).sum())
        if may_be_minus_infinity:
            not_finite -= int((bits == minus_infinity).sum())
        nonzero += int(np.count_nonzero(bits << unsigned(1)))
    return not_finite, nonzero


def check_fused(model: QuantizedFolder) -> Iterator[Finding]:
    """Check that linears which servers merge share format, tensor scale and input scale.

    Unequal scales corrupt tokens (vllm #54974, #54150).
    """
    folder = model.folder
    quantized = model.linears
    modules = set(quantized) | {n.removesuffix(".weight") for n in folder if n.endswith(".weight")}
    for group in folder.family.fused_groups(modules):
        members = [quantized[n] for n in group if n in quantized]
        if not members:
            continue
        if len(members) < len(group) or len({x.format for x in members}) > 1:
            kinds = {n: quantized[n].format if n in quantized else "16 bit" for n in group}
            formats = ", ".join(f"{n.rpartition('.')[2]} {kind}" for n, kind in kinds.items())
            yield fault(
                "fused_mixed", group[0], f"served as one matrix with different formats ({formats})"
            )
            continue
        if folder.headers_only:
            continue
        yield from unequal_scales(folder, "tensor", members, Linear.tensor_scale)
        yield from unequal_scales(folder, "input", members, Linear.input_scale)


def unequal_scales(
    folder: ModelFolder,
    kind: str,
    members: list[Linear],
    scale_of: Callable[[Linear, ModelFolder], TensorScale | None],
) -> Iterator[Finding]:
    """Check that the scales of one fused group are equal."""
    try:
        scales = [scale_of(x, folder) for x in members]
    except ShardError:
        return  # reported by the check of the linear itself
    values = [str(s.multiplier if s else None) for s in scales]
    if len(set(values)) > 1:
        listed = ", ".join(
            f"{x.name.rpartition('.')[2]} {v}" for x, v in zip(members, values, strict=True)
        )
        problem = f"served as one matrix with unequal {kind} scales ({listed})"
        yield fault(f"fused_{kind}_scale", members[0].name, problem)
