"""Model families: one value of type Family (family.py) per family. A new family is one new value, or a file with one.

family_of(config)                the family of a config.json; an error that lists the known ones for any other
family_or_default(config)        the same, with a default for an unknown model type
aliases(name), short_name(name)  a tensor's names in the text and the multimodal form, and without either's prefix
"""

# ruff: noqa: F401
from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

from annie_quant.core.errors import CheckpointError
from annie_quant.models.family import (
    Experts,
    Family,
    Form,
    LinearInput,
    aliases,
    attention_of,
    in_layer,
    is_attention,
    layer_of,
    short_name,
)

# Model types of published models whose decoder layers have no Family: model_type → models.
NOT_COMPUTED = {
    "qwen4_exp": "Qwen3.8-Flash-Next",
    "qwen4_exp_text": "Qwen3.8-Flash-Next",
    "gemma4": "Gemma 4",
    "gemma4_text": "Gemma 4",
    "gemma4_unified": "Gemma 4",
    "gemma4_unified_text": "Gemma 4",
}


@functools.cache
def families() -> tuple[Family, ...]:
    """Return every family of this package."""
    modules = [import_module(f"{__name__}.{m.name}") for m in iter_modules(__path__)]
    return tuple(
        value for module in modules for value in vars(module).values() if isinstance(value, Family)
    )


def family_of(config: Mapping[str, object]) -> Family:
    """Return the family that a config.json's model_type names. Raises CheckpointError for an unknown model type."""
    kind = config.get("model_type")
    for family in families():
        if kind in family.model_types:
            return family
    if isinstance(kind, str) and kind in NOT_COMPUTED:
        raise CheckpointError(
            f"config.json: model_type {kind!r} ({NOT_COMPUTED[kind]}) is recognised, and its layers are not computed here",
            "audit, compare and convert read its tensors; --strategy direct rounds its linears",
        )
    known = ", ".join(t for f in families() for t in f.model_types)
    raise CheckpointError(
        f"config.json: model_type {str(kind)[:40]!r} is not a known family",
        f"known model types: {known}",
    )


def is_known(config: Mapping[str, object]) -> bool:
    """Return whether a config.json's model_type names a family."""
    return any(config.get("model_type") in family.model_types for family in families())


def family_or_default(config: Mapping[str, object]) -> Family:
    """Return the family of a config.json, or for an unknown model type one with the names of every known layer.

    The default is sufficient to read, audit and round without calibration.
    """
    try:
        return family_of(config)
    except CheckpointError:
        return _default()


@functools.cache
def _default() -> Family:
    from annie_quant.models import qwen3_5

    # Its layers include the dense ones, and the mixture has its norms.
    return replace(
        qwen3_5.FAMILY,
        name="unknown",
        text=Form("", ""),
        multimodal=None,
        gguf=None,
        published={},
        position_axes=1,
    )


def is_log_decay(name: str) -> bool:
    """Return whether a tensor holds a DeltaNet layer's log(A), in which minus infinity is a valid value."""
    return any(
        f.deltanet is not None and f".{name}".endswith(f".{f.deltanet.log_decay}")
        for f in families()
    )
