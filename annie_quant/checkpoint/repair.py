"""Mending a ModelOpt checkpoint: exactly where that is possible, else by quantizing again from the bf16 source.

What is sound keeps its bytes. A linear is packed anew from the source when its own tensors are faulty, when its error
shows that they are not the source's, or when its layer was folded (AWQ), right or wrong: the norms then return to the
source's too, so that the function is the source's again. Configurations are always written anew from what is on disk.
Nothing is changed in place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from annie_quant.checkpoint import dialects, folding_check, header, runtime_names, source_diff, writer
from annie_quant.checkpoint.audit import Audit, audit
from annie_quant.checkpoint.convert import QUANTIZER
from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.linears import Linear, fused_groups, is_linear
from annie_quant.checkpoint.shards import ModelFolder, ShardError
from annie_quant.checkpoint.staging import staged
from annie_quant.errors import CheckpointError, UsageError
from annie_quant.files import write_json

# Faults of single blocks: the others of the tensor may stay.
BAD_BLOCKS = {"block_scale_nan", "block_scale_negative", "block_scale_zero"}
NAN = 0x7F  # an E4M3 byte; what is above it has a sign
LARGEST_E4M3 = 448.0


def repair(
    path: str | os.PathLike,
    source: str | os.PathLike | None = None,
    output: str | os.PathLike | None = None,
    names: str | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Write a mended copy and return {"path", "actions", "remaining"}: what was done in words, findings that stay.

    output: `path` with "-repaired" by default; force: replace it where it exists.  names: "old" writes config
    fields and tensor names as runtimes on transformers 4.57 want them, "new" as transformers from 5.2; None keeps the
    form and mends what disagrees. Raises CheckpointError for a folder that is no NVFP4 checkpoint in
    ModelOpt's layout, UsageError where only the source can help and it is not given.
    """
    folder = ModelFolder(path)
    if dialects.of(folder) is not modelopt or not modelopt.linears(folder):
        raise CheckpointError(
            f"{path}: no NVFP4 in ModelOpt's layout", f"first: annie-quant convert {path} --to modelopt"
        )
    target = Path(output) if output else folder.path.resolve().with_name(f"{folder.path.resolve().name}-repaired")
    if target.resolve() == folder.path.resolve():
        raise UsageError(f"{target} is the checkpoint itself", "choose another --output")
    with staged(target, force=force) as part:
        work = Repair(folder, ModelFolder(source) if source else None, names)
        work.write(part)
    return {
        "path": str(target),
        "actions": work.actions,
        "remaining": [f.__dict__ for f in audit(target, source=source).findings],
    }


class Repair:
    """Decides for each tensor whether it stays, returns to the source, or is made anew."""

    def __init__(self, folder: ModelFolder, source: ModelFolder | None, names: str | None = None) -> None:
        self.folder, self.source = folder, source
        self.naming = runtime_names.Renaming(folder, names, source)
        self.actions: list[str] = []
        self.linears = modelopt.linears(folder)
        self.modules = self.known()
        self.folded: set[str] = set()
        found = audit(folder.path, source=source.path if source else None)
        self.faulty = self.modules_of(found)
        self.group = self.group_size()
        if self.faulty and source is None:
            raise UsageError(
                f"{len(self.faulty)} linears can only be mended from the bf16 checkpoint, such as {min(self.faulty)}",
                "give it with --source",
            )
        self.patched = self.blocks_alone(found) if source else set()
        self.faulty -= self.patched
        self.widen()
        self.scales = self.shared_scales()
        self.inputs = self.input_scales()

    def modules_of(self, found: Audit) -> set[str]:
        """Modules whose codes or scales cannot stay, by the audit's findings."""
        keep = (
            "config_",
            "excluded",
            "not_excluded",
            "not_listed",
            "listed_",
            "input_scale",
            "fused_input",
            "not_finite",
            "differs_from_source",
            "group_size",
            "nothing_",
            "names_",
            "prefix_",
        )
        bad = set()
        for f in found.findings:
            if f.code.startswith(keep):
                continue
            names = [n for n in self.modules if f.tensor == n or f.tensor.startswith(n + ".")]
            if f.code.startswith("fused_"):
                names = next((g for g in fused_groups(self.all_linears()) if f.tensor in g), names)
                self.modules |= set(names)  # a group that is quantized in part is quantized as a whole
            bad |= set(names)
        return bad

    def group_size(self) -> int:
        """Columns of one block scale: what the sound linears have, or the configuration says; 16 where nothing does."""
        sizes = set()
        for name, linear in self.linears.items():
            if linear.format == "nvfp4" and name not in self.faulty:
                sizes.add(linear.group(self.folder))
        if len(sizes) > 1:
            raise CheckpointError(
                f"{self.folder.path}: group sizes {sorted(sizes)} in one checkpoint cannot be mended",
                "quantize again: annie-quant quantize --strategy direct",
            )
        return sizes.pop() if sizes else modelopt.config(self.folder).group or 16

    def blocks_alone(self, found: Audit) -> set[str]:
        """Linears of which only some blocks are bad: those come from the source, under the tensor scale that is there."""
        codes = {
            n: {f.code for f in found.findings if f.tensor.startswith(f"{n}.") or f.tensor == n} for n in self.faulty
        }
        return {n for n, seen in codes.items() if n in self.linears and seen and seen <= BAD_BLOCKS}

    def known(self) -> set[str]:
        """Modules that are quantized, or are in pieces on disk."""
        pieces = {n.rpartition(".")[0] for n in self.folder if n.endswith((".weight_scale", ".weight_scale_2"))}
        codes = {n[:-7] for n in self.folder if n.endswith(".weight") and self.folder.info(n).dtype == "U8"}
        return set(self.linears) | pieces | codes

    def all_linears(self) -> set[str]:
        plain = {n[:-7] for n in self.folder if is_linear(n, self.folder.info(n).shape)}
        return self.modules | plain

    def widen(self) -> None:
        """A folded layer is mended as a whole; fused linears are packed together, as they share a scale."""
        if self.source is None:
            return
        self.folded = {folding_check.layer_of(n) for n in source_diff.changed_norms(self.folder, self.source)}
        self.folded |= {folding_check.layer_of(x.name) for x in self.linears.values() if x.pre_quant}
        self.faulty |= {m for m in self.modules if folding_check.layer_of(m) in self.folded}
        self.patched -= self.faulty
        for group in fused_groups(self.modules):
            if self.faulty & set(group):
                self.faulty |= set(group)

    def original(self, module: str) -> str:
        """The source's name for a module's weight."""
        assert self.source is not None
        name = source_diff.source_name(f"{module}.weight", self.source)
        if name is None:
            raise CheckpointError(f"{module}: the source has no such linear", "is this the right --source?")
        return name

    def shared_scales(self) -> dict[str, np.float32]:
        """The tensor scale of each linear that is packed anew."""
        from annie_quant import nvfp4

        if self.source is None:
            return {}
        amax = {m: float(nvfp4.amax(self.source.tensor(self.original(m)))) for m in self.faulty}
        for group in fused_groups(self.faulty):
            amax |= dict.fromkeys(group, max(amax[m] for m in group))
        return {m: fp8_scale(v) if self.is_fp8(m) else np.float32(nvfp4.tensor_scale(v)) for m, v in amax.items()}

    def is_fp8(self, module: str) -> bool:
        linear = self.linears.get(module)
        return linear is not None and linear.format == "fp8"

    def input_scales(self) -> dict[str, np.float32]:
        """An input scale for every linear, or for none: without one for each, only the weights stay quantized."""
        scales: dict[str, np.float32] = {}
        for module in sorted(self.modules):
            scale = self.input_scale(module)
            if scale is not None:
                scales[module] = scale
        for group in fused_groups(self.modules):
            there = [scales[m] for m in group if m in scales]
            if there and (len(there) < len(group) or len(set(there)) > 1):
                self.actions.append(f"{group[0]}: input scale of the fused group set to its largest")
                scales |= dict.fromkeys(group, max(there))
        missing = sorted(self.modules - set(scales))
        if scales and missing:
            self.actions.append(
                f"input scales removed, weights alone are quantized: {missing[0]} has none, only calibration gives one"
            )
            return {}
        return scales

    def input_scale(self, module: str) -> np.float32 | None:
        """What is on disk if it can be used, enlarged by the largest factor that a fold took from the input."""
        name = f"{module}.input_scale"
        if name not in self.folder or self.folder.info(name).elements != 1:
            return None
        scale = self.folder.scalar(name)
        if not np.isfinite(scale) or scale <= 0 or scale > 100:
            return None
        linear = self.linears.get(module)
        if linear is None or folding_check.layer_of(module) not in self.folded:
            return scale
        if linear.pre_quant:
            least = np.abs(self.folder.tensor(linear.pre_quant).astype(np.float32)).min()
            return np.float32(scale / least) if least > 0 else None
        return np.float32(scale * self.fold_factor(linear))

    def fold_factor(self, linear: Linear) -> float:
        """The largest column factor of a folded linear; 1 where its own tensors are too faulty to tell."""
        assert self.source is not None
        try:
            ours, theirs = (
                linear.dequantize(self.folder),
                self.source.tensor(self.original(linear.name)).astype(np.float32),
            )
        except ShardError:
            return 1.0
        if ours.shape != theirs.shape or not np.isfinite(ours).all():
            return 1.0
        columns = folding_check.fit(ours, theirs)[1]
        return (
            max(1.0, float(columns.max())) if source_diff.rel_l2(ours, theirs) > source_diff.SUSPICIOUS_ERROR else 1.0
        )

    def write(self, target: Path) -> None:
        plan: list[writer.Planned] = []
        for module in sorted(self.modules):
            if module in self.faulty:
                plan += self.remade(module)
            elif module in self.patched:
                plan += self.mended(module)
            else:
                plan += self.kept(self.linears[module])
            if module in self.inputs:
                plan.append(writer.planned(f"{module}.input_scale", np.array(self.inputs[module], np.float32)))
        done = {m + s for m in self.modules for s in (".weight", *QUANTIZER)}
        excluded = []
        for name in self.folder:
            if name in done:
                continue
            plan.append(self.plain(name))
            if is_linear(name, self.folder.info(name).shape):
                excluded.append(self.naming.name(name.removesuffix(".weight")))
        formats = {self.naming.name(m): "fp8" if self.is_fp8(m) else "nvfp4" for m in self.modules}
        inline, beside = modelopt.small_files(formats, sorted(excluded), self.group, bool(self.inputs))
        if self.folder.config.get("quantization_config") != inline:
            self.actions.append("config.json and hf_quant_config.json written from what is on disk")
        config = self.naming.config()
        writer.write(target, [replace(t, name=self.naming.name(t.name)) for t in plan])
        writer.carry(self.folder, target)
        self.naming.small_files(target)
        for file, value in beside.items():
            write_json(target / file, value)
        write_json(target / "config.json", {**config, "quantization_config": inline})
        self.actions += self.naming.actions

    def kept(self, linear: Linear) -> list[writer.Planned]:
        return [t for t in modelopt.tensors(linear, self.folder) if not t.name.endswith(".input_scale")]

    def remade(self, module: str) -> list[writer.Planned]:
        """A linear from the source, packed when it is written."""
        assert self.source is not None
        source, name, scale = self.source, self.original(module), self.scales[module]
        self.actions.append(f"{module}: quantized again from the source")
        beside = np.array(scale, np.float32)
        if self.is_fp8(module):
            shape = source.info(name).shape
            codes = writer.Planned(f"{module}.weight", "F8_E4M3", shape, lambda: fp8_codes(source.tensor(name), scale))
            return [codes, writer.planned(f"{module}.weight_scale", beside)]
        return [*self.packed(module, name, scale), writer.planned(f"{module}.weight_scale_2", beside)]

    def packed(
        self, module: str, name: str, scale: np.float32, keep: Callable[[], Any] | None = None
    ) -> list[writer.Planned]:
        """Codes and block scales of a source tensor under a tensor scale; where `keep` gives a tensor, its good blocks."""
        from annie_quant import nvfp4

        assert self.source is not None
        source, group = self.source, self.group
        rows, columns = source.info(name).shape
        found: list[np.ndarray] = []

        def codes() -> np.ndarray:
            fresh = nvfp4.pack(source.tensor(name), tensor_scale=float(scale), group=group)
            if keep is not None:
                kept_codes, kept_scale, bad = keep()
                wide = np.repeat(bad, group // 2, axis=1)
                fresh.codes = np.where(wide, fresh.codes, kept_codes)
                fresh.block_scale = np.where(bad, fresh.block_scale.view(np.uint8), kept_scale).view(nvfp4.E4M3)
            found[:] = [fresh.block_scale]
            return fresh.codes

        return [
            writer.Planned(f"{module}.weight", "U8", (rows, columns // 2), codes),
            writer.Planned(f"{module}.weight_scale", "F8_E4M3", (rows, columns // group), lambda: found.pop()),
        ]

    def mended(self, module: str) -> list[writer.Planned]:
        """A linear that keeps its bytes but for the blocks whose scale is NaN, negative or zero."""
        linear, folder = self.linears[module], self.folder

        def there() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            codes, scale = folder.tensor(linear.weight), folder.tensor(linear.block_scale or "").view(np.uint8)
            filled = (codes & 0x77).reshape(len(codes), -1, self.group // 2).any(axis=2)
            return codes, scale, (scale >= NAN) | ((scale == 0) & filled)

        n = int(there()[2].sum())
        self.actions.append(f"{module}: {n} blocks quantized again from the source, the others kept")
        scale = linear.tensor_scale(folder)
        return [
            *self.packed(module, self.original(module), scale, there),
            writer.planned(f"{module}.weight_scale_2", np.array(scale, np.float32)),
        ]

    def plain(self, name: str) -> writer.Planned:
        """A tensor that is not quantized: the source's where it differs from that."""
        info = self.folder.info(name)
        source = self.source
        wanted = source_diff.source_name(name, source) if source else None
        if source and wanted and source.info(wanted).shape == info.shape:
            theirs = source.info(wanted)
            ours = self.folder.tensor(name).astype(np.float32)
            if not source_diff.rel_l2(ours, source.tensor(wanted).astype(np.float32)) < 2**-8:
                self.actions.append(f"{name}: taken from the source")
                return writer.Planned(name, theirs.dtype, theirs.shape, lambda: source.tensor(wanted))
        return writer.Planned(name, info.dtype, info.shape, lambda: self.folder.tensor(name))


def fp8_scale(amax: float) -> np.float32:
    return np.float32(amax) / np.float32(LARGEST_E4M3) if amax > 0 else np.float32(1)


def fp8_codes(weight: np.ndarray, scale: np.float32) -> np.ndarray:
    """E4M3 codes under a multiplier: ModelOpt's FP8 of a linear's weight."""
    scaled = np.clip(weight.astype(np.float32) / scale, -LARGEST_E4M3, LARGEST_E4M3)
    return scaled.astype(header.DTYPES["F8_E4M3"])
