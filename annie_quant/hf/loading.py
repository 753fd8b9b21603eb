"""Loading a model folder for evaluation: bf16 or NVFP4, with the numerics and the cache asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from annie_quant.checkpoint import ModelFolder
from annie_quant.checkpoint.remote_code import refused
from annie_quant.errors import AnnieError, CheckpointError, EnvironmentFault
from annie_quant.hf.nvfp4_linear import nvfp4_linears, set_cache, set_numerics

CACHE_BYTES = {"packed": 0.0, "bf16": 2.0, "float32": 4.0}  # a weight, besides the packed bytes


def load(
    model_dir: str | os.PathLike,
    numerics: str | None = None,
    cache: str = "packed",
    dtype: Any = "auto",
    device: str | None = None,
    **more: Any,
) -> Any:
    """A transformers causal LM in eval mode from a folder.

    numerics: w4a4, w4a16, or None for what the checkpoint says; nothing for a model without NVFP4 linears.
    cache: packed, bf16 or float32 (see NVFP4Linear.set_cache). dtype: of everything that is not packed.
    more: goes to from_pretrained (device_map and the like). Raises CheckpointError for a folder that is no model and for
    a faulty checkpoint (the audit's finding), EnvironmentFault where memory is short.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(model_dir)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is no model folder: config.json is missing")
    shards = ModelFolder(folder)
    if "device_map" not in more and device in (None, "cpu"):
        enough_memory(shards, cache, dtype)
    side = shards.json("hf_quant_config.json")
    with one_line(folder):
        if "quantization_config" not in shards.config and side is not None:
            written = side["quantization"]
            more["config"] = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            more["config"].quantization_config = {
                "quant_method": "modelopt",
                **written,
                "ignore": written.get("exclude_modules", []),
            }
        if device is not None:
            more.setdefault("device_map", device)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, trust_remote_code=False, **more
        )
        model, info = loaded
        missing = sorted(info["missing_keys"]) + sorted(str(k[0]) for k in info["mismatched_keys"])
        if missing:
            raise CheckpointError(
                f"{folder.name} lacks {missing[0]}" + (f" and {len(missing) - 1} more tensors" if missing[1:] else ""),
                "annie-quant audit DIR",
            )
        model.eval()
        if nvfp4_linears(model):
            if numerics is not None:
                set_numerics(model, numerics)
            set_cache(model, cache)
    return model


def enough_memory(shards: ModelFolder, cache: str, dtype: Any) -> None:
    """Refuse what the machine's free memory cannot hold: Linux would end the process without a word."""
    import psutil

    size = 0.0
    for info in shards.tensors.values():
        packed = info.dtype == "U8"
        wide = not packed and str(dtype) == "torch.float32" and info.dtype in ("BF16", "F16")
        size += info.size_bytes * (2 if wide else 1) + (2 * info.elements * CACHE_BYTES.get(cache, 0) if packed else 0)
    free = psutil.virtual_memory().available
    if size > free:
        raise EnvironmentFault(
            f"{shards.path.name} needs {size / 1e9:.1f} GB of memory this way and {free / 1e9:.1f} GB are free",
            'cache="packed" and dtype="auto" need least; device_map="auto" with offload_folder uses the disk',
        )


@contextmanager
def one_line(folder: Path) -> Iterator[None]:
    """What transformers and torch raise about a folder, as one line."""
    import torch

    try:
        with refused(folder):
            yield
    except AnnieError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise EnvironmentFault(f"{folder.name} does not fit into memory: {first_line(error)}", MEMORY_HINT) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        if "not enough memory" in str(error):
            raise EnvironmentFault(f"{folder.name} does not fit into memory", MEMORY_HINT) from error
        raise CheckpointError(
            f"{folder.name} cannot be loaded: {type(error).__name__}: {first_line(error)}", "annie-quant audit DIR"
        ) from error


MEMORY_HINT = 'a smaller cache (packed), another device, or device_map="auto" with offload_folder'


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else "no reason given"


def numerics_of(model: Any) -> list[str]:
    """What this model can be evaluated under: ["bf16"] without NVFP4 linears, else w4a16 and, where any linear has an
    input scale, w4a4."""
    linears = nvfp4_linears(model).values()
    if not linears:
        return ["bf16"]
    return ["w4a4", "w4a16"] if any(m.rounds_input for m in linears) else ["w4a16"]
