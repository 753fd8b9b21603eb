"""Shared by the commands: the console, --json, and the check of the calibration data's system prompt."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from annie_quant.cli.terminal import TerminalConsole, is_secondary_process, shown
from annie_quant.core.files import finite

console = TerminalConsole()
PATH = click.Path(path_type=Path)
Command = TypeVar("Command", bound=Callable[..., None])


def json_option(function: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")(
        function
    )


def persona_option(function: Command) -> Command:
    return click.option(
        "--persona",
        help="A built-in persona, a JSON file, or a folder from annie-quant init. Default: annie.",
    )(function)


def workloads_option(function: Command) -> Command:
    return click.option(
        "--workloads",
        help="Names (also bfcl), JSON files or folders, comma-separated. Default: those of the persona.",
    )(function)


def role_options(function: Command) -> Command:
    """Add --candidate, --reference and --incumbent (judge/decision/roles.py)."""
    for name, text in (
        ("incumbent", "The side that the candidate would replace. Default: the other one."),
        ("reference", "The bf16 side that all are compared with. Default: the one whose weights are known to be bf16."),
        ("candidate", "The side that is judged. Default: backend A; of two sides of one format, the second."),
    ):
        function = click.option(f"--{name}", metavar="NAME", help=text)(function)
    return function


def emit(value: object) -> None:
    """Print a typed result, or a mapping with such values, as one JSON object on stdout."""
    if not is_secondary_process():
        text = json.dumps(finite(msgspec.to_builtins(value, enc_hook=str)), indent=1, ensure_ascii=False)
        click.echo("".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text))


def echo(text: str, err: bool = False) -> None:
    """Print a line of data, cleaned for a terminal."""
    click.echo(shown(text), err=err)


def quiet_engines() -> None:
    """Turn off the progress bars and notes of transformers. Must run before it is imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


def refuse_stale_prompt(conversations: Path | None, allow: bool, persona: str | None = None) -> None:
    """Refuse conversations with another system prompt than the served one; with `allow`, print a note instead.

    Conversations whose form is invalid are named, with the command that lists them.
    """
    from annie_quant.data import check_prompt_hash, load_persona
    from annie_quant.data.rows import read_rows
    from annie_quant.data.rules import form_report

    if conversations is None:
        return
    rows = read_rows(conversations)
    if message := check_prompt_hash(rows, persona, allow=allow):
        console.note(message)
    if message := form_report(rows, load_persona(persona) if persona else None):
        console.note(f"{message} (annie-quant data --check --persona {persona or 'FILE'} --output {conversations})")
