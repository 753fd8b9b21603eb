"""What a dialect finds in a folder: its quantized linears, by module name, whatever the tensors are called on disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.shards import ModelFolder

# Linears that read the same input and are served as one matrix: their tensor scale and input scale must be equal
# (vllm #54974, #54150: unequal ones corrupt tokens).
FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
)
# What servers call those matrices; on disk they never are one.
FUSED_NAMES = {"qkv_proj": FUSED[0], "gate_up_proj": FUSED[1], "in_proj_qkvz": FUSED[2]}


@dataclass(frozen=True)
class Linear:
    """One quantized linear. `weight`, `block_scale`, … are tensor names; None where the file has no such tensor.

    format: "nvfp4" or "fp8".  reciprocal: the globals on disk are divisors (compressed-tensors), not multipliers.
    """

    name: str
    format: str
    weight: str
    block_scale: str | None
    global_scale: str | None
    input_global: str | None
    pre_quant: str | None = None
    reciprocal: bool = False

    def tensors(self) -> list[str]:
        names = (self.weight, self.block_scale, self.global_scale, self.input_global, self.pre_quant)
        return [n for n in names if n]

    def shape(self, folder: ModelFolder) -> tuple[int, int]:
        """[out, in] of the weight that the codes stand for."""
        shape = folder.info(self.weight).shape
        if len(shape) != 2:
            raise ShardError(
                "weight_shape", f"{self.weight}: shape {list(shape)}, expected [out, in]", tensor=self.weight
            )
        return (shape[0], shape[1] * 2) if self.format == "nvfp4" else (shape[0], shape[1])

    def group(self, folder: ModelFolder) -> int:
        """Columns that share one block scale, from the shapes on disk."""
        rows, columns = self.shape(folder)
        shape = folder.info(self.block_scale or "").shape
        if len(shape) != 2 or shape[0] != rows or shape[1] == 0 or columns % shape[1]:
            raise ShardError(
                "scale_shape",
                f"{self.block_scale}: shape {list(shape)} does not divide a weight of {[rows, columns]}",
                tensor=self.block_scale or "",
            )
        return columns // shape[1]

    def tensor_scale(self, folder: ModelFolder) -> np.float32:
        """The multiplier of the whole tensor (ModelOpt's weight_scale_2)."""
        if self.global_scale is None:
            raise ShardError(
                "tensor_scale_missing", f"{self.name}: no tensor scale beside {self.weight}", tensor=self.name
            )
        return self._multiplier(folder, self.global_scale)

    def input_scale(self, folder: ModelFolder) -> np.float32 | None:
        """The multiplier of the activations, or None for weight-only quantization."""
        return self._multiplier(folder, self.input_global) if self.input_global else None

    def _multiplier(self, folder: ModelFolder, name: str) -> np.float32:
        value = folder.scalar(name)
        with np.errstate(divide="ignore"):
            return np.float32(1) / value if self.reciprocal else value

    def load(self, folder: ModelFolder):
        """The codec's tensor for an NVFP4 linear."""
        from annie_quant import nvfp4

        return nvfp4.Tensor(
            folder.tensor(self.weight),
            folder.tensor(self.block_scale or ""),
            self.tensor_scale(folder),
            self.shape(folder),
            self.group(folder),
            folder.scalar(self.global_scale) if self.reciprocal and self.global_scale else None,
        )

    def dequantize(self, folder: ModelFolder) -> np.ndarray:
        """float32 [out, in]: what the activations are multiplied with, a left-over pre_quant_scale included."""
        if self.format == "fp8":
            scale = folder.tensor(self.block_scale).astype(np.float32) if self.block_scale else np.float32(1)
            weight = folder.tensor(self.weight).astype(np.float32)
            return weight * (scale.reshape(-1, 1) if np.size(scale) > 1 else np.reshape(scale, ()))
        from annie_quant import nvfp4

        try:
            weight = nvfp4.unpack(self.load(folder), dtype="float32", nan="keep")
            if self.pre_quant:
                weight *= folder.tensor(self.pre_quant).astype(np.float32).reshape(1, -1)
        except ValueError as error:  # shapes that do not fit each other
            raise ShardError("weight_shape", f"{self.name}: {error}", tensor=self.name) from None
        return weight


@dataclass
class QuantConfig:
    """What a folder's configuration says. `algo`: NVFP4, W4A16_NVFP4, NVFP4_AWQ, FP8, MIXED_PRECISION; "" = none."""

    method: str
    algo: str
    group: int | None
    excluded: list[str]
    layers: dict[str, str] = field(default_factory=dict)
    kv_cache: str | None = None
    raw: dict[str, Any] = field(default_factory=dict)


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a Linear, by name and shape: two dimensions and no embedding."""
    return len(shape) == 2 and name.endswith(".weight") and "embed" not in name


def matches(module: str, patterns: list[str]) -> str | None:
    """The first pattern that covers a module. Patterns are exact names, `prefix*`, `prefix.*`, fnmatch, or `re:…`."""
    import re

    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                if re.match(pattern[3:], module):
                    return pattern
            except re.error:
                continue
        elif module == pattern or fnmatchcase(module, pattern):
            return pattern
    return None


def fused_groups(names: set[str]) -> list[list[str]]:
    """Those of `names` that a server fuses, in groups of at least two."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in sorted(names):
        for members in FUSED:
            member = next((m for m in members if name == m or name.endswith("." + m)), None)
            if member:
                groups.setdefault((name[: -len(member)], members), []).append(name)
    return [group for group in groups.values() if len(group) > 1]
