"""Several processes that evaluate together: torchrun or accelerate launch starts them, each takes its share of batches.

Batches are cut from the whole work as one process would cut them, and shared out whole; so every number is computed from
the same tensors wherever it is computed, and counts are those of one process. What is gathered is small (figures and
tokens), as Python objects over gloo, whatever the model's device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Team:
    """This process among `size` of them. group: of torch.distributed, over gloo; None when alone."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def mine(self, number: int) -> bool:
        """Whether the batch of this number is this process's to do."""
        return number % self.size == self.rank

    def gather(self, found: Mapping[Key, Value]) -> dict[Key, Value]:
        """What all processes found, the same in each of them."""
        if self.size == 1:
            return dict(found)
        import torch.distributed as dist

        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, dict(found), group=self.group)
        return {key: value for part in parts for key, value in part.items()}


ALONE = Team()


def team() -> Team:
    """The team that torchrun's or accelerate's environment speaks of, or ALONE."""
    import torch.distributed as dist

    if not dist.is_available():
        return ALONE
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return ALONE
        dist.init_process_group("gloo")
    gloo = dist.get_backend() == "gloo"
    return Team(dist.get_rank(), dist.get_world_size(), dist.group.WORLD if gloo else dist.new_group(backend="gloo"))


def finish() -> None:
    """Leave the team that team() made."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def device_of(team: Team) -> str:
    """cuda (the process's own GPU among several) where there is one, else cpu."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    if team.size == 1:
        return "cuda"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', team.rank)) % torch.cuda.device_count()}"
