"""A server's NVFP4 linear on this package's W4A16 kernel: repacked once, after a check on this device. For the plug-ins."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

_checked: dict[tuple[Any, ...], str] = {}  # by device, shape and dtype: why the kernel is not used, "" if it is
_logged: set[str] = set()


def switched_on(switch: str) -> bool:
    """Return whether an environment variable is set to anything but 0."""
    return os.environ.get(switch, "") not in ("", "0")


def log_once(logger: str, level: int, line: str, kind: str = "") -> None:
    """Log a line, unless this process has logged one of this kind before (numbers aside), by default the line itself."""
    kind = re.sub(r"\d+", "", kind or line)
    if kind not in _logged:
        _logged.add(kind)
        logging.getLogger(logger).log(level, "annie_quant: %s", line)


def take(layer: Any, logger: str) -> str:
    """Repack a layer's weight for our kernel. Returns why it stays as it is, "" if it was repacked.

    layer: with the names of vLLM and SGLang: weight uint8 [N, K/2], weight_scale float8_e4m3fn [N, K/16], weight_global_scale,
    params_dtype. Repacked, it has weight uint8 [bytes] and annie_scale, and no weight_scale.
    logger: whose handlers the server prints
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
                log_once(
                    logger,
                    logging.INFO,
                    f"NVFP4 linears run on this package's W4A16 kernel, which was checked on {device}",
                )
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not _checked[key]:
        layer.weight = torch.nn.Parameter(weight.packed, requires_grad=False)
        layer.annie_scale = weight.tensor_scale
        del layer.weight_scale
    return _checked[key]


def product(layer: Any, x: Any, bias: Any = None) -> Any:
    """Return the product of x with a layer that `take` repacked, plus the bias. Its output_size_per_partition is N."""
    import torch

    y = torch.ops.annie_quant.nvfp4_linear(x, layer.weight, layer.annie_scale, layer.output_size_per_partition)
    return y if bias is None else y + bias
