"""The annie-quant command. Data goes to stdout, notes and progress to stderr; exit codes are in annie_quant.core.errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import cyclopts

from annie_quant.cli import bench, checkpoint, data, doctor, draft, quantize, report
from annie_quant.cli.process import Stopped, clean_library_messages, describe, stop_signals_raise
from annie_quant.cli.terminal import console, emit
from annie_quant.core.errors import AnnieError, UsageError


def describe_default(value: object) -> str | None:
    """Return a default for the help; None for one that says nothing."""
    if value is None or value is False or value == "" or value == ():
        return None
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


app = cyclopts.App(
    name="annie-quant",
    help="Quantize fine-tuned Qwen3.5 to NVFP4, verify its behaviour, serve it, time it, report.",
    help_flags=["-h", "--help"],
    help_format="plaintext",
    version_flags=[],
    # An option that is repeated counts as it was written last.
    default_parameter=cyclopts.Parameter(
        negative=(), show_default=describe_default, allow_repeating=True
    ),
    suppress_keyboard_interrupt=False,
    result_action="return_value",
)


@app.default
def root(
    *,
    show_version: Annotated[bool, cyclopts.Parameter(name="--version")] = False,
    verbose: bool = False,
    as_json: Annotated[bool, cyclopts.Parameter(name="--json")] = False,
) -> None:
    """Quantize fine-tuned Qwen3.5 to NVFP4, verify its behaviour, serve it, time it, report.

    Parameters
    ----------
    show_version
        Print the version and exit.
    verbose
        With --version: also what is installed, and how to install the rest.
    as_json
        With --version: the same as one JSON object.
    """
    if show_version:
        doctor.show_version(verbose, as_json)
    elif verbose or as_json:
        raise UsageError("--verbose and --json need --version, or follow a command that has them")
    else:
        app.help_print()


# In the order in which they are used.
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": quantize.demo,
    "record": data.record_command,
    "init": data.init,
    "data": data.data,
    "quantize": quantize.quantize,
    "draft": draft.draft,
    "audit": checkpoint.audit,
    "convert": checkpoint.convert,
    "compare": checkpoint.compare,
    "eval": checkpoint.evaluate,
    "search": quantize.search,
    "serve": quantize.serve,
    "doctor": doctor.doctor,
    "validate-gpu": doctor.validate_gpu,
    "bench": bench.bench,
    "attribute": bench.attribute,
    "report": report.report,
    "publish": report.publish,
    "explain": report.explain,
}
# What Ctrl-C ends: a program that runs until then, and work that the same command continues.
RUN_UNTIL_STOPPED = ("record", "serve")
RESUMED = (
    "attribute",
    "bench",
    "convert",
    "data",
    "demo",
    "draft",
    "eval",
    "publish",
    "quantize",
    "search",
)
for position, (name, function) in enumerate(COMMANDS.items()):
    app.command(function, name=name, alias=None, sort_key=position)


def main() -> None:
    """Run the command line. An expected error is one line; ANNIE_QUANT_TRACEBACK=1 shows its traceback."""
    # Idle OpenMP threads (torch's and the codec's) spin by default, which slows servers on a machine with few cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # so spelled: ops/llama_cpp.py
    stop_signals_raise()
    clean_library_messages()
    words = sys.argv[1:]
    try:
        app(words, exit_on_error=False, print_error=False)
    except AnnieError as error:
        if os.environ.get("ANNIE_QUANT_TRACEBACK"):
            raise
        hint = error.hint
        code = getattr(error, "code", None)
        if isinstance(code, str):
            hint = f"{hint} (annie-quant explain {code})" if hint else f"annie-quant explain {code}"
        _fail(error.message, hint, error.exit_code)
    except cyclopts.CycloptsError as error:
        command = next((word for word in words if word in COMMANDS), "")
        _fail(str(error), f"annie-quant {command} --help".replace("  ", " "), UsageError.exit_code)
    except KeyboardInterrupt as interrupt:
        _report_interrupt(words[0] if words else "")
        if isinstance(interrupt, Stopped):
            interrupt.end_process()
        sys.exit(130)
    except Exception as error:
        _report(error)


def _report_interrupt(command: str) -> None:
    if command in RUN_UNTIL_STOPPED:
        console.note("stopped")
    elif command in RESUMED:
        console.error("interrupted; finished work is saved", "run the same command again to resume")
    else:
        console.error("interrupted")


def _fail(message: str, hint: str, exit_code: int) -> NoReturn:
    console.error(message, hint)
    _emit_error(message, hint, exit_code)
    sys.exit(exit_code)


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
