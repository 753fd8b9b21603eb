"""NVFP4 GEMM kernels on CUDA, and checks of these and other libraries' kernels.

    weight = aq.gemm.Weight(codes, block_scale, tensor_scale)     # repacked once from the checkpoint's layout
    out = aq.gemm.w4a16(x, weight)                                # bf16 / fp16 activations, any M
    out = aq.gemm.w4a4(a_codes, a_scale, a_ts, codes, block_scale, tensor_scale)
    aq.gemm.fake_quant                                            # the C codec's values, on the GPU
    aq.gemm.validate()                                            # annie-quant validate-gpu

Arrays are torch tensors on a GPU, or DeviceArrays (to_device). Importing this package needs neither
a GPU nor a driver.
"""

from __future__ import annotations

from annie_quant.gemm import oracle
from annie_quant.gemm.arrays import DeviceArray, device_count, to_device
from annie_quant.gemm.ops import Weight, fake_quant, fp4_native, w4a4, w4a16
from annie_quant.gemm.plans import GroupedPlan, SkinnyPlan, TiledPlan, WgmmaPlan
from annie_quant.gemm.validate import validate

__all__ = [
    "DeviceArray",
    "GroupedPlan",
    "SkinnyPlan",
    "TiledPlan",
    "Weight",
    "WgmmaPlan",
    "device_count",
    "fake_quant",
    "fp4_native",
    "oracle",
    "to_device",
    "validate",
    "w4a4",
    "w4a16",
]
