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

from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import QuantConfig
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.schema import Audit

MODELOPT = re.compile(r"0\.\d{1,3}\b")  # its versions; our own exports have another text there
ENDS = (".k_scale", ".v_scale")


def check(folder: ModelFolder, config: QuantConfig, audit: Audit) -> None:
    """Check that the stored scales are positive numbers and not all 1.0, and that the cache is not NVFP4."""
    if config.kv_cache and "NVFP4" in config.kv_cache.upper():
        audit.fault(
            "kv_cache_nvfp4",
            "config.json",
            f"asks for a KV cache in {config.kv_cache[:20]}, which loops at token 0 with thinking and tools; serve with FP8",
        )
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
