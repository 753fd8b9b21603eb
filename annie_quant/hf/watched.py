"""One count of the changes after which a plan that was made from several modules must be checked again.

A mixture's layer has hundreds of linears. Whether one kernel may compute all of them depends on each one's settings, and reading
them takes longer than the launch, so they are read again only after a change of any watched module.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn


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
