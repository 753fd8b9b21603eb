"""Check that nothing was lost.

The decoder's tensors, experts, the head for multi-token prediction, the vision tower.

No file is invalid where a tensor is lost, and not every loader reports it: transformers initializes
it with random values, and reads neither head nor tower from a text checkpoint. Without its weights
none of the MTP head's tokens are accepted (vLLM #35548). ModelOpt leaves merged experts unquantized without a message
(#1340) and writes dead experts and scales that underflow (#1382, #1421); vLLM drops the scales of
merged experts when it loads them (#49638).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from annie_quant import models
from annie_quant.checkpoint.checks import fault
from annie_quant.checkpoint.checks.source import same_tensor
from annie_quant.checkpoint.checks.tensors import QUANTIZED_SUFFIXES
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import Linear, covering_pattern, owned_tensors
from annie_quant.checkpoint.runtime_names import is_multimodal
from annie_quant.checkpoint.shards import INDEX, ModelFolder
from annie_quant.documents import Finding
from annie_quant.models import Experts
from annie_quant.models.family import ATTENTION_PREFIX

if TYPE_CHECKING:
    from annie_quant.checkpoint.dialects import QuantizedFolder

# outside of the layers; NORM is the last norm
EMBEDDING_MODULE = "embed_tokens"
NORM_MODULE = "norm"
HEAD_MODULE = "lm_head"
MAX_LAYERS = 10_000
# Suffixes of tensors that a checkpoint may lack: those of quantizers, and those that the model
# computes itself.
OPTIONAL_ENDS = (
    *QUANTIZED_SUFFIXES,
    ".input_scale",
    ".input_global_scale",
    ".k_scale",
    ".v_scale",
    ".inv_freq",
)


def check_decoder(model: QuantizedFolder, source: ModelFolder | None) -> Iterator[Finding]:
    """Check the shards' other tensors and the decoder's layers.

    With a source, each of its tensors must be there.
    """
    folder = model.folder
    yield from check_unlisted(folder)
    lost = list(check_complete(model))
    yield from lost
    if source is not None and all(f.code != "decoder_incomplete" for f in lost):
        yield from check_source(folder, source)


def check_complete(model: QuantizedFolder) -> Iterator[Finding]:
    """Check that the decoder's layers are complete, and the embedding, the last norm and the head are there."""
    yield from check_layers(model.folder, decoder_layers(model))
    yield from check_outside(model.folder)


def check_unlisted(folder: ModelFolder) -> Iterator[Finding]:
    """Check that the index lists every tensor of a shard in that shard.

    Loaders differ in whether they use an unlisted one.
    """
    for name, file in folder.unlisted:
        if name in folder:
            problem = f"in {file}, and {INDEX} lists it in {folder.info(name).file}"
            yield fault("duplicate_tensor", name, problem)
        else:
            yield fault("index_mismatch", name, f"in {file}, and {INDEX} does not list it")


def decoder_layers(model: QuantizedFolder) -> dict[int, set[str]]:
    """Return the decoder's layers by number, each with the names of its modules inside the layer."""
    family = model.folder.family
    layers = defaultdict[int, set[str]](set)
    for name in [*model.unowned, *(f"{n}.weight" for n in model.linears)]:
        number = models.short_name(models.layer_of(name)).removeprefix("layers.")
        if family.in_decoder(name) and number.isdecimal() and not name.endswith(OPTIONAL_ENDS):
            layers[int(number)].add(module_in_layer(family, name))
    return layers


def module_in_layer(family: models.Family, name: str) -> str:
    """Return the module of a tensor inside its layer; the experts, merged or single, are one."""
    inside = models.in_layer(name)
    experts = family.experts
    if experts and experts.contain(name):
        return experts.module
    for end in (".weight_packed", ".weight_scale_inv", ".weight"):
        inside = inside.removesuffix(end)
    return inside


def check_layers(folder: ModelFolder, layers: dict[int, set[str]]) -> Iterator[Finding]:
    """Check that the layers are those that config.json counts, and complete.

    Layers of one kind must have the same modules.
    """
    count = folder.text_config.get("num_hidden_layers")
    n_layers = count if type(count) is int and count > 0 else 0
    if count is not None and not n_layers:
        problem = f"num_hidden_layers is {str(count)[:40]!r}, expected a positive number"
        yield fault("config_unreadable", "config.json", problem)
    prefix = next((n.rpartition(".")[0] for n in map(models.layer_of, folder) if n), "")

    def lost(number: int, problem: str) -> Finding:
        return fault("decoder_incomplete", f"{prefix}.{number}", problem)

    if layers and 0 < n_layers < MAX_LAYERS:
        expected = set(range(n_layers))
        missing = sorted(expected - layers.keys())
        extra = sorted(layers.keys() - expected)
        if missing:
            which = f"of {len(missing)} of the {count} layers that config.json counts"
            yield lost(missing[0], f"no tensor of this layer, and {which}")
        if extra:
            yield lost(extra[0], f"config.json counts {count} layers")
    kinds: dict[tuple[bool, bool, bool], dict[int, set[str]]] = defaultdict(dict)
    for number, modules in layers.items():
        kinds[kind_of_layer(folder.family, modules)][number] = modules
    for (attention, recurrent, _), alike in kinds.items():
        all_modules = set().union(*alike.values())
        for number, modules in sorted(alike.items()):
            names = sorted(all_modules - modules)
            if not (attention or recurrent) and len(kinds) > 1:
                yield lost(number, "no attention, and other layers have one")
            elif names:
                shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
                yield lost(number, f"{shown}: missing, and other layers have it")


def kind_of_layer(family: models.Family, modules: set[str]) -> tuple[bool, bool, bool]:
    """Return whether a layer has attention with a KV cache, DeltaNet, and experts."""
    attention = any(module.startswith(ATTENTION_PREFIX) for module in modules)
    deltanet = family.deltanet
    recurrent = deltanet is not None and not modules.isdisjoint(
        (deltanet.output, deltanet.log_decay)
    )
    return attention, recurrent, family.experts is not None and family.experts.module in modules


def check_outside(folder: ModelFolder) -> Iterator[Finding]:
    """Check the embedding, the last norm, and the head where it is not the embedding."""
    if not folder.text_config.get("num_hidden_layers") or not models.is_known(folder.config):
        return  # other families name them otherwise, such as Phi's final_layernorm
    expected = [EMBEDDING_MODULE, NORM_MODULE]
    if not may_be_tied(folder):
        expected.append(HEAD_MODULE)
    decoder = [name for name in folder if not folder.family.is_auxiliary(name)]
    modules = {models.short_name(name).rpartition(".")[0] for name in decoder}
    for name in expected:
        if name not in modules:
            yield fault("decoder_incomplete", name, "missing")


def check_source(folder: ModelFolder, source: ModelFolder) -> Iterator[Finding]:
    """Check that each tensor of the source's decoder is there, plain or quantized."""
    experts = folder.family.experts
    lost = []
    for name in source:
        routed = experts is not None and experts.contain(name)
        tied = models.short_name(name).startswith(HEAD_MODULE) and may_be_tied(folder)
        optional = name.endswith(OPTIONAL_ENDS) or source.family.is_auxiliary(name)
        if not (routed or tied or optional) and is_missing(folder, name):
            lost.append(name)
    if lost:
        problem = f"missing, as {len(lost)} tensors of the source are"
        yield fault("decoder_incomplete", lost[0], problem)


def may_be_tied(folder: ModelFolder) -> bool:
    """Return whether the head may be the embedding.

    Classes have different defaults, so only an explicit False excludes it.
    """
    return folder.ties_embedding is not False


def is_missing(folder: ModelFolder, name: str) -> bool:
    """Return whether a tensor is there in no form.

    Neither by any of its names, nor under compressed-tensors' name of codes.
    """
    packed = any(f"{n}_packed" in folder for n in models.aliases(name) if n.endswith(".weight"))
    return folder.find(name) is None and not packed


# ---- the head for multi-token prediction and the vision tower


def mtp_tensors(folder: ModelFolder) -> list[str]:
    """Return the names of the tensors of the MTP head, those of quantizers included."""
    return [n for n in folder if folder.family.in_mtp(n)]


def vision_tensors(folder: ModelFolder) -> list[str]:
    """Return the names of the tensors of the vision tower."""
    return [n for n in folder if folder.family.in_vision(n)]


def missing_tensors(folder: ModelFolder, source: ModelFolder) -> list[str]:
    """Return the source's names of the MTP head's and vision tower's missing tensors.

    The tower is missing only where the folder's class takes images.
    """
    names = mtp_tensors(source)
    if is_multimodal(folder):
        names += vision_tensors(source)
    return sorted(n for n in names if is_missing(folder, n))


def describe_mtp(model: QuantizedFolder) -> str | None:
    """Return the head's number of weights per format ("15 BF16"), "missing", or None.

    None for a model without a head.
    """
    folder = model.folder
    names = mtp_tensors(model.folder)
    if not names:
        return "missing" if mtp_layers(folder) else None
    quantized = [x for m, x in model.linears.items() if folder.family.in_mtp(m)]
    owned = owned_tensors(quantized)
    formats = Counter(x.format for x in quantized)
    formats.update(folder.info(n).dtype for n in names if n not in owned)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(formats.items()))


def mtp_layers(folder: ModelFolder) -> int:
    """Return the number of MTP layers that config.json gives, 0 where it gives none."""
    value = folder.text_config.get("mtp_num_hidden_layers")
    return value if type(value) is int and 0 < value < 100 else 0


def check_auxiliary(model: QuantizedFolder, source: ModelFolder | None) -> Iterator[Finding]:
    """Check that the MTP head is there, and fits the model. Servers differ in whether they load one in NVFP4 (loader_support.py).

    With a source, nothing may be lost.
    """
    folder = model.folder
    layers = mtp_layers(model.folder)
    lost = [] if source is None else list(check_lost(folder, source))
    yield from lost
    mtp_lost = any(f.code == "mtp_missing" for f in lost)
    if mtp_tensors(folder):
        yield from check_mtp_shapes(model, complete=layers == 0 or mtp_lost)
    elif layers and not mtp_lost:
        head = f"there is no {folder.family.mtp}* tensor (audit --repair --source)"
        yield fault("mtp_missing", "config.json", f"mtp_num_hidden_layers is {layers} and {head}")


def check_lost(folder: ModelFolder, source: ModelFolder) -> Iterator[Finding]:
    """Check that the source's head and tower are there, and that the tower has the same bytes."""
    lost: dict[str, list[str]] = defaultdict(list)
    for name in missing_tensors(folder, source):
        lost["vision_missing" if folder.family.in_vision(name) else "mtp_missing"].append(name)
    for code, names in lost.items():
        problem = "such tensors of the source are missing (audit --repair --source)"
        yield fault(code, names[0], f"{len(names)} {problem}")
    for name in vision_tensors(folder):
        original = source.find(name)
        if original is None:
            yield fault("vision_differs", name, "the source has no such tensor")
        elif not same_tensor(folder, name, source, original):
            problem = "not the source's bytes; the vision tower must stay as it is"
            yield fault("vision_differs", name, problem)


def check_mtp_shapes(model: QuantizedFolder, complete: bool) -> Iterator[Finding]:
    """Check the head's own tensors by the hidden size, and its layers by the decoder's.

    complete: do not report missing tensors: none is expected, or a missing one was reported.
    """
    folder = model.folder
    family = folder.family
    hidden = folder.text_config.get("hidden_size")
    for end, factors in family.mtp_shapes.items():
        name = f"{family.mtp}{end}"
        if name not in folder:
            if not complete and is_missing(folder, name):
                complete = True
                yield fault("mtp_missing", name, "the MTP head has other tensors and not this one")
            continue
        shape = shape_of(model, name)
        expected = tuple(f * hidden for f in factors) if type(hidden) is int else shape
        if shape is not None and shape != expected:
            yield fault("mtp_shape", name, f"shape {list(shape)}, expected {list(expected or ())}")
    decoder: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for name in filter(family.in_decoder, folder):
        shape = shape_of(model, name)
        if shape:
            decoder[models.in_layer(name)].add(shape)
    if not complete:
        yield from check_mtp_layers(folder, set(decoder))
    for name in mtp_tensors(folder):
        shapes = decoder.get(models.in_layer(name))
        shape = shape_of(model, name)
        if shapes and shape and shape not in shapes:
            expected_text = f"the decoder's layers have {list(min(shapes))}"
            yield fault("mtp_shape", name, f"shape {list(shape)}, and {expected_text}")


def check_mtp_layers(folder: ModelFolder, decoder: set[str]) -> Iterator[Finding]:
    """Check that the head's layers have the MLP and the attention of a decoder layer.

    Without them its drafts are noise.

    decoder: names, inside a decoder layer, of the tensors that stand for weights.
    """
    family = folder.family
    experts = family.experts
    inside: dict[str, set[str]] = defaultdict(set)
    for name in mtp_tensors(folder):
        layer = models.layer_of(name)
        if layer:
            inside[layer].add(module_in_layer(family, name))
    expected = set()
    for name in decoder:
        if name.startswith(("mlp.", ATTENTION_PREFIX)) and not name.endswith(
            ("k_scale", "v_scale")
        ):
            expected.add(module_in_layer(family, f"model.layers.0.{name}"))
    for layer, modules in sorted(inside.items()):
        missing = sorted(expected - modules)
        if missing:
            module = missing[0]
            which = " of all experts" if experts and module == experts.module else ""
            problem = f"the MTP head's layer lacks the tensors{which} of {module}"
            yield fault("mtp_missing", f"{layer}.{module}", problem)
            return


def shape_of(model: QuantizedFolder, name: str) -> tuple[int, ...] | None:
    """Return the shape of the weight that a tensor stands for; None for a quantizer's tensor."""
    module, _, end = name.rpartition(".")
    linear = model.linears.get(module)
    if linear is None or end == "bias":
        return model.folder.info(name).shape
    if end != "weight":
        return None
    try:
        return linear.shape(model.folder)
    except ShardError:
        return None


# ---- mixtures of experts: complete, in one format, with scales, and with scales of similar size

# Largest factor between a scale of one expert and the layer's median. Weights of trained experts
# differ by about ten; activations by more, but an expert that saw no token has an input scale of
# some epsilon.
SCALE_RANGES = {"tensor": 100.0, "input": 1000.0}
PACKED_DTYPES = ("U8", "I8", "F8_E4M3")


def check_experts(model: QuantizedFolder) -> Iterator[Finding]:
    """Check the experts of every layer. Yields nothing for a dense model."""
    folder = model.folder
    experts = model.folder.family.experts
    if experts is None:
        return
    weights: dict[str, list[str]] = defaultdict(list)  # layer → names of single experts' weights
    for name in folder:
        expert = experts.split(name)
        if expert and name.endswith((".weight", ".weight_packed")):
            weights[expert[0]].append(name)
    quantized: dict[str, list[Linear]] = defaultdict(list)  # layer → linears of single experts
    for x in model.linears.values():
        expert = experts.split(x.name)
        if expert:
            quantized[expert[0]].append(x)
    expected = folder.text_config.get(experts.count)
    for layer, names in sorted(weights.items()):
        module = f"{layer}.{experts.module}"
        yield from check_expert_numbers(module, experts, names, expected)
        yield from check_expert_formats(model, module, names)
        yield from check_expert_ranges(folder, quantized[layer])
    for name in folder:
        yield from check_router(folder, name, experts, expected)
    for name in sorted(model.linears):
        if models.in_layer(name) == experts.router or name.endswith("shared_expert_gate"):
            yield fault(
                "router_quantized",
                name,
                "a quantized router chooses other experts; it must stay in 16 bits",
            )
    for name in folder:
        if folder.parts_of(name):
            yield from check_merged(model, name, expected)


def check_expert_numbers(
    module: str, experts: Experts, weights: list[str], expected: object
) -> Iterator[Finding]:
    """Check that the experts of a layer are 0..n-1, and that each has every linear.

    expected: the number of experts in the configuration.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    for expert in map(experts.split, weights):
        if expert:
            numbers[expert[2]].add(expert[1])
    count = max(map(max, numbers.values())) + 1
    if isinstance(expected, int) and expected > 0:
        count = expected
    for name in experts.linears:
        stored = numbers[name]
        missing = set(range(min(count, 1 << 16))) - stored
        if missing:
            which = f"expert {min(missing)} has no {name}"
        elif len(stored) != count:
            which = f"expert {max(stored)} is one too many"
        else:
            continue
        problem = f"{len(stored)} of {count} experts with {name}; {which}"
        yield fault("expert_count", module, problem)


def check_expert_formats(
    model: QuantizedFolder, module: str, weights: list[str]
) -> Iterator[Finding]:
    """Check that all experts of a layer have one format.

    Servers run them as one matrix multiplication.
    """
    formats = defaultdict(list)
    for name in weights:
        linear = name.rpartition(".")[0]
        quantized = model.linears.get(linear)
        formats[quantized.format if quantized else model.folder.info(name).dtype].append(linear)
    if len(formats) > 1:
        fewest = min(formats, key=lambda f: (len(formats[f]), f))
        others = ", ".join(f"{len(n)} linears {f}" for f, n in sorted(formats.items()))
        yield fault(
            "experts_mixed",
            module,
            f"served together with different formats ({others}); {formats[fewest][0]}",
        )


def check_expert_ranges(folder: ModelFolder, linears: list[Linear]) -> Iterator[Finding]:
    """Check that no expert's scale is far from those of the layer's other experts.

    linears: of one layer's experts.
    """
    if folder.headers_only:
        return
    scale_of = {"tensor": Linear.tensor_scale, "input": Linear.input_scale}
    for kind, limit in SCALE_RANGES.items():
        by_linear: dict[str, dict[str, float]] = defaultdict(dict)
        for x in linears:
            try:
                scale = scale_of[kind](x, folder)
            except ShardError:
                continue  # reported by the check of the linear itself
            value = float(scale.multiplier) if scale else 0.0
            if np.isfinite(value) and value > 0:
                by_linear[x.name.rpartition(".")[2]][x.name] = value
        reason = "it saw no token in calibration" if kind == "input" else "is this expert dead?"
        for values in by_linear.values():
            median = float(np.median(list(values.values())))
            for name, value in values.items():
                if not median / limit <= value <= median * limit:
                    others = f"the median of the layer's experts is {median:.3g}"
                    problem = f"{kind} scale {value:.3g}, and {others}; {reason}"
                    yield fault("expert_scale_range", name, problem)


def check_router(
    folder: ModelFolder, name: str, experts: Experts, expected: object
) -> Iterator[Finding]:
    """Check that a router has one row per expert."""
    if models.in_layer(name) != f"{experts.router}.weight" or not isinstance(expected, int):
        return
    info = folder.info(name)
    if len(info.shape) == 2 and info.dtype not in PACKED_DTYPES and info.shape[0] != expected:
        problem = f"a router for {info.shape[0]} experts, and the configuration has {expected}"
        yield fault("expert_count", name, problem)


def check_merged(model: QuantizedFolder, name: str, expected: object) -> Iterator[Finding]:
    """Check merged experts in 16 bits: their number, and that they are excluded."""
    folder = model.folder
    config = model.config
    info = folder.info(name)
    if isinstance(expected, int) and info.shape[0] != expected:
        problem = f"{info.shape[0]} experts, and the configuration has {expected}"
        yield fault("expert_count", name, problem)
    base = name.removesuffix(".weight")
    names = (name, base, base.rpartition(".")[0])
    listed = config.layers or any(covering_pattern(n, config.excluded) for n in names)
    if model.linears and not listed and not folder.family.is_auxiliary(name):
        reason = "ModelOpt leaves merged experts out without a message"
        problem = f"experts in {info.dtype}, not listed as excluded; {reason}"
        yield fault("experts_unquantized", name, problem)
