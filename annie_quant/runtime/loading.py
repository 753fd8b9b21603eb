"""Loading a model folder for evaluation: bf16 or NVFP4, with the numerics and the cache asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from annie_quant import files
from annie_quant.errors import CheckpointError
from annie_quant.runtime.linear import nvfp4_linears, set_cache, set_numerics


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
    more: goes to from_pretrained (device_map and the like). Raises CheckpointError for a folder that is no model.
    """
    from transformers import AutoModelForCausalLM, PreTrainedConfig

    folder = Path(model_dir)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is no model folder: config.json is missing")
    config = files.read_json(folder / "config.json")
    side = folder / "hf_quant_config.json"
    if "quantization_config" not in config and side.is_file():
        from transformers import AutoConfig

        written = files.read_json(side)["quantization"]
        more["config"] = AutoConfig.from_pretrained(folder)
        assert isinstance(more["config"], PreTrainedConfig)
        more["config"].quantization_config = {
            "quant_method": "modelopt",
            **written,
            "ignore": written.get("exclude_modules", []),
        }
    if device is not None:
        more.setdefault("device_map", device)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **more)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be loaded: {error}") from error
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


def numerics_of(model: Any) -> list[str]:
    """What this model can be evaluated under: ["bf16"] without NVFP4 linears, else w4a16 and, with input scales,
    w4a4."""
    linears = nvfp4_linears(model).values()
    if not linears:
        return ["bf16"]
    return ["w4a4", "w4a16"] if all(m.input_scale is not None for m in linears) else ["w4a16"]
