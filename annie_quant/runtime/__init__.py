"""NVFP4 in transformers on any machine, and judging a checkpoint before any server exists.

import annie_quant.runtime                                     registers ModelOpt's NVFP4 with transformers
model = transformers.AutoModelForCausalLM.from_pretrained(dir)
runtime.load(dir, numerics="w4a16", cache="bf16")              the same, with the arithmetic chosen
runtime.set_numerics(model, "w4a4")                            change it in place
runtime.evaluate(dir, reference_dir, workloads)                gates, KL divergence, perplexity; no server
runtime.register_modelopt_backend()                            ModelOpt's quantized forwards on a CPU
"""

from __future__ import annotations

from annie_quant.errors import need

need("torch", "quantize")
need("transformers", "quantize")

from annie_quant.runtime.evaluate import evaluate  # noqa: E402
from annie_quant.runtime.linear import NVFP4Linear, set_cache, set_numerics  # noqa: E402
from annie_quant.runtime.loading import load, numerics_of  # noqa: E402
from annie_quant.runtime.quantizer import register  # noqa: E402

register()

__all__ = ["NVFP4Linear", "evaluate", "load", "numerics_of", "set_cache", "set_numerics"]
