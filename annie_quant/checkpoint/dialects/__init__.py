"""Ways to store quantized linears in a safetensors folder, one file per dialect.

A dialect has NAME and
    matches(folder)                        whether a folder is written in it
    linears(folder)                        module name → Linear, from the tensors on disk
    config(folder)                         the folder's settings as a QuantConfig
    tensors(linear, folder)                one linear as tensors to write in this dialect
    settings(formats, excluded, group)     what goes into config.json, and further files
"""

from __future__ import annotations

import sys
from types import ModuleType

from annie_quant import registry
from annie_quant.checkpoint.linears import Linear
from annie_quant.checkpoint.shards import ModelFolder


def find(name: str) -> ModuleType:
    """Return the dialect called `name`."""
    return registry.find(sys.modules[__name__], name, "dialect")


def of(folder: ModelFolder) -> ModuleType | None:
    """Return the dialect that a folder is written in, or None for plain weights."""
    package = sys.modules[__name__]
    return next((d for d in map(find, registry.names(package)) if d.matches(folder)), None)


def linears(folder: ModelFolder) -> dict[str, Linear]:
    """Return the quantized linears of a folder by module name; empty for plain weights."""
    dialect = of(folder)
    return dialect.linears(folder) if dialect else {}
