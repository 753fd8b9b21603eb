"""Shared by the commands: the console, JSON output, and the check of the calibration data's system prompt."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import msgspec

from annie_quant.cli.terminal import TerminalConsole, is_secondary_process, shown
from annie_quant.core.files import finite

console = TerminalConsole()


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
