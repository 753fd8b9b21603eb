"""A mixture's routed experts as one linear per matrix, under the names of checkpoints that store every expert on its own.

transformers keeps all experts of a layer in two three-dimensional parameters. Here each expert's matrices are linears, so they
can be NVFP4Linear or FP8Linear, be rounded alone, and be observed in calibration. Tokens are grouped by expert: each expert's
weights are read once per forward, for the tokens that the router sends to it. On a GPU with this package's kernels, GroupedExperts
computes all experts in one launch per matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from annie_quant.gemm import grouped
from annie_quant.gemm.grouped import PreparedExperts
from annie_quant.models import Experts, Family
from annie_quant.offline import nvfp4_linear, profiles
from annie_quant.offline.nvfp4_linear import NVFP4Linear, Watched


class GroupedExperts:
    """All experts of a layer by the grouped W4A16 kernel on a CUDA GPU: one launch for each of gate, up and down.

    It is used where the single linears would compute the same product: NVFP4 weights in blocks of 16, activations that are not
    rounded (w4a16), bfloat16 or float16 inputs, no gradient. Nothing waits for the GPU. Weighted outputs are added in float32.

    linears: by name (gate, up, down), of all experts in order; repacked when first used.
    """

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
            used = [profiles.find_profile(numerics) for numerics in {m.numerics for m in linears}]
            if any(p.activations != profiles.UNROUNDED or p.operands != profiles.EXACT for p in used):
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
        """Return the weighted sums of the experts' outputs, as SingleExperts.forward does."""
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
    return nvfp4_linear.can_use_kernels(linear)


def is_changed(linear: NVFP4Linear) -> bool:
    """Return whether something observes the linear, or makes it compute in another way than from packed weights."""
    hooked = bool(linear._forward_hooks or linear._forward_pre_hooks)
    return hooked or linear.dense is not None or linear.permutation is not None or linear.parts > 1


class Expert(Watched):
    """One expert: down(act(gate(x)) * up(x)). Its linears have the names of the family's description."""

    def __init__(self, linears: dict[str, nn.Linear], act_fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        for name, linear in linears.items():
            self.add_module(name, linear)
        self.names = tuple(linears)
        self.act_fn = act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act_fn(gate(x)) * up(x))


class SingleExperts(Watched):
    """All experts of a layer, called "0", "1" and so on; called as transformers calls its merged experts.

    rows: in a forward pass, the indices of the tokens that the current expert computes; observers read it.
    """

    def __init__(self, merged: Any, experts: Experts) -> None:
        super().__init__()
        self.rows: torch.Tensor | None = None
        self.count = 0
        self.act_fn: Callable[[torch.Tensor], torch.Tensor] = merged.act_fn
        self.grouped: GroupedExperts | None = None  # of the linears in the last forward pass
        tensors = {name: getattr(merged, name) for name in experts.merged}
        for i in range(next(iter(tensors.values())).shape[0]):
            linears: dict[str, nn.Linear] = {}
            for name, members in experts.merged.items():
                weights = tensors[name].detach()[i].chunk(len(members))
                linears |= {m: linear_of(w) for m, w in zip(members, weights, strict=True)}
            self.add_module(str(i), Expert(linears, merged.act_fn))
            self.count += 1

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of the experts' outputs [n, hidden].

        hidden_states: [n, hidden].  top_k_index: the experts of each token [n, k].  top_k_weights: of their outputs [n, k].
        """
        kernel = self.find_kernel(hidden_states)
        if kernel is not None:
            return kernel.forward(hidden_states, top_k_index, top_k_weights, self.act_fn)
        out = torch.zeros_like(hidden_states)
        for i in top_k_index.unique().tolist():
            rows, position = torch.where(top_k_index == i)
            self.rows = rows
            y = self.get_submodule(str(i))(hidden_states[rows])
            out.index_add_(0, rows, (y * top_k_weights[rows, position, None]).to(out.dtype))
        self.rows = None
        return out

    def find_kernel(self, x: torch.Tensor) -> GroupedExperts | None:
        """Return the experts as our grouped kernel computes them, None where it cannot or must not."""
        first = next(expert for expert in self._modules.values() if isinstance(expert, Expert))
        if not fits(first._modules[first.names[0]]):
            return None
        if self.grouped is None or not self.grouped.is_confirmed():
            singles = [expert for expert in self._modules.values() if isinstance(expert, Expert)]
            linears = {name: [single._modules[name] for single in singles] for name in first.names}
            if self.grouped is None or self.grouped.linears != linears:
                self.grouped = GroupedExperts(linears)
        return self.grouped if self.grouped.applies(x) else None

    def _apply(self, fn, recurse: bool = True):
        """Also drop what was derived from the linears."""
        self.grouped = None
        return super()._apply(fn, recurse)


def linear_of(weight: torch.Tensor) -> nn.Linear:
    """Return a linear without bias over the memory of `weight` [out, in]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def separate(model: nn.Module, family: Family, only: Callable[[str], bool] = lambda name: True) -> None:
    """Replace the merged experts of a model by single ones over the same memory.

    only: whether to replace the module of this name. Does nothing to a dense model.
    """
    experts = family.experts
    if experts is None:
        return
    for name, module in list(model.named_modules()):
        if f".{name}".endswith(f".{experts.module}") and is_merged(module, experts) and only(name):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, SingleExperts(module, experts))


def is_merged(module: nn.Module, experts: Experts) -> bool:
    """Return whether a module holds merged experts. Modules whose weights a device map moves are not."""
    own = dict(module.named_parameters(recurse=False))
    return own.keys() == set(experts.merged) and not hasattr(module, "_hf_hook")
