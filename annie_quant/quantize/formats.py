"""The linears that can be quantized, the formats that they can be stored in, and the bytes that these take.

A pattern of --exclude-layers with *, ? or [ is an fnmatch over the full module name. Any other pattern names whole dotted
parts: `layers.0` matches model.layers.0.* and not layers.01 or layers.10; `linear_attn` matches any module below that name.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from annie_quant.checkpoint.checks.contents import read_input
from annie_quant.checkpoint.linears import (
    HEAD,
    all_linears,
    covering_pattern,
    unties,
    weight_name,
)
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.models import in_layer
from annie_quant.models.formats import GROUP, NVFP4, W4A16, Format
from annie_quant.quantize.strategy import Job

UNQUANTIZED_HINT = "give --model the bf16 checkpoint, or annie-quant convert DIR --to bf16 first"
_FLOATS = ("BF16", "F16", "F32")


def names_module(pattern: str, module: str) -> bool:
    """Return whether a pattern of --exclude-layers names a module."""
    if any(c in pattern for c in "*?["):
        return fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."


def similar_names(pattern: str, modules: Sequence[str]) -> str:
    """Return a hint: one or two dotted parts of names that are close to a pattern, or a full name."""
    parts: set[str] = set()
    for module in modules:
        words = module.split(".")
        parts |= {*words, *map(".".join, itertools.pairwise(words))}
    close = difflib.get_close_matches(pattern.strip("*."), sorted(parts), n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"a full name is {modules[0]!r}" if modules else ""


def excluded(patterns: Iterable[str], modules: Iterable[str]) -> set[str]:
    """Return the modules that the patterns name. Raises UsageError for a pattern that names none."""
    modules = list(modules)
    chosen: set[str] = set()
    for pattern in patterns:
        matched = {m for m in modules if names_module(pattern, m)}
        if not matched:
            raise UsageError(
                f"--exclude-layers: {pattern!r} matches none of the model's {len(modules)} linear layers",
                similar_names(pattern, modules),
            )
        chosen |= matched
    return chosen


def choose(folder: ModelFolder, exclude: Iterable[str]) -> list[str]:
    """Return the linears that a strategy may quantize, in file order.

    exclude: patterns of modules to leave out, in addition to those that the family leaves unquantized.
    Raises CheckpointError for a weight that cannot be quantized, or if no linear is left.
    """
    if read_input(folder).dialect:
        raise CheckpointError(f"{folder.path} is quantized already", UNQUANTIZED_HINT)
    modules = all_linears(folder)
    left_out = excluded(exclude, dict.fromkeys([*modules, HEAD]))  # also a head that is tied
    chosen = []
    for module in modules:
        info = folder.info(f"{module}.weight")
        if module in left_out or covering_pattern(module, folder.family.unquantized):
            continue
        if info.dtype not in _FLOATS:
            raise CheckpointError(
                f"{info.name}: dtype {info.dtype}, expected one of {', '.join(_FLOATS)}",
                UNQUANTIZED_HINT,
            )
        chosen.append(module)
    uneven = [module for module in chosen if folder.info(f"{module}.weight").shape[1] % GROUP]
    if uneven:
        info = folder.info(f"{uneven[0]}.weight")
        names = dict.fromkeys(map(in_layer, uneven))
        raise CheckpointError(
            f"{info.name}: rows of {info.shape[1]}, expected a multiple of {GROUP}",
            f"add --exclude-layers {','.join(names)}",
        )
    if not chosen:
        raise CheckpointError(
            f"{folder.path}: no linear layer is left to quantize", "annie-quant audit it"
        )
    return chosen


def four_bit_formats(job: Job[Any], activation_bits: object) -> dict[str, Format]:
    """Return the format of every linear that may be quantized: 4-bit weights whose inputs have 4 or 16 bits."""
    kind = W4A16 if activation_bits == 16 else NVFP4
    return dict.fromkeys(choose(ModelFolder(job.model), job.exclude), kind)


def expected_bytes(folder: ModelFolder, formats: Mapping[str, Format]) -> int:
    """Return the size of the output's tensors. formats: linear → format; all other tensors keep their size."""
    total = 0
    if unties(folder, formats):
        total += formats[HEAD].stored_bytes(folder.info(weight_name(folder, HEAD)).shape)
    for tensor in folder:
        for name in folder.parts_of(tensor) or [tensor]:
            info = folder.info(name)
            kind = formats.get(name.removesuffix(".weight"))
            total += info.size_bytes if kind is None else kind.stored_bytes(info.shape)
    return total


def active_weights(folder: ModelFolder, linears: Iterable[str]) -> dict[str, float]:
    """Return linear → number of weights, for an expert's linear times the share of experts that a token passes."""
    experts = folder.family.experts
    share = folder.active_share
    counts: dict[str, float] = {}
    for name in linears:
        is_expert = experts is not None and experts.split(name) is not None
        elements = folder.info(weight_name(folder, name)).elements
        counts[name] = elements * (share if is_expert else 1.0)
    return counts
