"""Ways to lay NVFP4 out in a safetensors folder, one to a file.

A dialect has NAME and
    matches(folder)            whether a folder is written in it
    linears(folder)            module name → Linear, from the tensors on disk
    config(folder)             what the configuration says, as a QuantConfig
    tensors(linear, folder)    one linear as tensors to write in this dialect
    small_files(formats, excluded, group, with_input)   what goes into config.json, and files beside it
"""

from __future__ import annotations

import importlib
from types import ModuleType

from annie_quant import registry
from annie_quant.checkpoint.linears import Linear
from annie_quant.checkpoint.shards import ModelFolder


def find(name: str) -> ModuleType:
    """The dialect called `name`."""
    return registry.find(importlib.import_module(__name__), name, "dialect")


def of(folder: ModelFolder) -> ModuleType | None:
    """The dialect a folder is written in, or None for plain weights."""
    package = importlib.import_module(__name__)
    return next((d for d in map(find, registry.names(package)) if d.matches(folder)), None)


def linears(folder: ModelFolder) -> dict[str, Linear]:
    """The quantized linears of a folder by module name; none for plain weights."""
    dialect = of(folder)
    return dialect.linears(folder) if dialect else {}
