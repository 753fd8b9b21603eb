"""Checks of an audit on the parts next to the decoder: the head for multi-token prediction (MTP) and the vision tower.

Tools lose both: transformers reads neither from a text checkpoint. Without its weights an MTP head is accepted never
(vLLM #35548), and one quantized to NVFP4 was accepted 0 times of 24, against 48 % in 16 bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from annie_quant import models
from annie_quant.checkpoint import runtime_names
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import Linear, owned_tensors
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.documents import Audit


def mtp_tensors(folder: ModelFolder) -> list[str]:
    """Return the names of the tensors of the MTP head, those of quantizers included."""
    return [n for n in folder if f".{folder.family.mtp}" in f".{n}"]


def vision_tensors(folder: ModelFolder) -> list[str]:
    """Return the names of the tensors of the vision tower."""
    return [n for n in folder if folder.family.vision in n]


def missing_tensors(folder: ModelFolder, source: ModelFolder) -> list[str]:
    """Return the source's names of the MTP head's and the vision tower's tensors that a folder does not have.

    The tower is missing only where the folder's class takes images.
    """
    names = mtp_tensors(source)
    if runtime_names.is_multimodal(folder):
        names += vision_tensors(source)
    return sorted(n for n in names if folder.find(n) is None and not is_packed(folder, n))


def is_packed(folder: ModelFolder, name: str) -> bool:
    """Return whether a weight is stored under compressed-tensors' name of codes."""
    return any(f"{n}_packed" in folder for n in models.aliases(name) if n.endswith(".weight"))


def describe_mtp(folder: ModelFolder, linears: dict[str, Linear]) -> str | None:
    """Return the head's number of weights per format ("15 BF16"), "missing", or None for a model without a head."""
    names = mtp_tensors(folder)
    if not names:
        return "missing" if expected_layers(folder) else None
    quantized = {m: x for m, x in linears.items() if f".{folder.family.mtp}" in f".{m}"}
    owned = owned_tensors(quantized.values())
    formats = Counter(x.format for x in quantized.values())
    formats.update(folder.info(n).dtype for n in names if n not in owned)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(formats.items()))


def expected_layers(folder: ModelFolder) -> int:
    """Return the number of MTP layers that config.json gives, 0 where it gives none."""
    value = folder.text_config.get("mtp_num_hidden_layers")
    return value if type(value) is int and 0 < value < 100 else 0


def check(folder: ModelFolder, source: ModelFolder | None, linears: dict[str, Linear], audit: Audit) -> None:
    """Check that the MTP head is there, not in NVFP4 and fits the model, and with a source that nothing was lost."""
    names, layers = mtp_tensors(folder), expected_layers(folder)
    if source is not None:
        check_source(folder, source, audit)
    if layers and not names and not any(f.code == "mtp_missing" for f in audit.findings):
        audit.fault(
            "mtp_missing",
            "config.json",
            f"mtp_num_hidden_layers is {layers} and there is no {folder.family.mtp}* tensor (audit --repair --source)",
        )
    if names:
        check_shapes(folder, linears, layers, audit)
    quantized = sorted(m for m, x in linears.items() if x.format == "nvfp4" and f".{folder.family.mtp}" in f".{m}")
    if quantized:
        audit.fault(
            "mtp_quantized",
            quantized[0],
            f"{len(quantized)} linears of the MTP head are in NVFP4; drafts of such a head are not accepted",
        )


def check_source(folder: ModelFolder, source: ModelFolder, audit: Audit) -> None:
    """Check that the head and the tower of the source are there, and that the tower's bytes are the source's."""
    lost: dict[str, list[str]] = defaultdict(list)
    for name in missing_tensors(folder, source):
        lost["vision_missing" if folder.family.vision in name else "mtp_missing"].append(name)
    for code, names in lost.items():
        audit.fault(code, names[0], f"{len(names)} such tensors of the source are missing (audit --repair --source)")
    for name in vision_tensors(folder):
        original = source.find(name)
        if original is None:
            audit.fault("vision_differs", name, "the source has no such tensor")
        elif not same_tensor(folder, name, source, original):
            audit.fault("vision_differs", name, "not the source's bytes; the vision tower must stay as it is")


def same_tensor(folder: ModelFolder, name: str, source: ModelFolder, original: str) -> bool:
    """Return whether two tensors have one shape, one type, and the same bytes."""
    from annie_quant.checkpoint.source_diff import same_bytes

    return folder.info(name).shape == source.info(original).shape and same_bytes(folder, name, source, original)


def check_shapes(folder: ModelFolder, linears: dict[str, Linear], layers: int, audit: Audit) -> None:
    """Check the head's own tensors by the hidden size, and its layers by the decoder's."""
    family, hidden = folder.family, folder.text_config.get("hidden_size")
    for end, factors in family.mtp_shapes.items():
        name = f"{family.mtp}{end}"
        if name not in folder:
            if layers and not is_packed(folder, name) and not has_mtp_fault(audit):
                audit.fault("mtp_missing", name, "the MTP head has other tensors and not this one")
            continue
        shape = shape_of(folder, name, linears)
        expected = tuple(f * hidden for f in factors) if type(hidden) is int else shape
        if shape is not None and shape != expected:
            audit.fault("mtp_shape", name, f"shape {list(shape)}, expected {list(expected or ())}")
    decoder: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for name in folder:
        if family.in_decoder(name) and (shape := shape_of(folder, name, linears)):
            decoder[models.in_layer(name)].add(shape)
    if layers and not has_mtp_fault(audit):
        check_layers_complete(folder, set(decoder), audit)
    for name in mtp_tensors(folder):
        shapes, shape = decoder.get(models.in_layer(name)), shape_of(folder, name, linears)
        if shapes and shape and shape not in shapes:
            audit.fault("mtp_shape", name, f"shape {list(shape)}, and the decoder's layers have {list(min(shapes))}")


def check_layers_complete(folder: ModelFolder, decoder: set[str], audit: Audit) -> None:
    """Check that the head's layers have the MLP and the attention of a decoder layer; one that lost them drafts noise.

    decoder: the names inside a decoder layer of tensors that stand for weights.
    """
    family, experts = folder.family, folder.family.experts
    inside: dict[str, set[str]] = defaultdict(set)
    for name in mtp_tensors(folder):
        if layer := models.layer_of(name):
            inside[layer].add(part_of(family, name))
    expected = {
        part_of(family, f"model.layers.0.{n}")
        for n in decoder
        if n.startswith("mlp.") or models.is_attention(f"model.layers.0.{n}")
    }
    for layer, parts in sorted(inside.items()):
        for part in sorted(p for p in expected - parts if not p.endswith(("k_scale", "v_scale"))):
            where = f"{layer}.{part}"
            which = " of all experts" if experts and part == experts.module else ""
            audit.fault("mtp_missing", where, f"the MTP head's layer lacks the tensors{which} of {part}")
            return


def part_of(family: models.Family, name: str) -> str:
    """Return the module of a tensor inside its layer; the experts, merged or single, are one."""
    inside, experts = models.in_layer(name), family.experts
    if experts and inside.startswith(f"{experts.module}."):
        return experts.module
    for end in (".weight_packed", ".weight_scale_inv", ".weight"):
        inside = inside.removesuffix(end)
    return inside


def has_mtp_fault(audit: Audit) -> bool:
    return any(f.code == "mtp_missing" for f in audit.findings)


def shape_of(folder: ModelFolder, name: str, linears: dict[str, Linear]) -> tuple[int, ...] | None:
    """Return the shape of the weight that a tensor stands for, or None for a tensor of a quantizer."""
    module = name.removesuffix(".weight")
    if module in linears and name.endswith(".weight"):
        try:
            return linears[module].shape(folder)
        except ShardError:
            return None
    is_scale = name.rpartition(".")[2] not in ("weight", "bias") and name.rpartition(".")[0] in linears
    return None if is_scale else folder.info(name).shape
