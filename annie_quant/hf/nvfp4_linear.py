"""NVFP4Linear: a linear layer on a checkpoint's NVFP4 tensors, with the arithmetic of each family of kernels.

y = x W^T + b, with W = value * f32(block scale * tensor scale) and x in the activation format of a numerics profile
(profiles.py):
  w4a4   x is first rounded to NVFP4 and back with the checkpoint's input_scale and one E4M3 scale per block of values,
         computed from x: what CUTLASS's and vLLM's NVFP4 kernels do to activations.
  w4a16  x is used unchanged: what Marlin does.
  llama.cpp-cpu, llama.cpp-blackwell   x is rounded to llama.cpp's 8-bit or 4-bit blocks (activations.py).
Where weights are dequantized first (many rows of x), W is rounded once to x's dtype: in bfloat16 this is ModelOpt's own
dequantize, in float32 it is exact. Kernels on packed weights (few rows on a CPU, any number on a GPU with _gemm) multiply by
exact weights in float32 and round the sum once. Tensor names are the checkpoint's own, so state dicts load and save unchanged.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import nn

from annie_quant.errors import UsageError
from annie_quant.gemm.torch_op import Prepared
from annie_quant.hf import activations, codec, matmul, profiles
from annie_quant.hf.base_linear import FixedDtypeLinear
from annie_quant.hf.watched import Watched

CACHES = ("packed", "bf16", "float32")
CACHE_DTYPE = {"bf16": torch.bfloat16, "float32": torch.float32}


class Names(NamedTuple):
    """A dialect's names for the tensors of a linear."""

    codes: str
    block_scale: str
    tensor_scale: str
    input_scale: str


class Scalars(NamedTuple):
    """A linear's scales as Python floats. divisor: the stored tensor scale, where the dialect stores its reciprocal."""

    tensor_scale: float
    divisor: float | None
    input_scale: float | None


class NVFP4Linear(Watched, FixedDtypeLinear):
    """A linear with ModelOpt's tensor names.

    Parameters: weight uint8 [N, K/2]; weight_scale float8_e4m3fn [N, K/group]; weight_scale_2 float32 []; input_scale float32
    [] or None; pre_quant_scale [K] or None (NVFP4_AWQ: x is multiplied by it first).
    """

    NAMES: ClassVar[Names] = Names("weight", "weight_scale", "weight_scale_2", "input_scale")
    FIXED_DTYPE = NAMES
    SETTINGS = frozenset({"numerics", "dense", "permutation", "parts", "bias", "pre_quant_scale"})
    SCALAR_SHAPE: ClassVar[tuple[int, ...]] = ()
    RECIPROCAL: ClassVar[bool] = False  # whether the scalar scales are stored as divisors

    pre_quant_scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: int = 16,
        bias: bool = False,
        activations: bool = True,
        pre_quant: bool = False,
        dtype: torch.dtype | None = None,
        device=None,
    ) -> None:
        super().__init__(in_features, out_features)
        if in_features % group:
            raise UsageError(f"NVFP4 needs rows of a multiple of {group} values, this linear has {in_features}")
        self.group = group
        dtype = dtype or torch.bfloat16
        names, scalar = self.NAMES, self.SCALAR_SHAPE
        self.register_parameter("weight", None)
        self.add_parameter(names.input_scale, scalar if activations else None, torch.float32, device)
        self.add_parameter("pre_quant_scale", (in_features,) if pre_quant else None, dtype, device)
        self.add_parameter("bias", (out_features,) if bias else None, dtype, device)
        self.add_parameter(names.codes, (out_features, in_features // 2), torch.uint8, device)
        self.add_parameter(names.block_scale, (out_features, in_features // group), torch.float8_e4m3fn, device)
        self.add_parameter(names.tensor_scale, scalar, torch.float32, device)
        self.numerics = "w4a4" if activations else "w4a16"
        self.cache = "packed"
        self.dense: torch.Tensor | None = None  # the dequantized weights, unless the cache is "packed"
        self.permutation: torch.Tensor | None = None  # of K, for another order of the sums (emulation.SumOrder)
        self.parts = 1  # of K, whose sums are added
        self.prepared: Prepared | None = None  # the weights as our CUDA kernels read them
        self._scalars: Scalars | None = None

    @property
    def codes(self) -> torch.Tensor:
        return getattr(self, self.NAMES.codes)

    @property
    def block_scale(self) -> torch.Tensor:
        return getattr(self, self.NAMES.block_scale)

    @property
    def has_input_scale(self) -> bool:
        """Whether the checkpoint defines how activations are rounded."""
        return getattr(self, self.NAMES.input_scale) is not None

    def _apply(self, fn, recurse: bool = True):
        """Also drop what was derived from the tensors, and move the dequantized weights."""
        super()._apply(fn, recurse)
        self._scalars = self.prepared = None
        if self.dense is not None:
            self.dense = self.dense.to(self.codes.device)
        return self

    def scalars(self) -> Scalars:
        """Return the scales, read from the device once."""
        if self._scalars is None:
            stored = getattr(self, self.NAMES.tensor_scale).item()
            input_scale = getattr(self, self.NAMES.input_scale).item() if self.has_input_scale else None
            if self.RECIPROCAL:
                input_scale = None if input_scale is None else reciprocal(input_scale)
                self._scalars = Scalars(reciprocal(stored), stored, input_scale)
            else:
                self._scalars = Scalars(stored, None, input_scale)
        return self._scalars

    def prepare(self) -> None:
        """Read the scales and, on a GPU with kernels, repack the weights for them.

        The first forward does this too; torch.compile needs it before.
        """
        self.scalars()
        if self.prepared is None and self.dense is None and matmul.can_use_kernels(self):
            self.prepared = matmul.repack(self)

    def set_numerics(self, numerics: str) -> None:
        """Set a numerics profile's activation format. Raises UsageError where the checkpoint or the shape does not define it."""
        profile = profiles.find_profile(numerics)
        if profile.needs_input_scale and not self.has_input_scale:
            raise UsageError(
                f"{numerics} needs an input_scale, and this checkpoint quantizes weights only",
                "use w4a16 or vllm-marlin",
            )
        if profile.activations == profiles.Q8_0 and self.in_features % activations.QK8_0:
            raise UsageError(f"{numerics} needs rows of a multiple of 32 values, this linear has {self.in_features}")
        self.numerics = numerics

    def set_cache(self, cache: str) -> None:
        """Set "packed" (4 bits per weight in memory) or "bf16" or "float32" (also store the dequantized weights)."""
        if cache not in CACHES:
            raise UsageError(f"unknown cache {cache!r}", f"choose one of: {', '.join(CACHES)}")
        self.cache = cache
        self.dense = None if cache == "packed" else self.rows(0, self.out_features, CACHE_DTYPE[cache])

    def reorder(self, permutation: torch.Tensor | None, parts: int) -> None:
        """Sum in another order from now on (emulation.SumOrder). Dequantized weights are stored in that order, in place."""
        undo = None if self.permutation is None else self.permutation.argsort()
        for order in (undo, permutation):
            self.dense = self.dense if self.dense is None or order is None else self.dense[:, order]
        self.permutation, self.parts = permutation, parts

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of output rows start to stop, [stop - start, K] in `dtype`."""
        tensor_scale, divisor, _ = self.scalars()
        codes, scales = self.codes[start:stop], self.block_scale[start:stop]
        return codec.dequantize(codes, scales, tensor_scale, self.group, dtype, divisor)

    def rounded_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return x in the activation format of the layer's numerics, in x's dtype."""
        kind = profiles.find_profile(self.numerics).activations
        if kind == profiles.NVFP4:
            input_scale = self.scalars().input_scale
            assert input_scale is not None  # set_numerics checks it
            rounded = codec.fake_quant(x, input_scale, self.group)
            return rounded if self.operands is None else rounded.to(self.operands).to(x.dtype)
        if kind == profiles.Q8_0:
            return activations.q8_0(x)
        return activations.nvfp4_searched(x) if kind == profiles.NVFP4_SEARCHED else x

    @property
    def operands(self) -> torch.dtype | None:
        """The dtype to which the profile rounds the dequantized values of both sides of a product; None: exact values."""
        name = profiles.find_profile(self.numerics).operands
        return None if name == profiles.EXACT else getattr(torch, name)

    def weights(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all weights [N, K] in `dtype`, as the profile multiplies them."""
        if self.dense is None:
            return self.rows(0, self.out_features, self.operands or dtype).to(dtype)
        return self.dense.to(dtype) if self.operands is None else self.dense.to(self.operands).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale.to(x.dtype)
        x = self.rounded_input(x)
        if self.permutation is not None or self.parts > 1:
            return matmul.reordered(self, x)
        if self.dense is not None or self.operands is not None:
            return nn.functional.linear(x, self.weights(x.dtype), self.bias)
        if not torch.compiler.is_compiling():
            self.prepare()
        return matmul.linear(self, x)

    def extra_repr(self) -> str:
        shape = f"in={self.in_features}, out={self.out_features}, group={self.group}"
        return f"{shape}, numerics={self.numerics}, cache={self.cache}"


class PackedNVFP4Linear(NVFP4Linear):
    """A linear with compressed-tensors' names (nvfp4-pack-quantized); both global scales, float32 [1], are divisors."""

    NAMES = Names("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    FIXED_DTYPE = NAMES
    SCALAR_SHAPE = (1,)
    RECIPROCAL = True


def reciprocal(value: float) -> float:
    """Return float32(1 / value); infinity for 0."""
    return (1 / torch.tensor(value, dtype=torch.float32)).item()


def nvfp4_linears(model: nn.Module) -> dict[str, NVFP4Linear]:
    """Return the model's NVFP4 linears by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, NVFP4Linear)}


def set_numerics(model: nn.Module, numerics: str) -> None:
    """Set a numerics profile, such as w4a4 or w4a16, for every NVFP4Linear of the model.

    In a model where some linears have an input scale, one without it stays w4a16, as its format defines. Raises UsageError for
    w4a4 where no linear has one.
    """
    needs_scale = profiles.find_profile(numerics).needs_input_scale
    linears = nvfp4_linears(model).values()
    mixed = any(m.has_input_scale for m in linears)
    for linear in linears:
        linear.set_numerics("w4a16" if mixed and needs_scale and not linear.has_input_scale else numerics)


def set_cache(model: nn.Module, cache: str) -> None:
    """Set packed, bf16 or float32 for every NVFP4Linear of the model."""
    for linear in nvfp4_linears(model).values():
        linear.set_cache(cache)
