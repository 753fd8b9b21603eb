"""Device, precision and kernels of calibration."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator

import torch

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.quantize.strategy import FLOAT32_BYTES


def device_and_dtype(folder: ModelFolder) -> tuple[str, torch.dtype]:
    """Return this process's GPU or the CPU, and float32 for models of up to FLOAT32_BYTES, else bfloat16."""
    dtype = torch.float32 if folder.weight_bytes < FLOAT32_BYTES else torch.bfloat16
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu", dtype


def device_kind(device: str) -> str:
    """Return "cpu" or "cuda"."""
    return device.partition(":")[0]


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@contextlib.contextmanager
def tensor_cores(use: bool) -> Iterator[None]:
    """Let a GPU multiply float32 matrices in TF32, which holds products of bf16 values exactly; sums stay float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = use or before
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
