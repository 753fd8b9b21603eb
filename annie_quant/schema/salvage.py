"""Read the parts of a document that fit its type, where another program or another version may have written it."""

from __future__ import annotations

import json
import math
import os
import types
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from annie_quant.errors import UsageError
from annie_quant.schema.reading import check_version, upgrade

T = TypeVar("T")
LIMIT = 1e15  # of a figure: with larger ones sums and charts would not be finite
_MISFIT = object()


def salvage(kind: type[T], path: str | os.PathLike[str]) -> T | None:
    """Decode a JSON document; fields and entries that do not fit count as missing, and so do numbers that are not finite.

    None where the file does not exist, or where not even the required fields fit. Raises ValueError for a file that is not JSON,
    EnvironmentFault for a document of a newer version.
    """
    try:
        text = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    try:
        document = _loads(text)
        check_version(document, path)
        value = _fit(kind, upgrade(kind, document))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return None if value is _MISFIT else value


def salvage_value(kind: type[T], value: Any) -> T | None:
    """Return a decoded JSON value as `kind`, without fields and entries that do not fit; None where the required ones do not."""
    try:
        fit = _fit(kind, value)
    except RecursionError:
        return None
    return None if fit is _MISFIT else fit


def salvage_or_default(kind: type[T], path: str | os.PathLike[str]) -> T:
    """Return salvage(), or kind() where the file is missing, cannot be read or is not JSON."""
    try:
        return salvage(kind, path) or kind()
    except (ValueError, OSError):
        return kind()


def salvage_line(kind: type[T], line: bytes) -> T:
    """Decode one line of a JSON Lines file; numbers that are not finite count as missing, lone surrogates are allowed.

    Raises ValueError for a line that is not JSON, or that does not fit.
    """
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError:
        return msgspec.convert(_loads(line), kind)


def _loads(text: bytes) -> Any:
    return json.loads(text, parse_constant=lambda name: None, parse_float=_number, parse_int=_number)


def _number(text: str) -> int | float | None:
    value = float(text)
    if not math.isfinite(value) or abs(value) > LIMIT:
        return None
    return int(value) if value.is_integer() else value


def _fit(kind: Any, value: Any) -> Any:
    """`value` as `kind`, without what does not fit; _MISFIT where nothing does."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UsageError):
        origin, members = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return next((fit for member in members if (fit := _fit(member, value)) is not _MISFIT), _MISFIT)
    if origin is dict and isinstance(value, dict):
        return {key: fit for key, item in value.items() if (fit := _fit(members[1], item)) is not _MISFIT}
    if origin is list and isinstance(value, list):
        return [fit for item in value if (fit := _fit(members[0], item)) is not _MISFIT]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
        hints = get_type_hints(kind, include_extras=True)
        names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
        fields = {name: _fit(hints[name], value[key]) for name, key in names if key in value}
        try:
            return kind(**{name: fit for name, fit in fields.items() if fit is not _MISFIT})
        except (TypeError, ValueError, UsageError):  # a required field is missing, or the type's own check fails
            return _MISFIT
    return _MISFIT
