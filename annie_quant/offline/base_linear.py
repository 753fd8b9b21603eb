"""Base class for linear layers that hold a checkpoint's tensors in the checkpoint's own types.

One count of the changes after which a plan that was made from several modules must be checked again.

A mixture's layer has hundreds of linears. Whether one kernel may compute all of them depends on each one's settings, and reading
them takes longer than the launch, so they are read again only after a change of any watched module.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn


class FixedDtypeLinear(nn.Linear):
    """A linear layer with parameters whose dtype is part of a storage format.

    .to() and .half() move the parameters named in FIXED_DTYPE (some may be None) to another device and cast only the
    others, such as the bias.
    """

    FIXED_DTYPE: ClassVar[tuple[str, ...]] = ()

    def __init__(self, in_features: int, out_features: int) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would create a float weight
        self.in_features, self.out_features = in_features, out_features

    def add_parameter(self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype, device: Any) -> None:
        """Register an uninitialized parameter without gradient; None for shape None."""
        empty = None if shape is None else torch.empty(shape, dtype=dtype, device=device)
        self.register_parameter(name, None if empty is None else nn.Parameter(empty, requires_grad=False))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = {name: p.data for name in self.FIXED_DTYPE if (p := getattr(self, name)) is not None}
        super()._apply(fn, recurse)
        for name, data in before.items():
            parameter = getattr(self, name)
            if parameter.dtype != data.dtype:
                setattr(self, name, nn.Parameter(data.to(parameter.device), requires_grad=False))
        return self


class Watched(nn.Module):
    """A module whose settings, submodules and forward hooks are counted when they are set. SETTINGS: names of attributes."""

    SETTINGS: ClassVar[frozenset[str]] = frozenset()
    changes: ClassVar[int] = 0  # of all watched modules

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.SETTINGS or isinstance(value, nn.Module):
            Watched.changes += 1
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        Watched.changes += 1
        super().add_module(name, module)

    def register_forward_hook(self, *arguments: Any, **options: Any) -> Any:
        Watched.changes += 1
        return super().register_forward_hook(*arguments, **options)

    def register_forward_pre_hook(self, *arguments: Any, **options: Any) -> Any:
        Watched.changes += 1
        return super().register_forward_pre_hook(*arguments, **options)
