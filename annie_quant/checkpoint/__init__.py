"""Checkpoints: read, audit, repair, compare and convert them.

audit(path, source=None)             every fault of a checkpoint, also from afar, and a row per tensor
repair(path, source, output)         a repaired copy, and the list of repairs
convert(path, to=..., output=...)    ModelOpt, compressed-tensors, GGUF, bf16
merge(base, adapter, output)         a LoRA adapter into its base
compare(source, {label: path})       forms of one model, tensor by tensor
ModelFolder(path)                    the tensors of a safetensors folder, mapped
linears(folder)                      its quantized linears, whatever the dialect
"""

from __future__ import annotations

from annie_quant.checkpoint.adapters import merge
from annie_quant.checkpoint.comparison import FormComparison, compare, labels
from annie_quant.checkpoint.conversion import (
    Conversion,
    convert,
    left_out_files,
    left_out_line,
)
from annie_quant.checkpoint.dialects import linears
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.inspection import audit
from annie_quant.checkpoint.linears import Linear
from annie_quant.checkpoint.remote import is_address
from annie_quant.checkpoint.repairs import RepairResult, repair, repair_command
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import Planned, planned, write
from annie_quant.documents import Audit, AuditSummary, Finding, TensorRow

__all__ = [
    "Audit",
    "AuditSummary",
    "Conversion",
    "Finding",
    "FormComparison",
    "Linear",
    "ModelFolder",
    "Planned",
    "RepairResult",
    "ShardError",
    "TensorRow",
    "audit",
    "compare",
    "convert",
    "is_address",
    "labels",
    "left_out_files",
    "left_out_line",
    "linears",
    "merge",
    "planned",
    "repair",
    "repair_command",
    "write",
]
