"""The public names of annie_quant.hf and annie_quant.evaluate. Importing it registers NVFP4 with transformers."""

from __future__ import annotations

from annie_quant.evaluate import evaluate, sensitivity
from annie_quant.hf import FP8Linear, NVFP4Linear, load, numerics_of, set_cache, set_numerics
from annie_quant.hf import modelopt_backend as backend

__all__ = [
    "FP8Linear",
    "NVFP4Linear",
    "backend",
    "evaluate",
    "load",
    "numerics_of",
    "sensitivity",
    "set_cache",
    "set_numerics",
]
