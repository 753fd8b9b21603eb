"""Device and precision of calibration."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.quantize.strategy import FLOAT32_BYTES


def device_and_dtype(folder: ModelFolder) -> tuple[str, torch.dtype]:
    """Return this process's GPU or the CPU, and float32 for models of up to FLOAT32_BYTES, else bfloat16."""
    dtype = torch.float32 if folder.weight_bytes < FLOAT32_BYTES else torch.bfloat16
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu", dtype


def device_kind() -> str:
    """Return "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
