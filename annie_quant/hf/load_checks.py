"""Checks while a checkpoint is loaded, so that a faulty one is refused with the audit's finding and not loaded as garbage.

Only cheap checks run here: types and shapes in the headers, the scales, and whether other weights are finite. If one fails,
the audit reads the whole folder, and its first finding that makes answers useless is raised.
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
from annie_quant.hf.fp8_linear import BlockFP8Linear, FP8Linear
from annie_quant.hf.nvfp4_linear import NVFP4Linear

HINT = "annie-quant audit DIR --repair"


@contextlib.contextmanager
def as_audit_finding(folder: Path) -> Iterator[None]:
    """Replace a CheckpointError raised inside by the audit's finding about `folder`, if the audit has one."""
    try:
        yield
    except CheckpointError as error:
        findings = checkpoint.audit(folder).findings
        deadly = [f for f in findings if f.code in loader_support.DEADLY]
        deadly.sort(key=lambda f: f.code == "orphan_scale")  # last: a missing tensor explains more than the rest of it
        if not deadly:
            raise
        more = f" (and {len(findings) - 1} more findings)" if findings[1:] else ""
        raise CheckpointError(f"{deadly[0].message}{more}", HINT) from error


def check_values(model: nn.Module) -> None:
    """Raise CheckpointError for scales and weights that would spread NaN, infinity or nonsense. Skips meta tensors."""
    for name, module in model.named_modules():
        if any(p.device.type == "meta" for p in module.parameters(recurse=False)):
            continue
        if isinstance(module, NVFP4Linear):
            check_nvfp4(name, module)
        elif isinstance(module, FP8Linear | BlockFP8Linear):
            for scale in module.scales():
                if not bool(((scale > 0) & scale.isfinite()).all()):
                    raise CheckpointError(f"{name}: a scale is not a positive number", HINT)
        else:
            for part, weight in module.named_parameters(recurse=False):
                values = weight.exp() if models.is_log_decay(f"{name}.{part}") else weight
                if weight.is_floating_point() and not math.isfinite(max_magnitude(values)):
                    raise CheckpointError(f"{name}.{part} holds NaN or infinity", HINT)


def max_magnitude(weight: torch.Tensor) -> float:
    """Return the largest magnitude, or NaN if the tensor has one."""
    if weight.device.type == "cpu" and codec.dtype_name(weight.dtype) in codec.DTYPE_CODES:
        return float(nvfp4.amax(codec.to_numpy(weight)))
    return weight.abs().amax().item() if weight.numel() else 0.0


def check_nvfp4(name: str, linear: NVFP4Linear) -> None:
    scalars = linear.scalars()
    for part, value, limit in (
        (linear.NAMES.tensor_scale, scalars.tensor_scale, checks.LARGEST_TENSOR_SCALE),
        (linear.NAMES.input_scale, scalars.input_scale, checks.LARGEST_INPUT_SCALE),
    ):
        if value is not None and not 0 < value <= limit:
            raise CheckpointError(f"{name}.{part} means {value}, expected a positive number of at most {limit:g}", HINT)
    magnitude = linear.block_scale.view(torch.uint8) & checks.MAGNITUDE
    if magnitude.numel() and int(magnitude.max()) == checks.NAN:
        raise CheckpointError(f"{name}.{linear.NAMES.block_scale} holds NaN block scales", HINT)
