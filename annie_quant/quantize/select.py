"""Select the linears to quantize: by the family's defaults and by --exclude-layers.

A pattern with *, ? or [ is an fnmatch over the full module name. Any other pattern names whole dotted parts: `layers.0`
means model.layers.0.* and not layers.01 or layers.10; `linear_attn` means any part of that name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from annie_quant.checkpoint.linears import all_linears, covering_pattern
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.quantize.formats import GROUP

FLOATS = ("BF16", "F16", "F32")


def names_module(pattern: str, module: str) -> bool:
    """Return whether a pattern of --exclude-layers names a module."""
    if any(c in pattern for c in "*?["):
        return fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."


def excluded(patterns: Iterable[str], modules: Iterable[str]) -> set[str]:
    """Return the modules that the patterns name. Raises UsageError for a pattern that names none."""
    modules = list(modules)
    chosen: set[str] = set()
    for pattern in patterns:
        matched = {m for m in modules if names_module(pattern, m)}
        if not matched:
            parts = {
                ".".join(m.split(".")[i:j]) for m in modules for i in range(len(m.split("."))) for j in (i + 1, i + 2)
            }
            close = difflib.get_close_matches(pattern.strip("*."), sorted(parts), n=3, cutoff=0.5)
            raise UsageError(
                f"--exclude-layers: {pattern!r} matches none of the model's {len(modules)} linear layers",
                f"did you mean {' or '.join(close)}?" if close else f"a full name is {modules[0]!r}" if modules else "",
            )
        chosen |= matched
    return chosen


def choose(folder: ModelFolder, exclude: Iterable[str]) -> list[str]:
    """Return the linears that a strategy may quantize, in file order.

    Those that the family leaves unquantized and those that `exclude` names are left out.
    Raises CheckpointError for a weight that cannot be quantized, or if no linear is left.
    """
    modules = all_linears(folder)
    left_out = excluded(exclude, modules)
    chosen = []
    for module in modules:
        info = folder.info(f"{module}.weight")
        if module in left_out or covering_pattern(module, folder.family.unquantized):
            continue
        if info.dtype not in FLOATS:
            raise CheckpointError(f"{info.name}: dtype {info.dtype}, expected one of {', '.join(FLOATS)}",
                                  "give --model the bf16 checkpoint, or annie-quant convert DIR --to bf16 first")  # fmt: skip
        if info.shape[1] % GROUP:
            raise CheckpointError(f"{info.name}: rows of {info.shape[1]}, expected a multiple of {GROUP}",
                                  f"--exclude-layers {module}")  # fmt: skip
        chosen.append(module)
    if not chosen:
        raise CheckpointError(f"{folder.path}: no linear layer is left to quantize", "annie-quant audit it")
    return chosen


def decoder_linears(folder: ModelFolder) -> list[str]:
    """Return the linears of the decoder's layers."""
    return [n for n in all_linears(folder) if folder.family.in_decoder(n)]
