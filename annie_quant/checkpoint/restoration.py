"""Give a checkpoint the MTP head and the vision tower that it lost back from its source: tensors, settings, exclusions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from annie_quant.checkpoint.dialects import QuantizedFolder, compressed_tensors, modelopt
from annie_quant.checkpoint.linears import covering_pattern, excluded_module
from annie_quant.checkpoint.runtime_names import is_multimodal
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import Planned, copied
from annie_quant.core.untrusted import JsonObject


@dataclass(frozen=True)
class RepairPlan:
    """A repaired copy.

    tensors: what is written, under the copy's names.
    files: JSON files by name, config.json among them.
    actions: the repairs, one sentence each.
    """

    tensors: list[Planned]
    files: dict[str, JsonObject]
    actions: list[str]


def describe_lost(folder: ModelFolder, lost: Sequence[str]) -> list[str]:
    """Return one sentence for the MTP head and one for the vision tower, where they lost tensors."""
    family = folder.family
    sentences = []
    for part, is_in_part in ((family.mtp, family.in_mtp), (family.vision, family.in_vision)):
        count = sum(map(is_in_part, lost))
        if count:
            sentences.append(f"{part}*: {count} missing tensors taken from the source")
    return sentences


def with_lost_settings(
    source: ModelFolder, config: JsonObject, multimodal: bool
) -> tuple[JsonObject, list[str]]:
    """Return config.json with the lost settings of the head and the tower, and the repairs.

    multimodal: whether the copy has the multimodal form, which needs the tower's settings.
    """
    config = dict(config)
    text = config
    if isinstance(config.get("text_config"), dict):
        text = dict(config["text_config"])
        config["text_config"] = text
    lost = [("mtp_num_hidden_layers", source.text_config, text)]
    if multimodal:
        lost.append(("vision_config", source.config, config))
    actions = []
    for name, values, target in lost:
        if target.get(name) in (None, 0) and values.get(name) not in (None, target.get(name)):
            target[name] = values[name]
            actions.append(f"config.json: {name} taken from the source")
    return config, actions


def plan_restoration(model: QuantizedFolder, source: ModelFolder, lost: list[str]) -> RepairPlan:
    """Plan a copy with lost tensors of `source`, their settings and entries of excluded linears.

    lost: the source's names of the tensors.
    """
    folder = model.folder
    config, actions = with_lost_settings(source, folder.config, is_multimodal(folder))
    if model.dialect is compressed_tensors and folder.quantization:
        ignore = [e for e in folder.quantization.get("ignore") or [] if isinstance(e, str)]
        found = {excluded_module(source, name) for name in lost}
        modules = {module for module in found if module is not None}
        added = [m for m in sorted(modules) if not covering_pattern(m, ignore)]
        config["quantization_config"] = folder.quantization | {"ignore": [*ignore, *added]}
        if added:
            actions.append(f"config.json: {len(added)} linears of them added to ignore")
    files = {"config.json": config}
    exported = folder.json(modelopt.HF_QUANT_CONFIG)
    if exported is not None:
        files[modelopt.HF_QUANT_CONFIG] = exported
    tensors = [*(copied(folder, n) for n in folder), *(copied(source, n) for n in lost)]
    return RepairPlan(tensors, files, describe_lost(folder, lost) + actions)
