"""The public names of annie_quant.offline. Importing it registers NVFP4 with transformers."""

from __future__ import annotations

from annie_quant.offline import FP8Linear, NVFP4Linear, load, numerics_of, set_cache, set_numerics
from annie_quant.offline.evaluation import evaluate
from annie_quant.offline.layers import sensitivity

__all__ = [
    "FP8Linear",
    "NVFP4Linear",
    "evaluate",
    "load",
    "numerics_of",
    "sensitivity",
    "set_cache",
    "set_numerics",
]
