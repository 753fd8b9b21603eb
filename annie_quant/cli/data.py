"""`annie-quant data`: make conversations with a teacher, or validate existing ones."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from annie_quant.cli.common import PATH, console, emit, json_option


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
@click.option("--retries", default=3, show_default=True, help="Retries of a failed batch.")
@click.option("--max-wait", default=900.0, show_default=True, help="Longest single wait for a rate limit, in seconds.")
@click.option("--max-budget-usd", type=float, help="Stop when this amount is spent, including resumed runs.")
@click.option("--max-budget-tokens", type=int, help="The same in tokens.")
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
    retries: int,
    max_wait: float,
    max_budget_usd: float | None,
    max_budget_tokens: int | None,
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
        conversations.check_apart(rows, *apart_from, gates=split != "gate")
        result: conversations.Validation = conversations.validate(rows, who)
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
                options=conversations.Options(teacher_model, url, timeout, batch_size),
                limits=conversations.Limits(retries, max_wait, max_budget_usd, max_budget_tokens),
                force=force,
            )
    document = msgspec.to_builtins(result)
    emit(document) if as_json else console.print_mapping(str(output), document)
    sys.exit(0 if result.ok else 1)
