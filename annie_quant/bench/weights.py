"""The format of the weights behind a server: from the model's own file, if it is on this machine; never from a name."""

from __future__ import annotations

import urllib.parse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from annie_quant.errors import AnnieError
from annie_quant.untrusted import decode_json

PLAIN = ("BF16", "F16", "F32", "F64")
MAX_CONFIG_BYTES = 1 << 22


def served_format(url: str, props: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """Return the format of the file that a server names: llama.cpp's /props (model_path), vLLM's and SGLang's /v1/models (root).

    None where the server is on another machine, or names no model file or folder that can be read here.
    """
    from annie_quant.data.record.proxy import is_local

    named = props.get("model_path") or model.get("root")
    if not isinstance(named, str) or not is_local(urllib.parse.urlsplit(url).hostname or ""):
        return None
    path = Path(named)
    try:
        if path.is_dir():
            return folder_format(path)
        return gguf_format(path) if path.is_file() else None
    except (AnnieError, OSError, ValueError):
        return None


def folder_format(folder: Path) -> str | None:
    """Return the quantization that config.json names, else the dtype of most of the weights: "BF16"."""
    from annie_quant.checkpoint import ModelFolder

    with (folder / "config.json").open("rb") as file:
        config = decode_json(file.read(MAX_CONFIG_BYTES))
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    if isinstance(quantization, dict):
        names = (quantization.get(key) for key in ("quant_algo", "format", "quant_method"))
        return next((name[:100].upper() for name in names if isinstance(name, str) and name), "quantized")
    if (folder / "hf_quant_config.json").exists():
        return "quantized"
    sizes: Counter[str] = Counter()
    for tensor in ModelFolder(folder).tensors.values():
        sizes[tensor.dtype] += tensor.size_bytes
    return most(sizes)


def gguf_format(path: Path) -> str | None:
    """Return the type of most of a GGUF file's quantized values, else of most of its values: "Q4_K", "BF16"."""
    from annie_quant.checkpoint.gguf.reader import open_gguf

    sizes: Counter[str] = Counter()
    for tensor in open_gguf(path).values():
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    return most(sizes)


def most(sizes: Mapping[str, int]) -> str | None:
    """Return the largest format: of the quantized ones, if there are any."""
    quantized = {name: size for name, size in sizes.items() if name not in PLAIN}
    return max(quantized or sizes, key=lambda name: sizes[name], default=None)
