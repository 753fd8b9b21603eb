"""The quantized linears of a checkpoint: which tensors belong to a linear, and what they mean.

A dialect reads them.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from annie_quant import nvfp4
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import salvage_value
from annie_quant.models.formats import FP8, FP8_BLOCK, FP8_CHANNEL, NVFP4, W4A16, Format

Size = Annotated[int, Meta(ge=1)]
Settings = TypeVar("Settings", bound=msgspec.Struct)
# Ends of the names of tensors that belong to a quantizer and not to the model; each dialect writes
# its own.
QUANTIZER = (
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".input_scale",
    ".weight_global_scale",
    ".input_global_scale",
    ".pre_quant_scale",
)
HEAD = "lm_head"
LINEAR_CLASS = "Linear"  # compressed-tensors' target for all linears
# Of a multiplier. A weight's is amax / 2688: above 1 the largest weight would exceed 2688, which no
# model has; a divisor usually does. Activations reach further: some models have outliers of several
# 10,000.
LARGEST_SCALE = {"tensor": 1.0, "input": 100.0}
COLUMNS_PER_RANK = 32  # vLLM reads wrong block scales where the columns are not a multiple (#48898)


@dataclass(frozen=True)
class TensorScale:
    """The scale of a whole tensor as a file stores it.

    value: a multiplier (ModelOpt), or a divisor (compressed-tensors).
    reciprocal: whether it is a divisor.
    """

    value: np.float32
    reciprocal: bool = False

    @property
    def multiplier(self) -> np.float32:
        return _inverse(self.value) if self.reciprocal else self.value

    @property
    def divisor(self) -> np.float32:
        return self.value if self.reciprocal else _inverse(self.value)


def _inverse(value: np.float32) -> np.float32:
    with np.errstate(divide="ignore"):
        return np.float32(1) / value


@dataclass(frozen=True)
class Linear:
    """One quantized linear, by the names of its tensors; None where the file has no such tensor.

    name: of the module.
    format: "nvfp4" or "fp8".
    weight: the codes.
    block_scale: the scales of blocks or rows, or the one scale of an FP8 weight.
    global_scale: the scale of a whole NVFP4 weight.
    input_global: the scale of the activations.
    pre_quant: activation scales of NVFP4_AWQ.
    reciprocal: whether the scales of whole tensors are divisors on disk.
    block: rows and columns of an FP8 weight that share one scale; None for a scale per row or per
        tensor.
    """

    name: str
    format: str
    weight: str
    block_scale: str | None
    global_scale: str | None
    input_global: str | None
    pre_quant: str | None = None
    reciprocal: bool = False
    block: tuple[int, int] | None = None

    def tensors(self) -> list[str]:
        """Return the names of all tensors of this linear."""
        names = (
            self.weight,
            self.block_scale,
            self.global_scale,
            self.input_global,
            self.pre_quant,
        )
        return [n for n in names if n]

    def shape(self, folder: ModelFolder) -> tuple[int, int]:
        """Return [out, in] of the weight that the codes stand for."""
        shape = folder.info(self.weight).shape
        if len(shape) != 2:
            message = f"{self.weight}: shape {list(shape)}, expected [out, in]"
            raise ShardError("weight_shape", message, tensor=self.weight)
        return (shape[0], shape[1] * 2) if self.format == "nvfp4" else (shape[0], shape[1])

    def group(self, folder: ModelFolder) -> int:
        """Return the number of columns that share one block scale, from the shapes on disk."""
        rows, columns = self.shape(folder)
        shape = folder.info(self.block_scale or "").shape
        if len(shape) != 2 or shape[0] != rows or shape[1] == 0 or columns % shape[1]:
            message = f"{self.block_scale}: shape {list(shape)} does not divide a weight of {[rows, columns]}"
            raise ShardError("scale_shape", message, tensor=self.block_scale or "")
        return columns // shape[1]

    def per_channel(self, folder: ModelFolder) -> bool:
        """Return whether an FP8 linear has one scale per row: shape [out] or [out, 1]."""
        if self.format != "fp8" or self.block_scale is None or self.block:
            return False
        rows = folder.info(self.weight).shape[:1]
        shape = folder.info(self.block_scale).shape
        return shape in (rows, (*rows, 1)) and rows != (1,)

    def stored_format(self, folder: ModelFolder) -> Format:
        """Return the format in which the linear is stored."""
        if self.format == "nvfp4":
            return NVFP4 if self.input_global else W4A16
        return FP8_CHANNEL if self.per_channel(folder) else FP8

    def scale_grid(self, folder: ModelFolder) -> tuple[int, int]:
        """Return the numbers of blocks in the rows and columns of an FP8 weight.

        The last ones may be smaller.
        """
        rows, columns = self.shape(folder)
        block = self.block or (1, 1)
        return -(-rows // block[0]), -(-columns // block[1])

    def tensor_scale(self, folder: ModelFolder) -> TensorScale:
        """Return the scale of the whole weight."""
        if self.global_scale is None:
            message = f"{self.name}: {self.weight} has no tensor scale"
            raise ShardError("tensor_scale_missing", message, tensor=self.name)
        return TensorScale(folder.scalar(self.global_scale), self.reciprocal)

    def input_scale(self, folder: ModelFolder) -> TensorScale | None:
        """Return the scale of the activations, or None where only the weight is quantized."""
        return (
            TensorScale(folder.scalar(self.input_global), self.reciprocal)
            if self.input_global
            else None
        )

    def load(self, folder: ModelFolder) -> nvfp4.Tensor:
        """Return the codec's tensor of an NVFP4 linear."""
        scale = self.tensor_scale(folder)
        dtype = folder.info(self.block_scale or "").dtype
        if dtype != "F8_E4M3":
            problem = f"{self.block_scale}: {dtype}, expected F8_E4M3"
            raise ShardError("scale_dtype", problem, tensor=self.block_scale or "")
        divisor = scale.value if scale.reciprocal else None
        codes = folder.tensor(self.weight)
        block_scale = folder.tensor(self.block_scale or "")
        return nvfp4.Tensor(
            codes, block_scale, scale.multiplier, self.shape(folder), self.group(folder), divisor
        )

    def dequantize(self, folder: ModelFolder) -> np.ndarray:
        """Return the weight by which the activations are multiplied, including a pre_quant_scale.

        float32 [out, in].
        """
        if self.format == "fp8":
            return self._dequantize_fp8(folder)
        try:
            weight = nvfp4.unpack(self.load(folder), dtype="float32", nan="keep")
            if self.pre_quant:
                weight *= folder.tensor(self.pre_quant).astype(np.float32).reshape(1, -1)
        except ValueError as error:  # shapes that do not fit each other
            raise ShardError("weight_shape", f"{self.name}: {error}", tensor=self.name) from None
        return weight

    def _dequantize_fp8(self, folder: ModelFolder) -> np.ndarray:
        self.check_fp8_scale(folder)
        scale = (
            folder.tensor(self.block_scale).astype(np.float32)
            if self.block_scale
            else np.float32(1)
        )
        weight = folder.tensor(self.weight).astype(np.float32)
        if not (self.block and self.block_scale):
            return weight * (scale.reshape(-1, 1) if np.size(scale) > 1 else np.reshape(scale, ()))
        # The settings may name blocks that are larger than the weight.
        rows, columns = (min(b, n) for b, n in zip(self.block, weight.shape, strict=True))
        for i, per_column in enumerate(np.repeat(scale, columns, axis=1)[:, : weight.shape[1]]):
            weight[i * rows : (i + 1) * rows] *= per_column
        return weight

    def check_fp8_scale(self, folder: ModelFolder) -> None:
        """Raise ShardError where the shape of an FP8 linear's scales does not fit.

        A number, one per row, or one per block.
        """
        if self.block_scale is None:
            return
        scale = folder.info(self.block_scale)
        if self.block:
            expected = f"{list(self.scale_grid(folder))} (blocks of {self.block})"
            fits = scale.shape == self.scale_grid(folder)
        else:
            expected = f"one number or [{self.shape(folder)[0]}, 1]"
            fits = scale.elements == 1 or self.per_channel(folder)
        if not fits:
            problem = f"{scale.name}: shape {list(scale.shape)}, expected {expected}"
            raise ShardError("scale_shape", problem, "start from the 16-bit checkpoint", scale.name)


@dataclass
class QuantConfig:
    """The quantization settings of a folder, whatever their dialect.

    method: the dialect's name.
    algo: NVFP4, W4A16_NVFP4, NVFP4_AWQ, FP8, FP8_BLOCK, MIXED_PRECISION; "" where none is named.
    group: columns per block scale.
    excluded: patterns of modules that are not quantized.
    layers: module → algorithm, for mixed precision; in compressed-tensors also patterns and class
        names, of which the first match counts.
    kv_cache: format of the KV cache, or None for a cache in 16 bits.
    raw: the settings as they were read.
    """

    method: str
    algo: str
    group: int | None
    excluded: list[str]
    layers: dict[str, str] = field(default_factory=dict)
    kv_cache: str | None = None
    raw: JsonObject = field(default_factory=dict)

    def algo_of(self, module: str) -> str:
        """Return the algorithm that the settings give a linear; "" where they give none.

        NVIDIA's releases list all experts of a layer as one module ("mlp.experts"), so an entry
        covers what is inside it.
        """
        if not self.layers:
            return self.algo
        name = module
        while name:
            if name in self.layers:
                return self.layers[name]
            name = name.rpartition(".")[0]
        pattern = covering_pattern(
            module, (t for t in self.layers if t.startswith("re:") or "*" in t)
        )
        return self.layers[pattern] if pattern else self.layers.get(LINEAR_CLASS, "")


class Scheme(msgspec.Struct):
    """How the weights or the activations of a group are quantized.

    block_structure: rows and columns of a block.
    dynamic: True: scales are computed per token while serving; "local": per block.
    """

    num_bits: int | None = None
    type: str | None = None
    strategy: str | None = None
    group_size: Size | None = None
    block_structure: tuple[Size, Size] | None = None
    dynamic: bool | str | None = None


class ConfigGroup(msgspec.Struct):
    """Linears that are quantized alike. input_activations: None: not quantized."""

    weights: Scheme | None = None
    input_activations: Scheme | None = None
    targets: list[str] = []
    format: str | None = None

    @property
    def algorithm(self) -> str:
        """ModelOpt's name of the group's algorithm; "" for any other format."""
        weights = self.weights or Scheme()
        activations = self.input_activations
        if weights.type not in (None, "float"):
            return ""
        if weights.num_bits == 8 and weights.strategy == "block":
            return FP8_BLOCK
        if weights.num_bits == 8:
            per_token = activations is not None and activations.dynamic is True
            return (FP8_CHANNEL if per_token else FP8).modelopt
        if weights.num_bits == 4 and (activations is None or activations.num_bits in (4, None)):
            return (NVFP4 if activations else W4A16).modelopt
        return ""


def algorithms_of_targets(groups: Iterable[ConfigGroup]) -> dict[str, str]:
    """Return target → algorithm; a linear belongs to the first group that names it."""
    layers: dict[str, str] = {}
    for group in groups:
        for target in group.targets:
            layers.setdefault(target, group.algorithm)
    return layers


class KvScheme(msgspec.Struct):
    """How the KV cache is quantized, as config.json names it."""

    type: str | None = None
    num_bits: int | None = None
    strategy: str | None = None


class KvSettings(msgspec.Struct):
    """The KV cache in quantization settings. kv_cache_quant_algo: of hf_quant_config.json."""

    kv_cache_scheme: KvScheme | None = None
    kv_cache_quant_algo: str | None = None


def kv_format(quant: JsonObject) -> str | None:
    """Return the KV cache's format that quantization settings ask for.

    A name, or "FP8" for type float and 8 bits.
    """
    settings = read_struct(KvSettings, quant)
    scheme = settings.kv_cache_scheme or KvScheme()
    is_fp8 = (scheme.type, scheme.num_bits) == ("float", 8)
    return "FP8" if is_fp8 else settings.kv_cache_quant_algo


def names_dialect(folder: ModelFolder, name: str, ends: str) -> bool:
    """Return whether the settings name a dialect, or name none and such tensors are on disk."""
    method = folder.quantization.get("quant_method")
    return bool(method == name) if method else any(n.endswith(ends) for n in folder)


def existing(folder: ModelFolder, name: str) -> str | None:
    """Return the name of a tensor, or None where the folder does not have it."""
    return name if name in folder else None


def read_struct(kind: type[Settings], value: JsonObject) -> Settings:
    """Return a JSON object as settings whose fields all have defaults.

    A field of another type counts as absent.
    """
    return salvage_value(kind, value) or kind()


def label_of(module: str) -> str:
    """Return a module's last two names, the same in every layer and for every expert.

    "model.layers.3.mlp.experts.7.up_proj" → "experts.up_proj".
    """
    return ".".join([part for part in module.split(".") if not part.isdecimal()][-2:])


def owned_tensors(linears: Iterable[Linear]) -> set[str]:
    """Return the names of all tensors of these linears."""
    return {t for linear in linears for t in linear.tensors()}


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is the weight of a Linear, by its name and shape.

    Two dimensions and not an embedding.
    """
    return len(shape) == 2 and name.endswith(".weight") and "embed" not in name


def excluded_module(folder: ModelFolder, name: str) -> str | None:
    """Return the module that settings list as excluded for an unquantized tensor, or None.

    None for one that needs no entry.

    It is the Linear, or for merged experts all of a layer's ("model.layers.3.mlp.experts"), as
    servers call them.
    """
    experts = folder.family.experts
    merged = experts.merged_part(name) if experts else None
    if experts and merged:
        return f"{merged[0]}.{experts.module}"
    return name.removesuffix(".weight") if is_linear(name, folder.info(name).shape) else None


def plain_linears(folder: ModelFolder) -> list[str]:
    """Return the modules of all linears of a folder whose weights are stored as such."""
    return [n.removesuffix(".weight") for n in folder if is_linear(n, folder.info(n).shape)]


def weight_name(folder: ModelFolder, module: str) -> str:
    """Return the tensor with a linear's weight.

    For the head of a model that ties it, the embedding.
    """
    name = f"{module}.weight"
    if module != HEAD or name in folder:
        return name
    embeddings = (
        n for n in folder if n.endswith("embed_tokens.weight") and not folder.family.is_auxiliary(n)
    )
    return next(embeddings, name)


def unties(folder: ModelFolder, formats: Iterable[str]) -> bool:
    """Return whether formats give a tied embedding a quantized copy that serves as the head."""
    return HEAD in formats and f"{HEAD}.weight" not in folder


def all_linears(folder: ModelFolder) -> list[str]:
    """Return the modules of plain_linears and of experts in merged tensors, in file order."""
    modules = []
    for name in folder:
        if is_linear(name, folder.info(name).shape):
            modules.append(name.removesuffix(".weight"))
        modules += [part.removesuffix(".weight") for part in folder.parts_of(name)]
    return modules


def covering_pattern(module: str, patterns: Iterable[str]) -> str | None:
    """Return the first pattern that covers a module.

    An exact name, an fnmatch pattern, or "re:" and an expression.
    """
    listed = tuple(patterns)
    names, starts, expressions = _compiled(listed)
    first = names.get(module, len(listed))
    if module.startswith(tuple(starts)):
        first = min(first, *(n for start, n in starts.items() if module.startswith(start)))
    for number, expression in expressions:
        if number > first:
            break
        if expression.match(module):
            first = number
            break
    return listed[first] if first < len(listed) else None


@functools.lru_cache(256)
def _compiled(
    patterns: tuple[str, ...],
) -> tuple[dict[str, int], dict[str, int], list[tuple[int, re.Pattern]]]:
    """Return the numbers of names, of the starts in patterns "START*", and of other patterns.

    Settings list thousands of names, and a mixture of experts has tens of thousands of modules.
    """
    names: dict[str, int] = {}
    starts: dict[str, int] = {}
    expressions = []
    for number, pattern in enumerate(patterns):
        if pattern.startswith("re:"):
            with contextlib.suppress(re.error):
                expressions.append((number, re.compile(pattern[3:])))
            continue
        names.setdefault(pattern, number)
        start = pattern.removesuffix("*")
        if any(sign in start for sign in "*?["):
            expressions.append((number, re.compile(translate(pattern))))
        elif start != pattern:
            starts.setdefault(start, number)
    return names, starts, expressions
