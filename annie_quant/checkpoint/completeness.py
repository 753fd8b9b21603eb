"""Check of an audit that the decoder is complete: each layer that config.json counts, and each tensor of a layer.

A lost tensor is a fault of no file, and not every loader reports it: transformers initializes it with random values. The
head for multi-token prediction and the vision tower are checked in auxiliary_checks, experts in expert_checks.
"""

from __future__ import annotations

from collections import defaultdict

from annie_quant import models
from annie_quant.checkpoint.auxiliary_checks import is_packed, part_of
from annie_quant.checkpoint.checks import QUANTIZED_SUFFIXES
from annie_quant.checkpoint.linears import Linear, owned_tensors
from annie_quant.checkpoint.shards import INDEX, ModelFolder
from annie_quant.documents import Audit

EMBEDDING, NORM, HEAD = "embed_tokens", "norm", "lm_head"  # outside of the layers; NORM is the last norm
MAX_LAYERS = 10_000
# Ends of names of tensors that a checkpoint may lack: a quantizer's, and what the model computes itself.
OPTIONAL = (*QUANTIZED_SUFFIXES, ".input_scale", ".input_global_scale", ".k_scale", ".v_scale", ".inv_freq")  # fmt: skip


def check(folder: ModelFolder, source: ModelFolder | None, linears: dict[str, Linear], audit: Audit) -> None:
    """Check the shards' other tensors and the decoder's layers, and with a source that each of its tensors is there."""
    check_unlisted(folder, audit)
    layers = decoder_layers(folder, linears)
    check_layers(folder, layers, audit)
    check_outside(folder, audit)
    if source is not None and all(f.code != "decoder_incomplete" for f in audit.findings):
        check_source(folder, source, audit)


def check_unlisted(folder: ModelFolder, audit: Audit) -> None:
    """Check that no shard holds a tensor that the index does not list in it: loaders differ in whether they use it."""
    for name, file in folder.unlisted:
        if name in folder:
            audit.fault("duplicate_tensor", name, f"in {file}, and {INDEX} lists it in {folder.info(name).file}")
        else:
            audit.fault("index_mismatch", name, f"in {file}, and {INDEX} does not list it")


def decoder_layers(folder: ModelFolder, linears: dict[str, Linear]) -> dict[int, set[str]]:
    """Return the decoder's layers by number, each with the names of its modules inside the layer."""
    owned = owned_tensors(linears.values())
    layers: dict[int, set[str]] = defaultdict(set)
    for name in [*(n for n in folder if n not in owned), *(f"{n}.weight" for n in linears)]:
        number = models.short_name(models.layer_of(name)).removeprefix("layers.")
        if folder.family.in_decoder(name) and number.isdecimal() and not name.endswith(OPTIONAL):
            layers[int(number)].add(part_of(folder.family, name))
    return layers


def check_layers(folder: ModelFolder, layers: dict[int, set[str]], audit: Audit) -> None:
    """Check that the layers are those that config.json counts, and that layers of one kind have the same modules."""
    count = folder.text_config.get("num_hidden_layers")
    if count is not None and (type(count) is not int or count < 1):
        problem = f"num_hidden_layers is {str(count)[:40]!r}, expected a positive number"
        audit.fault("config_unreadable", "config.json", problem)
    prefix = next((n.rpartition(".")[0] for n in map(models.layer_of, folder) if n), "")
    if layers and type(count) is int and 0 < count < MAX_LAYERS:
        if missing := sorted(set(range(count)) - set(layers)):
            problem = f"no tensor of this layer, and of {len(missing)} of the {count} layers that config.json counts"
            audit.fault("decoder_incomplete", f"{prefix}.{missing[0]}", problem)
        if extra := sorted(set(layers) - set(range(count))):
            audit.fault("decoder_incomplete", f"{prefix}.{extra[0]}", f"config.json counts {count} layers")
    experts, deltanet = folder.family.experts, folder.family.deltanet
    kinds: dict[tuple[bool, bool, bool], dict[int, set[str]]] = defaultdict(dict)
    for number, parts in layers.items():
        attention = any(models.is_attention(f"{prefix}.{number}.{part}") for part in parts)
        recurrent = deltanet is not None and any(part in (deltanet.output, deltanet.log_decay) for part in parts)
        kinds[attention, recurrent, experts is not None and experts.module in parts][number] = parts
    for (attention, recurrent, _), alike in kinds.items():
        expected = set().union(*alike.values())
        for number, parts in sorted(alike.items()):
            lost = sorted(expected - parts)
            if not (attention or recurrent) and len(kinds) > 1:
                audit.fault("decoder_incomplete", f"{prefix}.{number}", "no attention, and other layers have one")
            elif lost:
                which = f"{', '.join(lost[:3])}{' …' if len(lost) > 3 else ''}"
                audit.fault("decoder_incomplete", f"{prefix}.{number}", f"{which}: missing, and other layers have it")


def check_outside(folder: ModelFolder, audit: Audit) -> None:
    """Check the embedding, the last norm and, where config.json states that it is not the embedding, the head."""
    modules = {models.short_name(n).rpartition(".")[0] for n in folder if not folder.family.is_auxiliary(n)}
    if not folder.text_config.get("num_hidden_layers"):
        return
    for name in (EMBEDDING, NORM) if may_be_tied(folder) else (EMBEDDING, NORM, HEAD):
        if name not in modules:
            audit.fault("decoder_incomplete", name, "missing")


def check_source(folder: ModelFolder, source: ModelFolder, audit: Audit) -> None:
    """Check that each tensor of the source's decoder is there, in its own or in a quantized form."""
    experts, tied = folder.family.experts, may_be_tied(folder)
    lost = []
    for name in source:
        optional = name.endswith(OPTIONAL) or (tied and models.short_name(name).startswith(HEAD))
        routed = experts is not None and models.in_layer(name).startswith(f"{experts.module}.")
        if optional or routed or source.family.is_auxiliary(name):
            continue
        if folder.find(name) is None and not is_packed(folder, name):
            lost.append(name)
    if lost:
        audit.fault("decoder_incomplete", lost[0], f"missing, as {len(lost)} tensors of the source are")


def may_be_tied(folder: ModelFolder) -> bool:
    """Return whether the head may be the embedding. Classes differ in their default, so only a stated False excludes it."""
    stated = folder.config.get("tie_word_embeddings", folder.text_config.get("tie_word_embeddings"))
    return stated is not False
