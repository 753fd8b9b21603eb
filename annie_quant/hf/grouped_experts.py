"""All experts of a layer by the grouped W4A16 kernel on a CUDA GPU: one launch for each of gate, up and down.

It is used where the single linears would compute the same product one by one: NVFP4 weights in blocks of 16, activations that are
not rounded (w4a16), bfloat16 or float16 inputs, no gradient. It does not wait for the GPU. Weighted outputs are added in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from annie_quant.gemm import grouped
from annie_quant.gemm.grouped import PreparedExperts
from annie_quant.hf import matmul, profiles
from annie_quant.hf.nvfp4_linear import NVFP4Linear
from annie_quant.hf.watched import Watched


class GroupedExperts:
    """The linears of a layer's experts, repacked when first used. linears: by name (gate, up, down), of all experts in order."""

    def __init__(self, linears: dict[str, list[nn.Module | None]]) -> None:
        self.linears = linears
        nvfp4 = {
            name: [m for m in of_all if isinstance(m, NVFP4Linear) and fits(m)] for name, of_all in linears.items()
        }
        self.nvfp4 = nvfp4 if nvfp4 == linears else None  # None: the kernel cannot read one of them
        self.prepared: list[PreparedExperts] | None = None
        self.confirmed_at: int | None = None  # Watched.changes when the linears' settings last allowed the kernel

    def is_confirmed(self) -> bool:
        """Return whether nothing was changed since the settings allowed the kernel."""
        return self.confirmed_at == Watched.changes

    def applies(self, x: torch.Tensor) -> bool:
        """Return whether the kernel computes what the linears would compute of x with their present settings."""
        if self.nvfp4 is None or x.dtype not in (torch.bfloat16, torch.float16) or not len(x):
            return False
        if torch.is_grad_enabled() and x.requires_grad:
            return False
        if not self.is_confirmed():
            linears = [m for of_all in self.nvfp4.values() for m in of_all]
            if any(is_changed(m) for m in linears):
                return False
            if not all(is_unrounded(numerics) for numerics in {m.numerics for m in linears}):
                return False
            self.confirmed_at = Watched.changes
        return True

    def prepare(self) -> list[PreparedExperts]:
        """Return gate, up and down, repacked: a copy of the checkpoint's tensors."""
        if self.prepared is None:
            assert self.nvfp4 is not None  # as `applies` returned
            grouped.register()
            self.prepared = [prepared(of_all) for of_all in self.nvfp4.values()]
        return self.prepared

    def forward(
        self,
        x: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        act_fn: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the weighted sums of the experts' outputs, as hf.experts.SingleExperts.forward does."""
        gate, up, down = self.prepare()
        (tokens, k), top_k, experts = x.shape, top_k_index.shape[1], len(gate.packed)
        tile = grouped.plan_tokens(tokens * top_k, experts, top_k, gate.n, k, x.device.index)
        aligned = grouped.align(top_k_index, experts, tile)
        multiply = torch.ops.annie_quant.nvfp4_experts
        inner = act_fn(multiply(x, *gate, *aligned, top_k, tile)) * multiply(x, *up, *aligned, top_k, tile)
        y = multiply(inner, *down, *aligned, 1, tile).view(tokens, top_k, -1)
        return (y.float() * top_k_weights[..., None].float()).sum(1).to(x.dtype)


def prepared(linears: Sequence[NVFP4Linear]) -> PreparedExperts:
    """Repack one linear of all experts."""
    codes, scales = (
        torch.stack([m.codes for m in linears]),
        torch.stack([m.block_scale.view(torch.uint8) for m in linears]),
    )
    tensor_scales = [m.scalars().tensor_scale for m in linears]
    return grouped.prepare_experts(codes, scales.view(torch.float8_e4m3fn), tensor_scales)


def fits(linear: nn.Module | None) -> bool:
    """Return whether a linear's tensors are such that the kernel can read them, on a device where it runs."""
    if not isinstance(linear, NVFP4Linear) or linear.bias is not None or linear.pre_quant_scale is not None:
        return False
    return matmul.can_use_kernels(linear)


def is_changed(linear: NVFP4Linear) -> bool:
    """Return whether something observes the linear, or makes it compute in another way than from packed weights."""
    hooked = bool(linear._forward_hooks or linear._forward_pre_hooks)
    return hooked or linear.dense is not None or linear.permutation is not None or linear.parts > 1


def is_unrounded(numerics: str) -> bool:
    """Return whether a profile multiplies activations and exact weights as they are."""
    profile = profiles.find_profile(numerics)
    return profile.activations == profiles.UNROUNDED and profile.operands == profiles.EXACT
