"""Decode and encode documents, and salvage the valid parts of a document of another program or version."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from annie_quant.core.errors import AnnieError, EnvironmentFault, UsageError
from annie_quant.core.files import write_text

# Limits of values that another party writes into a document: a server, a model, a file from
# elsewhere.
ShortText = Annotated[str, Meta(max_length=200)]
Digest = Annotated[str, Meta(max_length=64)]
Share = Annotated[float, Meta(ge=0, le=1)]
Milliseconds = Annotated[float, Meta(ge=-1e12, le=1e12)]  # so that sums and charts stay finite
Count = Annotated[int, Meta(ge=0, le=10**15)]
JsonScalar = Annotated[str, Meta(max_length=1000)] | int | float | bool | None

# Of bench.json, run.json, eval/*.json and search.json; incremented when readers of the old layout
# would misread the new one.
SCHEMA_VERSION = 2

_T = TypeVar("_T")

_BYTE = re.compile(r" ?\(byte (\d+)\)")
_PACKAGE = re.compile(r"\d+(\.\d+){1,3}")  # a version of this package
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)


def decode(
    kind: type[_T],
    source: bytes | str | os.PathLike[str],
    where: str = "",
    *,
    error: type[AnnieError] = EnvironmentFault,
    hint: str = "",
) -> _T:
    """Decode one JSON document.

    kind: a type of this package.
    source: bytes, or the path of a file.
    where: how messages name the source (default: the path).
    error: the exception class for faults. Its message is one line with the source, the line or the
        field, what was expected and what was there. A document of a newer package is refused with
        EnvironmentFault.
    """
    if not isinstance(source, bytes):
        where = where or str(source)
        try:
            source = Path(source).read_bytes()
        except OSError as fault:
            raise error(f"{where}: cannot be read: {fault.strerror}", hint) from fault
    with _one_line_errors(where, error, hint, source):
        if is_versioned(kind):
            return _convert(kind, _loads(source), where)
        return msgspec.json.decode(source, type=kind)


def convert(
    kind: type[_T],
    document: object,
    where: str = "",
    *,
    error: type[AnnieError] = EnvironmentFault,
    hint: str = "",
) -> _T:
    """Return `document`, as JSON decodes it, as a value of `kind`; faults as in `decode`."""
    with _one_line_errors(where, error, hint):
        return _convert(kind, document, where)


def is_versioned(kind: type[object]) -> bool:
    """Return whether documents of a type have the version of their layout."""
    return "schema_version" in getattr(kind, "__struct_fields__", ())


def _convert(kind: type[_T], document: object, where: str) -> _T:
    document = upgrade(kind, document, where)
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError:
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(with_nan(kind, document), kind)
        raise


def _loads(source: bytes) -> object:
    """Return the value of a JSON document; version 0.2.0 wrote NaN, which JSON does not have."""
    try:
        return msgspec.json.decode(source)
    except msgspec.DecodeError:
        if b"NaN" in source or b"Infinity" in source:
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(source)
        raise


def with_nan(kind: Any, value: object) -> object:
    """Return a decoded value with NaN for each null where `kind` has a number.

    Figures of a broken model are not numbers.
    """
    if kind is float:
        return math.nan if value is None else value
    origin = get_origin(kind)
    members = get_args(kind)
    if origin is Annotated:
        return with_nan(members[0], value)
    if origin in (Union, types.UnionType):
        others = [member for member in members if member is not type(None)]
        return with_nan(others[0], value) if value is not None and len(others) == 1 else value
    if isinstance(value, list) and origin is list:
        return [with_nan(members[0], item) for item in value]
    if isinstance(value, dict):
        kinds = _entry_kinds(kind, value)
        return value | {key: with_nan(kinds[key], value[key]) for key in kinds}
    return value


def _entry_kinds(kind: Any, value: Mapping[str, object]) -> dict[str, Any]:
    """Return the type of each known entry of a JSON object that stands for a dict or a struct."""
    if get_origin(kind) is dict:
        return dict.fromkeys(value, get_args(kind)[1])
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return {}
    return {key: hint for key, hint in _field_kinds(kind).items() if key in value}


@cache
def _field_kinds(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the types of a struct's fields by their names in JSON."""
    hints = get_type_hints(kind, include_extras=True)
    names = zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True)
    return {key: hints[name] for key, name in names}


def upgrade(kind: type[object], document: object, where: str | os.PathLike[str]) -> object:
    """Return a decoded document as one of this version; others than those with a version unchanged.

    Documents of version 0.2.0 have fewer fields, which all have defaults now.
    """
    if not is_versioned(kind) or not isinstance(document, dict):
        return document
    check_version(document, where)
    return document | {"schema_version": SCHEMA_VERSION}


@contextlib.contextmanager
def _one_line_errors(
    where: str, error: type[AnnieError], hint: str, source: bytes = b""
) -> Iterator[None]:
    prefix = f"{where}: " if where else ""
    try:
        yield
    except RecursionError:
        raise error(f"{prefix}nested too deeply", hint) from None
    except msgspec.ValidationError as fault:
        raise error(f"{prefix}{_mismatch(str(fault))}", hint) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise error(f"{prefix}not JSON: {_malformed(str(fault), source)}", hint) from None
    except UsageError as fault:  # from a type's own checks
        raise error(f"{prefix}{fault.message}", hint or fault.hint) from None


def check_version(document: object, where: str | os.PathLike[str]) -> None:
    """Raise EnvironmentFault for a document of a newer package, which this one would misread.

    A document without a version, or with one that is not a number, counts as the oldest.
    """
    fields = document if isinstance(document, dict) else {}
    version = fields.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        package = str(fields.get("version", ""))
        needed = f"'annie-quant>={package}'" if _PACKAGE.fullmatch(package) else "annie-quant"
        raise EnvironmentFault(
            f"{where} was written by a newer annie-quant (schema_version {version}; this one reads up to {SCHEMA_VERSION})",
            f"pip install --upgrade {needed}",
        )


def _mismatch(message: str) -> str:
    """Return msgspec's message with the field first: "served[...].n: expected int, got str"."""
    place = _PLACE.search(message)
    problem = _PLACE.sub("", message)
    problem = problem.replace("`", "" if problem.startswith("Expected") else "'")
    problem = problem[:1].lower() + problem[1:]
    return f"{place[1]}: {problem}" if place and place[1] else problem


def _malformed(message: str, source: bytes) -> str:
    """Return msgspec's message, with the line in place of the byte where the text has several lines."""
    message = message.removeprefix("JSON is malformed: ")
    byte = _BYTE.search(message)
    if byte and b"\n" in source.strip():
        line = source.count(b"\n", 0, int(byte[1])) + 1
        return f"{_BYTE.sub('', message)} in line {line}"
    return message[:1].lower() + message[1:]


def _plain(value: object) -> object:
    """Return a NumPy scalar or array as Python values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"a {type(value).__name__} cannot be stored as JSON")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def encode(value: object) -> bytes:
    """Return `value` as JSON on one line; numbers that are not finite become null."""
    return _ENCODER.encode(value)


def write(path: str | os.PathLike[str], value: object) -> None:
    """Write `value` as indented JSON. The file appears complete or not at all."""
    write_text(path, msgspec.json.format(encode(value), indent=1).decode() + "\n")


MAX_FIGURE = 1e15  # of a figure: with larger ones sums and charts would not be finite
_MISFIT = object()


def salvage(kind: type[_T], path: str | os.PathLike[str]) -> _T | None:
    """Decode a JSON document; invalid fields and entries, and numbers that are not finite, count as missing.

    Returns None where the file does not exist, or where a required field is invalid. Raises
    ValueError for a file that is not JSON, EnvironmentFault for a document of a newer version.
    """
    try:
        text = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    try:
        value = _fit(kind, upgrade(kind, _finite_json(text), path))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return None if value is _MISFIT else value


def salvage_value(kind: type[_T], value: object) -> _T | None:
    """Return a decoded JSON value as `kind`, without invalid fields and entries; None where a required field is invalid."""
    try:
        fit = _fit(kind, value)
    except RecursionError:
        return None
    return None if fit is _MISFIT else fit


def salvage_or_default(kind: type[_T], path: str | os.PathLike[str]) -> _T:
    """Return salvage(), or kind() where the file is missing, cannot be read or is not JSON."""
    try:
        return salvage(kind, path) or kind()
    except (ValueError, OSError):
        return kind()


def salvage_line(kind: type[_T], line: bytes) -> _T:
    """Decode one line of a JSON Lines file; numbers that are not finite count as missing, lone surrogates are allowed.

    Raises ValueError for a line that is not JSON, or has another type.
    """
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError:
        return msgspec.convert(_finite_json(line), kind)


def _finite_json(text: bytes) -> object:
    return json.loads(
        text, parse_constant=lambda name: None, parse_float=_number, parse_int=_number
    )


def _number(text: str) -> int | float | None:
    value = float(text)
    if not math.isfinite(value) or abs(value) > MAX_FIGURE:
        return None
    return int(value) if value.is_integer() else value


def _fit(kind: Any, value: object) -> Any:
    """Return `value` as `kind`, without its invalid parts; _MISFIT where nothing is valid."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UsageError):
        origin = get_origin(kind)
        members = get_args(kind)
    if origin is Annotated:
        return _converted(_fit(members[0], value), kind)
    if origin in (Union, types.UnionType):
        fits = (_fit(member, value) for member in members)
        return next((fit for fit in fits if fit is not _MISFIT), _MISFIT)
    if isinstance(value, list) and origin is list:
        fits = (_fit(members[0], item) for item in value)
        return [fit for fit in fits if fit is not _MISFIT]
    if not isinstance(value, dict):
        return _MISFIT
    entries = {key: _fit(entry, value[key]) for key, entry in _entry_kinds(kind, value).items()}
    valid = {key: fit for key, fit in entries.items() if fit is not _MISFIT}
    if origin is dict:
        return valid
    return _converted(valid, kind)


def _converted(value: object, kind: Any) -> Any:
    """Return a value whose parts are valid as `kind`; _MISFIT where a required one is missing, or a type's own check fails."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UsageError):
        return _MISFIT
