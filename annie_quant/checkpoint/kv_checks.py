"""Checks of an audit on the scales of an FP8 KV cache.

Servers multiply the cache by k_scale and v_scale; without them, or before calibration, they are 1.0 (sgl-cookbook #237),
and vLLM cannot compute them itself for hybrid models. ModelOpt's `fp8_cast` means 1.0 on purpose (amax 448): 0.47 stores no scale
then, other versions 1.0, and until 0.42 ModelOpt raised calibrated scales to 1.0. A quantizer of ModelOpt without calibration
stores none, so its 1.0 is never a missing calibration; that of other producers is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from annie_quant import models
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import QuantConfig
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.schema import Audit

MODELOPT = re.compile(r"0\.\d{1,3}\b")  # its versions; our own exports have another text there
ENDS = (".k_scale", ".v_scale")


def check(folder: ModelFolder, config: QuantConfig, audit: Audit) -> None:
    """Check that the stored scales are complete, positive numbers and not all 1.0, and that the cache is not NVFP4."""
    if config.kv_cache and "NVFP4" in config.kv_cache.upper():
        audit.fault(
            "kv_cache_nvfp4",
            "config.json",
            f"asks for a KV cache in {config.kv_cache[:20]}, which loops at token 0 with thinking and tools; serve with FP8",
        )
    check_complete(folder, config, audit)
    values = {}
    for name in (n for n in folder if n.endswith(ENDS)):
        try:
            values[name] = float(folder.scalar(name))
        except ShardError as error:
            audit.add(error.code, name, error.message)
            continue
        if not np.isfinite(values[name]) or values[name] <= 0:
            audit.fault("kv_scale_bad", name, f"{values[name]}; it multiplies every key or value")
    if values and set(values.values()) == {1.0} and not is_cast(config):
        first = next(iter(values))
        audit.fault(
            "kv_scale_default",
            first,
            f"all {len(values)} KV scales are 1.0, as before calibration or by ModelOpt's fp8_cast; calibrate the KV cache",
        )


def check_complete(folder: ModelFolder, config: QuantConfig, audit: Audit) -> None:
    """Check that the keys and values of every layer have a scale if any has, and that a static scheme has them.

    compressed-tensors' kv_cache_scheme promises calibrated scales; ModelOpt's settings do not (fp8_cast stores none).
    """
    ends: dict[str, set[str]] = {}
    for name in folder:
        layer = models.layer_of(name)
        if layer and folder.family.in_decoder(name) and models.is_attention(name):
            ends.setdefault(layer, set())
            if name.endswith(ENDS):
                ends[layer].add(name.rpartition(".")[2])
    if not any(ends.values()):
        scheme = config.raw.get("kv_cache_scheme")
        if config.method == "compressed-tensors" and isinstance(scheme, dict) and not scheme.get("dynamic") and ends:
            audit.fault(
                "kv_scale_missing",
                "config.json",
                "kv_cache_scheme asks for calibrated scales and none is stored; servers use 1.0 (sgl-cookbook #237)",
            )
        return
    lacking = sorted(layer for layer, stored in ends.items() if len(stored) < len(ENDS))
    if lacking:
        have = ", ".join(sorted(ends[lacking[0]])) or "none"
        audit.fault(
            "kv_scale_missing",
            models.attention_of(lacking[0]),
            f"{len(lacking)} of {len(ends)} attention layers lack k_scale or v_scale (here: {have}); servers use 1.0 for them",
        )


def scales_to_keep(folder: ModelFolder, config: QuantConfig) -> list[str]:
    """Return the names of the scales that a copy keeps: none where all are a cast's 1.0, which servers use without any.

    The copy has another producer, so its scales of 1.0 would be those of a missing calibration.
    """
    names = [n for n in folder if n.endswith(ENDS) and folder.info(n).elements == 1]
    values = {float(folder.scalar(n)) for n in names}
    return [] if values == {1.0} and is_cast(config) else names


def is_cast(config: QuantConfig) -> bool:
    """Return whether the settings name a cast without calibration, or a ModelOpt, whose scales of 1.0 are meant."""
    producer = config.raw.get("producer")
    version = str(producer.get("version", "")) if isinstance(producer, dict) else ""
    return bool(MODELOPT.match(version)) or any("cast" in text.lower() for text in strings(config.raw))


def strings(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the strings in the settings; module names are keys or in lists, and skipped."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and depth < 4:
        for inner in value.values():
            yield from strings(inner, depth + 1)
