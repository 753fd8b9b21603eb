"""Put the MTP head and the vision tower of the source back into a checkpoint of any layout, without a change of the rest.

Tools lose both in every layout: fine-tuning tools in plain checkpoints, llm-compressor in compressed-tensors. A repair
(repair.py) rewrites ModelOpt's layout alone; here all tensors keep their bytes and names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from annie_quant.checkpoint import dialects, runtime_names, writer
from annie_quant.checkpoint.dialects import compressed_tensors, modelopt
from annie_quant.checkpoint.linears import covering_pattern, excluded_module
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.files import write_json


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
