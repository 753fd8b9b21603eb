"""nvidia_w4a16: NVIDIA's recipe for Qwen3.5 and 3.6 on a Spark, `w4a16_nvfp4-fp8_attn-kv_fp8_cast` of ModelOpt 0.47.

MLP, experts, shared experts and head in NVFP4 weights by amax, attention and DeltaNet projections in FP8, an FP8 KV cache without
scales. It is w4a16_mixed with that recipe's scales and cache; `--kv-cache fp8` stores calibrated ones in their place.
"""

from __future__ import annotations

from annie_quant.quantize.strategies import w4a16_mixed
from annie_quant.quantize.strategy import Cost, Strategy

STRATEGY = Strategy(
    name="nvidia_w4a16",
    summary="NVIDIA's Spark recipe: experts, MLP and head NVFP4 W4A16, attention and DeltaNet FP8, KV cache cast to FP8",
    formats=w4a16_mixed.STRATEGY.formats,
    cost=Cost(rank=61, layerwise=True, passes=1),
    quantize=w4a16_mixed.quantize,
    kv_cache="fp8_cast",
    searched=False,
)
