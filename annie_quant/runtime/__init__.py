"""NVFP4 in transformers on any machine, and judging a checkpoint before any server exists.

import annie_quant.runtime                              registers NVFP4 checkpoints with transformers
model = AutoModelForCausalLM.from_pretrained(folder)    works from then on
load(folder, numerics="w4a16", cache="bf16")            the same, with the arithmetic chosen and every fault named
set_numerics(model, "w4a4"), set_cache(model, "bf16")   change either in place
evaluate(folder, reference, workloads)                  gates, KL divergence, perplexity; no server
sensitivity(folder, reference, workloads)               which layers the divergence comes from
backend.register(), backend.with_backend(config)        ModelOpt's quantized forwards on a CPU
"""

from __future__ import annotations

import os

from annie_quant.errors import need

# torch and the codec each bring an OpenMP runtime whose idle threads spin; on a busy machine, or in turns, they take the
# cores from each other (seen: 586 s for 33 s of work). It must be set before either is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

need("torch", "quantize")
need("transformers", "quantize")

from annie_quant.runtime import backend, codec, quantizer  # noqa: E402
from annie_quant.runtime.evaluate import evaluate  # noqa: E402
from annie_quant.runtime.fp8 import FP8Linear  # noqa: E402
from annie_quant.runtime.layers import sensitivity  # noqa: E402
from annie_quant.runtime.linear import NVFP4Linear, set_cache, set_numerics  # noqa: E402
from annie_quant.runtime.loading import load, numerics_of  # noqa: E402

codec.register()
quantizer.register()

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
