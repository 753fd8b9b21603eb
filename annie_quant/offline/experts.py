"""A mixture's routed experts as one linear per matrix, under the names of checkpoints that store every expert on its own.

transformers keeps all experts of a layer in two three-dimensional parameters. Here each expert's matrices are linears, so they
can be NVFP4Linear or FP8Linear, be rounded alone, and be observed in calibration. Tokens are grouped by expert: each expert's
weights are read once per forward, for the tokens that the router sends to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from annie_quant.models import Experts, Family


class Expert(nn.Module):
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


class SingleExperts(nn.Module):
    """All experts of a layer, called "0", "1" and so on; called as transformers calls its merged experts.

    rows: in a forward pass, the indices of the tokens that the current expert computes; observers read it.
    """

    def __init__(self, merged: Any, experts: Experts) -> None:
        super().__init__()
        self.rows: torch.Tensor | None = None
        self.count = 0
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
        out = torch.zeros_like(hidden_states)
        for i in top_k_index.unique().tolist():
            rows, position = torch.where(top_k_index == i)
            self.rows = rows
            y = self.get_submodule(str(i))(hidden_states[rows])
            out.index_add_(0, rows, (y * top_k_weights[rows, position, None]).to(out.dtype))
        self.rows = None
        return out


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
