"""Our fake quantizer as a ModelOpt quantization backend, so that ModelOpt's quantized forwards run without a GPU.

ModelOpt 0.47's own dynamic NVFP4 quantizer asserts CUDA tensors, which keeps its AWQ search, KL scoring and QAD off a
CPU. A backend is called in its place with (inputs, tensor quantizer); calibration, search and export stay ModelOpt's.
"""

from __future__ import annotations

import copy
from typing import Any

from annie_quant.errors import UsageError, need
from annie_quant.hf import codec

NAME = "annie_quant"
E2M1, E4M3 = (2, 1), (4, 3)


def fake_quantize(inputs: Any, quantizer: Any) -> Any:
    """inputs [..., K] rounded to NVFP4 and back under the quantizer's amax: f32(amax) / 2688 for the tensor, E4M3 a
    block.

    Raises UsageError for a quantizer that is not NVFP4 with blocks along the last axis.
    """
    sizes = quantizer.block_sizes or {}
    group = sizes.get(-1) or sizes.get(inputs.dim() - 1)
    if tuple(quantizer.num_bits) != E2M1 or tuple(sizes.get("scale_bits") or ()) != E4M3 or not group:
        raise UsageError(f"the {NAME} backend does NVFP4 alone, not num_bits {quantizer.num_bits}, block_sizes {sizes}")
    amax = quantizer._get_amax(inputs).float().max()
    if amax == 0:
        return inputs
    return codec.fake_quant(inputs, float(amax / 2688.0), group)


def register() -> None:
    """Make ModelOpt know the backend; to be called before mtq.quantize with a config from with_backend."""
    need("modelopt.torch.quantization", "quantize")
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    if not tensor_quantizer.is_registered_quant_backend(NAME):
        tensor_quantizer.register_quant_backend(NAME, fake_quantize)


def with_backend(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of a ModelOpt quantization config whose NVFP4 quantizers run on the backend."""
    config = copy.deepcopy(config)
    for entry in config["quant_cfg"]:
        attributes = entry.get("cfg") or {}
        if isinstance(attributes, dict) and attributes.get("num_bits") == E2M1:
            attributes["backend"] = NAME
    return config


def release(model: Any) -> None:
    """Give the model's quantizers back to ModelOpt's own code, as export expects them."""
    for module in model.modules():
        if getattr(module, "backend", None) == NAME:
            module.backend = None
