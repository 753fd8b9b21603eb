"""NVFP4 for vLLM: two linear kernels for CPUs, and on GPUs, if asked for, ours instead of Marlin (vllm_cuda). vLLM loads this
plug-in itself (entry point vllm.general_plugins).

vLLM's table of NVFP4 kernels has no entry for CPUs. This plug-in adds W4A4 (activations rounded to NVFP4 by the C codec,
exact weights) and W4A16. Up to matmul.FEW_ROWS rows are multiplied with the packed weights; for more, weights are
dequantized part by part, so that a checkpoint stays 4-bit in memory.

    vllm serve CHECKPOINT --quantization modelopt --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser qwen3_coder
"""

from __future__ import annotations

from typing import Any

GROUP = 16


def register() -> None:
    """Add the kernels to vLLM's CPU or CUDA platform. Does nothing on other platforms and when called again."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        from annie_quant.serve import vllm_cuda

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


def multiply(x: Any, codes: Any, block_scale: Any, tensor_scale: float, input_scale: float) -> Any:
    """Multiply x [..., K] by the transpose of packed weights [N, K]. Returns [..., N] in x's dtype.

    Both sides are exact, sums are float32, and each sum is rounded once, for any number of rows: the arithmetic of CUTLASS's and
    Marlin's kernels. (Rounding dequantized values to bfloat16 first would make an answer depend on the batch that it is in.)

    input_scale: tensor scale that x is rounded with; 0: x is not rounded
    """
    import torch

    from annie_quant.hf import codec, matmul

    rows = x.reshape(-1, x.shape[-1]).float().contiguous()
    if input_scale:
        rows = codec.fake_quant_eager(rows, input_scale, GROUP)
    n, k = codes.shape[0], rows.shape[1]
    if rows.shape[0] <= matmul.FEW_ROWS:
        y = codec.packed_matmul(rows, codes, block_scale, tensor_scale, GROUP, divides=False)
    else:
        step = max(1, matmul.BLOCK_BYTES // (k * rows.element_size()))
        spans = [slice(i, i + step) for i in range(0, n, step)]
        parts = (codec.dequantize(codes[s], block_scale[s], tensor_scale, GROUP, rows.dtype) for s in spans)
        y = torch.cat([rows @ part.t() for part in parts], -1)
    return y.reshape(*x.shape[:-1], n).to(x.dtype)


def _operator() -> None:
    """Define torch.ops.annie_quant.vllm_nvfp4_linear once, so that torch.compile sees one opaque call."""
    import torch

    if hasattr(torch.ops.annie_quant, "vllm_nvfp4_linear"):
        return
    schema = "(Tensor x, Tensor codes, Tensor block_scale, float tensor_scale, float input_scale) -> Tensor"
    operator = torch.library.custom_op("annie_quant::vllm_nvfp4_linear", multiply, mutates_args=(), schema=schema)
    operator.register_fake(lambda x, codes, *_: x.new_empty((*x.shape[:-1], codes.shape[0])))
