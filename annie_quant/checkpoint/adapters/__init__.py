"""Merge a LoRA adapter into its base, tensor by tensor, in float32 with one rounding.

plan_merge(base, adapter)        what is merged into what; every fault is found here
write_merged(plan, folder, ...)  the merged model
merge(base, adapter, output)     both, into a folder that has its name only when it is complete
"""

from __future__ import annotations

import os
from pathlib import Path

from annie_quant.checkpoint import writer
from annie_quant.checkpoint.adapters.merge import write_merged
from annie_quant.checkpoint.adapters.plan import MergePlan, plan_merge
from annie_quant.core.progress import SILENT, Progress
from annie_quant.documents import MergedAdapter

__all__ = ["MergePlan", "merge", "plan_merge", "write_merged"]


def merge(
    base: str | os.PathLike,
    adapter: str | os.PathLike,
    output: str | os.PathLike,
    shard_bytes: int = writer.DEFAULT_SHARD_BYTES,
    progress: Progress = SILENT,
    force: bool = False,
) -> MergedAdapter:
    """Write the base with the adapter merged into it, and return the record of the merge.

    shard_bytes: largest size of a shard.
    force: replace an output that exists.
    Raises CheckpointError or UsageError for an adapter that cannot be merged into this base; then
    nothing is written.
    """
    inputs = (base, adapter)
    writer.check_output(writer.check_name(output), force, inputs)
    plan = plan_merge(Path(base), Path(adapter))
    progress.message(plan.line())
    with writer.staged(output, None, force, inputs) as part:
        return write_merged(plan, part, shard_bytes, progress)
