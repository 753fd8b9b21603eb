"""`annie-quant record`: pass requests on to a server and record its chats for `annie-quant init`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from annie_quant.cli.common import PATH, console, emit, json_option


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
    from annie_quant.data.record.proxy import Settings, is_local, record

    settings = Settings(
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
