"""Our fake quantizer as a ModelOpt quantization backend, so that ModelOpt's quantized forwards run without a GPU.

ModelOpt 0.47's own dynamic NVFP4 quantizer asserts CUDA tensors, so its AWQ search, KL scoring and QAD do not run on a CPU.
ModelOpt calls a backend in its place with (inputs, tensor quantizer); calibration, search and export stay ModelOpt's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from annie_quant.offline import codec

NAME = "annie_quant"
E2M1, E4M3 = (2, 1), (4, 3)  # (exponent bits, mantissa bits)


def fake_quantize(inputs: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Return inputs [..., K] rounded to NVFP4 and back, with tensor scale f32(amax) / 2688 from the quantizer's amax.

    The quantizer is NVFP4's with blocks along the last axis.
    """
    sizes = quantizer.block_sizes
    group = sizes.get(-1) or sizes[inputs.dim() - 1]
    assert tuple(quantizer.num_bits) == E2M1 and tuple(sizes["scale_bits"]) == E4M3, (
        f"not NVFP4: {quantizer}"
    )
    amax = quantizer._get_amax(inputs).float().max()
    if amax == 0:
        return inputs
    return codec.fake_quant(inputs, float(amax / 2688.0), group)


def register() -> None:
    """Register the backend with ModelOpt. Call it before mtq.quantize with a config from with_backend."""
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    if not tensor_quantizer.is_registered_quant_backend(NAME):
        tensor_quantizer.register_quant_backend(NAME, fake_quantize)


def with_backend(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a ModelOpt quantization config whose NVFP4 quantizers run on the backend."""
    config = copy.deepcopy(config)
    for entry in config["quant_cfg"]:
        attributes = entry.get("cfg") or {}
        if isinstance(attributes, dict) and attributes.get("num_bits") == E2M1:
            attributes["backend"] = NAME
    return config


def release(model: nn.Module) -> None:
    """Return the model's quantizers to ModelOpt's own code, which export expects."""
    for module in model.modules():
        if getattr(module, "backend", None) == NAME:
            module.backend = None  # type: ignore[assignment]
