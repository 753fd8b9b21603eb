"""The tokens of a forward that belong to prompts, for profiles that compute answers with another format of activations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from annie_quant.core.errors import UsageError


class PromptPositions:
    """Which positions of the running forward belong to prompts, for profiles that compute answers in another format.

    positions: bool [B, T] or [N] as the inputs of linears, or one value for all; None: those of a forward with several tokens.
    """

    def __init__(self) -> None:
        self.positions: torch.Tensor | bool | None = None

    def of(self, x: torch.Tensor) -> torch.Tensor | bool:
        """Return the positions of an input [..., K]."""
        if self.positions is None:
            return x.dim() > 1 and x.shape[-2] > 1
        if isinstance(self.positions, torch.Tensor) and self.positions.shape != x.shape[:-1]:
            raise UsageError(
                f"an input of shape {list(x.shape)} has other tokens than the batch, so its prompts are not known",
                "choose numerics with one format for prompts and answers, such as w4a4",
            )
        return self.positions

    @contextlib.contextmanager
    def set(self, positions: torch.Tensor | bool | None) -> Iterator[None]:
        before = self.positions
        self.positions = positions
        try:
            yield
        finally:
            self.positions = before
