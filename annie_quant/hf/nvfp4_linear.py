"""NVFP4Linear: a linear layer on the NVFP4 tensors of a checkpoint, with the arithmetic of either family of kernels.

Arithmetic, y = x W^T + b, with W = value * f32(block scale * tensor scale):
  w4a4   x is first rounded to NVFP4 and back under the checkpoint's input_scale, with one E4M3 scale for each block
         of values found from x itself: what CUTLASS's and vLLM's NVFP4 kernels do to activations.
  w4a16  x is taken as it comes: what Marlin and llama.cpp do.
Where the weights are dequantized first (many rows of x), W is rounded once to the dtype of x: in bfloat16 that is
ModelOpt's own dequantize, in float32 it is exact. Kernels that read the packed weights (few rows on a CPU, any on a GPU
with _gemm) multiply by exact weights in float32 and round the sum once. The tensor names are the checkpoint's own, so
state dicts go in and out unchanged.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from annie_quant.errors import UsageError
from annie_quant.hf import codec, matmul
from annie_quant.hf.base_linear import HeldLinear

NUMERICS = ("w4a4", "w4a16")
CACHES = ("packed", "bf16", "float32")
CACHE_DTYPE = {"bf16": torch.bfloat16, "float32": torch.float32}


class Names(NamedTuple):
    """What a dialect calls the tensors of a linear."""

    codes: str
    block_scale: str
    tensor_scale: str
    input_scale: str


class Scalars(NamedTuple):
    """A linear's scales as Python floats. divisor: the tensor's scale as it is kept, where it is kept as a divisor."""

    tensor_scale: float
    divisor: float | None
    input_scale: float | None


class NVFP4Linear(HeldLinear):
    """ModelOpt's names. Parameters that hold still: weight uint8 [N, K/2], weight_scale float8_e4m3fn [N, K/group],
    weight_scale_2 float32 [], input_scale float32 [] or none, pre_quant_scale [K] or none (NVFP4_AWQ: x is multiplied
    by it first)."""

    NAMES: ClassVar[Names] = Names("weight", "weight_scale", "weight_scale_2", "input_scale")
    HELD = NAMES
    SCALAR: ClassVar[tuple[int, ...]] = ()
    DIVIDES: ClassVar[bool] = False

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
        dtype=None,
        device=None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a float weight
        if in_features % group:
            raise UsageError(f"NVFP4 needs rows of a multiple of {group} values, this linear has {in_features}")
        self.in_features, self.out_features, self.group = in_features, out_features, group

        def put(name: str, shape: tuple[int, ...], kind: torch.dtype) -> None:
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape, dtype=kind, device=device), requires_grad=False)
            )

        dtype = dtype or torch.bfloat16
        for name in ("weight", self.NAMES.input_scale, "pre_quant_scale", "bias"):
            self.register_parameter(name, None)
        put(self.NAMES.codes, (out_features, in_features // 2), torch.uint8)
        put(self.NAMES.block_scale, (out_features, in_features // group), torch.float8_e4m3fn)
        put(self.NAMES.tensor_scale, self.SCALAR, torch.float32)
        if activations:
            put(self.NAMES.input_scale, self.SCALAR, torch.float32)
        if pre_quant:
            put("pre_quant_scale", (in_features,), dtype)
        if bias:
            put("bias", (out_features,), dtype)
        self.numerics = "w4a4" if activations else "w4a16"
        self.cache = "packed"
        self.dense: torch.Tensor | None = None
        self.prepared: Any = None
        self._scalars: Scalars | None = None

    @property
    def codes(self) -> torch.Tensor:
        return getattr(self, self.NAMES.codes)

    @property
    def block_scale(self) -> torch.Tensor:
        return getattr(self, self.NAMES.block_scale)

    @property
    def rounds_input(self) -> bool:
        """Whether the checkpoint says how activations are to be rounded."""
        return getattr(self, self.NAMES.input_scale) is not None

    def _apply(self, fn, recurse: bool = True):
        """Besides, what was made of the tensors follows them: a copy for kernels is made anew, a dense one moved."""
        super()._apply(fn, recurse)
        self._scalars = self.prepared = None
        if self.dense is not None:
            self.dense = self.dense.to(self.codes.device)
        return self

    def scalars(self) -> Scalars:
        """The scales, read from the device once."""
        if self._scalars is None:
            tensor_scale = getattr(self, self.NAMES.tensor_scale).item()
            given = getattr(self, self.NAMES.input_scale)
            input_scale = None if given is None else given.item()
            if self.DIVIDES:
                input_scale = None if input_scale is None else inverted(input_scale)
                self._scalars = Scalars(inverted(tensor_scale), tensor_scale, input_scale)
            else:
                self._scalars = Scalars(tensor_scale, None, input_scale)
        return self._scalars

    def prepare(self) -> None:
        """What a forward needs besides the tensors: the scales as numbers and, on a GPU with kernels, the weights as
        these want them. Done at the first forward where nobody did; torch.compile wants it before."""
        self.scalars()
        if self.prepared is None and self.dense is None and matmul.on_kernels(self):
            self.prepared = matmul.repacked(self)

    def set_numerics(self, numerics: str) -> None:
        if numerics not in NUMERICS:
            raise UsageError(f"numerics {numerics!r} is not known", f"choose one of: {', '.join(NUMERICS)}")
        if numerics == "w4a4" and not self.rounds_input:
            raise UsageError(
                "w4a4 needs an input_scale and this checkpoint holds none (weights alone are quantized)", "use w4a16"
            )
        self.numerics = numerics

    def set_cache(self, cache: str) -> None:
        """packed: 4 bits stay 4 bits in memory; bf16, float32: weights are dequantized once and kept beside them."""
        if cache not in CACHES:
            raise UsageError(f"cache {cache!r} is not known", f"choose one of: {', '.join(CACHES)}")
        self.cache = cache
        self.dense = None if cache == "packed" else self.rows(0, self.out_features, CACHE_DTYPE[cache])

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Weights of output rows start to stop, [stop - start, K] in `dtype`."""
        tensor_scale, divisor, _ = self.scalars()
        codes, scales = self.codes[start:stop], self.block_scale[start:stop]
        return codec.dequantize(codes, scales, tensor_scale, self.group, dtype, divisor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale.to(x.dtype)
        if self.numerics == "w4a4":
            input_scale = self.scalars().input_scale
            assert input_scale is not None  # set_numerics saw to it
            x = codec.fake_quant(x, input_scale, self.group)
        if self.dense is not None:
            return nn.functional.linear(x, self.dense.to(x.dtype), self.bias)
        if not torch.compiler.is_compiling():
            self.prepare()
        return matmul.linear(self, x)

    def extra_repr(self) -> str:
        shape = f"in={self.in_features}, out={self.out_features}, group={self.group}"
        return f"{shape}, numerics={self.numerics}, cache={self.cache}"


class PackedNVFP4Linear(NVFP4Linear):
    """The same on compressed-tensors' names (nvfp4-pack-quantized), whose two global scales float32 [1] are divisors."""

    NAMES = Names("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    HELD = NAMES
    SCALAR = (1,)
    DIVIDES = True


def inverted(value: float) -> float:
    """float32(1 / value); infinite for 0."""
    return (1 / torch.tensor(value, dtype=torch.float32)).item()


def nvfp4_linears(model: nn.Module) -> dict[str, NVFP4Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, NVFP4Linear)}


def set_numerics(model: nn.Module, numerics: str) -> None:
    """w4a4 or w4a16 for every NVFP4Linear of the model; one without an input scale among others that have one is w4a16
    by its format and stays so. UsageError: the checkpoint has no input scales for w4a4."""
    linears = nvfp4_linears(model).values()
    mixed = any(m.rounds_input for m in linears)
    for linear in linears:
        linear.set_numerics("w4a16" if mixed and numerics == "w4a4" and not linear.rounds_input else numerics)


def set_cache(model: nn.Module, cache: str) -> None:
    """packed, bf16 or float32 for every NVFP4Linear of the model."""
    for linear in nvfp4_linears(model).values():
        linear.set_cache(cache)
