"""Write the merged model: one tensor in memory at a time, all others as the base's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from annie_quant import __version__
from annie_quant.checkpoint import writer
from annie_quant.checkpoint.adapters.plan import MergePlan
from annie_quant.checkpoint.adapters.updates import ChangeSize, TensorUpdate, merged_rows
from annie_quant.checkpoint.shards import ModelFolder, model_sha256
from annie_quant.checkpoint.writer import Planned
from annie_quant.core.files import write_json
from annie_quant.core.progress import Progress
from annie_quant.documents import RECIPE_FILE, AdapterRecord, MergedAdapter, salvage_or_default

LARGE_CHANGE = 1.0  # of a tensor's norm, relative to the base's


def write_merged(
    plan: MergePlan, folder: Path, shard_bytes: int, progress: Progress
) -> MergedAdapter:
    """Write the merged model into `folder`, and return its record.

    Raises CheckpointError where a merged value is not finite or too large for the base's type.
    """
    sizes = {name: ChangeSize() for name in plan.updates}
    base = plan.base
    tensors = []
    for name in base:
        update = plan.updates.get(name)
        if update is not None:
            tensors.append(_planned(update, base, sizes[name]))
        elif name not in plan.left_out:
            tensors.append(writer.copied(base, name))
    tensors += [
        _planned(update, base, sizes[name])
        for name, update in plan.updates.items()
        if name not in base
    ]
    writer.write(folder, tensors, shard_bytes, progress)
    writer.copy_small_files(base, folder)
    plan.prompt_files.write(folder)
    writer.write_settings(folder, plan.config, None)
    record = _record(plan, sizes)
    earlier = salvage_or_default(AdapterRecord, base.path / RECIPE_FILE).adapters
    merged = AdapterRecord(version=__version__, adapters=[*earlier, record])
    write_json(folder / RECIPE_FILE, msgspec.to_builtins(merged))
    return record


def _planned(update: TensorUpdate, base: ModelFolder, size: ChangeSize) -> Planned:
    def load() -> Iterator[np.ndarray]:
        return merged_rows(update, base, size)

    return Planned(update.name, update.dtype, update.shape, load)


def _record(plan: MergePlan, sizes: dict[str, ChangeSize]) -> MergedAdapter:
    kinds: dict[str, ChangeSize] = {}
    for name, size in sizes.items():
        kinds.setdefault(plan.updates[name].kind, ChangeSize()).add(size)
    large = {n: s.relative for n, s in sizes.items() if s.relative > LARGE_CHANGE}
    notes = list(plan.notes)
    if large:
        name = max(large, key=large.__getitem__)
        products = plan.updates[name].low_rank
        scale = f" (scale {products[0].scale:g})" if products else ""
        notes.append(
            f"{len(large)} tensors change by more than their own norm, {name} by "
            f"{large[name]:.3g} times{scale}: check alpha, and whether it was trained with rsLoRA"
        )
    settings = plan.adapter.settings
    return MergedAdapter(
        name=plan.adapter.path.resolve().name,
        summary=settings.summary,
        weights_sha256=plan.adapter.weights_sha256,
        config_sha256=plan.adapter.config_sha256,
        base_sha256=model_sha256(plan.base.path),
        trained_on=settings.base_label,
        trained_on_revision=settings.revision,
        tensors=len(plan.adapter.keys),
        changed=len(plan.updates),
        relative_change={kind: round(s.relative, 6) for kind, s in sorted(kinds.items()) if s.base},
        prompt_files=plan.prompt_files.line,
        notes=notes,
    )
