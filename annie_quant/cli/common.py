"""What commands share: the terminal, --json, and the refusal of data that was made for another system prompt.

A file a command, or two that belong together; annie_quant.cli puts them in the order of the work.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from annie_quant.cli.console import Console, follows

console = Console()


def json_option(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")(
        function
    )


def emit(value: dict[str, Any]) -> None:
    if follows():
        return
    click.echo(json.dumps(value, indent=1, ensure_ascii=False, default=str))


def quiet_engines() -> None:
    """Before transformers is imported: its bars and notes would break up ours."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def refuse_stale_prompt(conversations: Path | None, allow: bool) -> None:
    """Before conversations are used: their system prompt is production's, or it is said that it may differ."""
    from annie_quant.data import check_prompt_hash

    if conversations is not None and (stale := check_prompt_hash(conversations, allow=allow)):
        console.note(stale)
