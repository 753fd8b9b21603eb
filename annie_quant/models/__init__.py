"""Model families: one file per family, with one `FAMILY`. Adding a family adds a file and changes nothing else.

family_of(config)                the family of a config.json; an error that lists the known ones for any other
family_or_default(config)        the same, with DEFAULT for an unknown model type
aliases(name), short_name(name)  a tensor's names in the text and the multimodal form, and without either's prefix
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import replace
from pkgutil import iter_modules
from typing import Any

from annie_quant.errors import CheckpointError
from annie_quant.models.family import (
    MULTIMODAL_PREFIX,
    TEXT_PREFIX,
    DeltaNet,
    Family,
    Form,
    GGUFNames,
    LinearInput,
    PublishedSize,
    aliases,
    in_layer,
    layer_of,
    short_name,
)

__all__ = [
    "MULTIMODAL_PREFIX",
    "TEXT_PREFIX",
    "DeltaNet",
    "Family",
    "Form",
    "GGUFNames",
    "LinearInput",
    "PublishedSize",
    "aliases",
    "families",
    "family_of",
    "family_or_default",
    "in_layer",
    "is_log_decay",
    "layer_of",
    "short_name",
]


@functools.cache
def families() -> tuple[Family, ...]:
    """Every family of this package, in the order of their file names."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in iter_modules(__path__) if m.name != "family")
    return tuple(module.FAMILY for module in modules)


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family that a config.json's model_type names.

    Raises CheckpointError for a model type that no family describes.
    """
    family = _find(config)
    if family is None:
        known = ", ".join(t for f in families() for t in f.model_types)
        raise CheckpointError(
            f"config.json: model_type {str(config.get('model_type'))[:40]!r} is not a known family",
            f"known model types: {known}",
        )
    return family


def family_or_default(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json, or for an unknown model type one that has the names of every known layer.

    The default serves what needs names alone: reading, auditing, rounding without calibration.
    """
    return _find(config) or _default()


def is_log_decay(name: str) -> bool:
    """Return whether a tensor holds a DeltaNet layer's log(A), in which minus infinity is a valid value."""
    return any(f.deltanet is not None and f".{name}".endswith(f".{f.deltanet.log_decay}") for f in families())


def _find(config: Mapping[str, Any]) -> Family | None:
    kind = config.get("model_type")
    return next((f for f in families() if kind in f.model_types), None)


@functools.cache
def _default() -> Family:
    from annie_quant.models import qwen3_5

    # Its layers include the dense ones, and its relatives (qwen3_5_moe) have its norms.
    return replace(qwen3_5.FAMILY, name="unknown", text=Form("", ""), multimodal=None, gguf=None, published={})
