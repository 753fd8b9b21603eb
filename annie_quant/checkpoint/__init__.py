"""Checkpoints: read, audit, compare and convert them; nothing is trusted that can be checked on the file.

audit(path, source=None)             every tensor of a checkpoint, and what is wrong with it
repair(path, source, output)         a mended copy, and what was done
convert(path, to=..., output=...)    ModelOpt, compressed-tensors, GGUF
compare(source, {label: path})       forms of one model, tensor by tensor
ModelFolder(path)                    the tensors of a safetensors folder, mapped
linears(folder)                      its quantized linears, whatever the dialect
"""

from __future__ import annotations

from annie_quant.checkpoint.audit import Audit, Finding, audit
from annie_quant.checkpoint.compare import Comparison, compare, labels
from annie_quant.checkpoint.convert import convert
from annie_quant.checkpoint.dialects import linears
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import Linear, QuantConfig, fused_groups, is_linear, matches
from annie_quant.checkpoint.repair import repair
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import Planned, planned, write

__all__ = [
    "Audit",
    "Comparison",
    "Finding",
    "Linear",
    "ModelFolder",
    "Planned",
    "QuantConfig",
    "ShardError",
    "audit",
    "compare",
    "convert",
    "fused_groups",
    "is_linear",
    "labels",
    "linears",
    "matches",
    "planned",
    "repair",
    "write",
]
