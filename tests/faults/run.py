"""Every stage under every fault: what is said, with which exit code, what is left, and whether a rerun ends as if nothing was.

    python tests/faults/run.py FOLDER [--stages "eval,bench"] [--faults "kill -9,full disk"]     needs root (mounts, users)

Prints a Markdown table (docs/faults.md holds one) and ends with 1 where a row is bad: a traceback, a hang, a rerun that
does not complete or gives something else, temporary files that stay.
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
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("folder", type=Path)
    asked.add_argument("--stages", default=",".join(STAGES))
    asked.add_argument("--faults", default=",".join(FAULTS))
    given = asked.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children would ignore it
    inputs = given.folder.resolve() / "inputs"
    prepare(inputs)
    bad = 0
    print("| stage | fault | code | what is said | left | the rerun |\n|---|---|---|---|---|---|")
    for name in given.stages.split(","):
        stage = STAGES[name]
        with serving(inputs) if stage.servers else contextlib.nullcontext():
            output = fresh(stage, inputs, given.folder)
            ended, whole = undisturbed(stage, inputs, output)
            if "Traceback" in ended.stderr or ended.code not in (0, 1):
                sys.exit(f"{name} fails undisturbed: {ended.stderr[-2000:]}")
            for fault in given.faults.split(","):
                bad += row(stage, fault, inputs, fresh(stage, inputs, given.folder), whole)
    return 1 if bad else 0


def fresh(stage: Stage, inputs: Path, folder: Path) -> Path:
    output = folder.resolve() / "out"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    stage.start(inputs, output)
    return output


def row(stage: Stage, fault: str, inputs: Path, output: Path, whole: Whole) -> bool:
    """One line of the table; whether it is bad."""
    ended = FAULTS[fault](stage, inputs, output, whole)
    if ended.code is None:
        return False
    left = [f.name for f in output.rglob("*") if f.name.endswith((".part", ".old", ".work"))]
    again = finish(begin(stage, inputs, output))
    remains = [str(f.relative_to(output)) for f in output.rglob("*") if f.name.endswith((".part", ".old"))]
    faults = problems(stage, ended, again, remains, output, whole)
    said = message(ended.stderr, output, inputs)
    cells = [stage.name, fault, str(ended.code), "; ".join(filter(None, (said, ended.note))), ", ".join(left[:2])]
    rerun = "; ".join(f"**{f}**" for f in faults) if faults else "the same"
    print("| " + " | ".join(c.replace("|", "\\|") for c in cells) + f" | {rerun} |", flush=True)
    for text in (ended.stderr, again.stderr):
        if "Traceback" in text:
            print(text[-3000:], file=sys.stderr, flush=True)
    return bool(faults)


def problems(stage: Stage, ended: Ended, again: Ended, remains: list[str], output: Path, whole: Whole) -> list[str]:
    found = []
    if "Traceback" in ended.stderr or "Traceback" in again.stderr:
        found.append("traceback")
    if (ended.code or 0) in (-4, -6, -7, -8, -11):
        found.append("crash")
    if ended.note and ended.note.isupper():
        found.append(f"{ended.note} within {LIMIT_S} s" if ended.note == "HUNG" else ended.note)
    elif "ANOTHER RESULT" in ended.note or "ENDED WITH" in ended.note:
        found.append(ended.note)
    if again.code != whole.code:
        return [*found, f"ends with {again.code}: {message(again.stderr, output, output)}"]
    if stage.outcome(output) != whole.outcome:
        found.append("another result")
    if remains:
        found.append(f"stays: {', '.join(remains[:3])}")
    return found


def message(stderr: str, output: Path, inputs: Path) -> str:
    """What a person reads: the lines of the error, without progress."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", stderr).replace(str(output), "OUT").replace(str(inputs), "IN")
    lines = [line.strip() for line in text.splitlines()]
    at = next((i for i, line in enumerate(lines) if line.startswith("annie-quant:")), None)
    if at is None:
        lines = [line for line in lines if line and not line.startswith("✓")][-1:]
        return lines[0][:200] if lines else ""
    return " ".join(lines[at : at + 2])[:330]


if __name__ == "__main__":
    sys.exit(main())
