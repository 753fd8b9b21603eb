"""Several processes that evaluate together, started by torchrun or accelerate launch; each computes its share of batches.

Batches are cut from the whole work as one process would cut them, and each is computed whole by one process. So every number
is computed from the same tensors wherever it is computed, and counts equal those of one process. Gathered values are small
(figures and tokens) and travel as Python objects over gloo, whatever the model's device is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class ProcessGroup:
    """This process among `size` processes. gloo: the group of torch.distributed; None for a single process."""

    rank: int = 0
    size: int = 1
    gloo: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    def owns(self, batch: int) -> bool:
        """Return whether this process computes the batch of this number."""
        return batch % self.size == self.rank

    def gather(self, part: Mapping[Key, Value]) -> dict[Key, Value]:
        """Return the entries of all processes, the same in each of them."""
        if self.size == 1:
            return dict(part)
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, dict(part), group=self.gloo)
        return {key: value for part in parts for key, value in part.items()}


SINGLE = ProcessGroup()


def join_group() -> ProcessGroup:
    """Return the group that torchrun's or accelerate's environment describes, or SINGLE."""
    if not dist.is_available():
        return SINGLE
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return SINGLE
        dist.init_process_group("gloo")
    group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), group)


def leave_group() -> None:
    """Leave the group that join_group joined."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def default_device(group: ProcessGroup) -> str:
    """Return "cuda" where there is a GPU (each process of a group its own, by LOCAL_RANK), else "cpu"."""
    if not torch.cuda.is_available():
        return "cpu"
    if group.size == 1:
        return "cuda"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', group.rank)) % torch.cuda.device_count()}"
