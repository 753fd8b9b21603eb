"""Checks of an audit on single tensors. Each adds findings to the audit and never raises on a faulty checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from annie_quant import models
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import Linear, QuantConfig, TensorScale, is_linear
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.documents import Audit, TensorRow

MAGNITUDE = 0x7F  # of an E4M3 byte
NAN = 0x7F  # an E4M3 byte; larger bytes are negative
CHUNK_BYTES = 1 << 24
# Bytes below are subnormal (under 2^-6): fewer bits, and vLLM's Marlin kernels clear them (#34577, #37502).
SMALLEST_NORMAL = 0x08
SUBNORMAL_SHARE = 0.01  # of the blocks with values; weights have a few such blocks
COLUMNS_PER_RANK = 32
# A multiplier is amax / 2688: above 1 the largest weight would exceed 2688, which no model has; a divisor usually does.
LARGEST_TENSOR_SCALE = 1.0
LARGEST_INPUT_SCALE = 100.0  # activations reach further: some models have outliers of several 10,000
QUANTIZED_SUFFIXES = (
    ".weight_scale", ".weight_scale_2", ".weight_global_scale", ".weight_packed", ".pre_quant_scale", ".weight_scale_inv",
)  # fmt: skip
# Mask of the exponent bits of the unquantized types, and the unsigned type of their size.
EXPONENTS = {"F32": (np.uint32, 0x7F800000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00)}


def check_linear(folder: ModelFolder, x: Linear, config: QuantConfig, audit: Audit) -> TensorRow:
    """Check one quantized linear and return its row."""
    row = TensorRow(x.name, x.format)
    try:
        row.shape = list(x.shape(folder))
        if x.format == "nvfp4":
            check_blocks(folder, x, config, audit, row)
        row.tensor_scale = (
            check_scale("tensor", x.global_scale, x.tensor_scale(folder), audit) if x.global_scale else None
        )
    except ShardError as error:
        audit.add(error.code, error.tensor or x.name, error.message)
        return row
    if x.format == "nvfp4" and x.global_scale is None:
        audit.fault("tensor_scale_missing", x.name, f"{x.weight} has no tensor scale")
    if x.format == "fp8":
        check_fp8(folder, x, audit)
    try:
        scale = x.input_scale(folder)
        row.input_scale = check_scale("input", x.input_global or "", scale, audit) if scale else None
    except ShardError as error:
        audit.add(error.code, error.tensor or x.name, error.message)
    if x.format == "nvfp4" and x.input_global is None and expects_input_scale(config, x.name):
        audit.fault("input_scale_missing", x.name, f"no input scale, and {config.algo} quantizes activations")
    if x.pre_quant:
        audit.fault(
            "pre_quant_scale",
            x.pre_quant,
            "an activation scale of NVFP4_AWQ; vLLM does not load it and other servers ignore it",
        )
    return row


def expects_input_scale(config: QuantConfig, module: str) -> bool:
    """Return whether the settings promise a static activation scale for a module."""
    algo = config.algo_of(module) if config.layers else config.algo
    return algo in ("NVFP4", "NVFP4_AWQ")


def check_scale(kind: str, name: str, scale: TensorScale, audit: Audit) -> float:
    """Check that a scale is positive and finite, and not a divisor instead of a multiplier. Return the multiplier.

    kind: "tensor" or "input".
    """
    value = float(scale.multiplier)
    if not np.isfinite(value) or value <= 0:
        fault = "zero" if value == 0 else "not a positive number"
        scaled = "activation" if kind == "input" else "weight"
        audit.fault(f"{kind}_scale_bad", name, f"{value}, {fault}; it multiplies every {scaled}")
    elif value > (LARGEST_INPUT_SCALE if kind == "input" else LARGEST_TENSOR_SCALE):
        audit.fault(f"{kind}_scale_inverted", name, f"{value:.6g} is too large for a multiplier; is it a divisor?")
    return value


def check_blocks(folder: ModelFolder, x: Linear, config: QuantConfig, audit: Audit, row: TensorRow) -> None:
    """Check codes and block scales of an NVFP4 linear."""
    info = folder.info(x.block_scale or f"{x.name}.weight_scale")
    if info.dtype != "F8_E4M3":
        audit.fault("scale_dtype", info.name, f"{info.dtype}, expected F8_E4M3")
        return
    group = row.group = x.group(folder)
    if group % 16:
        audit.fault("group_size", info.name, f"one scale for {group} columns, expected a multiple of 16 columns")
        return
    if config.group and config.group != group:
        audit.fault(
            "group_size",
            info.name,
            f"one scale for {group} columns, and the configuration has group_size {config.group}",
        )
    codes, scales = folder.tensor(x.weight), folder.tensor(info.name).view(np.uint8)
    magnitude = scales & MAGNITUDE
    nan, negative = int((magnitude == NAN).sum()), int(((scales > NAN) & (magnitude != NAN)).sum())
    zero = empty = small = 0
    for start, stop in row_ranges(codes):
        filled = np.bitwise_and(codes[start:stop], 0x77).reshape(stop - start, -1, group // 2).any(axis=2)
        part = magnitude[start:stop]
        zero += int((filled & (part == 0)).sum())
        small += int((filled & (part > 0) & (part < SMALLEST_NORMAL)).sum())
        empty += int((~filled).sum())
    row.scale_min, row.scale_max = int(magnitude.min(initial=NAN)), int(magnitude.max(initial=0))
    row.zero_blocks, row.blocks = empty, scales.size
    of = f"of {scales.size} block scales"
    if nan:
        audit.fault("block_scale_nan", info.name, f"{nan} {of} are NaN")
    if negative:
        audit.fault("block_scale_negative", info.name, f"{negative} {of} are negative")
    if zero:
        audit.fault("block_scale_zero", info.name, f"{zero} {of} are 0 where the block has values")
    if small > SUBNORMAL_SHARE * (scales.size - empty):
        audit.fault(
            "block_scale_underflow",
            info.name,
            f"{small} {of} are below 2^-6, which vLLM's Marlin kernels read as 0; is the tensor scale too large?",
        )
    if row.shape and row.shape[1] % COLUMNS_PER_RANK:
        audit.fault(
            "columns_per_rank",
            x.name,
            f"{row.shape[1]} columns, not a multiple of {COLUMNS_PER_RANK}; vLLM reads wrong block scales (#48898)",
        )
    if empty == scales.size and scales.size:
        audit.fault("all_zero", x.weight, "every weight is 0")
    folder.release(x.weight)
    folder.release(info.name)


def check_fp8(folder: ModelFolder, x: Linear, audit: Audit) -> None:
    """Check codes and scales of an FP8 linear: one scale for the tensor, per row ([out] or [out, 1]) or per block."""
    if x.block_scale is None:
        audit.fault(
            "fp8_scale_missing",
            x.name,
            f"{x.weight} is in FP8 and has no {'weight_scale_inv' if x.block else 'weight_scale'}",
        )
        return
    info = folder.info(x.block_scale)
    if x.block:
        if info.shape != x.scale_grid(folder):
            error = x.wrong_grid(folder)
            audit.fault(error.code, info.name, error.message)
            return
    elif info.elements != 1 and not x.per_channel(folder):
        rows = folder.info(x.weight).shape[0]
        audit.fault("scale_shape", info.name, f"shape {list(info.shape)}, expected one number or [{rows}, 1]")
        return
    if info.dtype not in EXPONENTS:
        audit.fault("scale_dtype", info.name, f"{info.dtype}, expected F32")
        return
    scale = folder.tensor(info.name).astype(np.float32).reshape(-1)
    invalid = int((~(np.isfinite(scale) & (scale > 0))).sum())
    if invalid:
        audit.fault("fp8_scale_bad", info.name, f"{invalid} of {scale.size} scales are not positive numbers")
    nan = sum(int(((part.view(np.uint8) & MAGNITUDE) == NAN).sum()) for part in folder.pieces(x.weight))
    if nan:
        audit.fault("fp8_code_nan", x.weight, f"{nan} of {folder.info(x.weight).elements} codes are NaN")


def row_ranges(array: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of about CHUNK_BYTES, so that a check's temporary arrays stay small."""
    step = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), step):
        yield start, min(start + step, len(array))


def check_plain(folder: ModelFolder, name: str, audit: Audit) -> TensorRow:
    """Check a tensor that is not part of a quantized linear, and return its row."""
    info = folder.info(name)
    row = TensorRow(name, info.dtype, list(info.shape))
    if name.endswith(QUANTIZED_SUFFIXES):
        audit.fault("orphan_scale", name, "belongs to a quantized linear, and that linear's other tensors are missing")
        return row
    if info.dtype == "U8" and name.endswith(".weight"):
        audit.fault("block_scale_missing", name, "packed codes, and their weight_scale is missing")
        return row
    if not info.elements or info.dtype not in EXPONENTS:
        return row
    unsigned, mask = EXPONENTS[info.dtype]
    exponent = unsigned(mask)
    minus_infinity = exponent | unsigned(1 << (8 * exponent.itemsize - 1))
    # transformers' own initialisation of DeltaNet computes log(0) here: minus infinity means no decay.
    may_be_minus_infinity = models.is_log_decay(name)
    not_finite = nonzero = 0
    for part in folder.pieces(name):
        bits = part.view(unsigned)
        not_finite += int(((bits & exponent) == exponent).sum())
        if may_be_minus_infinity:
            not_finite -= int((bits == minus_infinity).sum())
        nonzero += int(np.count_nonzero(bits << unsigned(1)))
    if not_finite:
        audit.fault("not_finite", name, f"{not_finite} of {info.elements} values are NaN or infinite")
    if not nonzero and is_linear(name, info.shape):
        audit.fault("all_zero", name, "every weight is 0")
    return row


def check_fused(folder: ModelFolder, linears: dict[str, Linear], audit: Audit) -> None:
    """Check that linears which servers merge into one matrix share format, tensor scale and input scale.

    Unequal scales corrupt tokens (vllm #54974, #54150).
    """
    modules = set(linears) | {n.removesuffix(".weight") for n in folder if n.endswith(".weight")}
    for group in folder.family.fused_groups(modules):
        members = [linears[n] for n in group if n in linears]
        if not members:
            continue
        if len(members) < len(group) or len({x.format for x in members}) > 1:
            formats = ", ".join(
                f"{n.rpartition('.')[2]} {linears[n].format if n in linears else '16 bit'}" for n in group
            )
            audit.fault("fused_mixed", group[0], f"served as one matrix with different formats ({formats})")
            continue
        check_equal(folder, "tensor", members, Linear.tensor_scale, audit)
        check_equal(folder, "input", members, Linear.input_scale, audit)


def check_equal(
    folder: ModelFolder,
    kind: str,
    members: list[Linear],
    scale_of: Callable[[Linear, ModelFolder], TensorScale | None],
    audit: Audit,
) -> None:
    """Check that the scales of one fused group are equal."""
    try:
        scales = [scale_of(x, folder) for x in members]
    except ShardError:
        return  # reported by the check of the linear itself
    values = [str(s.multiplier if s else None) for s in scales]
    if len(set(values)) > 1:
        listed = ", ".join(f"{x.name.rpartition('.')[2]} {v}" for x, v in zip(members, values, strict=True))
        first = members[0].name
        audit.fault(f"fused_{kind}_scale", first, f"served as one matrix with unequal {kind} scales ({listed})")
