"""Serving runtimes: start one, know when it is ready, stop it, or print the command that would start it.

server = start("model.gguf", runtime="llama.cpp")     a process; server.url, server.pid, server.stop()
print(command(model, runtime="vllm"))                 the recipe as a shell command, nothing is started
write_recipe(model, "annie.yaml", runtime="vllm")     the same as a file for sparkrun and spark-vllm-docker
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from annie_quant import registry
from annie_quant.errors import UsageError
from annie_quant.serve.server import Server

__all__ = ["Server", "command", "start", "write_recipe"]


def start(
    model_path: str | os.PathLike,
    runtime: str = "llama.cpp",
    port: int = 0,
    log: str | os.PathLike | None = None,
    timeout_s: float | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Server:
    """Start a server and return it when it answers. port 0 takes a free one; `log` is the server's own output;
    timeout_s is the runtime's own by default (two minutes for llama.cpp, fifteen for a container). say: told the phases.

    Raises ServerError (port in use, died while starting, not ready in time) with the log's last telling line.
    """
    if timeout_s is not None:
        options["timeout_s"] = timeout_s
    return part(runtime).start(Path(model_path), port=port, log=log, say=say, **options)


def command(model_path: str | os.PathLike, runtime: str = "llama.cpp", port: int = 8000, **options: Any) -> str:
    """The shell command that serves this model."""
    return part(runtime).command(Path(model_path), port=port, **options)


def write_recipe(
    model_path: str | os.PathLike, path: str | os.PathLike, runtime: str = "vllm", port: int = 8000, **options: Any
) -> Path:
    """Write the recipe as YAML. Raises UsageError for a runtime that has no such recipes (llama.cpp)."""
    module = part(runtime)
    if not hasattr(module, "write"):
        raise UsageError(f"{runtime} has no recipe files", "choose vllm or sglang")
    return module.write(Path(model_path), Path(path), port=port, **options)


def part(runtime: str):
    from annie_quant.serve import runtimes

    return registry.find(runtimes, runtime, "runtime")
