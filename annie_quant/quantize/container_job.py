"""Quantize in NVIDIA's container, as one command. The recipes are data (assets/recipes/ngc.json).

It runs as the calling user, so its files do not belong to root; models and data are mounted read-only; what pip installs
is in the container's /tmp and is removed with it. The package is installed from the checkout that this one runs from.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from annie_quant.errors import EnvironmentFault, UsageError
from annie_quant.files import ASSETS, read_json

RECIPES = ASSETS / "recipes" / "ngc.json"
SOURCE = Path(__file__).resolve().parents[2]


def arguments(
    strategy: str,
    model: Path,
    output: Path,
    calib_data: Path | None = None,
    more: Sequence[str] = (),
    recipe: str | None = None,
    source: Path = SOURCE,
) -> list[str]:
    """Return `docker run …` as a list. more: further options of `annie-quant quantize`."""
    recipes = read_json(RECIPES)
    name = recipe or max(recipes)
    if name not in recipes:
        raise UsageError(f"unknown container recipe {name!r}", f"choose one of: {', '.join(sorted(recipes))}")
    if not (source / "pyproject.toml").is_file():
        raise UsageError(
            f"{source} is not a checkout of annie_quant", "run this from a clone: the container installs it"
        )
    parts = recipes[name]
    model, output = model.resolve(), output.resolve()
    inner = ["/tmp/venv/bin/annie-quant", "quantize", "--strategy", strategy, "--model", "/model"]  # noqa: S108
    mounts = [(source, "/source:ro"), (model, "/model:ro"), (output.parent, "/output")]
    if calib_data is not None:
        calib_data = calib_data.resolve()
        mounts.append((calib_data.parent, "/data:ro"))
        inner += ["--calib-data", f"/data/{calib_data.name}"]
    inner += ["--output", f"/output/{output.name}", *more]
    script = " && ".join([*parts["setup"], shlex.join(inner)])
    return [
        "docker",
        "run",
        "--rm",
        *parts["docker"],
        "--user",
        f"{os.getuid()}:{os.getgid()}",
        "-e",
        "HOME=/tmp",
        *(word for host, inside in mounts for word in ("-v", f"{host}:{inside}")),
        parts["image"],
        "bash",
        "-c",
        script,
    ]


def run(argv: Sequence[str], output: Path) -> int:
    """Run the command and return its exit code. The output's parent is made first: docker would make it as root."""
    if shutil.which("docker") is None:
        raise EnvironmentFault(
            "docker is not installed here", "add --dry-run to print the command, or leave --container out"
        )
    output.resolve().parent.mkdir(parents=True, exist_ok=True)
    return subprocess.run(list(argv), check=False).returncode
