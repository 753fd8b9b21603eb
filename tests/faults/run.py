"""Run every stage with every fault: message, exit code, files left, and whether a second run gives the undisturbed result.

    python tests/faults/run.py FOLDER [--stages "eval,bench"] [--faults "kill -9,full disk"]     needs root (mounts, users)

Prints a Markdown table (README.md has one). Exit code 1 if a row is bad: a traceback, a hang, a second run that does not
complete or gives another result, temporary files that remain.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import signal
import sys
from pathlib import Path

from inject import FAULTS, LIMIT_S, Ended, Whole, begin, finish, undisturbed
from stages import STAGES, Stage, prepare, serving


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--faults", default=",".join(FAULTS))
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # child processes of a background job would ignore it
    inputs = arguments.folder.resolve() / "inputs"
    prepare(inputs)
    bad = 0
    print("| stage | fault | code | message | files left | second run |\n|---|---|---|---|---|---|")
    for name in arguments.stages.split(","):
        stage = STAGES[name]
        with serving(inputs) if stage.servers else contextlib.nullcontext():
            output = fresh(stage, inputs, arguments.folder)
            ended, whole = undisturbed(stage, inputs, output)
            if "Traceback" in ended.stderr or ended.code not in (0, 1):
                sys.exit(f"{name} fails undisturbed: {ended.stderr[-2000:]}")
            for fault in arguments.faults.split(","):
                bad += row(stage, fault, inputs, fresh(stage, inputs, arguments.folder), whole)
    return 1 if bad else 0


def fresh(stage: Stage, inputs: Path, folder: Path) -> Path:
    output = folder.resolve() / "out"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    stage.start(inputs, output)
    return output


def row(stage: Stage, fault: str, inputs: Path, output: Path, whole: Whole) -> bool:
    """Return one line of the table, and whether it is bad."""
    ended = FAULTS[fault](stage, inputs, output, whole)
    if ended.code is None:
        return False
    left = [f.name for f in output.rglob("*") if f.name.endswith((".part", ".old", ".work"))]
    again = finish(begin(stage, inputs, output))
    remains = [
        str(f.relative_to(output)) for f in output.rglob("*") if f.name.endswith((".part", ".old"))
    ]
    faults = problems(stage, ended, again, remains, output, whole)
    reported = message(ended.stderr, output, inputs)
    cells = [
        stage.name,
        fault,
        str(ended.code),
        "; ".join(filter(None, (reported, ended.note))),
        ", ".join(left[:2]),
    ]
    rerun = "; ".join(f"**{f}**" for f in faults) if faults else "the same"
    print("| " + " | ".join(c.replace("|", "\\|") for c in cells) + f" | {rerun} |", flush=True)
    for text in (ended.stderr, again.stderr):
        if "Traceback" in text:
            print(text[-3000:], file=sys.stderr, flush=True)
    return bool(faults)


def problems(
    stage: Stage, ended: Ended, again: Ended, remains: list[str], output: Path, whole: Whole
) -> list[str]:
    result = []
    if "Traceback" in ended.stderr or "Traceback" in again.stderr:
        result.append("traceback")
    if (ended.code or 0) in (-4, -6, -7, -8, -11):
        result.append("crash")
    if ended.note and ended.note.isupper():
        result.append(f"{ended.note} within {LIMIT_S} s" if ended.note == "HUNG" else ended.note)
    elif "ANOTHER RESULT" in ended.note or "ENDED WITH" in ended.note:
        result.append(ended.note)
    if again.code != whole.code:
        return [*result, f"ends with {again.code}: {message(again.stderr, output, output)}"]
    if stage.outcome(output) != whole.outcome:
        result.append("another result")
    if remains:
        result.append(f"stays: {', '.join(remains[:3])}")
    return result


def message(stderr: str, output: Path, inputs: Path) -> str:
    """Return the lines of the error message, without progress."""
    text = (
        re.sub(r"\x1b\[[0-9;]*m", "", stderr).replace(str(output), "OUT").replace(str(inputs), "IN")
    )
    lines = [line.strip() for line in text.splitlines()]
    at = next((i for i, line in enumerate(lines) if line.startswith("annie-quant:")), None)
    if at is None:
        lines = [line for line in lines if line and not line.startswith("✓")][-1:]
        return lines[0][:200] if lines else ""
    return " ".join(lines[at : at + 2])[:330]


if __name__ == "__main__":
    sys.exit(main())
