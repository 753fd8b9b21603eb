"""The routed experts of a mixture as llama.cpp stores them: one tensor [experts, out, in] per linear, gate and up apart.

NVFP4 experts keep codes and block scales; their tensor scales are one array `.scale` [experts], the activation scales
`.input_scale` [experts]. Source: conversion/qwen.py (Qwen2MoeModel) and conversion/base.py (_flush_nvfp4_experts).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from annie_quant.checkpoint.gguf.names import Layout
from annie_quant.checkpoint.linears import Linear
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import CheckpointError


@dataclass(frozen=True)
class Stack:
    """One tensor of the file. stored: its name.  modules: the linear of every expert, in order."""

    stored: str
    modules: list[str]

    def linears(self, linears: Mapping[str, Linear]) -> list[Linear]:
        """Return the quantized linears of all experts; [] where they are plain. Raises CheckpointError for a mixture."""
        quantized = [linears[m] for m in self.modules if m in linears]
        if quantized and len(quantized) < len(self.modules):
            plain = next(m for m in self.modules if m not in linears)
            raise CheckpointError(f"{plain} is not quantized, and other experts of its layer are", "annie-quant audit")
        return quantized


def stacks(folder: ModelFolder, layout: Layout, names: Iterable[str]) -> list[Stack]:
    """Return the tensors that hold the experts with these weights, in file order.

    names: of weights of single experts, those inside merged tensors included.
    Raises CheckpointError where a layer has other experts than 0 to the configuration's number.
    """
    experts = layout.family.experts
    by_name: dict[str, dict[int, str]] = {}
    for name in names:
        expert, stored = experts.split(name) if experts else None, layout.name(name)
        if expert and stored:
            by_name.setdefault(stored, {})[expert[1]] = name.removesuffix(".weight")
    count = folder.text_config.get(experts.count) if experts else None
    for stored, modules in by_name.items():
        if sorted(modules) != list(range(count if isinstance(count, int) and count < 1 << 20 else len(modules))):
            raise CheckpointError(
                f"{stored}: {len(modules)} experts, and config.json has {count}", "annie-quant audit the checkpoint"
            )
    return [Stack(stored, [m for _, m in sorted(modules.items())]) for stored, modules in by_name.items()]
