"""The single checks of an audit. Each takes `add(code, tensor, message)` and never raises on a faulty checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import FUSED_NAMES, Linear, QuantConfig, fused_groups, is_linear, matches
from annie_quant.checkpoint.shards import ModelFolder

Add = Callable[[str, str, str], None]

MAGNITUDE = 0x7F  # of an E4M3 byte
NAN = 0x7F
CHUNK_BYTES = 1 << 24
# DeltaNet's decay is exp of this, and transformers' own initialisation makes log(0) of it: minus infinity means no decay.
DECAY = ".A_log"
# A multiplier is amax/2688: above 1 the largest weight would be over 2688, which no model has; a divisor usually is.
# Activations reach further (massive outliers of some tens of thousands), hence the wider bound.
# By ModelOpt's names; "" where the configuration names none.
ALGORITHMS = ("", "NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "FP8", "MIXED_PRECISION")
LARGEST_TENSOR_SCALE = 1.0
LARGEST_INPUT_SCALE = 100.0


def linear(folder: ModelFolder, x: Linear, config: QuantConfig, add: Add) -> dict[str, Any]:
    """Check one quantized linear and return its row for the table."""
    row: dict[str, Any] = {"name": x.name, "format": x.format}
    try:
        row["shape"] = list(x.shape(folder))
        if x.format == "nvfp4":
            blocks(folder, x, config, add, row)
        row["tensor_scale"] = scalar(x.global_scale, lambda: x.tensor_scale(folder), LARGEST_TENSOR_SCALE, add)
    except ShardError as error:
        add(error.code, error.tensor or x.name, error.message)
        return row
    if x.format == "nvfp4" and x.global_scale is None:
        add("tensor_scale_missing", x.name, f"{x.name}: no tensor scale beside {x.weight}")
    try:
        row["input_scale"] = scalar(x.input_global, lambda: x.input_scale(folder), LARGEST_INPUT_SCALE, add, "input")
    except ShardError as error:
        add(error.code, error.tensor or x.name, error.message)
    if x.format == "nvfp4" and x.input_global is None and expects_input(config, x.name):
        add("input_scale_missing", x.name, f"{x.name}: no input scale, and {config.algo} quantizes activations")
    if x.pre_quant:
        add(
            "pre_quant_scale",
            x.pre_quant,
            f"{x.pre_quant}: an activation scale is left over (NVFP4_AWQ); vLLM does not load it and others ignore it",
        )
    return row


def expects_input(config: QuantConfig, module: str) -> bool:
    """Whether the configuration promises static activation scales for a module."""
    algo = config.layers.get(module, "") if config.layers else config.algo
    return algo in ("NVFP4", "NVFP4_AWQ")


def scalar(
    name: str | None, value_of: Callable[[], Any], largest: float, add: Add, kind: str = "tensor"
) -> float | None:
    """Check a global scale: finite, positive, and no divisor where a multiplier belongs."""
    if name is None:
        return None
    value = float(value_of())
    if not np.isfinite(value) or value <= 0:
        bad = "zero" if value == 0 else "not a positive number"
        add(
            f"{kind}_scale_bad",
            name,
            f"{name}: {value}, {bad}; it multiplies every {'activation' if kind == 'input' else 'weight'}",
        )
    elif value > largest:
        add(f"{kind}_scale_inverted", name, f"{name}: {value:.6g} is too large for a multiplier; is it a divisor?")
    return value


def blocks(folder: ModelFolder, x: Linear, config: QuantConfig, add: Add, row: dict[str, Any]) -> None:
    """Check codes and block scales of an NVFP4 linear."""
    info = folder.info(x.block_scale or f"{x.name}.weight_scale")
    if info.dtype != "F8_E4M3":
        add("scale_dtype", info.name, f"{info.name}: {info.dtype}, expected F8_E4M3")
        return
    group = row["group"] = x.group(folder)
    if group % 16:
        add("group_size", info.name, f"{info.name}: one scale for {group} columns, expected a multiple of 16")
        return
    expected = config.group
    if expected and expected != group:
        add(
            "group_size",
            info.name,
            f"{info.name}: one scale for {group} columns, and the configuration says {expected}",
        )
    codes, scales = folder.tensor(x.weight), folder.tensor(info.name).view(np.uint8)
    magnitude = scales & MAGNITUDE
    nan, negative = int((magnitude == NAN).sum()), int(((scales > NAN) & (magnitude != NAN)).sum())
    zero = dead = 0
    for start, stop in rows_at_a_time(codes):
        filled = np.bitwise_and(codes[start:stop], 0x77).reshape(stop - start, -1, group // 2).any(axis=2)
        zero += int((filled & (magnitude[start:stop] == 0)).sum())
        dead += int((~filled).sum())
    row |= {
        "scale_min": int(magnitude.min(initial=NAN)),
        "scale_max": int(magnitude.max(initial=0)),
        "zero_blocks": dead,
        "blocks": scales.size,
    }
    if nan:
        add("block_scale_nan", info.name, f"{info.name}: {nan} of {scales.size} block scales are NaN")
    if negative:
        add("block_scale_negative", info.name, f"{info.name}: {negative} of {scales.size} block scales have a sign")
    if zero:
        add(
            "block_scale_zero",
            info.name,
            f"{info.name}: {zero} of {scales.size} block scales are 0 where the block has values",
        )
    if dead == scales.size and scales.size:
        add("all_zero", x.weight, f"{x.weight}: every weight is 0")
    folder.release(x.weight)
    folder.release(info.name)


def rows_at_a_time(array: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of rows of some megabytes, so that a check's temporaries stay small."""
    step = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), step):
        yield start, min(start + step, len(array))


def plain(folder: ModelFolder, name: str, add: Add) -> dict[str, Any]:
    """Check a tensor that is not part of a quantized linear."""
    info = folder.info(name)
    row = {"name": name, "format": info.dtype, "shape": list(info.shape)}
    if name.endswith(
        (".weight_scale", ".weight_scale_2", ".weight_global_scale", ".weight_packed", ".pre_quant_scale")
    ):
        add("orphan_scale", name, f"{name}: belongs to a quantized linear, and its other tensors are missing")
        return row
    if info.dtype == "U8" and name.endswith(".weight"):
        add("block_scale_missing", name, f"{name}: packed codes, and no weight_scale beside them")
        return row
    if not info.elements or info.dtype not in ("BF16", "F16", "F32"):
        return row
    bad = nonzero = 0
    for part in folder.pieces(name):
        bits, exponent = (
            (np.uint32, 0x7F800000) if info.dtype == "F32" else (np.uint16, 0x7F80 if info.dtype == "BF16" else 0x7C00)
        )
        pattern = part.view(bits)
        bad += int(((pattern & bits(exponent)) == exponent).sum())
        if name.endswith(DECAY):
            bad -= int((pattern == bits(exponent | 1 << (8 * pattern.itemsize - 1))).sum())
        nonzero += int(np.count_nonzero(pattern << bits(1)))
    if bad:
        add("not_finite", name, f"{name}: {bad} of {info.elements} values are NaN or infinite")
    if not nonzero and is_linear(name, info.shape):
        add("all_zero", name, f"{name}: every weight is 0")
    return row


def fused(folder: ModelFolder, linears: dict[str, Linear], add: Add) -> None:
    """Linears that a server fuses must share format, tensor scale and input scale."""
    all_names = set(linears) | {n.removesuffix(".weight") for n in folder if n.endswith(".weight")}
    for group in fused_groups(all_names):
        inside = [linears[n] for n in group if n in linears]
        if not inside:
            continue
        if len(inside) < len(group) or len({x.format for x in inside}) > 1:
            kinds = ", ".join(
                f"{n.rpartition('.')[2]} {linears[n].format if n in linears else '16 bit'}" for n in group
            )
            add("fused_mixed", group[0], f"{group[0]}: served as one matrix with different formats ({kinds})")
            continue
        for kind, value in (("tensor", Linear.tensor_scale), ("input", Linear.input_scale)):
            try:
                values = {str(value(x, folder)) for x in inside}
            except ShardError:
                continue  # named where the linear itself was checked
            if len(values) > 1:
                seen = ", ".join(f"{n.rpartition('.')[2]} {value(linears[n], folder)}" for n in group)
                add(
                    f"fused_{kind}_scale",
                    group[0],
                    f"{group[0]}: served as one matrix with unequal {kind} scales ({seen})",
                )


def known_method(folder: ModelFolder, add: Add) -> bool:
    """Whether quantization_config, where there is one, names a layout that is read here: of another nothing can be said."""
    quant = folder.config.get("quantization_config")
    method = quant.get("quant_method") if isinstance(quant, dict) else None
    if not method:
        return True
    add(
        "method_unknown",
        "config.json",
        f"quant_method {str(method)[:40]!r} is not read here; modelopt and compressed-tensors are",
    )
    return False


def configuration(
    folder: ModelFolder, dialect: ModuleType | None, linears: dict[str, Linear], config: QuantConfig, add: Add
) -> None:
    """The settings against what is on disk, and against each other."""
    inline = folder.config.get("quantization_config")
    if dialect is None:
        return
    if not isinstance(inline, dict):
        add(
            "config_missing",
            "config.json",
            "config.json: no quantization_config; a server would take this for plain weights",
        )
    try:
        beside = modelopt.read_file(folder)
    except ShardError as error:
        add(error.code, error.tensor, error.message)
        beside = None
    modules = sorted(
        n.removesuffix(".weight") for n in folder if is_linear(n, folder.info(n).shape) and n[:-7] not in linears
    )
    if isinstance(inline, dict) and beside is not None and dialect is modelopt:
        agree(config, beside, [*linears, *modules], add)
    if config.algo not in ALGORITHMS:
        add(
            "algorithm_unknown",
            "config.json",
            f"quant_algo {config.algo[:40]!r} is not known here; what is read: {', '.join(ALGORITHMS[1:])}",
        )
    if not linears:
        add(
            "nothing_quantized",
            "config.json",
            f"the configuration says {config.algo or config.method}, and no tensor is quantized",
        )
        return
    for entry in sorted({e.rpartition(".")[2]: e for e in config.excluded}.items()):
        if parts := FUSED_NAMES.get(entry[0]):
            own = ", ".join(p.rpartition(".")[2] for p in parts)
            add("excluded_fused_name", entry[1], f"{entry[1]}: excluded by its fused name, and on disk it is {own}")
    for name in sorted(linears):
        if pattern := matches(name, config.excluded):
            add("excluded_but_quantized", name, f"{name}: listed as excluded (by {pattern!r}) and quantized on disk")
        elif config.layers and name not in config.layers:
            add("not_listed", name, f"{name}: quantized on disk and not in quantized_layers")
    for name in modules:
        if config.layers:
            if name in config.layers:
                add("listed_but_plain", name, f"{name}: listed in quantized_layers and not quantized on disk")
        elif not matches(name, config.excluded) and not skipped(name):
            add("not_excluded", name, f"{name}: not quantized on disk and not listed as excluded")


def skipped(name: str) -> bool:
    """Modules that servers never take for quantized: vision and multi-token prediction load on their own."""
    return "visual." in name or name.startswith("mtp.") or ".mtp." in name


def agree(inline: QuantConfig, beside: QuantConfig, modules: list[str], add: Add) -> None:
    """config.json's settings and hf_quant_config.json must say the same about every module."""
    file = modelopt.HF_QUANT_CONFIG
    if inline.algo != beside.algo:
        add(
            "config_disagrees",
            file,
            f"{file} says {beside.algo or 'nothing'}, config.json says {inline.algo or 'nothing'}",
        )
        return
    if inline.group and beside.group and inline.group != beside.group:
        add("config_disagrees", file, f"{file}: group_size {beside.group}, config.json: {inline.group}")
    for name in sorted(modules):
        if bool(matches(name, inline.excluded)) != bool(matches(name, beside.excluded)):
            add("config_disagrees", name, f"{name}: excluded in one of {file} and config.json and not in the other")
    if inline.layers != beside.layers:
        name = sorted(set(inline.layers.items()) ^ set(beside.layers.items()))[0][0]
        add("config_disagrees", name, f"{name}: {file} and config.json list it differently in quantized_layers")
