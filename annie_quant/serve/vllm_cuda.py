"""This package's W4A16 kernel in vLLM on CUDA GPUs, instead of Marlin. vLLM loads it through vllm_plugin.

    ANNIE_QUANT_VLLM_KERNEL=1 vllm serve CHECKPOINT

Opt-in. Wherever vLLM would run an NVFP4 linear on Marlin (weight-only checkpoints, W4A4 checkpoints on GPUs without FP4 units, and
--linear-backend marlin), the layer is repacked for our kernel instead. The first layer of each shape and dtype is compared with its
dequantized product on this device; a layer that does not agree, or that our kernel cannot take, stays on Marlin, with one
line of log. So do experts. Biases, merged linears, tensor-parallel shards and LoRA are vLLM's own business around the product.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import annie_quant
from annie_quant.errors import EnvironmentFault

SWITCH = "ANNIE_QUANT_VLLM_KERNEL"
NAME = "AnnieQuantNvFp4LinearKernel"
MARLIN = "MarlinNvFp4LinearKernel"
LEAST_CAPABILITY = 80

log = logging.getLogger("vllm.annie_quant")  # below "vllm", whose handlers print it
_checked: dict[tuple[Any, ...], str] = {}  # by device, shape and dtype: why the kernel is not used, "" if it is
_on_marlin: dict[str, str] = {}  # the reason of each layer that stays on Marlin
_logged: set[str] = set()


def switched_on() -> bool:
    """Whether the switch is on."""
    return os.environ.get(SWITCH, "") not in ("", "0")


def say_once(level: int, line: str, kind: str = "") -> None:
    """Log a line, unless this process has logged one of this kind before (numbers aside), by default the line itself."""
    kind = re.sub(r"\d+", "", kind or line)
    if kind not in _logged:
        _logged.add(kind)
        log.log(level, "annie_quant: %s", line)


def register() -> None:
    """Let vLLM take our kernel where it takes Marlin. Without the switch, or where it cannot work, vLLM is not changed."""
    if not switched_on():
        return
    try:
        reason = missing()
        if not reason:
            _replace_marlin()
    except Exception as error:  # a vLLM with other names must start all the same
        reason = f"this vLLM has other interfaces ({type(error).__name__}: {error})"
    if reason:
        say_once(logging.WARNING, f"{SWITCH} is set, and NVFP4 linears stay on vLLM's own kernels: {reason}")


def missing() -> str:
    """Return why the kernel cannot run here, "" if it can. Does not initialise CUDA, so that vLLM can still fork."""
    from vllm.platforms import current_platform

    from annie_quant.gemm.arrays import native

    if not current_platform.has_device_capability(LEAST_CAPABILITY):
        return "it needs compute capability 8.0 or newer"
    try:
        native()
    except EnvironmentFault as fault:
        return str(fault)
    return ""


def _replace_marlin() -> None:
    from vllm.config import VllmConfig
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization import modelopt  # noqa: F401 - it holds the name, too
    from vllm.platforms import PlatformEnum

    from annie_quant.serve import vllm_compile_key

    marlin = getattr(linear, MARLIN)
    if marlin.__name__ == NAME:
        return
    ours = kernel(marlin)
    table = linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]
    table.insert(table.index(marlin), ours)
    linear._LINEAR_BACKEND_KERNEL_MAP["marlin"].add(ours)
    for name, module in list(sys.modules.items()):  # where a checkpoint's format pins Marlin by name
        if name.startswith("vllm.model_executor.") and vars(module).get(MARLIN) is marlin and name != marlin.__module__:
            setattr(module, MARLIN, ours)
    vllm_compile_key.extend(VllmConfig, compile_key)


def compile_key() -> str:
    """Return what a graph compiled in this process depends on: this file, and the layers that stay on Marlin."""
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    return f"annie_quant {annie_quant.__version__} {source} {sorted(_on_marlin)}"


def kernel(marlin: type[Any]) -> type[Any]:
    """Return the class that vLLM instantiates, derived from its class for Marlin."""

    class AnnieQuantNvFp4LinearKernel(marlin):
        """NVFP4 weights times bf16 or fp16 activations by annie_quant's kernels; Marlin for layers that they do not take."""

        def process_weights_after_loading(self, layer: Any) -> None:
            name = getattr(layer, "prefix", "") or f"{type(layer).__name__} {list(layer.weight.shape)}"
            _on_marlin.pop(name, None)
            layer.annie_scale = None
            reason = take(layer)
            if reason:
                _on_marlin[name] = reason
                say_once(logging.WARNING, f"linears stay on Marlin, the first is {name}: {reason}", reason)
                marlin.process_weights_after_loading(self, layer)

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            import torch

            if layer.annie_scale is None:
                return marlin.apply_weights(self, layer, x, bias)
            n = layer.output_size_per_partition
            y = torch.ops.annie_quant.nvfp4_linear(x, layer.weight, layer.annie_scale, n)
            return y if bias is None else y + bias

    AnnieQuantNvFp4LinearKernel.__name__ = AnnieQuantNvFp4LinearKernel.__qualname__ = NAME
    return AnnieQuantNvFp4LinearKernel


def take(layer: Any) -> str:
    """Repack a layer's weight for our kernel. Returns why it stays as it is, "" if it was repacked.

    layer: with vLLM's names: weight uint8 [N, K/2], weight_scale float8_e4m3fn [N, K/16], weight_global_scale, params_dtype
    """
    import torch

    from annie_quant.gemm import self_check, torch_op

    codes, block_scale, dtype = layer.weight.data, layer.weight_scale.data, layer.params_dtype
    key = (str(codes.device), tuple(codes.shape), str(dtype))
    if _checked.get(key):
        return _checked[key]
    if str(dtype) not in self_check.MANTISSA:
        return f"activations are {dtype}; the kernel has bfloat16 and float16"
    try:
        torch_op.register()
        scale = float(layer.weight_global_scale)
        weight = torch_op.prepare(codes, block_scale, scale)
        if key not in _checked:
            worst = self_check.worst_error(weight, codes, block_scale, scale, dtype)
            agrees = worst <= 1
            _checked[key] = "" if agrees else f"its product is wrong on this device, {worst:.3g} times the error bound"
            if agrees:
                device = torch.cuda.get_device_name(codes.device) if codes.is_cuda else "the CPU"
                say_once(
                    logging.INFO, f"NVFP4 linears run on this package's W4A16 kernel, which was checked on {device}"
                )
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not _checked[key]:
        layer.weight = torch.nn.Parameter(weight.packed, requires_grad=False)
        layer.annie_scale = weight.tensor_scale
        del layer.weight_scale
    return _checked[key]
