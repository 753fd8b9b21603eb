"""NVFP4Linear: a linear layer on ModelOpt's NVFP4 tensors, with the arithmetic of either family of kernels.

Arithmetic, y = x W^T + b, with W = value * f32(block scale * tensor scale):
  w4a4   x is first rounded to NVFP4 and back under the checkpoint's input_scale, with one E4M3 scale for each 16
         values found from x itself: what CUTLASS's and vLLM's NVFP4 kernels do to activations.
  w4a16  x is taken as it comes: what Marlin and llama.cpp do.
W is rounded once to the dtype of x. In bfloat16 that is ModelOpt's own dequantize; in float32 it is exact, as in
kernels that apply the scales to float32 sums. The product is torch's linear: float32 sums, one rounding to the dtype
of x. The tensor names are the checkpoint's own, so state dicts go in and out unchanged.
"""

from __future__ import annotations

import torch
from torch import nn

from annie_quant.errors import UsageError
from annie_quant.runtime import codec

NUMERICS = ("w4a4", "w4a16")
CACHES = ("packed", "bf16", "float32")
CACHE_DTYPE = {"bf16": torch.bfloat16, "float32": torch.float32}
BLOCK_BYTES = 8 << 20  # dequantized weights alive at a time where they are kept packed


class NVFP4Linear(nn.Module):
    """Buffers: weight uint8 [N, K/2], weight_scale float8_e4m3fn [N, K/group], weight_scale_2 float32 [],
    input_scale float32 [] or none."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_scale_2: torch.Tensor
    input_scale: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: int = 16,
        bias: bool = False,
        activations: bool = True,
        dtype=None,
        device=None,
    ) -> None:
        super().__init__()
        if in_features % group:
            raise UsageError(f"NVFP4 needs rows of a multiple of {group} values, this linear has {in_features}")
        self.in_features, self.out_features, self.group = in_features, out_features, group
        empty = lambda shape, kind: torch.empty(shape, dtype=kind, device=device)  # noqa: E731
        self.register_buffer("weight", empty((out_features, in_features // 2), torch.uint8))
        self.register_buffer("weight_scale", empty((out_features, in_features // group), torch.float8_e4m3fn))
        self.register_buffer("weight_scale_2", empty((), torch.float32))
        self.register_buffer("input_scale", empty((), torch.float32) if activations else None)
        self.bias = nn.Parameter(empty((out_features,), dtype or torch.bfloat16)) if bias else None
        self.numerics = "w4a4" if activations else "w4a16"
        self.cache = "packed"
        self.dense: torch.Tensor | None = None
        self._scalars: tuple[float, float | None] | None = None

    def _apply(self, fn, recurse: bool = True):
        """.to(dtype) reaches bias alone: the packed tensors keep the format's own types, only their device follows."""
        kept = {n: b for n, b in self._buffers.items() if b is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            now = self._buffers[name]
            if now is not None and now.dtype != before.dtype:
                self._buffers[name] = before.to(now.device)
        self._scalars = None
        if self.dense is not None:
            self.dense = self.dense.to(self.weight.device)
        return self

    def scalars(self) -> tuple[float, float | None]:
        """(weight_scale_2, input_scale) as Python floats, read from the device once."""
        if self._scalars is None:
            self._scalars = (self.weight_scale_2.item(), None if self.input_scale is None else self.input_scale.item())
        return self._scalars

    def set_numerics(self, numerics: str) -> None:
        if numerics not in NUMERICS:
            raise UsageError(f"numerics {numerics!r} is not known", f"choose one of: {', '.join(NUMERICS)}")
        if numerics == "w4a4" and self.input_scale is None:
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
        return codec.dequantize(
            self.weight[start:stop], self.weight_scale[start:stop], self.scalars()[0], self.group, dtype
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.numerics == "w4a4":
            input_scale = self.scalars()[1]
            assert input_scale is not None  # set_numerics saw to it
            x = codec.fake_quant(x, input_scale)
        if self.dense is not None:
            return nn.functional.linear(x, self.dense.to(x.dtype), self.bias)
        step = max(1, BLOCK_BYTES // (self.in_features * x.element_size()))
        if step >= self.out_features:
            return nn.functional.linear(x, self.rows(0, self.out_features, x.dtype), self.bias)
        parts = [
            nn.functional.linear(x, self.rows(i, min(i + step, self.out_features), x.dtype))
            for i in range(0, self.out_features, step)
        ]
        y = torch.cat(parts, -1)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        shape = f"in={self.in_features}, out={self.out_features}, group={self.group}"
        return f"{shape}, numerics={self.numerics}, cache={self.cache}"


def nvfp4_linears(model: nn.Module) -> dict[str, NVFP4Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, NVFP4Linear)}


def set_numerics(model: nn.Module, numerics: str) -> None:
    """w4a4 or w4a16 for every NVFP4Linear of the model. UsageError: the checkpoint has no input scales for w4a4."""
    for linear in nvfp4_linears(model).values():
        linear.set_numerics(numerics)


def set_cache(model: nn.Module, cache: str) -> None:
    """packed, bf16 or float32 for every NVFP4Linear of the model."""
    for linear in nvfp4_linears(model).values():
        linear.set_cache(cache)
