"""Write a repaired copy of a checkpoint. The checkpoint itself is not changed."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import msgspec

from annie_quant.checkpoint import dialects, writer
from annie_quant.checkpoint.checks.completeness import missing_tensors
from annie_quant.checkpoint.dialects import Dialect, QuantizedFolder, compressed_tensors, fp8, modelopt
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.inspection import audit
from annie_quant.checkpoint.linears import covering_pattern, excluded_module
from annie_quant.checkpoint.repair_plan import RepairPlan, describe_lost, plan_repair, with_lost_settings
from annie_quant.checkpoint.runtime_names import is_multimodal, plan_renaming
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.core.files import write_json
from annie_quant.documents import Audit, Finding

# Beginnings of the codes of findings about settings, names and input scales, which are fixed without the source.
WITHOUT_SOURCE = (
    "config_", "excluded", "not_excluded", "not_listed", "listed_", "input_scale", "fused_input", "names_", "prefix_",
)  # fmt: skip
LOST = ("mtp_missing", "vision_missing")  # findings that a repair fixes in every layout
UNREPAIRED = ("decoder_incomplete", "duplicate_tensor", "index_mismatch")


class RepairResult(msgspec.Struct):
    """A repaired copy.

    path: its folder.
    actions: what was done, one sentence each.
    remaining: findings that it still has.
    """

    path: str
    actions: list[str]
    remaining: list[Finding]


def repair(
    path: str | os.PathLike,
    source: str | os.PathLike | None = None,
    output: str | os.PathLike | None = None,
    names: str | None = None,
    force: bool = False,
) -> RepairResult:
    """Write a repaired copy of a checkpoint.

    source: the bf16 checkpoint it was made from.
    output: `path` with "-repaired" by default.
    names: "old" writes config fields and tensor names for runtimes on transformers 4.57, "new" for transformers from
    5.2; None keeps the form and fixes what disagrees.
    force: replace `output` where it exists.

    Another layout than ModelOpt's NVFP4 keeps its tensors, and gets the source's MTP head and vision tower where it lost
    them; CheckpointError is raised where nothing of them is lost. Raises UsageError where the source is needed and not given.
    """
    folder = ModelFolder(path)
    dialects.refuse_unread(folder)
    target = Path(output) if output else folder.path.resolve().with_name(f"{folder.path.resolve().name}-repaired")
    model, original = dialects.read(folder), ModelFolder(source) if source else None
    is_modelopt = model.dialect is modelopt and bool(model.linears)
    lost = missing_tensors(folder, original) if original is not None and names is None and not is_modelopt else []
    if not is_modelopt and not lost:
        raise CheckpointError(f"{path}: no NVFP4 in ModelOpt's layout", first_step(model, str(path)))
    with writer.staged(target, force=force, inputs=(path, source)) as part:
        if is_modelopt or original is None:
            naming = plan_renaming(folder, names, original)
            plan = plan_repair(model, original, audit(path, source=source), naming)
        else:
            plan = plan_restoration(model, original, lost)
        apply_repair(plan, folder, part)
    return RepairResult(str(target), plan.actions, audit(target, source=source).findings)


def apply_repair(plan: RepairPlan, folder: ModelFolder, target: Path) -> None:
    """Write a repaired copy of `folder` into `target`."""
    writer.write(target, plan.tensors)
    writer.copy_small_files(folder, target)
    for name, content in plan.files.items():
        write_json(target / name, content)
    write_json(target / "config.json", plan.config)


def plan_restoration(model: QuantizedFolder, source: ModelFolder, lost: list[str]) -> RepairPlan:
    """Plan a copy with the lost tensors of `source`, their settings, and their entries of excluded linears.

    lost: the source's names of the tensors.
    """
    folder = model.folder
    config, actions = with_lost_settings(source, folder.config, is_multimodal(folder))
    if model.dialect is compressed_tensors and folder.quantization:
        ignore = [e for e in folder.quantization.get("ignore") or [] if isinstance(e, str)]
        modules = sorted({m for name in lost if (m := excluded_module(source, name))})
        added = [m for m in modules if not covering_pattern(m, ignore)]
        config["quantization_config"] = folder.quantization | {"ignore": [*ignore, *added]}
        actions += [f"config.json: {len(added)} linears of them added to ignore"] if added else []
    exported = folder.json(modelopt.HF_QUANT_CONFIG)
    files = {} if exported is None else {modelopt.HF_QUANT_CONFIG: exported}
    tensors = [*(writer.copied(folder, n) for n in folder), *(writer.copied(source, n) for n in lost)]
    return RepairPlan(tensors, config, files, describe_lost(folder, lost) + actions)


def conversion(path: str, dialect: Dialect | None) -> str:
    """Return the command that makes a checkpoint of another layout one that can be repaired or quantized."""
    return f"annie-quant convert {path} --to {'bf16' if dialect is fp8 else 'modelopt'}"


def first_step(model: QuantizedFolder, path: str) -> str:
    """Return what to do with a checkpoint before it can be repaired."""
    if model.linears:
        return f"first: {conversion(shlex.quote(path), model.dialect)}"
    return f"quantize it: annie-quant quantize --strategy direct --model {shlex.quote(path)} --output DIR"


def repair_command(audit: Audit, source: str | os.PathLike | None = None) -> str | None:
    """Return the shell command that repairs an audited checkpoint; None where `repair` cannot, as for missing files.

    source: the bf16 checkpoint, where it is known; the command has SOURCE in its place where one is needed and not known.
    """
    try:
        folder = ModelFolder(audit.path)
        dialect, quantized = dialects.of(folder), bool(dialects.linears(folder))
    except ShardError:
        return None
    path = shlex.quote(audit.path)
    command = f"annie-quant audit {path} --repair"
    with_source = f"{command} --source {'SOURCE' if source is None else shlex.quote(str(source))}"
    if (not quantized or dialect is not modelopt) and any(f.code in LOST for f in audit.findings):
        return with_source
    if not quantized or all(f.code in UNREPAIRED for f in audit.findings):
        return None
    if dialect is not modelopt:
        return conversion(path, dialect)
    needs_source = not all(f.code.startswith(WITHOUT_SOURCE) for f in audit.findings)
    return with_source if needs_source or source is not None else command
