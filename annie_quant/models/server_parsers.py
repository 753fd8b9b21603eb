"""The parsers of tool calls and of thinking that vLLM and SGLang need for a chat template.

The call form that the template shows decides, not the model's name. assets/server_parsers.json has one row per
family, each with its source and date; the first row whose marks are all in the template is the template's. llama.cpp
needs no option, because it derives its parser from the template.

Recipes, hints, the doctor and the audit of templates take the parsers from here.
"""

from __future__ import annotations

from functools import cache

import msgspec

from annie_quant.core.files import ASSETS
from annie_quant.models.call_forms import CallForm

PLACEHOLDER = "{parsers}"  # in a recipe's command
THINK = "<think>"
MAIN_FAMILY = "Qwen3.5, Qwen3-Coder"  # of a checkpoint without a readable template


class Parsers(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """One server's parsers; "" for none. options: what the tool parser needs besides its name."""

    tool: str = ""
    reasoning: str = ""
    options: list[str] = []

    def flags(self, server: str) -> list[str]:
        """Return the options of a server's command."""
        words = ["--reasoning-parser", self.reasoning] if self.reasoning else []
        if self.tool and server == "vllm":
            words.append("--enable-auto-tool-choice")
        if self.tool:
            words += ["--tool-call-parser", self.tool, *self.options]
        return words


class ParserRow(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The parsers of one family.

    form: of its tool calls; "" where it has none, or none that a parser reads.
    marks: texts that are all in the chat templates of this family, and not in those of later rows alone.
    thinking: text that is in the template if the model thinks. Without it there is no reasoning parser,
        which would move the whole answer of such a model into `reasoning`.
    assumes_thinking: the servers take an answer for thinking until its end mark, unless the request
        switches thinking off.
    """

    family: str
    form: CallForm
    marks: list[str]
    servers: dict[str, Parsers]
    source: str
    date: str
    thinking: str = ""
    assumes_thinking: bool = False
    note: str = ""


@cache
def parser_rows() -> list[ParserRow]:
    return msgspec.json.decode((ASSETS / "server_parsers.json").read_bytes(), type=list[ParserRow])


def row_of(template: str) -> ParserRow | None:
    """Return the row of a chat template's family; None where its form is not known here."""
    for row in parser_rows():
        if all(mark in template for mark in row.marks):
            return row
    return None


def form_of(template: str) -> CallForm:
    """Return the call form that a chat template shows the model; "" where it is not known here."""
    row = row_of(template)
    return row.form if row is not None else ""


def thinks(template: str) -> bool:
    """Return whether the model of a chat template can think."""
    row = row_of(template)
    mark = row.thinking if row is not None and row.thinking else THINK
    return mark in template


def parsers_for(server: str, template: str) -> Parsers:
    """Return a server's parsers for a chat template; none for an unknown form.

    An empty template stands for one that cannot be read, and gets the parsers of Qwen3.5.
    """
    if not template:
        return _row_named(MAIN_FAMILY).servers[server]
    row = row_of(template)
    if row is None or server not in row.servers:
        return Parsers()
    parsers = row.servers[server]
    if row.thinking not in template or not row.thinking:
        parsers = msgspec.structs.replace(parsers, reasoning="")
    if "tools" not in template:
        parsers = msgspec.structs.replace(parsers, tool="", options=[])
    return parsers


def _row_named(family: str) -> ParserRow:
    return next(row for row in parser_rows() if row.family == family)


def notes_for(server: str, template: str) -> list[str]:
    """Return what the user must know about the parsers of a chat template."""
    if not template:
        return ["its chat template cannot be read: the parsers are Qwen3.5's"]
    row = row_of(template)
    if row is None:
        return [
            "the form of its tool calls is not known here, so the command names no parser: see the server's "
            "documentation"
        ]
    notes = [f"{row.family}: {row.note}"] if row.note else []
    parsers = parsers_for(server, template)
    if not parsers.tool and "tools" in template and not row.note:
        notes.append(f"no parser of {server} reads the tool calls of {row.family}")
    return notes


def parser_hint(server: str | None) -> str:
    """Return how to start a server so that its parsers are those of the model's chat template.

    server: "vllm", "sglang", "llama.cpp"; any other is not known here.
    """
    if server == "llama.cpp":
        return "start it with --jinja and the chat template of the model"
    command = ""
    if server in ("vllm", "sglang"):
        command = f": annie-quant serve DIR --runtime {server} --dry-run prints it"
    return f"start it with the --tool-call-parser of its chat template{command}"
