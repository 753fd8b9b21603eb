"""Repair a ModelOpt checkpoint: exactly where that is possible, else by quantizing again from the bf16 source.

Sound tensors keep their bytes, those of a sound fold (AWQ) too. A linear is packed again from the source when its own tensors
are faulty, when its error shows that they are not the source's, or when its layer was folded and the fold or a linear of it is
faulty: the norms then become the source's, too, so that the model computes what the source does. Settings are always written
from what is on disk.
The checkpoint itself is not changed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from annie_quant import models, nvfp4
from annie_quant.checkpoint import (
    auxiliary_checks,
    checks,
    diagnosis,
    dialects,
    folding_check,
    quantized_tensors,
    runtime_names,
    settings_checks,
    source_diff,
    writer,
)
from annie_quant.checkpoint.audit import audit
from annie_quant.checkpoint.convert import QUANTIZER
from annie_quant.checkpoint.dialects import compressed_tensors, fp8, modelopt
from annie_quant.checkpoint.linears import Linear, covering_pattern, excluded_module
from annie_quant.checkpoint.shards import ModelFolder, ShardError
from annie_quant.checkpoint.staging import staged
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.core.files import write_json
from annie_quant.documents import Audit, Finding

# Beginnings of the codes of findings about settings, names and input scales, which are fixed without the source.
WITHOUT_SOURCE = (
    "config_", "excluded", "not_excluded", "not_listed", "listed_", "input_scale", "fused_input", "names_", "prefix_",
)  # fmt: skip
LOST = ("mtp_missing", "vision_missing")  # findings that `restore` fixes in every layout
UNREPAIRED = ("decoder_incomplete", "duplicate_tensor", "index_mismatch")


class RepairResult(msgspec.Struct):
    """path: of the repaired copy.  actions: what was done, one sentence each.  remaining: findings that it still has."""

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
    output: `path` with "-repaired" by default.  force: replace it where it exists.
    names: "old" writes config fields and tensor names for runtimes on transformers 4.57, "new" for transformers from
    5.2; None keeps the form and fixes what disagrees.
    Another layout than ModelOpt's NVFP4 keeps its tensors, and gets the source's MTP head and vision tower where it lost them;
    CheckpointError is raised where nothing of them is lost. Raises UsageError where the source is needed and
    not given.
    """
    folder = ModelFolder(path)
    dialects.refuse_unread(folder)
    target = Path(output) if output else folder.path.resolve().with_name(f"{folder.path.resolve().name}-repaired")
    if dialects.of(folder) is not modelopt or not modelopt.linears(folder):
        original = ModelFolder(source) if source else None
        if original is not None and names is None and (lost := auxiliary_checks.missing_tensors(folder, original)):
            with staged(target, force=force, inputs=(path, source)) as part:
                actions = restore(folder, original, lost, part)
            return RepairResult(str(target), actions, audit(target, source=source).findings)
        quoted = shlex.quote(str(path))
        first = (
            f"first: {conversion(quoted, dialects.of(folder))}"
            if dialects.linears(folder)
            else f"quantize it: annie-quant quantize --strategy direct --model {quoted} --output DIR"
        )
        raise CheckpointError(f"{path}: no NVFP4 in ModelOpt's layout", first)
    with staged(target, force=force, inputs=(path, source)) as part:
        work = Repair(folder, ModelFolder(source) if source else None, names)
        work.write(part)
    return RepairResult(str(target), work.actions, audit(target, source=source).findings)


def conversion(path: str, dialect: ModuleType | None) -> str:
    """Return the command that makes a checkpoint of another layout one that can be repaired or quantized."""
    return f"annie-quant convert {path} --to {'bf16' if dialect is fp8 else 'modelopt'}"


def repair_command(audit: Audit, source: str | os.PathLike | None = None) -> str | None:
    """Return the shell command that repairs an audited checkpoint; None where `repair` cannot, as for missing files.

    source: the bf16 checkpoint, where it is known; the command has SOURCE in its place where one is needed and not known.
    """
    try:
        folder = ModelFolder(audit.path)
        dialect = dialects.of(folder)
        linears = dialect.linears(folder) if dialect else {}
    except ShardError:
        return None
    path = shlex.quote(audit.path)
    if (not linears or dialect is not modelopt) and any(f.code in LOST for f in audit.findings):
        where = "SOURCE" if source is None else shlex.quote(str(source))
        return f"annie-quant audit {path} --repair --source {where}"
    if not linears or dialect is None or all(f.code in UNREPAIRED for f in audit.findings):
        return None
    if dialect is not modelopt:
        return conversion(path, dialect)
    words = f"annie-quant audit {path} --repair"
    if source is not None:
        return f"{words} --source {shlex.quote(str(source))}"
    return words if all(f.code.startswith(WITHOUT_SOURCE) for f in audit.findings) else f"{words} --source SOURCE"


class Repair:
    """The repair of one checkpoint. actions: what it does, one sentence each."""

    def __init__(self, folder: ModelFolder, source: ModelFolder | None, names: str | None = None) -> None:
        self.folder, self._source = folder, source
        self.naming = runtime_names.Renaming(folder, names, source)
        self.actions: list[str] = []
        self.linears = modelopt.linears(folder)
        findings = audit(folder.path, source=source.path if source else None)
        self.faults = {f.tensor for f in findings.findings}
        self.diagnosis = diagnosis.diagnose(folder, source, findings, self.linears)
        self.restored = self.restored_modules()
        for modules in (self.diagnosis.modules, self.diagnosis.faulty, self.diagnosis.patched):
            modules -= self.restored
        faulty = self.diagnosis.faulty
        if faulty and source is None:
            raise UsageError(
                f"{len(faulty)} linears can only be repaired from the bf16 checkpoint, such as {min(faulty)}",
                "give it with --source",
            )
        self.group = self.diagnosis.group
        self.scales = self.tensor_scales()
        self.inputs = self.input_scales()

    @property
    def source(self) -> ModelFolder:
        assert self._source is not None
        return self._source

    def original(self, module: str) -> str:
        """Return the source's name of a module's weight."""
        name = self.source.find(f"{module}.weight")
        if name is None:
            raise CheckpointError(f"{module}: the source has no such linear", "is this the right --source?")
        return name

    def restored_modules(self) -> set[str]:
        """Return the linears of the MTP head that become the source's 16-bit weights again: those in NVFP4."""
        source, mtp = self._source, f".{self.folder.family.mtp}"
        if source is None:
            return set()
        plain = {n.removesuffix(".weight") for n in source if n.endswith(".weight")}
        return {m for m in self.diagnosis.modules if mtp in f".{m}" and m in plain and not self.is_fp8(m)}

    def is_fp8(self, module: str) -> bool:
        linear = self.linears.get(module)
        return linear is not None and linear.format == "fp8"

    def fp8_format(self, module: str) -> str:
        """Return "fp8_channel" for a linear that keeps one scale per row, else "fp8"."""
        kept_rows = module not in self.diagnosis.faulty and self.linears[module].per_channel(self.folder)
        return "fp8_channel" if kept_rows else "fp8"

    # ---- scales

    def tensor_scales(self) -> dict[str, np.float32]:
        """Return the tensor scale of each linear that is packed again, one per fused group."""
        amax = {m: float(nvfp4.amax(self.source.tensor(self.original(m)))) for m in self.diagnosis.faulty}
        return {
            m: quantized_tensors.fp8_scale(top) if self.is_fp8(m) else np.float32(nvfp4.tensor_scale(top))
            for m, top in self.folder.family.largest_of_group(amax).items()
        }

    def input_scales(self) -> dict[str, np.float32]:
        """Return an input scale for every linear, or none at all: without one for each, only the weights are quantized."""
        modules = self.diagnosis.modules
        scales = {m: scale for m in sorted(modules) if (scale := self.input_scale(m)) is not None}
        for group in self.folder.family.fused_groups(modules):
            present = [scales[m] for m in group if m in scales]
            if present and (len(present) < len(group) or len(set(present)) > 1):
                self.actions.append(f"{group[0]}: input scale of the fused group set to its largest")
                scales |= dict.fromkeys(group, max(present))
        missing = sorted(modules - set(scales))
        if scales and missing:
            self.actions.append(
                f"input scales removed, only the weights are quantized: {missing[0]} has none, and only calibration "
                "gives one"
            )
            return {}
        return scales

    def input_scale(self, module: str) -> np.float32 | None:
        """Return the input scale on disk if it is valid, enlarged by the largest factor that a fold took from it."""
        name = f"{module}.input_scale"
        if name not in self.folder or self.folder.info(name).elements != 1:
            return None
        scale = self.folder.scalar(name)
        if not np.isfinite(scale) or scale <= 0 or scale > checks.LARGEST_INPUT_SCALE:
            return None
        linear = self.linears.get(module)
        if linear is None or models.layer_of(module) not in self.diagnosis.folded:
            return scale
        if linear.pre_quant:
            least = np.abs(self.folder.tensor(linear.pre_quant).astype(np.float32)).min()
            return np.float32(scale / least) if least > 0 else None
        return np.float32(scale * self.fold_factor(linear))

    def fold_factor(self, linear: Linear) -> float:
        """Return the largest column factor of a folded linear; 1 where its own tensors are too faulty to fit one."""
        try:
            ours = linear.dequantize(self.folder)
            theirs = self.source.tensor(self.original(linear.name)).astype(np.float32)
        except ShardError:
            return 1.0
        if ours.shape != theirs.shape or not np.isfinite(ours).all():
            return 1.0
        if source_diff.rel_l2(ours, theirs) <= source_diff.SUSPICIOUS_ERROR:
            return 1.0
        return max(1.0, float(folding_check.fit(ours, theirs)[1].max()))

    # ---- tensors

    def write(self, target: Path) -> None:
        """Write the repaired copy into `target`."""
        modules = self.diagnosis.modules
        plan = [t for module in sorted(modules) for t in self.linear_tensors(module)]
        quantizer = {m + suffix for m in modules | self.restored for suffix in (".weight", *QUANTIZER)}
        excluded = []
        stored = modelopt.config(self.folder)
        kv_names = settings_checks.scales_to_keep(self.folder, stored)
        for name in self.folder:
            if name in quantizer or (name.endswith(settings_checks.KV_ENDS) and name not in kv_names):
                continue
            plan.append(self.plain_tensor(name))
            if module := excluded_module(self.folder, name):
                excluded.append(self.naming.name(module))
        for name in self.lost_tensors():
            plan += copies(self.source, [name])
            if module := excluded_module(self.source, name):
                excluded.append(self.naming.name(module))
        four_bit = "nvfp4" if self.inputs else "w4a16"
        formats = {self.naming.name(m): self.fp8_format(m) if self.is_fp8(m) else four_bit for m in modules}
        settings = modelopt.settings(formats, sorted(set(excluded)), self.group, stored.kv_cache)
        if self.folder.config.get("quantization_config") != settings.quantization_config:
            self.actions.append("config.json and hf_quant_config.json written from what is on disk")
        config = self.naming.config()
        if self._source is not None:
            self.actions += lost_settings(self.source, config, self.naming.multimodal)
        writer.write(target, [replace(t, name=self.naming.name(t.name)) for t in plan])
        writer.copy_small_files(self.folder, target)
        self.naming.write_small_files(target)
        writer.write_settings(target, config, settings)
        self.actions += self.naming.actions

    def lost_tensors(self) -> list[str]:
        """Return the source's names of the MTP head's and the vision tower's tensors that the copy takes from it."""
        if self._source is None:
            return []
        lost = auxiliary_checks.missing_tensors(self.folder, self.source)
        self.actions += describe_lost(self.folder, lost)
        for module in sorted(self.restored):
            self.actions.append(f"{module}: taken from the source, in 16 bits")
        return lost + [f"{m}.weight" for m in sorted(self.restored)]

    def linear_tensors(self, module: str) -> list[writer.Planned]:
        """Plan the tensors of one quantized linear: packed again, patched, or as they are."""
        input_scale = self.inputs.get(module)
        if module not in self.diagnosis.faulty | self.diagnosis.patched:
            tensors = modelopt.tensors(self.linears[module], self.folder)
            return [
                *(t for t in tensors if not t.name.endswith(".input_scale")),
                *quantized_tensors.input_scale_tensors(module, input_scale),
            ]
        name = self.original(module)
        rows, columns = self.source.info(name).shape
        weight = partial(self.source.tensor, name)
        if module in self.diagnosis.patched:
            linear = self.linears[module]
            scale = linear.tensor_scale(self.folder).multiplier
            count = int(self.bad_blocks(linear).sum())
            self.actions.append(f"{module}: {count} blocks quantized again from the source, the others kept")
            pack = partial(self.pack_bad_blocks, linear, name, scale)
        else:
            scale = self.scales[module]
            self.actions.append(f"{module}: quantized again from the source")
            if self.is_fp8(module):
                return quantized_tensors.fp8_tensors(module, (rows, columns), weight, lambda: scale, input_scale)
            pack = partial(self.pack, name, scale)
        return quantized_tensors.nvfp4_tensors(
            module, (rows, columns), pack, lambda: scale, self.group, input_scale=input_scale
        )

    def pack(self, name: str, scale: np.float32) -> Iterator[nvfp4.Tensor]:
        """Yield a source tensor, packed under a tensor scale."""
        yield nvfp4.pack(self.source.tensor(name), tensor_scale=float(scale), group=self.group)

    def pack_bad_blocks(self, linear: Linear, name: str, scale: np.float32) -> Iterator[nvfp4.Tensor]:
        """Yield the checkpoint's codes with its bad blocks packed again from the source."""
        bad = self.bad_blocks(linear)
        block_scale = self.folder.tensor(linear.block_scale or "").view(np.uint8)
        (packed,) = self.pack(name, scale)
        codes = np.where(np.repeat(bad, self.group // 2, axis=1), packed.codes, self.folder.tensor(linear.weight))
        packed.codes = codes
        packed.block_scale = np.where(bad, packed.block_scale.view(np.uint8), block_scale).view(nvfp4.E4M3)
        yield packed

    def bad_blocks(self, linear: Linear) -> np.ndarray:
        """Return which blocks have a scale that is NaN, negative, or zero where the block has values: bool [N, K/group]."""
        codes = self.folder.tensor(linear.weight)
        scale = self.folder.tensor(linear.block_scale or "").view(np.uint8)
        filled = (codes & 0x77).reshape(len(codes), -1, self.group // 2).any(axis=2)
        return (scale >= checks.NAN) | ((scale == 0) & filled)

    def plain_tensor(self, name: str) -> writer.Planned:
        """Plan a tensor that is not quantized: the source's where it differs and is at fault."""
        info = self.folder.info(name)
        source = self._source
        original = source.find(name) if source else None
        family = self.folder.family
        if (
            source
            and original
            and (
                (family.vision in name and not auxiliary_checks.same_tensor(self.folder, name, source, original))
                or (f".{family.mtp}" in f".{name}" and source.info(original).shape != info.shape)
            )
        ):
            theirs = source.info(original)
            self.actions.append(f"{name}: taken from the source")
            return writer.Planned(name, theirs.dtype, theirs.shape, partial(source.tensor, original))
        changed = name in self.faults or models.layer_of(name) in self.diagnosis.folded
        if changed and source and original and source.info(original).shape == info.shape:
            theirs = source.info(original)
            ours = self.folder.tensor(name).astype(np.float32)
            if not source_diff.rel_l2(ours, source.tensor(original).astype(np.float32)) < source_diff.SAME_VALUES:
                self.actions.append(f"{name}: taken from the source")
                return writer.Planned(name, theirs.dtype, theirs.shape, partial(source.tensor, original))
        return writer.Planned(name, info.dtype, info.shape, partial(self.folder.tensor, name))


# ---- the source's MTP head and vision tower, put back into a checkpoint of any layout; all other tensors keep bytes and names


def restore(folder: ModelFolder, source: ModelFolder, lost: list[str], target: Path) -> list[str]:
    """Write a copy of `folder` with the lost tensors of `source`, their settings, and their entries of excluded linears.

    lost: of auxiliary_checks.missing_tensors. Returns what was done, one sentence each.
    """
    config = dict(folder.config)
    actions = describe_lost(folder, lost)
    actions += lost_settings(source, config, runtime_names.is_multimodal(folder))
    modules = sorted({m for name in lost if (m := excluded_module(source, name))})
    actions += exclude(folder, config, modules)
    writer.write(target, [*copies(folder, folder), *copies(source, lost)])
    writer.copy_small_files(folder, target)
    exported = folder.json(modelopt.HF_QUANT_CONFIG)
    if exported is not None:
        write_json(target / modelopt.HF_QUANT_CONFIG, exported)
    write_json(target / "config.json", config)
    return actions


def copies(owner: ModelFolder, names: Iterable[str]) -> list[writer.Planned]:
    """Plan tensors as a folder has them."""
    infos = map(owner.info, names)
    return [writer.Planned(i.name, i.dtype, i.shape, partial(owner.pieces, i.name)) for i in infos]


def describe_lost(folder: ModelFolder, lost: Sequence[str]) -> list[str]:
    """Return one sentence for the MTP head and one for the vision tower, where tensors of them are lost."""
    return [
        f"{part}*: {count} missing tensors taken from the source"
        for part in (folder.family.mtp, folder.family.vision)
        if (count := sum(part in name for name in lost))
    ]


def lost_settings(source: ModelFolder, config: dict[str, Any], multimodal: bool) -> list[str]:
    """Set in `config` what config.json lost of the head and, in a multimodal form, of the tower. Returns what was done."""
    actions = []
    inner = config.get("text_config")
    if isinstance(inner, dict):
        inner = config["text_config"] = dict(inner)
    for field, values in (("mtp_num_hidden_layers", source.text_config), ("vision_config", source.config)):
        target = inner if isinstance(inner, dict) and field.startswith("mtp") else config
        applies = field.startswith("mtp") or multimodal
        if applies and target.get(field) in (None, 0) and values.get(field) not in (None, target.get(field)):
            target[field] = values[field]
            actions.append(f"config.json: {field} taken from the source")
    return actions


def exclude(folder: ModelFolder, config: dict[str, Any], modules: list[str]) -> list[str]:
    """List linears in the `ignore` of compressed-tensors' settings that no entry covers. Returns what was done."""
    quant = config.get("quantization_config")
    if dialects.of(folder) is not compressed_tensors or not isinstance(quant, dict):
        return []
    ignore = [e for e in quant.get("ignore") or [] if isinstance(e, str)]
    added = [m for m in modules if not covering_pattern(m, ignore)]
    config["quantization_config"] = quant | {"ignore": [*ignore, *added]}
    return [f"config.json: {len(added)} linears of them added to ignore"] if added else []
