"""This package's W4A16 kernel in SGLang, where SGLang runs Marlin. SGLang loads it itself (entry point sglang.srt.plugins).

    ANNIE_QUANT_SGLANG_KERNEL=1 python -m sglang.launch_server --model-path CHECKPOINT --quantization modelopt_fp4 \\
        --fp4-gemm-backend marlin

Written to the interfaces of SGLang 0.5.23 and not run in it: its torch is newer than the one on this project's GPU machine
(docs/vllm-gpu.md). Opt-in; each layer is checked when it is loaded, and one that does not agree stays on Marlin, as in vllm_cuda.
"""

from __future__ import annotations

import logging
from typing import Any

from annie_quant.errors import EnvironmentFault
from annie_quant.serve import w4a16_layer

SWITCH = "ANNIE_QUANT_SGLANG_KERNEL"
LOGGER = "sglang.annie_quant"


def register() -> None:
    """Let ModelOpt's linears take our kernel where the backend is Marlin. Without the switch SGLang is not changed."""
    if not w4a16_layer.switched_on(SWITCH):
        return
    from annie_quant.gemm.arrays import native

    try:
        native()
        from sglang.srt.layers.quantization import modelopt_quant

        replace(modelopt_quant.ModelOptFp4LinearMethod, modelopt_quant.get_fp4_gemm_runner_backend)
        return
    except EnvironmentFault as fault:
        reason = str(fault)
    except Exception as error:  # an SGLang with other names must start all the same
        reason = f"this SGLang has other interfaces ({type(error).__name__}: {error})"
    w4a16_layer.log_once(LOGGER, logging.WARNING, f"{SWITCH} is set, and SGLang keeps its own kernels: {reason}")


def replace(method: type[Any], backend: Any) -> None:
    """Put our kernel before Marlin in SGLang's class of ModelOpt linears. backend: its function that names the backend."""
    process, apply = method.process_weights_after_loading, method.apply
    if hasattr(process, "annie_quant"):
        return

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        import torch

        layer.annie_scale = None
        # A scale per input channel is applied by SGLang's own path, and the mode w4a16 is FlashInfer's.
        if self.quant_mode == "w4a4" and backend().is_marlin() and not self.quant_config.is_awq:
            scale = layer.weight_scale_2.max().to(torch.float32)
            layer.weight_global_scale = torch.nn.Parameter(scale, requires_grad=False)
            layer.output_size_per_partition = layer.weight.shape[0]
            if not (reason := w4a16_layer.take(layer, LOGGER)):
                return
            w4a16_layer.log_once(LOGGER, logging.WARNING, f"linears stay on Marlin: {reason}")
            del layer.weight_global_scale
        process(self, layer)

    def apply_linear(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        if layer.annie_scale is None:
            return apply(self, layer, x, bias)
        return w4a16_layer.product(layer, x, bias)

    process_weights_after_loading.annie_quant = True  # type: ignore[attr-defined]
    method.process_weights_after_loading, method.apply = process_weights_after_loading, apply_linear
