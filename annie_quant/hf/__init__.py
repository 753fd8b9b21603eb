"""NVFP4 in transformers, on any machine.

import annie_quant.hf                                   registers NVFP4 checkpoints with transformers
model = AutoModelForCausalLM.from_pretrained(folder)    works after that import
load(folder, numerics="w4a16", cache="bf16")            the same with chosen numerics; every fault is named
set_numerics(model, "w4a4"), set_cache(model, "bf16")   change either in place
modelopt_backend.register()                             ModelOpt's quantized forwards on a CPU
"""

from __future__ import annotations

import os

from annie_quant.errors import need

# torch and the codec each have an OpenMP runtime, and idle threads of one take the cores from the other while they spin
# (measured: 586 s for 33 s of work). This must be set before either is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

need("torch", "quantize")
need("transformers", "quantize")

from annie_quant.hf import codec, modelopt_backend, quantizer  # noqa: E402
from annie_quant.hf.fp8_linear import FP8Linear  # noqa: E402
from annie_quant.hf.loading import load, numerics_of  # noqa: E402
from annie_quant.hf.nvfp4_linear import NVFP4Linear, set_cache, set_numerics  # noqa: E402

codec.register()
quantizer.register()

__all__ = [
    "FP8Linear",
    "NVFP4Linear",
    "load",
    "modelopt_backend",
    "numerics_of",
    "set_cache",
    "set_numerics",
]
