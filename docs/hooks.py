"""mkdocs hooks: write the command-line reference from the commands, and append pages that mkdocs.yml does not list."""

from __future__ import annotations

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
    import click

    from annie_quant.cli import cli

    parts = []
    for name, command in cli.commands.items():
        context = click.Context(command, info_name=f"annie-quant {name}", max_content_width=100)
        parts.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```")
    return markdown.replace(MARK, "\n\n".join(parts))
