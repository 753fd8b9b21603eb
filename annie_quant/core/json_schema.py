"""JSON Schema for tools' parameters and for the arguments of their calls, by the library jsonschema.

Gates, labels and the generator of prompts and calibration data all validate here. A schema may come
from elsewhere: a `$ref` to another document is never fetched.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from annie_quant.core.text import printable

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

# Keywords that state, or may state, what else an object may contain.
OPEN_KEYWORDS = frozenset(
    [
        "additionalProperties",
        "unevaluatedProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "if",
        "dependentSchemas",
        "$ref",
    ]
)


def mismatch(arguments: Any, schema: Any) -> str | None:
    """Return how the arguments of a call do not match its tool's parameters, in one line, or None.

    The schema is read by the draft that it names in `$schema`, else by 2020-12, or by draft 7 where
    only that accepts it (`items` as a list). Unknown arguments do not match unless the schema
    allows them: see `_closed`. A schema that cannot be used is a mismatch.
    """
    try:
        validator = _validator(json.dumps(schema))
        first = next(iter(validator.iter_errors(arguments)), None)
    except RecursionError:
        return "the tool's schema refers to itself without end"
    except Exception as error:  # an invalid schema raises errors of types, patterns and references
        text = printable(f"{type(error).__name__}: {error}", 200)
        return f"the tool's schema cannot be used: {text}"
    if first is None:
        return None
    where = ".".join(str(part) for part in first.path)
    return printable(f"{f'at {where}: ' if where else ''}{first.message}", 300)


def schema_fault(schema: Any) -> str:
    """Return why a schema is not valid, "" for a valid one."""
    return _draft(schema)[1]


def _draft(schema: Any) -> tuple[type[Validator], str]:
    """Return the validator class of a schema's draft, and why the schema is not valid or ""."""
    from jsonschema import Draft7Validator, Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    stated = validator_for(schema, default=Draft202012Validator)
    faults = []
    for draft in (stated, Draft7Validator):
        try:
            draft.check_schema(schema)
        except SchemaError as error:
            faults.append(error.message)
        else:
            return draft, ""
    return stated, faults[0]


@lru_cache(maxsize=1024)
def _validator(text: str) -> Validator:
    """Return the validator of a schema, which also refuses unknown arguments, of its JSON text."""
    import referencing

    schema = json.loads(text)
    draft, _ = _draft(schema)
    # An empty registry retrieves nothing; jsonschema's own would open any URL, and files.
    return draft(_closed(schema), registry=referencing.Registry())


def _closed(schema: Any) -> Any:
    """Return the parameters of a tool without room for arguments that they do not name.

    JSON Schema accepts unknown properties by default. A server ignores or rejects them, so a model
    that invents an argument is wrong, unless the schema says something about other arguments.
    Objects inside arguments follow JSON Schema.
    """
    if not isinstance(schema, dict) or "properties" not in schema or OPEN_KEYWORDS & schema.keys():
        return schema
    return {**schema, "additionalProperties": False}
