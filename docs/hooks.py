"""mkdocs hooks: the command line's reference is written from the commands themselves; pages that the contents do not name
stand at their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MARK = "<!-- commands -->"


def on_config(config: Any) -> Any:
    """A page of docs/ is in the contents, whoever wrote it."""
    named = str(config.nav)
    folder = Path(config.docs_dir)
    pages = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.md"))
    config.nav += [page for page in pages if f"'{page}'" not in named]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put each command's help in the place of the mark."""
    if MARK not in markdown:
        return markdown
    import click

    from annie_quant.cli import cli

    parts = []
    for name, command in cli.commands.items():
        context = click.Context(command, info_name=f"annie-quant {name}", max_content_width=100)
        parts.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```")
    return markdown.replace(MARK, "\n\n".join(parts))
