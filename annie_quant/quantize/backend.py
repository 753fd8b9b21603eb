"""Device and precision of calibration."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.quantize.strategy import in_float32


def device_and_dtype(folder: ModelFolder) -> tuple[str, torch.dtype]:
    """Return this process's GPU or the CPU, and the type in which it computes the model."""
    on_cpu = not torch.cuda.is_available()
    device = "cpu" if on_cpu else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return device, torch.float32 if in_float32(folder.weight_bytes, on_cpu) else torch.bfloat16


def device_kind() -> str:
    """Return "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
