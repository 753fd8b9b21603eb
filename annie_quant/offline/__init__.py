"""NVFP4 in transformers on any machine, and evaluating a checkpoint there before any server exists.

import annie_quant.offline                              registers NVFP4 checkpoints with transformers
model = AutoModelForCausalLM.from_pretrained(folder)    works after that import
load(folder, numerics="w4a16", cache="bf16")            the same with chosen numerics; every fault is named
set_numerics(model, "w4a4"), set_cache(model, "bf16")   change either in place
evaluation.evaluate(folder, reference, workloads)       gates, KL divergence and perplexity compared with the reference
layers.sensitivity(folder, reference, workloads)         which layers the divergence comes from

`annie_quant.runtime` has the public names of both.
"""

from __future__ import annotations

import os

from annie_quant.core.errors import need

# torch and the codec each have an OpenMP runtime, and idle threads of one take the cores from the other while they spin
# (measured: 586 s for 33 s of work). This must be set before either is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # so spelled: ops/llama_cpp.py

need("torch", "quantize")
need("transformers", "quantize")

from annie_quant.offline import quantizer  # noqa: E402
from annie_quant.offline.linears import (  # noqa: E402
    FP8Linear,
    NVFP4Linear,
    set_cache,
    set_numerics,
)
from annie_quant.offline.loading import load, numerics_of  # noqa: E402

quantizer.register()

__all__ = ["FP8Linear", "NVFP4Linear", "load", "numerics_of", "set_cache", "set_numerics"]
