"""The memory that a server will need, before it starts, and what a machine can give it.

It is counted where model and caches are in the system's memory: on a processor, and on a GPU that shares it (DGX Spark). There a
server that takes too much does not fail: the machine freezes (vllm-project/vllm#46307: with 7.5 of 128 GB available).

GRAPHS_BYTES and RUNTIME_BYTES are estimates: CUDA graphs of 1.8 GB were reported for a 27B, and contexts, libraries and
activations differ by server. Nothing of this was measured on a Spark. vLLM's --gpu-memory-utilization is not an upper bound
while it profiles, which is what the guard (supervisor.py) is for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from annie_quant.checkpoint import ModelFolder, dialects
from annie_quant.checkpoint.linears import read_struct
from annie_quant.checkpoint.size import AttentionShape, Caches, caches_of
from annie_quant.core import host
from annie_quant.core.errors import EnvironmentFault

GRAPHS_BYTES = 2_000_000_000
RUNTIME_BYTES = 4_000_000_000
KEPT_SHARE_UNIFIED = 1 / 12  # 10 GiB of a Spark's 122
KEPT_SHARE = 1 / 32
DEFAULT_CONTEXT = 32_768  # tokens, where neither the user nor the model says more
DEFAULT_STREAMS = 8
MIN_CONTEXT = 1024
# Runtime → its options for tokens per conversation, conversations at once, and the share of the memory.
OPTIONS = {
    "vllm": ("--max-model-len", "--max-num-seqs", "--gpu-memory-utilization"),
    "sglang": ("--context-length", "--max-running-requests", "--mem-fraction-static"),
}


@dataclass(frozen=True)
class ServingLimits:
    """What the user limits; None: as the recipe has it.

    context: tokens per conversation.
    streams: conversations at once.
    share: of the memory that the server reserves.
    """

    context: int | None = None
    streams: int | None = None
    share: float | None = None

    def applied(self, words: Sequence[str], runtime: str) -> list[str]:
        """Return a server's command with these limits in place of its own."""
        result = list(words)
        values = (self.context, self.streams, self.share)
        for name, value in zip(OPTIONS.get(runtime, ()), values, strict=False):
            if value is None:
                continue
            if name in result:
                result[result.index(name) + 1] = str(value)
            else:
                result += [name, str(value)]
        return result


@dataclass(frozen=True)
class MemoryNeed:
    """What a server takes, in bytes.

    weights: of all tensors, and the file's for a GGUF file.
    caches: of one conversation, whose keys and values grow with its tokens.
    context, streams: tokens per conversation, and conversations at once.
    graphs, runtime: estimates.
    reserved_share: of the memory, which the server takes in any case; 0: only what it needs.
    """

    weights: int
    caches: Caches
    context: int
    streams: int
    graphs: int = 0
    runtime: int = 0
    reserved_share: float = 0.0

    @property
    def cache_bytes(self) -> int:
        return self.streams * self.caches.stored(self.context)

    @property
    def used_bytes(self) -> int:
        return self.weights + self.cache_bytes + self.graphs + self.runtime

    def peak_bytes(self, total_bytes: int) -> int:
        """Return the peak on a machine with `total_bytes` of memory."""
        return max(self.used_bytes, round(self.reserved_share * total_bytes))

    def describe(self, total_bytes: int) -> str:
        parts = {
            "weights": self.weights,
            f"caches of {self.streams} x {self.context:,} tokens": self.cache_bytes,
            "graphs": self.graphs,
            "runtime": self.runtime,
        }
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
        reserved = f"; the server reserves {self.reserved_share:.0%} of the memory"
        return (
            f"predicted peak {self.peak_bytes(total_bytes) / 1e9:.1f} GB: {listed}"
            f"{reserved if self.reserved_share else ''}"
        )


def need_of(model: Path, words: Sequence[str], runtime: str) -> MemoryNeed:
    """Return what serving a checkpoint takes. words: the server's command, whose options count.

    Raises ShardError for a folder that cannot be read.
    """
    names = OPTIONS.get(runtime, ("", "", ""))
    context, streams, share = (option(words, name) for name in names)
    on_gpu = share is not None
    need = MemoryNeed(
        weights=0,
        caches=Caches(),
        context=int(context or DEFAULT_CONTEXT),
        streams=int(streams or (1 if model.is_file() else DEFAULT_STREAMS)),
        graphs=GRAPHS_BYTES if on_gpu and "--enforce-eager" not in words else 0,
        runtime=RUNTIME_BYTES if on_gpu else 0,
        reserved_share=share or 0.0,
    )
    if model.is_file():
        return replace(need, weights=model.stat().st_size)
    folder = ModelFolder(model)
    shape = read_struct(AttentionShape, folder.text_config)
    is_fp8 = dialects.config(folder).kv_cache == "FP8" or "fp8" in words
    most = shape.max_position_embeddings
    return replace(
        need,
        weights=folder.weight_bytes,
        caches=caches_of(shape, 1 if is_fp8 else 2),
        context=min(need.context, most) if most and not context else need.context,
    )


def option(words: Sequence[str], name: str) -> float | None:
    """Return the number that a command gives an option, or None."""
    for word, value in itertools.pairwise(words):
        if word == name and value.replace(".", "", 1).isdecimal():
            return float(value)
    return None


def is_in_system_memory(runtime: str) -> bool:
    """Return whether a server's model is in the system's memory: there is no GPU, it shares it, or the server uses none."""
    return runtime == "llama.cpp" or not host.nvml_devices()[1] or host.shares_memory()


def default_keep_free(memory: host.Memory) -> int:
    """Return how many bytes the guard keeps free where the user does not say."""
    share = KEPT_SHARE_UNIFIED if host.shares_memory() else KEPT_SHARE
    return round(share * memory.total_bytes)


def check(need: MemoryNeed, memory: host.Memory, keep_free_bytes: int) -> None:
    """Raise EnvironmentFault where a server's peak is above what the machine can give it."""
    budget = memory.available_bytes - keep_free_bytes
    peak = need.peak_bytes(memory.total_bytes)
    if peak <= budget:
        return
    message = (
        f"{need.describe(memory.total_bytes)}; {memory.available_bytes / 1e9:.1f} GB are available, of which "
        f"{keep_free_bytes / 1e9:.1f} have to stay free"
    )
    raise EnvironmentFault(message, "; or ".join(remedies(need, memory, budget)))


def remedies(need: MemoryNeed, memory: host.Memory, budget: int) -> list[str]:
    """Return the changes that each alone make the server fit, and what else there is."""
    changes = []
    reserved = need.reserved_share * memory.total_bytes
    share = max(0, int(100 * budget / memory.total_bytes)) / 100
    if reserved > budget and not share:
        return _others(need, budget)
    with_share = f" --memory-share {share:.2f}" if reserved > budget else ""
    if reserved > budget >= need.used_bytes:
        return [f"add{with_share}", *_others(need, budget)]
    context = need.context
    while context > MIN_CONTEXT and replace(need, context=context).used_bytes > budget:
        context //= 2
    streams = need.streams
    while streams > 1 and replace(need, streams=streams).used_bytes > budget:
        streams -= 1
    if replace(need, context=context).used_bytes <= budget and context < need.context:
        changes.append(f"add --context {context}{with_share}")
    if replace(need, streams=streams).used_bytes <= budget and streams < need.streams:
        changes.append(f"add --streams {streams}{with_share}")
    return [*changes, *_others(need, budget)]


def _others(need: MemoryNeed, budget: int) -> list[str]:
    excess = need.used_bytes - budget
    freed = f"free {excess / 1e9:.1f} GB" if excess > 0 else "stop other programs"
    return [f"{freed} (annie-quant doctor lists what uses the GPU)", "quantize to fewer bytes"]
