"""Check the quantization settings against the tensors, and the scales of an FP8 KV cache.

Servers multiply an FP8 KV cache by k_scale and v_scale, which are 1.0 where they are missing or not
calibrated (sgl-cookbook #237); vLLM cannot calibrate them itself for hybrid models. ModelOpt's
`fp8_cast` means 1.0 (amax 448): 0.47 then stores no scale, other versions store 1.0, and until 0.42
ModelOpt raised calibrated scales to 1.0. A ModelOpt quantizer without calibration stores no scale,
so a 1.0 of ModelOpt is never a missing calibration; a 1.0 of any other producer is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from annie_quant import models
from annie_quant.checkpoint import other_formats
from annie_quant.checkpoint.checks import fault, finding_of
from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import (
    QuantConfig,
    covering_pattern,
    plain_linears,
)
from annie_quant.checkpoint.shards import ModelFolder, ValuesUnread
from annie_quant.core.errors import CheckpointError
from annie_quant.core.text import printable
from annie_quant.documents import Finding
from annie_quant.models.formats import KNOWN_ALGORITHMS

if TYPE_CHECKING:
    from annie_quant.checkpoint.dialects import QuantizedFolder

MODELOPT_VERSION = re.compile(r"0\.\d{1,3}\b")  # our own exports have another text there
KV_ENDS = (".k_scale", ".v_scale")


def unread_method(model: QuantizedFolder) -> Finding | None:
    """Return the finding about settings that name a layout which is not read here."""
    folder = model.folder
    method = folder.quantization.get("quant_method")
    if model.dialect is not None:
        return None
    if not method:
        dtypes = {name: info.dtype for name, info in folder.tensors.items()}
        files = [path.name for path in folder.path.iterdir()]
        tool = other_formats.other_tool(folder.config, files, dtypes)
        problem = f"weights quantized by {tool}, a layout that is not read here"
        return Finding("method_unknown", "config.json", problem) if tool else None
    expected = "expected modelopt, compressed-tensors or fp8 in blocks"
    problem = f"quant_method {printable(str(method), 40)!r} is not read here, {expected}"
    return Finding("method_unknown", "config.json", problem)


def check_algorithm(model: QuantizedFolder) -> None:
    """Raise CheckpointError for an algorithm that is not known here.

    Its activation scales may have another meaning.
    """
    algo = model.config.algo
    path = model.folder.path
    if algo and algo not in KNOWN_ALGORITHMS:
        raise CheckpointError(
            f"{path}: quant_algo {printable(algo, 40)!r} is not known here",
            f"only its weights can be converted: annie-quant convert {path} --to bf16",
        )


def check(model: QuantizedFolder) -> Iterator[Finding]:
    """Compare the settings with what is on disk.

    The two files of ModelOpt's settings are also compared with each other.
    """
    folder = model.folder
    linears = model.linears
    config = model.config
    if model.dialect is None:
        return
    inline = bool(folder.quantization)
    if not inline:
        yield fault(
            "config_missing",
            "config.json",
            "no quantization_config; a server would read plain weights",
        )
    second = None
    try:
        second = modelopt.read_file(folder)
    except ShardError as error:
        yield finding_of(error)
    plain = sorted(n for n in plain_linears(folder) if n not in linears)
    if inline and second is not None and model.dialect is modelopt:
        yield from check_agreement(config, second, [*linears, *plain])
    if config.algo and config.algo not in KNOWN_ALGORITHMS:
        problem = f"quant_algo {config.algo[:40]!r} is not known here, expected one of {', '.join(KNOWN_ALGORITHMS)}"
        yield Finding("algorithm_unknown", "config.json", problem)
    if not linears:
        problem = (
            f"the configuration names {config.algo or config.method}, and no tensor is quantized"
        )
        yield Finding("nothing_quantized", "config.json", problem)
        return
    for entry in sorted({e.rpartition(".")[2]: e for e in config.excluded}.items()):
        members = folder.family.fused.get(entry[0])
        if members:
            on_disk = ", ".join(m.rpartition(".")[2] for m in members)
            yield fault(
                "excluded_fused_name",
                entry[1],
                f"excluded by its fused name, and on disk it is {on_disk}",
            )
    for name in sorted(linears):
        pattern = covering_pattern(name, config.excluded)
        if pattern:
            yield fault(
                "excluded_but_quantized",
                name,
                f"listed as excluded (by {pattern!r}) and quantized on disk",
            )
        elif config.layers and not config.algo_of(name):
            yield fault(
                "not_listed",
                name,
                "quantized on disk and not in quantized_layers or a group's targets",
            )
        elif config.layers and ("FP8" in config.algo_of(name)) != (linears[name].format == "fp8"):
            yield fault(
                "format_disagrees",
                name,
                f"listed as {config.algo_of(name)}, on disk {linears[name].format}",
            )
    for name in plain:
        excluded = covering_pattern(name, config.excluded) or folder.family.is_auxiliary(name)
        if config.layers:
            if name in config.layers or (config.algo_of(name) and not excluded):
                yield fault(
                    "listed_but_plain", name, "listed to be quantized, and not quantized on disk"
                )
        elif not excluded:
            yield fault("not_excluded", name, "not quantized on disk and not listed as excluded")


def check_agreement(
    inline: QuantConfig, second: QuantConfig, modules: list[str]
) -> Iterator[Finding]:
    """Compare config.json's settings with those of hf_quant_config.json, module by module."""
    file = modelopt.HF_QUANT_CONFIG
    if inline.algo != second.algo:
        problem = f"{file} has quant_algo {second.algo or 'none'}, config.json has {inline.algo or 'none'}"
        yield Finding("config_disagrees", file, problem)
        return
    if inline.group and second.group and inline.group != second.group:
        yield fault(
            "config_disagrees", file, f"group_size {second.group}, config.json: {inline.group}"
        )
    for name in sorted(modules):
        if bool(covering_pattern(name, inline.excluded)) != bool(
            covering_pattern(name, second.excluded)
        ):
            yield fault(
                "config_disagrees",
                name,
                f"excluded in one of {file} and config.json and not in the other",
            )
    if inline.layers != second.layers:
        name = sorted(set(inline.layers.items()) ^ set(second.layers.items()))[0][0]
        yield fault(
            "config_disagrees",
            name,
            f"{file} and config.json list it differently in quantized_layers",
        )


# Sources: sgl-project/sglang#21601, #36537; vllm-project/vllm#46329, #49011, #54772;
# MiaAI-Lab/Qwen3.8-Flash-Next-Dual-DGX-Sparks#19.
NVFP4_CACHE_SERVERS = (
    "SGLang serves it on SM12x (sglang#21601), vLLM's releases on SM100 (for SM12x vllm#46329 is open); on two Sparks one "
    "development version of SGLang repeated token 0 with thinking and tools (sglang#36537); judge it by eval "
    "--numerics w4a16-nvfp4kv, and in the server"
)


def describe_kv_cache(name: str | None) -> str | None:
    """Return the format of a KV cache, with what is known about servers with one in NVFP4."""
    if name is None or "NVFP4" not in name.upper():
        return name
    return f"{name[:20]}: {NVFP4_CACHE_SERVERS}"


def check_kv_cache(model: QuantizedFolder) -> Iterator[Finding]:
    """Check that the scales are complete, positive and not all 1.0."""
    folder = model.folder
    config = model.config
    yield from check_kv_complete(folder, config)
    values = {}
    for name in (n for n in folder if n.endswith(KV_ENDS)):
        try:
            values[name] = kv_scale(folder, config, name)
        except ValuesUnread:
            continue
        except ShardError as error:
            yield finding_of(error, name)
            continue
        bad = next((v for v in values[name] if not np.isfinite(v) or v <= 0), None)
        if bad is not None:
            yield fault("kv_scale_bad", name, f"{bad}; it multiplies every key or value")
    if values and set().union(*values.values()) == {1.0} and not is_cast(config):
        reason = "as before calibration or by ModelOpt's fp8_cast; calibrate the KV cache"
        yield fault(
            "kv_scale_default", next(iter(values)), f"all {len(values)} KV scales are 1.0, {reason}"
        )


def kv_scale(folder: ModelFolder, config: QuantConfig, name: str) -> list[float]:
    """Return a scale of the KV cache: one number, or one per head where the scheme's strategy is attn_head.

    Raises ShardError for another shape.
    """
    scheme = config.raw.get("kv_cache_scheme")
    per_head = isinstance(scheme, dict) and scheme.get("strategy") == "attn_head"
    heads = folder.text_config.get("num_key_value_heads")
    if per_head and folder.info(name).elements == heads:
        return [float(value) for value in folder.tensor(name).astype(np.float32).reshape(-1)]
    return [float(folder.scalar(name))]


def check_kv_complete(folder: ModelFolder, config: QuantConfig) -> Iterator[Finding]:
    """Check that every layer has scales of keys and values if any has.

    A static scheme must have them.

    compressed-tensors' kv_cache_scheme promises calibrated scales; ModelOpt's settings do not
    (fp8_cast stores none).
    """
    ends: dict[str, set[str]] = {}
    for name in folder:
        if folder.family.in_decoder(name) and models.is_attention(name):
            stored = ends.setdefault(models.layer_of(name), set())
            if name.endswith(KV_ENDS):
                stored.add(name.rpartition(".")[2])
    if not any(ends.values()):
        scheme = config.raw.get("kv_cache_scheme")
        if (
            config.method == "compressed-tensors"
            and isinstance(scheme, dict)
            and not scheme.get("dynamic")
            and ends
        ):
            problem = "kv_cache_scheme asks for calibrated scales and none is stored"
            yield fault(
                "kv_scale_missing", "config.json", f"{problem}; servers use 1.0 (sgl-cookbook #237)"
            )
        return
    lacking = sorted(layer for layer, stored in ends.items() if len(stored) < len(KV_ENDS))
    if lacking:
        have = ", ".join(sorted(ends[lacking[0]])) or "none"
        problem = (
            f"{len(lacking)} of {len(ends)} attention layers lack k_scale or v_scale (here: {have})"
        )
        yield fault(
            "kv_scale_missing",
            models.attention_of(lacking[0]),
            f"{problem}; servers use 1.0 for them",
        )


def scales_to_keep(folder: ModelFolder, config: QuantConfig) -> list[str]:
    """Return the names of the scales that a copy keeps.

    None where all are the 1.0 of a cast, the servers' default.

    The copy has another producer, so scales of 1.0 in it would mean a missing calibration.
    """
    scales = {n: kv_scale(folder, config, n) for n in folder if n.endswith(KV_ENDS)}
    values = {value for scale in scales.values() for value in scale}
    return [] if values == {1.0} and is_cast(config) else list(scales)


def is_cast(config: QuantConfig) -> bool:
    """Return whether scales of 1.0 are intended.

    The settings name a cast without calibration, or ModelOpt as the producer.
    """
    producer = config.raw.get("producer")
    version = str(producer.get("version", "")) if isinstance(producer, dict) else ""
    return bool(MODELOPT_VERSION.match(version)) or any(
        "cast" in text.lower() for text in strings(config.raw)
    )


def strings(value: object, depth: int = 0) -> Iterator[str]:
    """Yield the strings in the settings; module names are keys or in lists, and skipped."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and depth < 4:
        for inner in value.values():
            yield from strings(inner, depth + 1)
