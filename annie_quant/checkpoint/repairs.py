"""Repair a copy of a checkpoint in ModelOpt's layout, exactly or from the source.

Sound tensors keep their bytes, also those of a sound fold (AWQ). A linear is packed again from the
source where its own tensors are faulty, where its error shows that it does not come from the
source, or where its layer was folded and the fold or one of its linears is faulty; the norms of
such a layer also become the source's, so that the model computes the same. Settings are always
written from the tensors on disk.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from annie_quant import models, nvfp4
from annie_quant.checkpoint import dialects, writer
from annie_quant.checkpoint.checks import CODES, NOT_JUDGED, folds
from annie_quant.checkpoint.checks import source as source_checks
from annie_quant.checkpoint.checks.completeness import missing_tensors
from annie_quant.checkpoint.checks.settings import (
    KV_ENDS,
    check_algorithm,
    scales_to_keep,
    unread_method,
)
from annie_quant.checkpoint.checks.tensors import filled_blocks, scale_faults
from annie_quant.checkpoint.dialects import (
    Dialect,
    QuantizedFolder,
    fp8,
    modelopt,
)
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.inspection import audit as audit_folder
from annie_quant.checkpoint.linears import (
    QUANTIZER,
    Linear,
    TensorScale,
    excluded_module,
    plain_linears,
)
from annie_quant.checkpoint.restoration import (
    RepairPlan,
    describe_lost,
    plan_restoration,
    with_lost_settings,
)
from annie_quant.checkpoint.runtime_names import Renaming, plan_renaming
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import Planned, copied
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.core.files import write_json
from annie_quant.documents import Audit, Finding
from annie_quant.models.formats import FP8, FP8_CHANNEL, NVFP4, W4A16, Format

# Findings about single blocks: the tensor's other blocks may stay.
BLOCK_FAULTS = {"block_scale_nan", "block_scale_negative", "block_scale_zero"}
# Prefixes of the findings' codes about settings, names and input scales, which are repaired without
# the source.
WITHOUT_SOURCE = (
    "config_",
    "excluded",
    "not_excluded",
    "not_listed",
    "listed_",
    "input_scale",
    "fused_input",
    "names_",
    "prefix_",
)
# Prefixes of those that a conversion to ModelOpt's layout removes.
SETTINGS_CODES = ("config_", "excluded", "not_excluded", "not_listed", "listed_")
# Prefixes of all that are not about a linear's codes and scales.
UNRELATED = (
    *WITHOUT_SOURCE,
    "not_finite",
    "differs_from_source",
    "group_size",
    "nothing_",
    "expert_count",
    "expert_scale",
    "experts_",
    "kv_",
    "columns_",
    "router_",
    "mtp_",
    "vision_",
)


@dataclass(frozen=True)
class Diagnosis:
    """The linears of a checkpoint that a repair changes. All others stay as they are.

    modules: all linears that the repaired copy quantizes.
    faulty: those that are packed again from the source.
    patched: those of which only the bad blocks are packed again.
    restored: those of the MTP head in NVFP4, which become the source's 16-bit weights again.
    folded: layers with moved scales that do not cancel, or with a linear that is packed again; they
        get the source's norms.
    group: columns per block scale of the repaired copy.
    """

    modules: set[str]
    faulty: set[str]
    patched: set[str]
    restored: set[str]
    folded: set[str]
    group: int


def diagnose(model: QuantizedFolder, source: ModelFolder | None, audit: Audit) -> Diagnosis:
    """Return the linears to change, by the findings of an audit.

    Raises UsageError where the source is needed and not given.
    """
    quantized = model.linears
    family = model.folder.family
    faulty, modules = faulty_modules(model, audit)
    group = group_size(model, faulty)
    if source is None:
        if faulty:
            message = f"{len(faulty)} linears can only be repaired from the bf16 checkpoint, such as {min(faulty)}"
            raise UsageError(message, "give it with --source")
        return Diagnosis(modules, faulty, set(), set(), set(), group)
    codes = {module: codes_of(audit, module) for module in faulty}
    patched = {n for n in faulty if n in quantized and codes[n] <= BLOCK_FAULTS}
    faulty -= patched
    # Such a layer is packed again as a whole: a fold's scales are known only from its tensors.
    folded = source_checks.plain_differences(model, source).scaled
    for row in audit.tensors:
        if row.rel_l2 is None or row.name in faulty:
            continue
        if not row.rel_l2 < source_checks.SUSPICIOUS_ERROR:
            folded.add(models.layer_of(row.name))
    folded &= set(map(models.layer_of, faulty | patched))
    fold_faults = {f.tensor for f in audit.findings if f.code.startswith("fold_")}
    # A linear that is faulty itself explains that its scales do not cancel.
    explained = {n for n in faulty if not all(code.startswith("fold_") for code in codes[n])}
    folded |= set(map(models.layer_of, fold_faults)) - set(map(models.layer_of, explained))
    folded |= {models.layer_of(x.name) for x in quantized.values() if x.pre_quant}
    faulty |= {m for m in modules if models.layer_of(m) in folded}
    patched -= faulty
    for fused in family.fused_groups(modules):  # they share a tensor scale
        if faulty & set(fused):
            faulty |= set(fused)
    restored = set()
    for module in modules:
        linear = quantized.get(module)
        is_fp8 = linear is not None and linear.format == "fp8"
        if family.in_mtp(module) and not is_fp8 and f"{module}.weight" in source:
            restored.add(module)
    return Diagnosis(
        modules - restored, faulty - restored, patched - restored, restored, folded, group
    )


def faulty_modules(model: QuantizedFolder, audit: Audit) -> tuple[set[str], set[str]]:
    """Return the modules whose codes or scales cannot stay, and all modules to quantize.

    The latter have all or some of a linear's tensors on disk, or are fused with such a module.
    """
    folder = model.folder
    modules = set(model.linears)
    for name in folder:
        module, _, end = name.rpartition(".")
        is_scale = end in ("weight_scale", "weight_scale_2")
        if is_scale or (end == "weight" and folder.info(name).dtype == "U8"):
            modules.add(module)
    groups = folder.family.fused_groups(modules | set(plain_linears(folder)))
    faulty: set[str] = set()
    for finding in audit.findings:
        if finding.code.startswith(UNRELATED):
            continue
        names = [module for module in modules if is_about(finding, module)]
        if finding.code.startswith("fused_"):
            names = next((group for group in groups if finding.tensor in group), names)
            modules.update(names)
        faulty.update(names)
    return faulty, modules


def is_about(finding: Finding, module: str) -> bool:
    """Return whether a finding is about a module or one of its tensors."""
    return f"{finding.tensor}.".startswith(f"{module}.")


def codes_of(audit: Audit, module: str) -> set[str]:
    """Return the codes of the findings about a module; {"unknown"} where there are none."""
    return {f.code for f in audit.findings if is_about(f, module)} or {"unknown"}


def group_size(model: QuantizedFolder, faulty: set[str]) -> int:
    """Return the columns per block scale: of the sound linears, else of the settings, else 16."""
    folder = model.folder
    sizes = {x.group(folder) for x in model.nvfp4 if x.name not in faulty}
    if len(sizes) > 1:
        message = f"{folder.path}: group sizes {sorted(sizes)} in one checkpoint cannot be repaired"
        raise CheckpointError(message, "quantize again: annie-quant quantize --strategy direct")
    return sizes.pop() if sizes else model.config.group or 16


@dataclass(frozen=True)
class _RepairPlanner:
    """Collects the tensors and the actions of one repair.

    naming: the names of the copy.
    """

    model: QuantizedFolder
    optional_source: ModelFolder | None
    audit: Audit
    naming: Renaming
    diagnosis: Diagnosis
    actions: list[str] = field(default_factory=list)

    @property
    def folder(self) -> ModelFolder:
        return self.model.folder

    @property
    def source(self) -> ModelFolder:
        assert self.optional_source is not None  # diagnose() refuses what needs it
        return self.optional_source

    def plan(self) -> RepairPlan:
        folder = self.folder
        source = self.optional_source
        diagnosis = self.diagnosis
        name_in_copy = self.naming.name
        scales = self.tensor_scales()
        inputs = self.input_scales()
        tensors = []
        for module in sorted(diagnosis.modules):
            tensors += self.linear_tensors(module, scales.get(module), inputs.get(module))
        kv_names = scales_to_keep(folder, self.model.config)
        excluded = set()
        for name in folder:
            module, _, end = name.rpartition(".")
            is_linear = module in diagnosis.modules or module in diagnosis.restored
            if is_linear and f".{end}" in (".weight", *QUANTIZER):
                continue
            if not name.endswith(KV_ENDS) or name in kv_names:
                tensors.append(self.plain_tensor(name))
                excluded.add(excluded_module(folder, name))
        for name in self.lost_tensors():
            tensors.append(copied(self.source, name))
            excluded.add(excluded_module(self.source, name))
        four_bit = NVFP4 if inputs else W4A16
        settings = modelopt.settings(
            {name_in_copy(m): self.fp8_format(m) or four_bit for m in diagnosis.modules},
            sorted({name_in_copy(m) for m in excluded if m}),
            diagnosis.group,
            self.model.config.kv_cache,
        )
        inline = {"quantization_config": settings.quantization_config}
        if folder.config.get("quantization_config") != settings.quantization_config:
            self.actions.append("config.json and hf_quant_config.json written from what is on disk")
        config = self.naming.config
        if source is not None:
            config, actions = with_lost_settings(source, config, self.naming.multimodal)
            self.actions.extend(actions)
        files = settings.files | self.naming.files | {"config.json": config | inline}
        tensors = [replace(tensor, name=name_in_copy(tensor.name)) for tensor in tensors]
        return RepairPlan(tensors, files, self.actions + self.naming.actions)

    def original(self, module: str) -> str:
        """Return the source's name of a module's weight."""
        name = self.source.find(f"{module}.weight")
        if name is None:
            raise CheckpointError(
                f"{module}: the source has no such linear", "is this the right --source?"
            )
        return name

    def fp8_format(self, module: str) -> Format | None:
        """Return FP8, with a scale per row for a linear that keeps its own; None for other ones."""
        linear = self.model.linears.get(module)
        if linear is None or linear.format != "fp8":
            return None
        keeps_rows = module not in self.diagnosis.faulty and linear.per_channel(self.folder)
        return FP8_CHANNEL if keeps_rows else FP8

    # ---- scales

    def tensor_scales(self) -> dict[str, np.float32]:
        """Return the tensor scale of each linear that is packed again, one per fused group."""
        amax = {}
        for module in self.diagnosis.faulty:
            amax[module] = float(nvfp4.amax(self.source.tensor(self.original(module))))
        scales = {}
        for module, top in self.folder.family.largest_of_group(amax).items():
            scale_of = modelopt.fp8_scale if self.fp8_format(module) else nvfp4.tensor_scale
            scales[module] = scale_of(top)
        return scales

    def input_scales(self) -> dict[str, np.float32]:
        """Return an input scale for every linear, or none at all.

        Where one linear lacks a scale, only the weights are quantized.
        """
        modules = self.diagnosis.modules
        scales = {}
        for module in sorted(modules):
            scale = self.input_scale(module)
            if scale is not None:
                scales[module] = scale
        for group in self.folder.family.fused_groups(modules):
            present = [scales[module] for module in group if module in scales]
            if present and (len(present) < len(group) or len(set(present)) > 1):
                action = "input scale of the fused group set to its largest"
                self.actions.append(f"{group[0]}: {action}")
                scales |= dict.fromkeys(group, max(present))
        missing = sorted(modules - scales.keys())
        if scales and missing:
            reason = f"{missing[0]} has none, and only calibration gives one"
            self.actions.append(f"input scales removed, only the weights are quantized: {reason}")
            return {}
        return scales

    def input_scale(self, module: str) -> np.float32 | None:
        """Return the input scale on disk if it is valid, else None.

        It is multiplied by the largest factor by which a fold had reduced it.
        """
        folder = self.folder
        name = f"{module}.input_scale"
        if name not in folder or folder.info(name).elements != 1:
            return None
        scale = folder.scalar(name)
        if any(scale_faults("input", name, TensorScale(scale))):
            return None
        linear = self.model.linears.get(module)
        if linear is None or models.layer_of(module) not in self.diagnosis.folded:
            return scale
        if linear.pre_quant:
            least = np.abs(folder.tensor(linear.pre_quant).astype(np.float32)).min()
            return np.float32(scale / least) if least > 0 else None
        try:
            ours = linear.dequantize(folder)
            theirs = source_checks.float32(self.source, self.original(module))
        except ShardError:
            return scale
        comparable = ours.shape == theirs.shape and np.isfinite(ours).all()
        if not comparable or source_checks.rel_l2(ours, theirs) <= source_checks.SUSPICIOUS_ERROR:
            return scale
        column_factors = folds.fit(ours, theirs)[1]
        return np.float32(scale * max(1.0, float(column_factors.max())))

    # ---- tensors

    def lost_tensors(self) -> list[str]:
        """Return the source's names of the tensors that the copy takes from it.

        They are the MTP head's and the vision tower's.
        """
        if self.optional_source is None:
            return []
        lost = missing_tensors(self.folder, self.source)
        self.actions.extend(describe_lost(self.folder, lost))
        for module in sorted(self.diagnosis.restored):
            self.actions.append(f"{module}: taken from the source, in 16 bits")
            lost.append(f"{module}.weight")
        return lost

    def linear_tensors(
        self, module: str, scale: np.float32 | None, input_scale: np.float32 | None
    ) -> list[Planned]:
        """Plan the tensors of one quantized linear: packed again, patched, or as they are.

        scale: the tensor scale of one that is packed again.
        """
        diagnosis = self.diagnosis
        if module not in diagnosis.faulty | diagnosis.patched:
            tensors = modelopt.tensors(self.model.linears[module], self.folder)
            others = [t for t in tensors if not t.name.endswith(".input_scale")]
            return others + modelopt.input_scale_tensors(module, input_scale)
        name = self.original(module)
        rows, columns = self.source.info(name).shape
        shape = (rows, columns)
        if module in diagnosis.patched:
            linear = self.model.linears[module]
            scale = linear.tensor_scale(self.folder).multiplier
            count = int(self.bad_blocks(linear).sum())
            action = f"{count} blocks quantized again from the source, the others kept"
            pack = partial(self.pack_bad_blocks, linear, name, scale)
        else:
            assert scale is not None  # tensor_scales() has every faulty linear
            action = "quantized again from the source"
            pack = partial(self.pack, name, scale)
        self.actions.append(f"{module}: {action}")
        final_scale = scale
        if module in diagnosis.faulty and self.fp8_format(module):
            weight = partial(self.source.tensor, name)
            return modelopt.fp8_tensors(module, shape, weight, lambda: final_scale, input_scale)
        return modelopt.nvfp4_tensors(
            module, shape, pack, lambda: final_scale, diagnosis.group, input_scale=input_scale
        )

    def pack(self, name: str, scale: np.float32) -> Iterator[nvfp4.Tensor]:
        """Yield a source tensor, packed under a tensor scale."""
        weight = self.source.tensor(name)
        yield nvfp4.pack(weight, tensor_scale=float(scale), group=self.diagnosis.group)

    def pack_bad_blocks(
        self, linear: Linear, name: str, scale: np.float32
    ) -> Iterator[nvfp4.Tensor]:
        """Yield the checkpoint's codes with its bad blocks packed again from the source."""
        bad = self.bad_blocks(linear)
        bad_codes = np.repeat(bad, self.diagnosis.group // 2, axis=1)
        (packed,) = self.pack(name, scale)
        packed.codes = np.where(bad_codes, packed.codes, self.folder.tensor(linear.weight))
        block_scale = np.where(bad, packed.block_scale.view(np.uint8), self.scale_bytes(linear))
        packed.block_scale = block_scale.view(nvfp4.E4M3)
        yield packed

    def bad_blocks(self, linear: Linear) -> np.ndarray:
        """Return which blocks have a bad scale: bool [N, K/group].

        It is NaN, negative, or zero where the block has values.
        """
        filled = filled_blocks(self.folder.tensor(linear.weight), self.diagnosis.group)
        scale = self.scale_bytes(linear)
        return (scale >= nvfp4.E4M3_NAN) | ((scale == 0) & filled)

    def scale_bytes(self, linear: Linear) -> np.ndarray:
        return self.folder.tensor(linear.block_scale or "").view(np.uint8)

    def plain_tensor(self, name: str) -> Planned:
        """Plan a tensor that is not quantized: the source's where this one differs and is at fault."""
        original = self.optional_source.find(name) if self.optional_source else None
        if original is not None and self.is_faulty(name, original):
            self.actions.append(f"{name}: taken from the source")
            return copied(self.source, original, name)
        return copied(self.folder, name)

    def is_faulty(self, name: str, original: str) -> bool:
        """Return whether an unquantized tensor is to become the source's `original`."""
        folder = self.folder
        family = folder.family
        source = self.source
        in_vision = family.in_vision(name)
        if in_vision and not source_checks.same_tensor(folder, name, source, original):
            return True
        if source.info(original).shape != folder.info(name).shape:
            return family.in_mtp(name)
        at_fault = any(finding.tensor == name for finding in self.audit.findings)
        if not at_fault and models.layer_of(name) not in self.diagnosis.folded:
            return False
        ours = source_checks.float32(folder, name)
        theirs = source_checks.float32(source, original)
        return not source_checks.rel_l2(ours, theirs) < source_checks.SAME_VALUES


# ---- the repaired copy

LOST = ("mtp_missing", "vision_missing")  # findings that a repair fixes in every layout
UNREPAIRED = NOT_JUDGED | {
    "algorithm_unknown",
    "decoder_incomplete",
    "duplicate_tensor",
    "index_mismatch",
    "file_unread",
}


class RepairResult(msgspec.Struct):
    """A repaired copy.

    path: its folder.
    actions: the repairs, one sentence each.
    remaining: findings about the copy.
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
    names: "old" writes config fields and tensor names for runtimes on transformers 4.57, "new" for
        transformers from
    5.2; None keeps the form and fixes what disagrees.
    force: replace `output` where it exists.

    Another layout than ModelOpt's NVFP4 keeps its tensors, and gets the source's MTP head and
    vision tower where it lost them; CheckpointError is raised where nothing of them is lost. Raises
    UsageError where the source is needed and not given.
    """
    folder = ModelFolder(path)
    home = folder.path.resolve()
    target = Path(output) if output else home.with_name(f"{home.name}-repaired")
    model = dialects.read(folder)
    unread = unread_method(model)
    if unread:
        raise CheckpointError(f"{path}: {unread.message}", CODES[unread.code].fix)
    original = ModelFolder(source) if source else None
    is_modelopt = model.dialect is modelopt and bool(model.linears)
    lost = []
    if is_modelopt:
        check_algorithm(model)
    elif original is not None and names is None:
        lost = missing_tensors(folder, original)
    if not is_modelopt and not lost:
        quoted = shlex.quote(str(path))
        if model.linears:
            hint = f"first: {conversion(quoted, model.dialect)}"
        else:
            hint = (
                f"quantize it: annie-quant quantize --strategy direct --model {quoted} --output DIR"
            )
        raise CheckpointError(f"{path}: no NVFP4 in ModelOpt's layout", hint)
    with writer.staged(target, force=force, inputs=(path, source)) as part:
        if is_modelopt or original is None:
            naming = plan_renaming(folder, names, original)
            audit = audit_folder(path, source=source)
            diagnosis = diagnose(model, original, audit)
            plan = _RepairPlanner(model, original, audit, naming, diagnosis).plan()
        else:
            plan = plan_restoration(model, original, lost)
        writer.write(part, plan.tensors)
        writer.copy_small_files(folder, part)
        for name, content in plan.files.items():
            write_json(part / name, content)
    return RepairResult(str(target), plan.actions, audit_folder(target, source=source).findings)


def conversion(path: str, dialect: Dialect | None) -> str:
    """Return the command that makes a checkpoint of another layout one that can be repaired."""
    return f"annie-quant convert {path} --to {'bf16' if dialect is fp8 else 'modelopt'}"


def repair_command(audit: Audit, source: str | os.PathLike | None = None) -> str | None:
    """Return the shell command that repairs an audited checkpoint.

    None where `repair` cannot, as for missing files.

    source: the bf16 checkpoint, where it is known; where one is needed and not known, the command
        has SOURCE in its place.
    """
    try:
        folder = ModelFolder(audit.path)
        dialect = dialects.of(folder)
        quantized = bool(dialects.linears(folder))
    except ShardError:
        return None
    codes = {finding.code for finding in audit.findings}
    path = shlex.quote(audit.path)
    command = f"annie-quant audit {path} --repair"
    with_source = f"{command} --source {'SOURCE' if source is None else shlex.quote(str(source))}"
    if (not quantized or dialect is not modelopt) and not codes.isdisjoint(LOST):
        return with_source
    if not quantized or codes <= UNREPAIRED:
        return None
    if dialect is fp8:
        return conversion(path, dialect)
    needs_source = not all(code.startswith(WITHOUT_SOURCE) for code in codes)
    chosen = with_source if needs_source or source is not None else command
    if dialect is modelopt:
        return chosen
    # A conversion writes settings from what is on disk, and keeps faults of scales.
    if all(code.startswith(SETTINGS_CODES) for code in codes):
        return conversion(path, dialect)
    output = shlex.quote(f"{audit.path.rstrip('/')}-modelopt")
    first = f"{conversion(path, dialect)} --output {output}"
    return f"{first} && {chosen.replace(path, output, 1)}"
