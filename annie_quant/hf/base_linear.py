"""A linear layer whose stored tensors keep the checkpoint's own types, whatever the model is cast to."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn


class HeldLinear(nn.Linear):
    """A parent for layers on a checkpoint's tensors. HELD: names of parameters (some may be None) whose type is part of
    the format; .to() and .half() move these to another device and cast only the others (bias and the like)."""

    HELD: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = {name: p.data for name in self.HELD if (p := getattr(self, name)) is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            now = getattr(self, name)
            if now.dtype != before.dtype:
                setattr(self, name, nn.Parameter(before.to(now.device), requires_grad=False))
        return self
