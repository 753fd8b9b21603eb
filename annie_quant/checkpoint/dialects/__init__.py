"""Ways to store quantized linears in a safetensors folder, one file per dialect.

A dialect has NAME and
    matches(folder)                        whether a folder is written in it
    linears(folder)                        module name → Linear, from the tensors on disk
    config(folder)                         the folder's settings as a QuantConfig
    tensors(linear, folder)                one linear as tensors to write in this dialect
    settings(formats, excluded, group, kv_cache)     what goes into config.json, and further files
    kv_scale(layer, end, value)            a layer's scale of the KV cache to write; end: "k_scale" or "v_scale"
The last three are missing from a dialect that is only read (fp8).
"""

from __future__ import annotations

import sys
from types import ModuleType

from annie_quant.checkpoint.linears import Linear, QuantConfig
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core import registry
from annie_quant.core.errors import CheckpointError
from annie_quant.core.text import printable


def find(name: str) -> ModuleType:
    """Return the dialect called `name`."""
    return registry.find(sys.modules[__name__], name, "dialect")


def of(folder: ModelFolder) -> ModuleType | None:
    """Return the dialect that a folder is written in, or None for plain weights."""
    package = sys.modules[__name__]
    return next((d for d in map(find, registry.names(package)) if d.matches(folder)), None)


def refuse_unread(folder: ModelFolder) -> None:
    """Raise CheckpointError where config.json names a layout of quantized weights that is not read here.

    Its codes would be taken for weights.
    """
    quant = folder.config.get("quantization_config")
    method = quant.get("quant_method") if isinstance(quant, dict) else None
    if method and of(folder) is None:
        raise CheckpointError(
            f"{folder.path}: quant_method {printable(str(method), 40)!r} is not read here, "
            "expected modelopt, compressed-tensors or fp8 in blocks",
            "start from the 16-bit checkpoint of the same model",
        )


def linears(folder: ModelFolder) -> dict[str, Linear]:
    """Return the quantized linears of a folder by module name; empty for plain weights."""
    dialect = of(folder)
    return dialect.linears(folder) if dialect else {}


def config(folder: ModelFolder) -> QuantConfig:
    """Return the quantization settings of a folder; empty ones for plain weights."""
    dialect = of(folder)
    return dialect.config(folder) if dialect else QuantConfig("", "", None, [])
