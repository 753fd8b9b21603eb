"""Loading a model folder, bf16 or NVFP4, with chosen numerics and cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub.errors import StrictDataclassError  # a field of config.json has another type
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from annie_quant.checkpoint import ModelFolder, dialects
from annie_quant.checkpoint.chat_template import refused
from annie_quant.checkpoint.dialects import compressed_tensors, fp8
from annie_quant.checkpoint.linears import FP8_BLOCK
from annie_quant.core.errors import AnnieError, CheckpointError, EnvironmentFault
from annie_quant.core.untrusted import JsonObject
from annie_quant.offline.experts import separate
from annie_quant.offline.linears import nvfp4_linears, set_cache, set_numerics
from annie_quant.offline.profiles import PROFILES, UNQUANTIZED
from annie_quant.offline.quantizer import BLOCK_FP8, NAMED_BLOCK_FP8

CACHE_BYTES = {"packed": 0.0, "bf16": 2.0, "float32": 4.0}  # per weight, in addition to the packed bytes
MEMORY_HINT = 'a smaller cache (packed), another device, or device_map="auto" with offload_folder'


def load(
    model_dir: str | os.PathLike,
    numerics: str | None = None,
    cache: str = "packed",
    dtype: torch.dtype | str = "auto",
    device: str | None = None,
    **options: Any,
) -> Any:
    """Load a folder as a transformers causal LM in eval mode.

    numerics: a profile's name (profiles.py), such as "w4a4", or None for what the checkpoint defines; ignored for a model without
    NVFP4 linears.
    cache: "packed", "bf16" or "float32" (see NVFP4Linear.set_cache). dtype: of everything that is not packed.
    options: for from_pretrained, such as device_map.
    Raises CheckpointError for a folder without a model and for a faulty checkpoint (with the audit's finding),
    EnvironmentFault where memory is too small.
    """
    folder = Path(model_dir)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is not a model folder: config.json is missing")
    shards = ModelFolder(folder)
    if "device_map" not in options and device in (None, "cpu"):
        check_memory(shards, cache, dtype)
    quant_config = shards.json("hf_quant_config.json")
    dialect = dialects.of(shards)
    method = BLOCK_FP8 if dialect is fp8 else ""
    if dialect is compressed_tensors and compressed_tensors.config(shards).algo == FP8_BLOCK:
        method = NAMED_BLOCK_FP8
    settings: JsonObject | None = None
    with one_line_errors(folder):
        if method:
            settings = shards.config.get("quantization_config") or {"weight_block_size": list(fp8.BLOCK)}
            settings = {**settings, "quant_method": method}
        elif "quantization_config" not in shards.config and quant_config is not None:
            settings = {"quant_method": "modelopt", **quant_config["quantization"]}
            settings["ignore"] = settings.get("exclude_modules", [])
        if settings is not None:
            options["config"] = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            options["config"].quantization_config = settings
        if device is not None:
            options.setdefault("device_map", device)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, trust_remote_code=False, **options
        )
        model, info = loaded
        check_names(folder, info)
        separate(model, shards.family)
        model.eval()
        if nvfp4_linears(model):
            if numerics is not None:
                set_numerics(model, numerics)
            set_cache(model, cache)
    return model


def check_names(folder: Path, info: dict[str, Any]) -> None:
    """Raise CheckpointError where the tensors are not those of the model that config.json describes.

    info: of from_pretrained(output_loading_info=True). Of the tensors that it leaves out only biases are faults: they are
    part of what a linear computes.
    """
    missing = sorted(info["missing_keys"]) + sorted(str(k[0]) for k in info["mismatched_keys"])
    biases = sorted(n for n in info["unexpected_keys"] if n.endswith("_proj.bias"))
    for names, problem in (
        (missing, "lacks"),
        (biases, "holds what config.json excludes (attention_bias, mlp_bias?):"),
    ):
        if names:
            more = f" and {len(names) - 1} more tensors" if names[1:] else ""
            raise CheckpointError(f"{folder.name} {problem} {names[0]}{more}", "annie-quant audit DIR")


def check_memory(shards: ModelFolder, cache: str, dtype: torch.dtype | str) -> None:
    """Raise EnvironmentFault where the free memory is too small: Linux would end the process without a message."""
    size = 0.0
    for info in shards.tensors.values():
        if info.dtype == "U8":
            size += info.size_bytes + 2 * info.elements * CACHE_BYTES.get(cache, 0)
        else:
            size += info.size_bytes * (2 if str(dtype) == "torch.float32" and info.dtype in ("BF16", "F16") else 1)
    free = psutil.virtual_memory().available
    if size > free:
        raise EnvironmentFault(
            f"{shards.path.name} needs {size / 1e9:.1f} GB of memory this way and {free / 1e9:.1f} GB are free",
            'cache="packed" and dtype="auto" need least; device_map="auto" with offload_folder uses the disk',
        )


@contextmanager
def one_line_errors(folder: Path) -> Iterator[None]:
    """Turn exceptions of transformers and torch about a folder into a CheckpointError or EnvironmentFault of one line."""
    try:
        with refused(folder):
            yield
    except AnnieError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise EnvironmentFault(f"{folder.name} does not fit into memory: {first_line(error)}", MEMORY_HINT) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, StrictDataclassError) as error:
        if "not enough memory" in str(error):
            raise EnvironmentFault(f"{folder.name} does not fit into memory", MEMORY_HINT) from error
        raise CheckpointError(
            f"{folder.name} cannot be loaded: {type(error).__name__}: {first_line(error)}", "annie-quant audit DIR"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of a message, with the second one where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return "no reason given"
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])[:200]


def numerics_of(model: nn.Module) -> list[str]:
    """Return the activation formats that the checkpoint defines.

    ["bf16"] without NVFP4 linears, ["w4a4", "w4a16"] if any linear has an input scale, else ["w4a16"].
    """
    linears = nvfp4_linears(model).values()
    if not linears:
        return [UNQUANTIZED.name]
    return ["w4a4", "w4a16"] if any(m.has_input_scale for m in linears) else ["w4a16"]


def profiles_of(model: nn.Module) -> list[str]:
    """Return all numerics profiles that the model can compute with; those with the checkpoint's input scales need one."""
    formats = numerics_of(model)
    if formats == [UNQUANTIZED.name]:
        return formats
    return [name for name, profile in PROFILES.items() if "w4a4" in formats or not profile.needs_input_scale]
