"""Serving from a container image: recipes are data (assets/recipes), here they become a command or a process."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from annie_quant.errors import EnvironmentFault, UsageError
from annie_quant.files import read_json
from annie_quant.serve import server as process

RECIPES = Path(__file__).resolve().parent.parent / "assets" / "recipes"


def recipe(runtime: str, name: str | None) -> dict[str, Any]:
    """A runtime's recipe by the date it was seen to work; the newest by default."""
    known = read_json(RECIPES / f"{runtime}.json")
    chosen = name or max(known)
    if chosen not in known:
        raise UsageError(f"{runtime} has no recipe {chosen!r}", f"choose one of: {', '.join(sorted(known))}")
    return known[chosen]


def arguments(runtime: str, model: Path, port: int, name: str | None = None) -> list[str]:
    """`docker run …` in the foreground, so that ending the process ends the container."""
    parts = recipe(runtime, name)
    model = model.resolve()
    fill = {"{port}": str(port), "{name}": model.name}
    return [
        "docker",
        "run",
        "--rm",
        *parts["docker"],
        "-p",
        f"{port}:{port}",
        "-v",
        f"{model}:/model:ro",
        parts["image"],
        *(fill.get(a, a) for a in parts["command"]),
    ]


def command(runtime: str, model: Path, port: int, name: str | None = None) -> str:
    return shlex.join(arguments(runtime, model, port, name))


def start(
    runtime: str, model: Path, port: int, log: str | os.PathLike | None, timeout_s: float, name: str | None = None
) -> process.Server:
    """Run the container and wait for /health. Raises EnvironmentFault where there is no docker."""
    if not (model / "config.json").is_file():
        raise UsageError(f"{model} is no model folder", f"{runtime} serves a safetensors checkpoint")
    if shutil.which("docker") is None:
        raise EnvironmentFault(
            f"{runtime} is run from a container, and docker is not installed here",
            f"annie-quant serve {shlex.quote(str(model))} --runtime {runtime} --dry-run",
        )
    port = port or 8000
    process.check_port(port)
    server = process.spawn(arguments(runtime, model, port, name), log, runtime)
    process.wait_ready(server, lambda: f"http://127.0.0.1:{port}", "/health", timeout_s)
    return server
