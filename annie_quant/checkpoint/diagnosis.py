"""Decide for each quantized linear of a faulty checkpoint whether it stays, loses single blocks, or is packed again."""

from __future__ import annotations

from dataclasses import dataclass

from annie_quant import models
from annie_quant.checkpoint import source_diff
from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.linears import Linear, plain_linears
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.documents import Audit

# Findings about single blocks: the tensor's other blocks may stay.
BLOCK_FAULTS = {"block_scale_nan", "block_scale_negative", "block_scale_zero"}
# Beginnings of the codes that concern no linear's codes and scales: settings, names, input scales, plain tensors.
UNRELATED = (
    "config_", "excluded", "not_excluded", "not_listed", "listed_", "input_scale", "fused_input", "not_finite",
    "differs_from_source", "group_size", "nothing_", "names_", "prefix_",
    "expert_count", "expert_scale", "experts_", "kv_", "columns_", "router_", "mtp_", "vision_",
)  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """The quantized linears of a checkpoint by what a repair does with them. All others stay as they are.

    modules: all that the repaired copy quantizes.
    faulty: packed again from the source.  patched: only their bad blocks are.
    folded: layers with moved scales that do not cancel, or with a linear that is packed again: they get the source's norms.
    group: columns per block scale of the repaired copy.
    """

    modules: set[str]
    faulty: set[str]
    patched: set[str]
    folded: set[str]
    group: int


def diagnose(folder: ModelFolder, source: ModelFolder | None, audit: Audit, linears: dict[str, Linear]) -> Diagnosis:
    """Return what is to be done, by the findings of an audit.

    Without a source nothing can be packed again: `faulty` then lists what would have to be.
    """
    modules = quantized_modules(folder, linears)
    faulty = faulty_modules(folder, audit, modules)
    group = group_size(folder, linears, faulty)
    if source is None:
        return Diagnosis(modules, faulty, set(), set(), group)
    patched = {n for n in faulty if n in linears and codes_of(audit, n) <= BLOCK_FAULTS}
    faulty -= patched
    # Such a layer is packed again as a whole: nothing is known of a fold's scales but what its tensors show.
    folded = {models.layer_of(n) for n in source_diff.changed_norms(folder, source)}
    folded |= {models.layer_of(r.name) for r in audit.tensors if r.rel_l2 is not None and r.name not in faulty
               and not r.rel_l2 < source_diff.SUSPICIOUS_ERROR}  # fmt: skip
    folded &= {models.layer_of(m) for m in faulty | patched}
    # A linear that is faulty itself explains that its scales do not cancel.
    explained = {models.layer_of(m) for m in faulty if not all(c.startswith("fold_") for c in codes_of(audit, m))}
    folded |= {models.layer_of(f.tensor) for f in audit.findings if f.code.startswith("fold_")} - explained
    folded |= {models.layer_of(x.name) for x in linears.values() if x.pre_quant}
    faulty |= {m for m in modules if models.layer_of(m) in folded}
    patched -= faulty
    for fused in folder.family.fused_groups(modules):  # they share a tensor scale
        if faulty & set(fused):
            faulty |= set(fused)
    return Diagnosis(modules, faulty, patched, folded, group)


def quantized_modules(folder: ModelFolder, linears: dict[str, Linear]) -> set[str]:
    """Return the modules that are quantized, or of which only some of the tensors are on disk."""
    scales = {n.rpartition(".")[0] for n in folder if n.endswith((".weight_scale", ".weight_scale_2"))}
    codes = {n.removesuffix(".weight") for n in folder if n.endswith(".weight") and folder.info(n).dtype == "U8"}
    return set(linears) | scales | codes


def faulty_modules(folder: ModelFolder, audit: Audit, modules: set[str]) -> set[str]:
    """Return the modules whose codes or scales cannot stay.

    Adds to `modules` the unquantized members of a fused group that is quantized in part.
    """
    faulty: set[str] = set()
    groups = folder.family.fused_groups(modules | set(plain_linears(folder)))
    for finding in audit.findings:
        if finding.code.startswith(UNRELATED):
            continue
        names = [n for n in modules if finding.tensor == n or finding.tensor.startswith(n + ".")]
        if finding.code.startswith("fused_"):
            names = next((g for g in groups if finding.tensor in g), names)
            modules |= set(names)
        faulty |= set(names)
    return faulty


def codes_of(audit: Audit, module: str) -> set[str]:
    """Return the codes of the findings about a module; one that nothing names has an unknown fault."""
    about = {f.code for f in audit.findings if f.tensor == module or f.tensor.startswith(f"{module}.")}
    return about or {"unknown"}


def group_size(folder: ModelFolder, linears: dict[str, Linear], faulty: set[str]) -> int:
    """Return the columns per block scale: those of the sound linears, else those of the settings, else 16."""
    sizes = {x.group(folder) for n, x in linears.items() if x.format == "nvfp4" and n not in faulty}
    if len(sizes) > 1:
        raise CheckpointError(
            f"{folder.path}: group sizes {sorted(sizes)} in one checkpoint cannot be repaired",
            "quantize again: annie-quant quantize --strategy direct",
        )
    return sizes.pop() if sizes else modelopt.config(folder).group or 16
