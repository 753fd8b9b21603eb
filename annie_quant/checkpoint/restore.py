"""Put the MTP head and the vision tower of the source back into a checkpoint of any layout, without a change of the rest.

Tools lose both in every layout: fine-tuning tools in plain checkpoints, llm-compressor in compressed-tensors. A repair
(repair.py) rewrites ModelOpt's layout alone; here all tensors keep their bytes and names.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from annie_quant.checkpoint import auxiliary_checks, dialects, runtime_names, writer
from annie_quant.checkpoint.dialects import compressed_tensors, modelopt
from annie_quant.checkpoint.linears import covering_pattern, excluded_module
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.files import write_json


def lost_tensors(folder: ModelFolder, source: ModelFolder) -> list[str]:
    """Return the source's names of the MTP head's and the vision tower's tensors that a checkpoint lost."""
    return auxiliary_checks.missing_tensors(folder, source)


def restore(folder: ModelFolder, source: ModelFolder, target: Path) -> list[str]:
    """Write a copy of `folder` with the lost tensors of `source`, their settings, and their entries of excluded linears.

    Returns what was done, one sentence each.
    """
    lost = lost_tensors(folder, source)
    plan = []
    for owner, names in ((folder, list(folder)), (source, lost)):
        for name in names:
            info = owner.info(name)
            plan.append(writer.Planned(name, info.dtype, info.shape, partial(owner.pieces, name)))
    actions = [
        f"{part}*: {count} missing tensors taken from the source"
        for part in (folder.family.mtp, folder.family.vision)
        if (count := sum(part in name for name in lost))
    ]
    config = dict(folder.config)
    actions += lost_settings(folder, source, config)
    modules = sorted({m for name in lost if (m := excluded_module(source, name))})
    actions += exclude(folder, config, modules)
    writer.write(target, plan)
    writer.copy_small_files(folder, target)
    exported = folder.json(modelopt.HF_QUANT_CONFIG)
    if exported is not None:
        write_json(target / modelopt.HF_QUANT_CONFIG, exported)
    write_json(target / "config.json", config)
    return actions


def lost_settings(folder: ModelFolder, source: ModelFolder, config: dict[str, Any]) -> list[str]:
    """Set in `config` what config.json lost of the head and the tower. Returns what was done."""
    actions = []
    inner = config.get("text_config")
    if isinstance(inner, dict):
        inner = config["text_config"] = dict(inner)
    for field, values in (("mtp_num_hidden_layers", source.text_config), ("vision_config", source.config)):
        target = inner if isinstance(inner, dict) and field.startswith("mtp") else config
        applies = field.startswith("mtp") or runtime_names.is_multimodal(folder)
        if applies and values.get(field) is not None and target.get(field) in (None, 0):
            target[field] = values[field]
            actions.append(f"config.json: {field} taken from the source")
    return actions


def exclude(folder: ModelFolder, config: dict[str, Any], modules: list[str]) -> list[str]:
    """List linears in the `ignore` of compressed-tensors' settings that no entry covers. Returns what was done."""
    if dialects.of(folder) is not compressed_tensors:
        return []
    quant = dict(config["quantization_config"])
    ignore = [e for e in quant.get("ignore") or [] if isinstance(e, str)]
    added = [m for m in modules if not covering_pattern(m, ignore)]
    config["quantization_config"] = quant | {"ignore": [*ignore, *added]}
    return [f"config.json: {len(added)} linears of them added to ignore"] if added else []
