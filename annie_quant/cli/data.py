"""`annie-quant data`: make conversations with a teacher, or validate existing ones.

`annie-quant init`: a persona, gate prompts and calibration data from a system prompt, tools and logs.

`annie-quant record`: pass requests on to a server and record its chats for `annie-quant init`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from annie_quant.cli.common import PATH, console, emit, json_option
from annie_quant.core.errors import UsageError
from annie_quant.core.untrusted import decode_json


@click.command()
@click.option("--persona", default="annie", show_default=True, help="A built-in persona or a JSON file.")
@click.option(
    "--teacher", default="offline", show_default=True, help="Writer of the answers: claude-cli, openai, offline."
)
@click.option("--n", default=500, show_default=True, help="Conversations, evenly over the persona's categories.")
@click.option("--seed", default=0, show_default=True, help="Of the offline teacher's draws.")
@click.option(
    "--split",
    default="calibration",
    show_default=True,
    type=click.Choice(["train", "calibration", "gate"]),
    help="Purpose of the conversations; prompts of gates are excluded from the other two splits.",
)
@click.option(
    "--apart-from",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="A file whose prompts are excluded; repeatable.",
)
@click.option("--teacher-model", help="Model of the teacher. Default for claude-cli: claude-opus-4-6.")
@click.option("--url", help="Endpoint of --teacher openai. Default: OPENAI_BASE_URL.")
@click.option("--batch-size", default=10, show_default=True, help="Conversations per batch.")
@click.option("--timeout", default=300.0, show_default=True, help="Time limit of a batch, in seconds.")
@click.option("--max-budget-usd", type=float, help="Stop when this amount is spent, including resumed runs.")
@click.option(
    "--output",
    default="data/calibration/annie_calibration.jsonl",
    show_default=True,
    type=PATH,
    help="JSON lines, one conversation per line.",
)
@click.option("--check", is_flag=True, help="Only validate the conversations in --output.")
@click.option("--force", is_flag=True, help="Replace a finished set, and discard an unfinished one.")
@json_option
def data(
    persona: str,
    teacher: str,
    n: int,
    seed: int,
    split: str,
    apart_from: tuple[Path, ...],
    teacher_model: str | None,
    url: str | None,
    batch_size: int,
    timeout: float,
    max_budget_usd: float | None,
    output: Path,
    check: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Make conversations with a teacher, or validate existing ones. Exit code 1 if they are too few or not valid."""
    from annie_quant import data as conversations

    if check:
        who = conversations.load_persona(persona)
        rows = conversations.read_rows(output)
        conversations.check_prompt_hash(rows, persona)
        conversations.check_apart(rows, *apart_from, gates=split != "gate", persona=who)
        result: conversations.ValidatedRows = conversations.validate(rows, who)
    else:
        with console.task(f"conversations by {teacher}") as step:
            result = conversations.generate(
                persona,
                teacher,
                n,
                output,
                seed,
                step,
                split=split,
                apart_from=apart_from,
                options=conversations.Options(teacher_model, url, timeout, batch_size, max_budget_usd),
                force=force,
            )
    document = msgspec.to_builtins(result)
    emit(document) if as_json else console.print_mapping(str(output), document)
    sys.exit(0 if result.ok else 1)


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
    type=PATH,
    help="Chat logs: JSON lines, server logs, Parquet, or a folder; repeatable.",
)
@click.option("--name", default="", help="The assistant's name. Default: Assistant.")
@click.option("--fill", is_flag=True, help="Also make prompts and conversations from the tools' schemas.")
@click.option(
    "--mask-personal", is_flag=True, help="Mask email addresses, phone and card numbers, and names that users state."
)
@click.option("--mask-word", multiple=True, metavar="WORD", help="Mask this text; repeatable.")
@click.option("--seed", default=0, show_default=True, help="Of the sample of the logs, and of generated prompts.")
@click.option("--output", required=True, type=PATH, help="Folder to write.")
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
    from annie_quant.data.init_folder import Sources, initialize

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
    from annie_quant.data.log_records import tools_of

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


@click.command(name="record")
@click.option("--upstream", required=True, metavar="URL", help="The OpenAI-compatible server to pass requests on to.")
@click.option(
    "--output", type=PATH, default=Path("recorded.jsonl"), show_default=True, help="JSON lines; an existing file grows."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8100, show_default=True, help="0: any free port.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen at; others than this machine's are noted."
)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), help="Stop after this time. Default: at Ctrl-C.")
@click.option(
    "--max-mb",
    type=click.FloatRange(0, min_open=True),
    default=1000,
    show_default=True,
    help="Limit of the file's size.",
)
@click.option(
    "--mask-personal", is_flag=True, help="Mask email addresses, phone and card numbers, and names that users state."
)
@click.option("--mask-word", multiple=True, metavar="WORD", help="Mask this text; repeatable.")
@json_option
def record_command(
    upstream: str,
    output: Path,
    port: int,
    host: str,
    minutes: float | None,
    max_mb: float,
    mask_personal: bool,
    mask_word: tuple[str, ...],
    as_json: bool,
) -> None:
    """Record real chats: a proxy between your clients and an OpenAI-compatible server.

    Point the clients at the printed address. Requests and answers are passed on unchanged, streams too. Keys and headers
    are never written, secrets in messages are masked. Ctrl-C ends it; `annie-quant init --logs FILE` reads the file.
    """
    from annie_quant.core.host import is_local
    from annie_quant.data.record_proxy import RecorderSettings, record

    settings = RecorderSettings(
        upstream=upstream,
        output=output,
        host=host,
        port=port,
        most_bytes=int(max_mb * 1e6),
        personal=mask_personal,
        words=mask_word,
        duration_s=60 * minutes if minutes else None,
    )

    def ready(url: str) -> None:
        console.note(f"recording: set your clients' base URL to {url}/v1   (Ctrl-C ends it)")
        if not is_local(host):
            console.note(
                f"{host} is not this machine's own address: everyone who reaches it reaches the server behind it"
            )

    with console.task("record") as step:
        result = record(settings, step, ready)
    document = msgspec.to_builtins(result)
    if as_json:
        emit(document)
    else:
        console.print_mapping(
            str(output), {k: v for k, v in document.items() if k not in ("output", "left_out", "masked")}
        )
        for reason, n in sorted(result.left_out.items(), key=lambda item: -item[1]):
            console.note(f"{n:,} × {reason if reason.startswith('answer ') else f'not recorded: {reason}'}")
        for kind, n in sorted(result.masked.items()):
            console.note(f"masked: {n} × {kind}")
        if result.lines:
            console.note(f"next: annie-quant init --logs {output} --output mine")
    sys.exit(3 if result.stopped and "--max-mb" not in result.stopped else 0)
