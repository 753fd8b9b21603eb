"""The annie-quant command. Data goes to stdout, notes and progress to stderr; exit codes are in annie_quant.errors."""

from __future__ import annotations

import errno
import os
import resource
import sys

import click

from annie_quant import files
from annie_quant.cli import bench, checkpoint, data, demo, evaluate, machine, quantize, report, search, serve, version
from annie_quant.cli.common import console
from annie_quant.errors import AnnieError


class Commands(click.Group):
    """Lists commands in the order of the work, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.option("--version", "asked", is_flag=True, help="Print the version and stop.")
@click.option("--verbose", is_flag=True, help="With --version: what of the package is here, and what brings the rest.")
@click.option("--json", "as_json", is_flag=True, help="With --version: the same as one JSON object.")
@click.pass_context
def cli(context: click.Context, asked: bool, verbose: bool, as_json: bool) -> None:
    """Fine-tuned Qwen3.5 to NVFP4 with its manners intact: quantize, prove, serve, time, report."""
    if asked:
        version.show(verbose, as_json)
        context.exit()
    if verbose or as_json:
        raise click.UsageError("--verbose and --json go with --version, or after a command that has them")
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


# In the order of the work.
for command in (
    demo.demo, data.data, quantize.quantize, checkpoint.audit, checkpoint.convert, checkpoint.compare, evaluate.evaluate,
    search.search, serve.serve, machine.doctor, machine.validate_gpu, bench.bench, report.report, report.publish,
):  # fmt: skip
    cli.add_command(command)


def main() -> None:
    """The entry point: one clear line for what can be expected, a traceback only with ANNIE_QUANT_TRACEBACK=1."""
    # Idle OpenMP threads (torch's and the codec's) spin by default; beside servers on a few cores that costs minutes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        cli.main(standalone_mode=False)
    except AnnieError as error:
        if os.environ.get("ANNIE_QUANT_TRACEBACK"):
            raise
        console.error(error.message, error.hint)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        console.error("interrupted; what is finished is kept", "run the same command again to go on")
        sys.exit(130)
    except Exception as error:
        said = explained(error)
        if os.environ.get("ANNIE_QUANT_TRACEBACK") or said is None:
            raise
        try:
            console.error(*said)
        except (MemoryError, ImportError, OSError):  # no memory for a beautiful line either
            sys.stderr.write("annie-quant: {}\n  → {}\n".format(*said))
        sys.exit(3)


# What the machine lacks, as libraries say it in exceptions of their own.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), ("No space left on device",)
MEMORY = (errno.ENOMEM,), ("allocate memory", "out of memory", "bad_alloc", "start new thread", "failed to map segment")


def explained(error: Exception) -> tuple[str, str] | None:
    """Message and hint for what can be expected of a machine: full, out of memory, a file that is not ours; else None."""
    if came_from(error, *FULL):
        return "the disk is full; what is finished is kept", "free some, then run the same command again"
    # Under ulimit -v libraries do not load either, and say so in many ways; oneDNN's is not even about memory.
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    unloaded = limited and (
        isinstance(error, (ImportError, SystemError)) or came_from(error, (), ("could not create a primitive",))
    )
    if isinstance(error, MemoryError) or unloaded or came_from(error, *MEMORY):
        return (
            "there is not enough memory; what is finished is kept",
            "close something, or raise ulimit -v, and run it again",
        )
    if not isinstance(error, OSError):
        return None
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename:
        return (
            f"{where}{error.strerror}{files.owner(error.filename)}",
            "choose another --output, or mend the permissions",
        )
    return f"{where}{error.strerror or error}", "set ANNIE_QUANT_TRACEBACK=1 to see where"


def came_from(error: BaseException | None, numbers: tuple[int, ...], words: tuple[str, ...]) -> bool:
    """Whether this, or what it was raised from, is one of these faults of the system."""
    while error is not None:
        if getattr(error, "errno", None) in numbers or any(word in str(error) for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main()
