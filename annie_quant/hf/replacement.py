"""Replacing a model's linears by NVFP4Linear, FP8Linear or BlockFP8Linear.

Their tensors have the shapes and types in the checkpoint's headers.

While a checkpoint is loaded only cheap checks run: types and shapes in the headers, the scales, and whether other weights are
finite. If one fails, the audit reads the whole folder, and its first finding that makes answers useless is raised.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from annie_quant import checkpoint, models, nvfp4
from annie_quant.checkpoint import Linear, ModelFolder, checks, loader_support
from annie_quant.errors import CheckpointError
from annie_quant.hf import codec
from annie_quant.hf.fp8_linear import BlockFP8Linear, FP8Linear, NamedBlockFP8Linear
from annie_quant.hf.nvfp4_linear import NVFP4Linear, PackedNVFP4Linear

AUDIT = "annie-quant audit DIR"
SCALE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Match(NamedTuple):
    """A module and its name in the model, which may differ from its name in the checkpoint."""

    name: str
    module: nn.Module


def find_module(model: nn.Module, name: str) -> Match | None:
    """Return the module that a checkpoint calls `name`, with or without the multimodal prefix."""
    for candidate in models.aliases(name):
        try:
            return Match(candidate, model.get_submodule(candidate))
        except AttributeError:
            continue
    return None


def replace_linear(model: nn.Module, linear: Linear, folder: ModelFolder, per_token: bool = False) -> None:
    """Replace one linear of the model, after a check of its tensors' types and shapes.

    per_token: the settings ask for FP8 activations with a scale per token.

    A linear of a part that the model class leaves out (vision tower, MTP) is skipped; transformers reports its tensors as
    unexpected.
    """
    match = find_module(model, linear.name)
    if match is None:
        if ".experts." in linear.name and not folder.family.is_auxiliary(linear.name):
            raise CheckpointError(
                f"{linear.name}: this runtime reads no quantized experts (transformers stores them as one 3-D weight)",
                "audit, compare and convert work; serve it with vLLM",
            )
        return
    if not isinstance(match.module, nn.Linear):
        raise CheckpointError(
            f"{linear.name} has {linear.format} tensors but is a {type(match.module).__name__}, expected a linear"
        )
    n, k = match.module.out_features, match.module.in_features
    info = folder.info(linear.weight)
    expected = ("U8", (n, k // 2)) if linear.format == "nvfp4" else ("F8_E4M3", (n, k))
    if (info.dtype, info.shape) != expected:
        raise CheckpointError(
            f"{linear.weight} is {info.dtype} {list(info.shape)}, expected {expected[0]} {list(expected[1])}", AUDIT
        )
    options = {"bias": match.module.bias is not None, "dtype": match.module.weight.dtype, "device": "meta"}
    if linear.format == "nvfp4":
        new: nn.Module = build_nvfp4(linear, folder, k, n, options)
    elif linear.block:
        new = build_block_fp8(linear, folder, k, n, options)
    else:
        new = build_fp8(linear, folder, k, n, options | {"per_token": per_token})
    new._is_hf_initialized = True  # type: ignore[assignment]  # so that transformers draws no random values for it
    parent, _, leaf = match.name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new.requires_grad_(False))


def build_nvfp4(linear: Linear, folder: ModelFolder, k: int, n: int, options: dict[str, Any]) -> NVFP4Linear:
    kind = PackedNVFP4Linear if linear.reciprocal else NVFP4Linear
    for name, tensor in (
        (kind.NAMES.block_scale, linear.block_scale),
        (kind.NAMES.tensor_scale, linear.global_scale),
    ):
        if tensor is None:
            raise CheckpointError(f"{linear.name}.{name} is missing, {linear.weight} needs it", AUDIT)
    scales = folder.info(linear.block_scale or "")
    if scales.dtype != "F8_E4M3" or scales.shape not in {(n, k // 16), (n, k // 32)}:
        raise CheckpointError(
            f"{scales.name} is {scales.dtype} {list(scales.shape)}, expected F8_E4M3 [{n}, {k // 16}] or [{n}, {k // 32}]",
            AUDIT,
        )
    activations = linear.input_global is not None
    return kind(k, n, group=k // scales.shape[1], activations=activations, pre_quant=bool(linear.pre_quant), **options)


def build_fp8(linear: Linear, folder: ModelFolder, k: int, n: int, options: dict[str, Any]) -> FP8Linear:
    if linear.block_scale is None:
        raise CheckpointError(f"{linear.name}.weight_scale is missing, {linear.weight} needs it", AUDIT)
    scale = folder.info(linear.block_scale)
    if scale.elements not in (1, n):
        raise CheckpointError(f"{scale.name} is {list(scale.shape)}, expected one value or one for each of {n} rows")
    return FP8Linear(
        k,
        n,
        scale_shape=scale.shape,
        scale_dtype=meta_tensor(folder, scale.name).dtype,
        input_shape=folder.info(linear.input_global).shape if linear.input_global else None,
        **options,
    )


def build_block_fp8(linear: Linear, folder: ModelFolder, k: int, n: int, options: dict[str, Any]) -> BlockFP8Linear:
    if linear.block is None or linear.block_scale is None:
        raise CheckpointError(f"the block scales of {linear.weight} are missing", AUDIT)
    if folder.info(linear.block_scale).shape != linear.scale_grid(folder):
        raise linear.wrong_grid(folder)
    kind = BlockFP8Linear if linear.block_scale.endswith(BlockFP8Linear.SCALE) else NamedBlockFP8Linear
    return kind(k, n, block=linear.block, scale_dtype=meta_tensor(folder, linear.block_scale).dtype, **options)


def check_shapes(model: nn.Module, folder: ModelFolder) -> None:
    """Raise CheckpointError where a tensor's shape differs from the model's.

    transformers does not compare shapes for quantized models. This also finds codes without their scales.
    """
    state = model.state_dict()
    for name in folder:
        module_name, _, part = name.rpartition(".")
        match = find_module(model, module_name)
        info, tensor = folder.info(name), state.get(f"{match.name}.{part}") if match else None
        if tensor is not None and tuple(tensor.shape) != info.shape:
            raise CheckpointError(
                f"{name} is {info.dtype} {list(info.shape)}, and config.json makes it {list(tensor.shape)}",
                "compare config.json with the source checkpoint's",
            )


def meta_tensor(folder: ModelFolder, name: str) -> torch.Tensor:
    """Return a tensor without memory that has the shape and type of a scale in the file."""
    info = folder.info(name)
    if info.dtype not in SCALE_DTYPES:
        raise CheckpointError(f"{name} is {info.dtype}, expected a scale of 16 or 32 bits", AUDIT)
    return torch.empty(info.shape, dtype=SCALE_DTYPES[info.dtype], device="meta")


AUDIT_HINT = "annie-quant audit DIR --repair"


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
        raise CheckpointError(f"{deadly[0].message}{more}", AUDIT_HINT) from error


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
                    raise CheckpointError(f"{name}: a scale is not a positive number", AUDIT_HINT)
        else:
            for part, weight in module.named_parameters(recurse=False):
                values = weight.exp() if models.is_log_decay(f"{name}.{part}") else weight
                if weight.is_floating_point() and not math.isfinite(max_magnitude(values)):
                    raise CheckpointError(f"{name}.{part} holds NaN or infinity", AUDIT_HINT)


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
            raise CheckpointError(
                f"{name}.{part} means {value}, expected a positive number of at most {limit:g}", AUDIT_HINT
            )
    magnitude = linear.block_scale.view(torch.uint8) & checks.MAGNITUDE
    if magnitude.numel() and int(magnitude.max()) == checks.NAN:
        raise CheckpointError(f"{name}.{linear.NAMES.block_scale} holds NaN block scales", AUDIT_HINT)
