"""annie_quant: quantize fine-tuned Qwen3.5 to NVFP4 so that its behaviour survives, verify it, serve it and time it.

    aq.nvfp4       pack, unpack and scale search, exact to the bit        (C: _nvfp4)
    aq.kquant      ggml's K-quants, for the comparison with Q4_K_M       (C: _nvfp4)
    aq.stream      streaming HTTP timing client                          (C: _stream)
    aq.gemm        dequant-GEMM validation kernels                       (CUDA: _gemm)
    aq.checkpoint  read, audit, repair and convert checkpoints
    aq.data        personas, teachers, calibration conversations
    aq.quantize    strategies from bf16 to NVFP4
    aq.runtime     NVFP4 in transformers; gates, KL divergence and perplexity without a server
    aq.judge       workloads, gates, intervals, A/B statistics
    aq.serve       serving runtimes
    aq.bench       timing two or more servers against each other
    aq.report      HTML and Markdown reports, model card, upload
    aq.errors      AnnieError and its kinds, with their exit codes

Each part is imported on first use. Importing the package itself imports no third-party package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from annie_quant import (
        bench,
        checkpoint,
        data,
        gemm,
        judge,
        kquant,
        nvfp4,
        quantize,
        report,
        runtime,
        stream,
    )
    from annie_quant.core import errors
    from annie_quant.ops import serving as serve

__all__ = [
    "__version__",
    "bench",
    "checkpoint",
    "data",
    "errors",
    "gemm",
    "judge",
    "kquant",
    "nvfp4",
    "quantize",
    "report",
    "runtime",
    "serve",
    "stream",
]


_MODULES = {
    "errors": "core.errors",
    "serve": "ops.serving",
}  # where they are not named as the attribute


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"annie_quant.{_MODULES.get(name, name)}")
    raise AttributeError(f"module 'annie_quant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
