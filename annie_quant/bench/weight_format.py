"""The format of the weights behind a server: from the model's own file, if it is on this machine; never from a name."""

from __future__ import annotations

import contextlib
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from annie_quant.core.errors import AnnieError
from annie_quant.core.host import is_local
from annie_quant.core.untrusted import decode_json

UNQUANTIZED_FORMATS = ("BF16", "F16", "F32", "F64")
MAX_CONFIG_BYTES = 1 << 22


def served_format(url: str, props: Mapping[str, object], model: Mapping[str, object]) -> str | None:
    """Return the format of the file that a server names: model_path of llama.cpp and SGLang, root in vLLM's /v1/models.

    None where the server is on another machine, or names no model file or folder that can be read here.
    """
    named = props.get("model_path") or model.get("root")
    if not isinstance(named, str) or not is_local(urllib.parse.urlsplit(url).hostname or ""):
        return None
    with contextlib.suppress(AnnieError, OSError, ValueError):
        return folder_format(Path(named)) if Path(named).is_dir() else gguf_format(Path(named))
    return None


def folder_format(folder: Path) -> str | None:
    """Return the quantization that config.json names, else the dtype of most of the weights: "BF16"."""
    from annie_quant.checkpoint import ModelFolder

    with (folder / "config.json").open("rb") as file:
        config = decode_json(file.read(MAX_CONFIG_BYTES))
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    if isinstance(quantization, dict):
        for key in ("quant_algo", "format", "quant_method"):
            name = quantization.get(key)
            if isinstance(name, str) and name:
                return name[:100].upper()
        return "quantized"
    if (folder / "hf_quant_config.json").exists():
        return "quantized"
    tensors = ModelFolder(folder).tensors.values()
    return most((tensor.dtype, tensor.size_bytes) for tensor in tensors)


def gguf_format(path: Path) -> str | None:
    """Return the type of most of a GGUF file's quantized values, else of most of its values: "Q4_K", "BF16"."""
    from annie_quant.checkpoint.gguf.reader import open_gguf

    tensors = open_gguf(path).values()
    return most((tensor.tensor_type.name, int(tensor.n_elements)) for tensor in tensors)


def most(tensors: Iterable[tuple[str, int]]) -> str | None:
    """Return the format of most, from (format, size) of each tensor: of the quantized ones, if there are any."""
    sizes: Counter[str] = Counter()
    for name, size in tensors:
        sizes[name] += size
    quantized = {name: size for name, size in sizes.items() if name not in UNQUANTIZED_FORMATS}
    return max(quantized or sizes, key=lambda name: sizes[name], default=None)
