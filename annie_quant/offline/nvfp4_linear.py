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

The formats in which servers round activations, each as a function x -> x rounded and back, and those of a KV cache.

A KV cache in "fp8" divides by the checkpoint's k_scale and v_scale (buffers; 1.0 without them), saturates at 448 and rounds
to E4M3. "nvfp4" rounds blocks of 16 values of a head to E2M1 with an E4M3 scale each, under the same scales taken as tensor
scales, or under 1.0. Values are rounded when they are read, which is the same as when they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from annie_quant.core.errors import UsageError
from annie_quant.gemm.torch_op import Prepared
from annie_quant.offline import codec, fp8_linear, matmul, profiles
from annie_quant.offline.base_linear import FixedDtypeLinear, Watched

QK8_0 = 32  # values per block of ggml's Q8_0
QK_NVFP4 = 16
SCALE_OFFSETS = (0, -1, 1, -2, 2)  # neighbours of amax's scale code that llama.cpp tries, in its order
MAX_CODE = 0x7E  # E4M3's largest finite value, 448


def q8_0(x: torch.Tensor) -> torch.Tensor:
    """Round x [..., K] to ggml's Q8_0 and back: per block of 32 a float16 scale amax / 127 and 8-bit integers.

    Source: quantize_row_q8_0 of ggml-cpu, to which llama.cpp rounds the activations of NVFP4 products on CPUs. Integers are
    computed with the float32 scale, ties to even as its SIMD forms do. K must be a multiple of 32.
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, QK8_0)
    amax = blocks.abs().amax(-1, keepdim=True)
    integers = (blocks * torch.where(amax > 0, 127 / amax, 0.0)).round()
    return (integers * (amax / 127).half().float()).reshape(x.shape).to(x.dtype)


def nvfp4_searched(x: torch.Tensor) -> torch.Tensor:
    """Round x [..., K] to NVFP4 as llama.cpp's native Blackwell kernel does, and back.

    Per block of 16 the E4M3 scale of amax / 6 and its four neighbours are tried, and the one with the smallest squared error is
    used; there is no tensor scale. Source: quantize_mmq_nvfp4 of ggml-cuda (ggml-org/llama.cpp #22196).
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, QK_NVFP4)
    amax = blocks.abs().amax(-1, keepdim=True)
    first = (amax / 6).clamp(max=codec.MAX_E4M3).to(torch.float8_e4m3fn).view(torch.uint8).int()
    best, best_error = torch.zeros_like(blocks), torch.full_like(amax, torch.inf)
    for offset in SCALE_OFFSETS:
        code = first + offset
        valid = (code >= 0) & (code <= MAX_CODE)
        scale = code.clamp(0, MAX_CODE).to(torch.uint8).view(torch.float8_e4m3fn).float()
        candidate = to_e2m1(blocks / torch.where(scale > 0, scale, 1.0)) * scale
        error = (candidate - blocks).square().sum(-1, keepdim=True)
        better = valid & (error < best_error)
        best, best_error = torch.where(better, candidate, best), torch.where(better, error, best_error)
    return best.reshape(x.shape).to(x.dtype)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest values of E2M1, ties to the even code, clamped to ±6."""
    magnitude = x.abs()
    index = sum(magnitude > m if i % 2 == 0 else magnitude >= m for i, m in enumerate(codec.MIDPOINTS))
    values = torch.tensor(codec.E2M1[:8], dtype=x.dtype, device=x.device)[index]
    return torch.copysign(values, x)


FP8, NVFP4 = "fp8", "nvfp4"
Rounding = Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def cache_rounding(kind: str) -> Rounding:
    """Return f(attention module, keys, values) → both as the cache holds them, in their own dtype."""
    if kind == "float32":
        return lambda module, key, value: (key, value)
    if kind not in (FP8, NVFP4):
        dtype = getattr(torch, kind)
        return lambda module, key, value: (key.to(dtype).to(key.dtype), value.to(dtype).to(value.dtype))

    def rounded(module: Any, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return round_one(key, scale_of(module, "k_scale"), kind), round_one(value, scale_of(module, "v_scale"), kind)

    return rounded


def scale_of(module: Any, name: str) -> torch.Tensor:
    """Return the scale of an attention module or of its projection (compressed-tensors and ModelOpt), or 1.0."""
    scales = [getattr(child, name) for child in (module, *module.children()) if hasattr(child, name)]
    return scales[0].float() if scales else torch.ones(())


def round_one(x: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    scale = scale.to(x.device)
    if kind == FP8:
        return fp8_linear.fake_quant(x, scale)
    return codec.fake_quant(x.contiguous(), float(scale))


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
        if profile.activations == profiles.Q8_0 and self.in_features % QK8_0:
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
            return q8_0(x)
        return nvfp4_searched(x) if kind == profiles.NVFP4_SEARCHED else x

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
