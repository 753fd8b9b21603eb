"""The model that a strategy reads where an adapter is given: base and adapter, merged into a folder that is removed afterwards."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from annie_quant import __version__
from annie_quant.checkpoint import writer
from annie_quant.checkpoint.adapters import MergePlan, write_merged
from annie_quant.core.errors import EnvironmentFault
from annie_quant.core.progress import Progress
from annie_quant.core.resume import KEY_FILE, KeyedJson
from annie_quant.documents import RECIPE_FILE, AdapterRecord, salvage_or_default
from annie_quant.quantize.strategy import Strategy


def merged_folder(output: Path) -> Path:
    """Return the folder of the merged model, next to the output."""
    return output.with_name(f".{output.name}.merged")


def result_bytes(plan: MergePlan, strategy: Strategy) -> int:
    """Return about how many bytes of weights a strategy makes of the merged model."""
    base = plan.base
    bits = sum(
        info.elements * strategy.bits(base.family.kind_of(name))
        for name, info in base.tensors.items()
    )
    return round(bits / 8)


def disk_line(plan: MergePlan, strategy: Strategy, output: Path) -> str:
    """Return the disk that a run with an adapter takes, as text."""
    place = next(folder for folder in output.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(place).free
    result = result_bytes(plan, strategy)
    return (
        f"  disk    {(plan.size_bytes + result) / 1e9:.2f} GB: {plan.size_bytes / 1e9:.2f} for the "
        f"merged model, until the end, and {result / 1e9:.2f} for the result; {free / 1e9:.2f} free"
    )


@contextlib.contextmanager
def merged_base(
    plan: MergePlan | None, model: Path, output: Path, strategy: Strategy, progress: Progress
) -> Iterator[Path]:
    """Yield the folder to quantize: the merged model, or `model` without a plan.

    An interrupted run leaves the merged model, and the same command uses it.
    Raises DiskFull where merged model and result do not fit.
    """
    if plan is None:
        yield model
        return
    folder = merged_folder(output)
    key = {
        "version": __version__,
        "base": writer.source_key(plan.base),
        "adapter": [plan.adapter.weights_sha256, plan.adapter.config_sha256],
    }
    mark = KeyedJson(folder / KEY_FILE, key)
    progress.message(plan.line())
    if not mark.load(default=False):
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        writer.check_free_space(folder.parent, plan.size_bytes + result_bytes(plan, strategy))
        with writer.staged(folder) as part:
            write_merged(plan, part, writer.DEFAULT_SHARD_BYTES, progress)
        mark.save(True)
    try:
        yield folder
    except BaseException as error:
        # A fault of the model would occur again; Ctrl-C or a server that was away would not.
        is_fault = isinstance(error, Exception) and not isinstance(error, OSError)
        if is_fault and type(error) is not EnvironmentFault:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def merge_notes(folder: Path, model: Path, adapter: Path, output: Path) -> list[str]:
    """Return what was merged, and how to make the reference of an evaluation.

    folder: the merged model.
    """
    record = salvage_or_default(AdapterRecord, folder / RECIPE_FILE)
    reference = f"{output}-bf16"
    merge = shlex.join(
        ["annie-quant", "convert", str(model), "--adapter", str(adapter), "--output", reference]
    )
    evaluate = shlex.join(["annie-quant", "eval", str(output), "--reference", reference])
    return [
        *record.adapters[-1].lines(),
        f"the reference of an evaluation is the merged model: {merge} && {evaluate}",
    ]
