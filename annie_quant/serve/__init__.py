"""Serving runtimes: start one, know when it is ready, stop it, or print the command that would start it.

server = start("model.gguf", runtime="llama.cpp")     a process; server.url, server.pid, server.stop()
print(command(model, runtime="vllm"))                 the recipe as a shell command, nothing is started
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from annie_quant import registry
from annie_quant.serve.server import Server

__all__ = ["Server", "command", "start"]


def start(
    model_path: str | os.PathLike,
    runtime: str = "llama.cpp",
    port: int = 0,
    log: str | os.PathLike | None = None,
    timeout_s: float | None = None,
    **options: Any,
) -> Server:
    """Start a server and return it when it answers. port 0 takes a free one; `log` is the server's own output;
    timeout_s is the runtime's own by default (two minutes for llama.cpp, fifteen for a container).

    Raises ServerError (port in use, died while starting, not ready in time) with the log's last telling line.
    """
    if timeout_s is not None:
        options["timeout_s"] = timeout_s
    return part(runtime).start(Path(model_path), port=port, log=log, **options)


def command(model_path: str | os.PathLike, runtime: str = "llama.cpp", port: int = 8000, **options: Any) -> str:
    """The shell command that serves this model."""
    return part(runtime).command(Path(model_path), port=port, **options)


def part(runtime: str):
    from annie_quant.serve import runtimes

    return registry.find(runtimes, runtime, "runtime")
