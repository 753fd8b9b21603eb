"""Whether a GPU multiplies float32 matrices in TF32, for one part of the work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def tensor_cores(use: bool) -> Iterator[None]:
    """Let a GPU multiply float32 matrices in TF32, which holds products of bf16 values exactly; sums stay float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = use or before
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
