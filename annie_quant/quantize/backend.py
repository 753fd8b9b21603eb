"""Device and precision of calibration."""

from __future__ import annotations

import functools
import importlib.util

import psutil
import torch

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.quantize.strategy import in_float32


def device_and_dtype(folder: ModelFolder) -> tuple[str, torch.dtype]:
    """Return this process's GPU or the CPU, and the type in which it computes the model."""
    device = device_kind()
    full = in_float32(folder.weight_bytes, on_cpu=device == "cpu")
    return device, torch.float32 if full else torch.bfloat16


def device_kind() -> str:
    """Return "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_memory_bytes() -> float:
    """Return the free bytes of this process's GPU, or of the machine without one."""
    host = float(psutil.virtual_memory().available)
    if not torch.cuda.is_available():
        return host
    free = float(torch.cuda.mem_get_info()[0])
    # Where GPU and CPU share one memory (a Spark) the driver's number leaves out the page cache, which can be freed.
    return max(free, host) if torch.cuda.get_device_properties(0).is_integrated else free


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
