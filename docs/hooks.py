"""mkdocs hooks: write the command-line reference from the commands, and append pages that mkdocs.yml does not list."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

MARK = "<!-- commands -->"


def on_config(config: Any) -> Any:
    """Append all pages of docs/ that are not in the navigation."""
    named = str(config.nav)
    folder = Path(config.docs_dir)
    pages = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.md"))
    config.nav += [page for page in pages if f"'{page}'" not in named]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark with the help of all commands."""
    if MARK not in markdown:
        return markdown
    from rich.console import Console

    from annie_quant.cli import COMMANDS, app

    app.help_formatter = "plain"
    parts = []
    for name in COMMANDS:
        console = Console(file=io.StringIO(), width=100)
        app.help_print([name], console=console)
        parts.append(f"## {name}\n\n```text\n{console.file.getvalue()}\n```")
    return markdown.replace(MARK, "\n\n".join(parts))
