"""The options of a command as one frozen struct, from which its command line and its help are made.

    class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
        "worst: Tensors with the largest error to list per form."

        source: Annotated[Path, Argument()]
        worst: int = 3

    @command(CompareOptions)
    def compare(options: CompareOptions) -> None: ...

A field's line in the docstring is its help. A field without a default is required. `bool` is a flag, `Literal` a choice,
`tuple[X, ...]` an option that may be repeated. `Option` has what follows neither from the type nor from the docstring.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import click
import msgspec

Options = TypeVar("Options", bound=msgspec.Struct)


@dataclass(frozen=True)
class Option:
    """How a field is given on the command line.

    help: default: the field's line in the docstring of its struct.
    name: of the option; default: the field's, with dashes.
    metavar: what the help calls the value.
    least: the smallest number.
    type: click's type, where the field's own does not suffice.
    listed: whether a tuple is one value, separated by commas, and not an option that may be repeated.
    """

    help: str = ""
    name: str = ""
    metavar: str | None = None
    least: float | None = None
    type: click.ParamType[Any] | None = None
    listed: bool = False


@dataclass(frozen=True)
class Argument:
    """A field that is given by its position."""


class CommaSeparated(click.ParamType[tuple[object, ...]]):
    """Values of one type, separated by commas."""

    name = "text"

    def __init__(self, kind: Callable[[str], object]) -> None:
        self.kind = kind

    def convert(
        self,
        value: str | tuple[object, ...],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[object, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.kind(part.strip()) for part in value.split(",") if part.strip())
        except ValueError:
            raise click.UsageError(f"{value!r} is not a list of numbers; write it as 1,8") from None


def command(
    options: type[Options], name: str = ""
) -> Callable[[Callable[[Options], None]], click.Command]:
    """Return a decorator that makes a command of a function of `options`. name: default: the function's."""

    def decorate(function: Callable[[Options], None]) -> click.Command:
        def callback(**values: object) -> None:
            function(options(**values))

        texts = documented_fields(options)
        own_first = sorted(
            msgspec.structs.fields(options), key=lambda f: f.name not in options.__annotations__
        )
        parameters = [_parameter(field, texts.get(field.name, "")) for field in own_first]
        return click.Command(
            name or function.__name__, callback=callback, params=parameters, help=function.__doc__
        )

    return decorate


def picked(options: msgspec.Struct, *names: str) -> dict[str, Any]:
    """Return some of the options, as keyword arguments of the function that has them under the same names."""
    return {name: getattr(options, name) for name in names}


def documented_fields(options: type[Options]) -> dict[str, str]:
    """Return field → its text in the docstrings of its struct and its bases: "NAME: TEXT", with indented further lines."""
    documented = "\n".join(inspect.cleandoc(kind.__doc__ or "") for kind in options.__mro__)
    paragraphs = re.sub(r"\n +", " ", documented).splitlines()
    return dict(line.split(": ", 1) for line in paragraphs if re.match(r"\w+: ", line))


def _parameter(field: msgspec.structs.FieldInfo, text: str) -> click.Parameter:
    annotated = get_origin(field.type) is Annotated
    annotation, given = get_args(field.type) if annotated else (field.type, Option())
    kind = _without_none(annotation)
    items = get_args(kind) if get_origin(kind) is tuple else ()
    if isinstance(given, Argument):
        count = -1 if items else 1
        return click.Argument(
            [field.name], type=_click_type(kind), required=field.required, nargs=count
        )
    declared = [f"--{given.name or field.name.replace('_', '-')}", field.name]
    text = given.help or text
    if kind is bool:
        return click.Option(declared, is_flag=True, default=field.default, help=text)
    if given.listed:
        kind, items = CommaSeparated(items[0]), ()
    several = Ellipsis in items
    option = click.Option(
        declared,
        type=given.type or _click_type(kind, given.least),
        nargs=len(items) if items and not several else 1,
        multiple=several,
        required=field.required,
        metavar=given.metavar,
        help=text,
    )
    if not field.required:  # click takes a default of None for a value
        option.default = (
            ",".join(map(str, field.default)) if given.listed and field.default else field.default
        )
        option.show_default = field.default not in (None, "", ())
    return option


def _without_none(annotation: object) -> object:
    """Return X of `X | None`, any other type as it is."""
    parts = get_args(annotation)
    return next(part for part in parts if part is not NoneType) if NoneType in parts else annotation


def _click_type(kind: object, least: float | None = None) -> click.ParamType[Any] | type:
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if isinstance(kind, click.ParamType):
        return kind
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    if kind is Path:
        return click.Path(path_type=Path)
    if least is not None:
        return click.IntRange(int(least)) if kind is int else click.FloatRange(least)
    assert isinstance(kind, type)
    return kind


# ---- options that several commands have

AsJson = Annotated[bool, Option("Print one JSON object on stdout and nothing else.", name="json")]
Force = Annotated[bool, Option("Replace an existing output.")]
PersonaName = Annotated[
    str | None,
    Option("Built-in persona, JSON file, or folder of annie-quant init. Default: annie."),
]
WorkloadNames = Annotated[
    str | None, Option("Names (also bfcl), files, folders, by commas. Default: the persona's.")
]
AllowMismatch = Annotated[bool, Option("Accept data that was made for another system prompt.")]
PerGate = Annotated[int, Option("Prompts per gate.", least=1)]
KeyVariable = Annotated[
    str | None, Option("Environment variable with the API key of the servers.", metavar="NAME")
]


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    """Options that name the sides of a comparison.

    candidate: Side that is judged. Default: A; of two of one format, B.
    reference: The bf16 side. Default: the one whose weights are bf16.
    incumbent: Side that would be replaced. Default: the other one.
    """

    candidate: Annotated[str | None, Option(metavar="NAME")] = None
    reference: Annotated[str | None, Option(metavar="NAME")] = None
    incumbent: Annotated[str | None, Option(metavar="NAME")] = None
