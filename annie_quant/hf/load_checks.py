"""A faulty checkpoint is refused with the audit's own finding, not loaded as garbage.

While loading only what is cheap is looked at: the headers' types and shapes, the scales, and whether the other weights
are finite. Where something is wrong the audit reads the whole folder, and its first finding of a kind that spoils
answers is what is raised.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from annie_quant import checkpoint, models, nvfp4
from annie_quant.checkpoint import checks, loader_support
from annie_quant.errors import CheckpointError
from annie_quant.hf import codec
from annie_quant.hf.fp8_linear import FP8Linear
from annie_quant.hf.nvfp4_linear import NVFP4Linear

HINT = "annie-quant audit DIR --repair"


@contextlib.contextmanager
def named(folder: Path) -> Iterator[None]:
    """A CheckpointError raised inside leaves as the audit's finding about `folder`, if the audit has one."""
    try:
        yield
    except CheckpointError as error:
        findings = checkpoint.audit(folder).findings
        deadly = [f for f in findings if f.code in loader_support.DEADLY]
        deadly.sort(key=lambda f: f.code == "orphan_scale")  # what is left of a linear says less than what is gone
        if not deadly:
            raise
        more = f" (and {len(findings) - 1} more findings)" if findings[1:] else ""
        raise CheckpointError(f"{deadly[0].message}{more}", HINT) from error


def check(model: nn.Module) -> None:
    """Refuse scales and weights that would spread NaN, infinity or nonsense. What is not in memory is passed over."""
    for name, module in model.named_modules():
        if any(p.device.type == "meta" for p in module.parameters(recurse=False)):
            continue
        if isinstance(module, NVFP4Linear):
            check_nvfp4(name, module)
        elif isinstance(module, FP8Linear):
            scales: list[torch.Tensor] = [
                module.weight_scale,
                *([] if module.input_scale is None else [module.input_scale]),
            ]
            if not all(bool(((p > 0) & p.isfinite()).all()) for p in scales):
                raise CheckpointError(f"{name}: a scale is not a positive number", HINT)
        else:
            for part, weight in module.named_parameters(recurse=False):
                used = weight.exp() if models.is_log_decay(f"{name}.{part}") else weight
                if weight.is_floating_point() and not math.isfinite(largest(used)):
                    raise CheckpointError(f"{name}.{part} holds NaN or infinity", HINT)


def largest(weight: torch.Tensor) -> float:
    """The largest magnitude; NaN where there is one."""
    if weight.device.type == "cpu" and str(weight.dtype).removeprefix("torch.") in codec.KINDS:
        return float(nvfp4.amax(codec.to_numpy(weight)))
    return weight.abs().amax().item() if weight.numel() else 0.0


def check_nvfp4(name: str, linear: NVFP4Linear) -> None:
    scalars = linear.scalars()
    for part, value, largest in (
        (linear.NAMES.tensor_scale, scalars.tensor_scale, checks.LARGEST_TENSOR_SCALE),
        (linear.NAMES.input_scale, scalars.input_scale, checks.LARGEST_INPUT_SCALE),
    ):
        if value is not None and not 0 < value <= largest:
            raise CheckpointError(
                f"{name}.{part} means {value}, expected a positive number of at most {largest:g}", HINT
            )
    magnitude = linear.block_scale.view(torch.uint8) & checks.MAGNITUDE
    if magnitude.numel() and int(magnitude.max()) == checks.NAN:
        raise CheckpointError(f"{name}.{linear.NAMES.block_scale} holds NaN block scales", HINT)
