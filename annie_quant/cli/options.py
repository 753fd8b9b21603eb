"""What the options of several commands share: their types, and options that more than one command has.

The options of a command are one frozen dataclass, from which cyclopts makes the command line. Its docstring has the help of each
field under "Attributes:". A field without a default is required; `bool` is a flag, `Literal` a choice, `tuple[X, ...]` an option
that may be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from cyclopts import CoercionError, Parameter, Token, validators


def at_least(smallest: float) -> Parameter:
    return Parameter(validator=validators.Number(gte=smallest))


def split_at_commas(kind: type, tokens: Sequence[Token]) -> tuple[object, ...]:
    """Return the values of an option that is written once, as 1,8. kind: tuple[X, ...]."""
    item_type = next(item for item in get_args(kind) if item is not Ellipsis)
    text = ",".join(token.value for token in tokens)
    parts = [part.strip() for part in text.split(",")]
    try:
        values = tuple(item_type(part) for part in parts if part)
    except ValueError:
        content = "whole numbers" if item_type is int else "numbers"
        raise CoercionError(msg=f"{text!r} is not a list of {content}; write it as 1,8") from None
    if not values:
        raise CoercionError(msg=f"{text!r} is an empty list; leave the option out")
    return values


COMMA_SEPARATED = Parameter(converter=split_at_commas, n_tokens=1, accepts_keys=False)
PORT = Parameter(validator=validators.Number(gte=0, lte=65535))
POSITIVE = Parameter(validator=validators.Number(gt=0))

AsJson = Annotated[
    bool, Parameter(name="--json", help="Print one JSON object on stdout and nothing else.")
]
Force = Annotated[bool, Parameter(help="Replace an existing output.")]
PersonaName = Annotated[
    str | None,
    Parameter(help="Built-in persona, JSON file, or folder of annie-quant init. Default: annie."),
]
WorkloadNames = Annotated[
    str | None,
    Parameter(help="Names (also bfcl), files, folders, by commas. Default: the persona's."),
]
AllowMismatch = Annotated[
    bool, Parameter(help="Accept data that was made for another system prompt.")
]
PromptTokens = Annotated[
    int | None,
    Parameter(help="Prompt whose time to the first token is predicted. Default: 2048."),
    at_least(1),
]
CachedTokens = Annotated[
    int,
    Parameter(help="Of these, tokens that the server has from an earlier request."),
    at_least(0),
]
PerGate = Annotated[int, Parameter(help="Prompts per gate.", validator=validators.Number(gte=1))]
KeyVariable = Annotated[
    str | None, Parameter(help="Environment variable with the API key of the servers.")
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Sides:
    """Options that name the sides of a comparison.

    Attributes:
        candidate: Side that is judged. Default: A; of two of one format, B.
        reference: The bf16 side. Default: the one whose weights are bf16.
        incumbent: Side that would be replaced. Default: the other one.
    """

    candidate: str | None = None
    reference: str | None = None
    incumbent: str | None = None


def keywords_of(options: object, *names: str) -> dict[str, Any]:
    """Return some of the options, as keyword arguments of the function that has them under the same names."""
    return {name: getattr(options, name) for name in names}
