"""Processes that evaluate together: the first one starts the others as its helpers.

Batches are cut from the whole work as one process would cut them, and each is computed whole by one process. So every number
is computed from the same tensors wherever it is computed, and counts equal those of one process. Gathered values are small
(figures and tokens): they travel as Python objects over pipes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

from annie_quant.core import host
from annie_quant.core.errors import EnvironmentFault

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class ProcessGroup:
    """One process among `size` processes.

    connections: the first process has one to each of its helpers, a helper one to the first process.
    """

    rank: int = 0
    size: int = 1
    connections: tuple[Connection, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    def owns(self, batch: int) -> bool:
        """Return whether this process computes the batch of this number."""
        return batch % self.size == self.rank

    def gather(self, part: Mapping[Key, Value]) -> dict[Key, Value]:
        """Return the entries of all processes, the same in each of them."""
        if not self.is_first:
            self.connections[0].send(dict(part))
            return self.connections[0].recv()
        merged = dict(part)
        for connection in self.connections:
            merged |= received(connection)
        for connection in self.connections:
            connection.send(merged)
        return merged


SINGLE = ProcessGroup()


def default_device(group: ProcessGroup) -> str:
    """Return "cuda" where there is a GPU (each process of a group its own), else "cpu"."""
    if not torch.cuda.is_available():
        return "cpu"
    if group.size == 1:
        return "cuda"
    return f"cuda:{group.rank % torch.cuda.device_count()}"


SMALL_BYTES = 256 << 20  # of both checkpoints together: larger models keep all threads busy, and need the memory
LEAST_ANSWERS = 200  # fewer take about as long as the start of a process
MOST_PROCESSES = 4
MEMORY_BYTES = 2 << 30  # free memory per process; tiny-annie's evaluation takes 1.2 GB (2026-11-22, n = 100)
FIX = "run it with --processes 1"


def automatic(folders: Sequence[Path], n_answers: int) -> int:
    """Return how many processes evaluate the checkpoints in these folders fastest on this machine.

    A small model's steps are too short for several threads of a CPU, so processes with few threads each share the batches. On one
    GPU they would take turns, and their start takes longer than they save.
    """
    size = sum(f.stat().st_size for folder in folders for f in folder.glob("*.safetensors"))
    if n_answers < LEAST_ANSWERS or size > SMALL_BYTES or torch.cuda.device_count() == 1:
        return 1
    memory = host.memory()
    fitting = memory.available_bytes // MEMORY_BYTES if memory else 1
    return max(1, min(MOST_PROCESSES, host.cores(), fitting))


def received(connection: Connection) -> dict[Key, Value]:
    """Return a helper's part. Raises EnvironmentFault where it has failed, and sent a text instead, or ended."""
    try:
        part = connection.recv()
    except (EOFError, OSError):
        raise EnvironmentFault("a helper process of the evaluation ended (was memory short?)", FIX) from None
    if isinstance(part, str):
        raise EnvironmentFault(f"a helper process of the evaluation failed: {part}", FIX)
    return part


@contextlib.contextmanager
def helped_by(work: Callable[..., object], processes: int) -> Iterator[ProcessGroup]:
    """Start processes - 1 helpers, if any, that run work(group=...), and yield the group of which this process is the first.

    This process must call `work` too. Its threads are divided by the number of processes.
    """
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    share = max(1, threads // processes)
    connections, helpers = [], []
    try:
        for rank in range(1, processes):
            own, other = context.Pipe()
            helper = context.Process(target=help_with, args=(work, rank, processes, share, other), daemon=True)
            helper.start()
            other.close()  # the helper has a copy: its end must close with it
            connections.append(own)
            helpers.append(helper)
        torch.set_num_threads(share)
        yield ProcessGroup(0, processes, tuple(connections))
    finally:
        torch.set_num_threads(threads)
        for connection in connections:
            connection.close()
        for helper in helpers:
            helper.terminate()
            helper.join()


def help_with(work: Callable[..., object], rank: int, size: int, threads: int, connection: Connection) -> None:
    """Run work(group=...) in a helper process; a failure is sent to the first process."""
    # Ctrl-C reaches all processes of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    try:
        work(group=ProcessGroup(rank, size, (connection,)))
    except (EOFError, OSError) as error:  # also when the first process has ended
        with contextlib.suppress(OSError):
            connection.send(str(error))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
