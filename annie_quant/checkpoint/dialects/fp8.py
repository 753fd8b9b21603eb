"""FP8 with one scale per block of a weight, as Qwen and DeepSeek publish it.

Weight F8_E4M3 and weight_scale_inv.

W = code * weight_scale_inv of its block; the scale is a multiplier despite its name. This dialect
is only read: `convert` writes 16-bit numbers (--to bf16) or a GGUF file. Source: transformers,
integrations/finegrained_fp8.py (Fp8Dequantize).
"""

from __future__ import annotations

import msgspec

from annie_quant.checkpoint.linears import (
    Linear,
    QuantConfig,
    Size,
    existing,
    names_dialect,
    read_struct,
)
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.untrusted import JsonObject
from annie_quant.models.formats import FP8_BLOCK

NAME = "fp8"
BLOCK = (128, 128)  # rows and columns that share one scale, where the settings name no size
SCALE = "weight_scale_inv"


def matches(folder: ModelFolder) -> bool:
    """Return whether a folder is in this dialect.

    The configuration names it, or names none and the tensors are in its layout.

    Settings without a block size are of another layout (one scale per tensor), which is not read
    here.
    """
    quant = folder.quantization
    return names_dialect(folder, NAME, f".{SCALE}") and (
        not quant.get("quant_method") or block_size(quant) is not None
    )


def linears(folder: ModelFolder) -> dict[str, Linear]:
    """Return the quantized linears on disk, whatever the configuration lists."""
    block = block_size(folder.quantization) or BLOCK
    quantized = {}
    for name in folder:
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and folder.info(name).dtype == "F8_E4M3":
            scale = existing(folder, f"{module}.{SCALE}")
            quantized[module] = Linear(module, "fp8", name, scale, None, None, block=block)
    return quantized


class Fp8Settings(msgspec.Struct):
    """quantization_config of config.json. weight_block_size: rows and columns of a block."""

    modules_to_not_convert: list[str] = []
    weight_block_size: tuple[Size, Size] | None = None
    activation_scheme: object = "dynamic"


def config(folder: ModelFolder) -> QuantConfig:
    """Return the settings of config.json's quantization_config."""
    return read(folder.quantization)


def read(quant: JsonObject) -> QuantConfig:
    """Read the settings. Fields of another type than expected read as absent.

    An entry of modules_to_not_convert covers a module and what is inside it, as in transformers and
    vLLM.
    """
    settings = read_struct(Fp8Settings, quant)
    dynamic = settings.activation_scheme == "dynamic"
    return QuantConfig(
        method=NAME,
        algo=FP8_BLOCK if dynamic else f"{FP8_BLOCK} with static activations",
        group=None,
        excluded=[pattern for e in settings.modules_to_not_convert for pattern in (e, f"{e}.*")],
        raw=quant,
    )


def block_size(quant: JsonObject) -> tuple[int, int] | None:
    """Return the rows and columns of a block that the settings name, or None."""
    return read_struct(Fp8Settings, quant).weight_block_size
