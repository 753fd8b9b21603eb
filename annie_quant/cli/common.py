"""Shared by the commands: the console, --json, and the check of the calibration data's system prompt."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import msgspec

from annie_quant.cli.console import Console, is_secondary_process, shown

console = Console()
PATH = click.Path(path_type=Path)


def json_option(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")(
        function
    )


def emit(value: object) -> None:
    """Print a typed result, or a mapping with such values, as one JSON object on stdout."""
    if not is_secondary_process():
        text = json.dumps(msgspec.to_builtins(value, enc_hook=str), indent=1, ensure_ascii=False)
        click.echo("".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text))


def echo(text: str, err: bool = False) -> None:
    """Print a line of data, cleaned for a terminal."""
    click.echo(shown(text), err=err)


def quiet_engines() -> None:
    """Turn off the progress bars and notes of transformers. Must run before it is imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def refuse_stale_prompt(conversations: Path | None, allow: bool) -> None:
    """Refuse conversations with another system prompt than the served one; with `allow`, print a note instead."""
    from annie_quant.data import check_prompt_hash

    if conversations is not None and (message := check_prompt_hash(conversations, allow=allow)):
        console.note(message)
