"""A server's NVFP4 linear on this package's W4A16 kernel: repacked once, after a check on this device. For the plug-ins."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VllmObject = Any  # a layer, a class or a setting of vLLM, whose types cannot be imported here

_checked: dict[tuple[object, ...], str] = {}  # by device, shape and dtype: why the kernel is not used, "" if it is
_logged: set[str] = set()


class LoadedLinear(Protocol):
    """A linear layer of vLLM with an NVFP4 weight, under vLLM's names.

    weight: uint8 [N, K/2]; repacked: uint8 [bytes].
    weight_scale: float8_e4m3fn [N, K/16]; gone once it is repacked.
    annie_scale: tensor scale of the repacked weight; None: the weight is as vLLM loaded it.
    """

    weight: torch.nn.Parameter
    weight_scale: torch.nn.Parameter
    weight_global_scale: torch.nn.Parameter
    params_dtype: torch.dtype
    output_size_per_partition: int
    annie_scale: Tensor | None


def switched_on(switch: str) -> bool:
    """Return whether an environment variable is set to anything but 0."""
    return os.environ.get(switch, "") not in ("", "0")


def log_once(logger: str, level: int, line: str, kind: str = "") -> None:
    """Log a line, unless this process has logged one of this kind before (numbers aside), by default the line itself."""
    kind = re.sub(r"\d+", "", kind or line)
    if kind not in _logged:
        _logged.add(kind)
        logging.getLogger(logger).log(level, "annie_quant: %s", line)


def refused(key: tuple[object, ...], dtype: torch.dtype) -> str:
    """Return why a layer like this one is left as it is without another check, "" if nothing is known against it."""
    from annie_quant.gemm import self_check

    if str(dtype) not in self_check.MANTISSA:
        return f"activations are {dtype}; the kernel has bfloat16 and float16"
    return _checked.get(key, "")


def checked(key: tuple[object, ...], worst: Callable[[], float], what: str, device: torch.device, logger: str) -> str:
    """Return why a kernel is not used for layers of this key: "" if its product is right. Checks the first layer of a key.

    worst: compute the largest error in units of its bound.  what: the layers, for the log
    """
    import torch

    if key not in _checked:
        error = worst()
        agrees = error <= 1
        _checked[key] = "" if agrees else f"its product is wrong on this device, {error:.3g} times the error bound"
        if agrees:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
            line = f"{what} run on this package's W4A16 kernel, which was checked on {name}"
            log_once(logger, logging.INFO, line)
    return _checked[key]


def in_one_line(error: Exception) -> str:
    """Return the class of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def take(layer: LoadedLinear, logger: str) -> str:
    """Repack a layer's weight for our kernel. Returns why it stays as it is, "" if it was repacked.

    logger: whose handlers the server prints
    """
    import torch

    from annie_quant.gemm import self_check, torch_op

    codes, block_scale, dtype = layer.weight.data, layer.weight_scale.data, layer.params_dtype
    key = (str(codes.device), tuple(codes.shape), str(dtype))
    if reason := refused(key, dtype):
        return reason
    try:
        torch_op.register()
        scale = float(layer.weight_global_scale)
        weight = torch_op.prepare(codes, block_scale, scale)
        worst = partial(self_check.worst_error, weight, codes, block_scale, scale, dtype)
        reason = checked(key, worst, "NVFP4 linears", codes.device, logger)
    except Exception as error:
        return in_one_line(error)
    if not reason:
        layer.weight = torch.nn.Parameter(weight.packed, requires_grad=False)
        layer.annie_scale = weight.tensor_scale
        del layer.weight_scale
    return reason


def product(layer: LoadedLinear, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product of x with a layer that `take` repacked, plus the bias. Its output_size_per_partition is N."""
    import torch

    y = torch.ops.annie_quant.nvfp4_linear(x, layer.weight, layer.annie_scale, layer.output_size_per_partition)
    return y if bias is None else y + bias
