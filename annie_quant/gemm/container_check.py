"""The stack examination inside a container: one command as a list of arguments, the code on its standard input.

A name of a running container is entered (`docker exec`), anything else is an image that is started for the purpose
(`docker run --rm`). Nothing is mounted or installed there: the few pure Python files that `annie_quant.gemm.stack_check` needs
travel as a zip archive within the script that Python reads, so it needs Python 3.10 with NumPy, as every serving stack
has.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

from annie_quant.errors import EnvironmentFault, UsageError
from annie_quant.gemm import known_failures
from annie_quant.gemm.stack_check import STACKS

PROGRAMS = ("docker", "podman")
PACKAGE = Path(__file__).parents[1]
NEEDED = ("__init__", "errors", "native")  # what annie_quant.gemm imports of the rest
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
    """The program that the container's Python reads: the archive, then the examination of `stack`."""
    if stack not in (*STACKS, "all"):
        raise UsageError(f"there is no stack called {stack!r}", f"choose one of: {', '.join(STACKS)}, all")
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in [*(PACKAGE / f"{name}.py" for name in NEEDED), *sorted((PACKAGE / "gemm").glob("*.py"))]:
            archive.write(path, Path("annie_quant") / path.relative_to(PACKAGE))
    return SCRIPT.format(archive=base64.b64encode(held.getvalue()).decode("ascii"), stack=stack)


def command(target: str, program: str, running: bool) -> list[str]:
    """The arguments, one by one: there is no shell between. `target` is a running container's name or an image."""
    if not target or target.startswith("-"):
        raise UsageError(f"{target!r} names no container and no image", "docker ps; docker images")
    if running:
        return [program, "exec", "-i", target, "python3", "-"]
    return [program, "run", "--rm", "-i", "--gpus", "all", "--entrypoint", "python3", target, "-"]


def plan(target: str, stack: str) -> list[str]:
    """The command for `target` on this machine; asks the container program only whether that name is running."""
    script(stack)
    program = next((p for p in PROGRAMS if shutil.which(p)), None)
    if program is None:
        return command(target, PROGRAMS[0], running=False)
    asked = command(target, program, running=False)  # refuses what is no name before it is passed on
    state = subprocess.run(
        [program, "container", "inspect", "--format", "{{.State.Running}}", target], capture_output=True, text=True
    )
    return command(target, program, running=True) if state.stdout.strip() == "true" else asked


def examine(target: str, stack: str, timeout_s: float = 1800.0) -> dict[str, Any]:
    """`stack.examine` as seen in the container; EnvironmentFault with the container's last words if it gave no result."""
    argv = plan(target, stack)
    if shutil.which(argv[0]) is None:
        raise EnvironmentFault("neither docker nor podman is on the PATH", "validate-gpu --stack without --container")
    try:
        done = subprocess.run(argv, input=script(stack), capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(f"{target} gave no result within {timeout_s:.0f} s", "docker logs") from error
    for line in reversed(done.stdout.splitlines()):  # the stack's own imports may print before it
        if line.startswith("{"):
            return {"container": target, **json.loads(line)}
    said = (done.stderr or done.stdout).strip().splitlines()
    last = said[-1] if said else f"exit code {done.returncode} and not a word"
    hint = known_failures.recognise(done.stderr)
    raise EnvironmentFault(f"{target}: {last[:300]}", hint[1] if hint else "docker run --gpus all … nvidia-smi")
