"""The annie-quant command. Data goes to stdout, notes and progress to stderr; exit codes are in annie_quant.core.errors."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from annie_quant.cli import bench, checkpoint, data, doctor, quantize, report
from annie_quant.cli.terminal import (
    Stopped,
    clean_library_messages,
    console,
    describe,
    emit,
    stop_signals_raise,
)
from annie_quant.core.errors import AnnieError


class Commands(click.Group):
    """Lists commands in the order in which they are used, each with its whole first sentence (click cuts at the line's end)."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(limit=500)) for name, each in self.commands.items()]
            )


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.option("--version", "show_version", is_flag=True, help="Print the version and exit.")
@click.option(
    "--verbose",
    is_flag=True,
    help="With --version: also what is installed, and how to install the rest.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="With --version: the same as one JSON object."
)
@click.pass_context
def cli(context: click.Context, show_version: bool, verbose: bool, as_json: bool) -> None:
    """Quantize fine-tuned Qwen3.5 to NVFP4, verify its behaviour, serve it, time it, report."""
    if show_version:
        doctor.show_version(verbose, as_json)
        context.exit()
    if verbose or as_json:
        raise click.UsageError(
            "--verbose and --json need --version, or follow a command that has them"
        )
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for each in (
    quantize.demo,
    data.record_command,
    data.init,
    data.data,
    quantize.quantize,
    checkpoint.audit,
    checkpoint.convert,
    checkpoint.compare,
    checkpoint.evaluate,
    checkpoint.retention,
    quantize.search,
    quantize.serve,
    doctor.doctor,
    doctor.validate_gpu,
    bench.bench,
    bench.attribute,
    report.report,
    report.export,
    report.publish,
    report.explain,
):
    cli.add_command(each)


def main() -> None:
    """Run the command line. An expected error is one line; ANNIE_QUANT_TRACEBACK=1 shows its traceback."""
    # Idle OpenMP threads (torch's and the codec's) spin by default, which slows servers on a machine with few cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # so spelled: ops/llama_cpp.py
    stop_signals_raise()
    clean_library_messages()
    try:
        cli.main(standalone_mode=False)
    except AnnieError as error:
        if os.environ.get("ANNIE_QUANT_TRACEBACK"):
            raise
        hint = error.hint
        if isinstance(code := getattr(error, "code", None), str):
            hint = f"{hint} (annie-quant explain {code})" if hint else f"annie-quant explain {code}"
        console.error(error.message, hint)
        _emit_error(error.message, hint, error.exit_code)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        _emit_error(error.format_message(), "", 2)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt) as error:
        cause = error.__cause__ if isinstance(error, click.Abort) else error
        if isinstance(cause, EOFError):  # click takes it for the end of the terminal's input
            _report(cause)
        console.error("interrupted; finished work is saved", "run the same command again to resume")
        if isinstance(cause, Stopped):
            cause.end_process()
        sys.exit(130)
    except Exception as error:
        _report(error)


def _emit_error(message: str, hint: str, exit_code: int) -> None:
    """Print an error as the one JSON object that --json promises."""
    if "--json" in sys.argv[1:]:
        emit({"error": message, "hint": hint, "exit_code": exit_code})


def _report(error: Exception) -> NoReturn:
    """Print an error of the system as one line and exit with code 3; raise any other, or all with ANNIE_QUANT_TRACEBACK."""
    description = describe(error)
    if os.environ.get("ANNIE_QUANT_TRACEBACK") or description is None:
        raise error
    try:
        console.error(*description)
        _emit_error(*description, 3)
    except (MemoryError, ImportError, OSError):  # too little memory for rich
        sys.stderr.write("annie-quant: {}\n  → {}\n".format(*description))
    sys.exit(3)
