"""Arguments of a tool call compared with the tool's JSON schema, which may come from elsewhere.

A schema's `$ref` to another document is never fetched: jsonschema would open any URL, and files.
"""

from __future__ import annotations

from typing import Any

from annie_quant.core.text import printable


def mismatch(arguments: object, schema: Any) -> str | None:
    """Return how arguments do not match a schema, in one line, or None. A schema that cannot be used is a mismatch."""
    import jsonschema
    import referencing

    try:
        # An empty registry retrieves nothing.
        validator = jsonschema.Draft202012Validator(schema, registry=referencing.Registry())
        first = next(iter(validator.iter_errors(arguments)), None)
    except RecursionError:
        return "the tool's schema refers to itself without end"
    except Exception as error:  # an invalid schema raises errors of many types: of types, of patterns, of references
        return f"the tool's schema cannot be used: {printable(f'{type(error).__name__}: {error}', 200)}"
    if first is None:
        return None
    where = ".".join(str(part) for part in first.path)
    return printable(f"{f'at {where}: ' if where else ''}{first.message}", 300)
