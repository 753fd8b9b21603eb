"""Device, precision and kernels of calibration, and the output of the libraries that it runs on."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import warnings
from collections.abc import Iterator

import torch
import transformers

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import SILENT, Progress
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


@contextlib.contextmanager
def quiet(progress: Progress = SILENT) -> Iterator[None]:
    """Keep the libraries' output, progress bars and warnings off the terminal; report the last line if they raise."""
    output = io.StringIO()
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with contextlib.redirect_stdout(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception:
        last = output.getvalue().strip().splitlines()[-1:]
        if last:
            progress.message(last[0])
        raise
    finally:
        transformers.logging.set_verbosity(before)
