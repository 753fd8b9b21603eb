"""mkdocs hook: the command line's reference is written from the commands themselves."""

from __future__ import annotations

from typing import Any

MARK = "<!-- commands -->"


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
