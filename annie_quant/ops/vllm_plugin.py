"""The plug-in for vLLM, which loads it itself (entry point vllm.general_plugins).

For CPUs it has linear kernels and experts in NVFP4 (vllm_cpu); on GPUs, if asked for, our kernels instead of Marlin (vllm_cuda).

vLLM's table of NVFP4 kernels has no entry for CPUs. This plug-in adds W4A4 (activations rounded to NVFP4 by the C codec,
exact weights) and W4A16. Up to nvfp4_linear.FEW_ROWS rows are multiplied with the packed weights; for more, weights are
dequantized part by part, so that a checkpoint stays 4-bit in memory.

    vllm serve CHECKPOINT --quantization modelopt --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser qwen3_coder
"""

from __future__ import annotations

import logging
from typing import Any

from annie_quant.ops import vllm_cpu, w4a16_layer
from annie_quant.ops.vllm_cpu import multiply


def register() -> None:
    """Add the kernels to vLLM's CPU or CUDA platform. Does nothing on other platforms and when called again."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        from annie_quant.ops import vllm_cuda

        vllm_cuda.register()
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    w4a4, w4a16 = kernels()
    table = linear._POSSIBLE_NVFP4_KERNELS
    if w4a4.__name__ not in [kernel.__name__ for kernel in table.get(PlatformEnum.CPU, [])]:
        table[PlatformEnum.CPU] = [w4a4, w4a16, *table.get(PlatformEnum.CPU, [])]
        # For weight-only checkpoints vLLM uses Marlin by name, which exists for GPUs only.
        linear.MarlinNvFp4LinearKernel = w4a16
    try:
        vllm_cpu.install()
    except (ImportError, AttributeError) as error:  # a vLLM with other names serves dense models all the same
        line = f"vLLM's experts have other interfaces here, so mixtures in NVFP4 are not served: {error}"
        w4a16_layer.log_once("vllm.annie_quant", logging.WARNING, line)


def kernels() -> tuple[type, type]:
    """Return the two kernel classes (W4A4, W4A16). They derive from vLLM's base class, so this needs vLLM."""
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel

    class AnnieNvFp4LinearKernel(NvFp4LinearKernel):
        """Activations rounded to NVFP4 with the checkpoint's input scale, as CUTLASS does."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            from vllm.platforms import current_platform

            return (True, None) if current_platform.is_cpu() else (False, "annie_quant's kernel is for CPUs")

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            _operator()  # must be defined before torch.compile traces the model
            layer.annie_scale = float(layer.weight_global_scale)
            layer.annie_input_scale = self.input_scale(layer)

        @staticmethod
        def input_scale(layer: Any) -> float:
            return float(layer.input_global_scale)

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            import torch

            y = torch.ops.annie_quant.vllm_nvfp4_linear(
                x, layer.weight, layer.weight_scale, layer.annie_scale, layer.annie_input_scale
            )
            return y if bias is None else y + bias

    class AnnieNvFp4W4A16LinearKernel(AnnieNvFp4LinearKernel):
        """Unrounded activations, as Marlin does."""

        @staticmethod
        def input_scale(layer: Any) -> float:
            return 0.0

    return AnnieNvFp4LinearKernel, AnnieNvFp4W4A16LinearKernel


def _operator() -> None:
    """Define torch.ops.annie_quant.vllm_nvfp4_linear once, so that torch.compile sees one opaque call."""
    import torch

    if hasattr(torch.ops.annie_quant, "vllm_nvfp4_linear"):
        return
    schema = "(Tensor x, Tensor codes, Tensor block_scale, float tensor_scale, float input_scale) -> Tensor"
    operator = torch.library.custom_op("annie_quant::vllm_nvfp4_linear", multiply, mutates_args=(), schema=schema)
    operator.register_fake(lambda x, codes, *_: x.new_empty((*x.shape[:-1], codes.shape[0])))
