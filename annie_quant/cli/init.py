"""`annie-quant init`: a persona, gate prompts and calibration data from a system prompt, tools and logs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from annie_quant.cli.common import console, emit, json_option
from annie_quant.errors import UsageError
from annie_quant.untrusted import decode_json


@click.command()
@click.option(
    "--prompt", type=click.Path(path_type=Path, allow_dash=True), help="System prompt: a text file; - is stdin."
)
@click.option(
    "--tools", type=click.Path(path_type=Path, allow_dash=True), help="OpenAI function tools: a JSON file; - is stdin."
)
@click.option(
    "--logs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Chat logs: JSON lines, server logs, Parquet, or a folder; repeatable.",
)
@click.option("--name", default="", help="The assistant's name. Default: Assistant.")
@click.option("--fill", is_flag=True, help="Also make prompts and conversations from the tools' schemas.")
@click.option(
    "--mask-personal", is_flag=True, help="Mask email addresses, phone and card numbers, and names that users state."
)
@click.option("--mask-word", multiple=True, metavar="WORD", help="Mask this text; repeatable.")
@click.option("--seed", default=0, show_default=True, help="Of the sample of the logs, and of generated prompts.")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--force", is_flag=True, help="Replace a folder that init has made.")
@json_option
def init(
    prompt: Path | None,
    tools: Path | None,
    logs: tuple[Path, ...],
    name: str,
    fill: bool,
    mask_personal: bool,
    mask_word: tuple[str, ...],
    seed: int,
    output: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Make persona.json, workloads/ and calibration.jsonl from a system prompt, tools and logs.

    Secrets in logs are masked. README.md in the folder states where everything comes from.
    """
    from annie_quant.data.initialize import Sources, initialize

    if prompt == tools == Path("-"):
        raise click.UsageError("--prompt - and --tools - cannot both read stdin")
    sources = Sources(
        prompt=read_text(prompt) if prompt else None,
        tools=read_tools(tools) if tools else None,
        logs=logs,
        name=name,
        personal=mask_personal,
        words=mask_word,
        seed=seed,
        fill=fill,
    )
    with console.task("init") as step:
        result = initialize(sources, output, force, step)
    document = msgspec.to_builtins(result)
    if as_json:
        emit(document)
        return
    console.print_mapping(str(output), {k: v for k, v in document.items() if k not in ("lines", "output")})
    for line in result.lines:
        console.note(line)
    console.note(
        f"next: annie-quant search --model BF16 --persona {output} --calib-data {output}/calibration.jsonl --output RUN"
    )


def read_text(path: Path) -> str:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        return text.removeprefix("\N{BYTE ORDER MARK}")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path} cannot be read: {reason}", "give a UTF-8 text file, or - for stdin") from None


def read_tools(path: Path) -> list[dict[str, Any]]:
    """Return the tools in a file: OpenAI's list, an object with `tools`, or bare function definitions."""
    from annie_quant.data.logs.records import tools_of

    try:
        document = decode_json(read_text(path), lenient=True)
    except ValueError as error:
        raise UsageError(f"{path} is {error}", "give a list of OpenAI function tools") from None
    if isinstance(document, dict):
        document = document.get("tools") or document.get("functions") or [document]
    if document == []:
        return []
    tools = tools_of(document)
    if tools is None or len(tools) != len(document):
        raise UsageError(
            f"{path} is not a list of OpenAI function tools", '[{"type": "function", "function": {"name": ...}}]'
        )
    definitions: dict[str, dict[str, Any]] = {}
    for tool in tools:
        name = tool["function"]["name"]
        if definitions.setdefault(name, tool) != tool:
            raise UsageError(f"{path} defines the tool {name} twice, and differently", "remove one of the definitions")
    return list(definitions.values())
