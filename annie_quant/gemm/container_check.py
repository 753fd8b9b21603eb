"""The stack check inside a container: one command as a list of arguments, the code on its standard input.

A running container is entered (`docker exec`); any other name is an image that is started for the check (`docker run
--rm`). Nothing is mounted or installed there: the few pure Python files that `annie_quant.gemm.stack_check` needs are
a zip archive in the script that Python reads. It needs Python 3.10 with NumPy, which all serving stacks have.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import shutil
import subprocess
import zipfile
from pathlib import Path

from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.gemm import known_failures
from annie_quant.gemm.stack_check import STACKS, StackResult, last_json_line

PROGRAMS = ("docker", "podman")
PACKAGE = Path(__file__).parents[1]
DEPENDENCIES = (
    "__init__",
    "core/__init__",
    "core/errors",
    "core/native",
    "core/text",
)  # of annie_quant.gemm in the rest of the package
SCRIPT = """import base64, os, runpy, sys, tempfile
folder = tempfile.mkdtemp()
archive = os.path.join(folder, "annie.zip")
with open(archive, "wb") as f:
    f.write(base64.b64decode("{archive}"))
sys.path.insert(0, archive)
sys.argv = ["stack", "{stack}"]
runpy.run_module("annie_quant.gemm.stack_check", run_name="__main__")
"""


def script(stack: str) -> str:
    """Return the program for the container's Python: the archive, then the check of `stack`."""
    if stack not in (*STACKS, "all"):
        raise UsageError(f"there is no stack called {stack!r}", f"choose one of: {', '.join(STACKS)}, all")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in [*(PACKAGE / f"{name}.py" for name in DEPENDENCIES), *sorted((PACKAGE / "gemm").glob("*.py"))]:
            archive.write(path, Path("annie_quant") / path.relative_to(PACKAGE))
    return SCRIPT.format(archive=base64.b64encode(content.getvalue()).decode("ascii"), stack=stack)


def command(target: str, program: str, running: bool) -> list[str]:
    """Return the command as a list of arguments (no shell). target: a running container's name or an image."""
    if not target or target.startswith("-"):
        raise UsageError(f"{target!r} is not the name of a container or an image", "docker ps; docker images")
    if running:
        return [program, "exec", "-i", target, "python3", "-"]
    return [program, "run", "--rm", "-i", "--gpus", "all", "--entrypoint", "python3", target, "-"]


def plan(target: str, stack: str) -> list[str]:
    """Return the command for `target` on this machine. Runs the container program only to check what is running."""
    script(stack)
    program = next((p for p in PROGRAMS if shutil.which(p)), None)
    if program is None:
        return command(target, PROGRAMS[0], running=False)
    start = command(target, program, running=False)  # checks the name before it is passed to the program
    state = subprocess.run(
        [program, "container", "inspect", "--format", "{{.State.Running}}", target], capture_output=True, text=True
    )
    return command(target, program, running=True) if state.stdout.strip() == "true" else start


def examine(target: str, stack: str, timeout_s: float = 1800.0) -> StackResult:
    """Run `stack_check.examine` in the container. EnvironmentFault: no result, with the last line of its output."""
    argv = plan(target, stack)
    if shutil.which(argv[0]) is None:
        raise EnvironmentFault("neither docker nor podman is on the PATH", "validate-gpu --stack without --container")
    try:
        process = subprocess.run(argv, input=script(stack), capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(f"{target} gave no result within {timeout_s:.0f} s", "docker logs") from error
    if (result := last_json_line(process.stdout)) is not None:
        return dataclasses.replace(StackResult.from_dict(json.loads(result)), container=target)
    output = (process.stderr or process.stdout).strip().splitlines()
    last = output[-1] if output else f"exit code {process.returncode} without output"
    known = known_failures.find_failure(process.stderr)
    raise EnvironmentFault(f"{target}: {last[:300]}", known.fix if known else "docker run --gpus all … nvidia-smi")
