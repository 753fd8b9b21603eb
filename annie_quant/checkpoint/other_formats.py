"""Recognise by name what is given in place of a model folder: another tool's files, adapters, git-lfs pointers.

Sources: the files that each tool's exporter writes (mlx-lm, AutoGPTQ, AutoAWQ, bitsandbytes, ExLlamaV2 and V3, Optimum, peft).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from annie_quant.core.errors import CheckpointError
from annie_quant.core.untrusted import JsonObject

# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
LFS_PREFIX = b"version https://git-lfs.github.com/spec/"
GGUF_MAGIC = b"GGUF"
SAVE_AGAIN = "load it with transformers, and save it with save_pretrained"
USE_SOURCE = "start from the 16-bit checkpoint of the same model"
# Files that never are weights of the model in the same folder → what they are.
SEPARATE_FILES = {
    "consolidated": "the weights under Mistral's names",
    "adapter_": "an adapter",
}
# Pattern of a file → what the folder is, what to do.
FOLDERS: dict[str, tuple[str, str]] = {
    "adapter_config.json": (
        "a LoRA adapter, not a model",
        "merge it into its base: annie-quant convert BASE --adapter FOLDER",
    ),
    "adapter_model.*": (
        "a LoRA adapter, not a model",
        "merge it into its base: annie-quant convert BASE --adapter FOLDER",
    ),
    "consolidated*": (
        "weights under Mistral's names, which are not read here",
        "download the model*.safetensors files of the same model",
    ),
    "*.gguf": ("a GGUF file, not safetensors", "annie-quant convert FILE.gguf --to hf"),
    "pytorch_model*.bin": ("pickled PyTorch weights, which is not safetensors", SAVE_AGAIN),
    "*.onnx": ("an ONNX export, which is not safetensors", USE_SOURCE),
    "onnx": ("an ONNX export, which is not safetensors", USE_SOURCE),
    "openvino_model.xml": ("an OpenVINO export, which is not safetensors", USE_SOURCE),
    "*.engine": ("a TensorRT-LLM engine, which is not safetensors", USE_SOURCE),
    "*.distcp": ("a distributed PyTorch checkpoint, which is not safetensors", SAVE_AGAIN),
    "tf_model.h5": ("TensorFlow weights, which is not safetensors", SAVE_AGAIN),
    "flax_model.msgpack": ("Flax weights, which is not safetensors", SAVE_AGAIN),
    "model_index.json": ("a diffusers pipeline", "give the folder of a language model"),
}
# End of a tensor's name → the tool that writes it.
TENSOR_ENDS = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    ".q_weight": "EXL2",
    ".trellis": "EXL3",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".W_q": "HQQ",
    ".biases": "MLX",
}
SETTINGS_FILES = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ"}


def is_lfs_pointer(raw: bytes) -> bool:
    """Return whether a file's first bytes are those of a git-lfs pointer."""
    return raw.startswith(LFS_PREFIX)


def first_bytes(path: Path) -> bytes:
    """Return the beginning of a file, or nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_PREFIX))
    except OSError:
        return b""


def describe_file(path: Path) -> tuple[str, str]:
    """Return what a file is that was given in place of a model folder, and what to do."""
    raw = first_bytes(path)
    if raw.startswith(GGUF_MAGIC):
        return "a GGUF file", f"convert it: annie-quant convert {path} --to hf"
    if is_lfs_pointer(raw):
        return "a git-lfs pointer", f"git -C {path.parent} lfs pull"
    return "a file" if path.exists() else "not there", "give a checkpoint's folder"


def describe_folder(folder: Path) -> tuple[str, str] | None:
    """Return what a folder without weights that are read here is, and what to do; None: not known."""
    for pattern, (description, hint) in FOLDERS.items():
        name = next((path.name for path in sorted(folder.glob(pattern))), None)
        if name is not None:
            return f"it has {name}: {description}", hint.replace("FILE.gguf", str(folder / name))
    return None


def refuse_other_folder(folder: Path) -> None:
    """Raise CheckpointError where a folder is known to be something else than a model folder."""
    described = describe_folder(folder)
    if described is not None:
        raise CheckpointError(f"{folder}: {described[0]}", described[1])


def separate_file(name: str) -> str | None:
    """Return what a .safetensors file is that is not part of the model next to it, or None."""
    matching = (text for start, text in SEPARATE_FILES.items() if name.startswith(start))
    return next(matching, None)


def other_tool(config: JsonObject, files: Iterable[str], dtypes: Mapping[str, str]) -> str | None:
    """Return the tool whose layout of quantized weights a folder without quant_method has, or None.

    files: names in the folder. dtypes: tensor → safetensors' name of its type.
    """
    settings = config.get("quantization")
    if isinstance(settings, dict) and "bits" in settings:
        return "MLX"
    for name, dtype in dtypes.items():
        tool = next((tool for end, tool in TENSOR_ENDS.items() if name.endswith(end)), None)
        if tool and dtype != "BOOL":
            return tool
    if any(dtype in ("U8", "I8", "I32", "U32") for dtype in dtypes.values()):
        return next((tool for file, tool in SETTINGS_FILES.items() if file in files), None)
    return None
