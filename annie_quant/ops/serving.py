"""Serving runtimes: start a server and wait until it is ready, stop it, or print the command that starts it.

server = start("model.gguf", runtime="llama.cpp")     a process; server.url, server.pid, server.stop()
print(command(model, runtime="vllm"))                 the recipe as a shell command; nothing is started
check(model, runtime="vllm")                          an error if the runtime does not load the model
write_recipe(model, "annie.yaml", runtime="vllm")     the recipe as a file for sparkrun and spark-vllm-docker
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from annie_quant.core.errors import UsageError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.ops.llama_cpp import LlamaCpp
from annie_quant.ops.recipes import RecipeRuntime
from annie_quant.ops.server import Server

__all__ = ["Server", "check", "command", "start", "write_recipe"]


class Runtime(Protocol):
    """A program that serves models.

    start    (model, port, *, log, progress, **options of the runtime) -> the server, when it responds
    command  (model, port, **options of the runtime) -> one line for a shell
    """

    @property
    def name(self) -> str: ...

    @property
    def start(self) -> Callable[..., Server]: ...

    @property
    def command(self) -> Callable[..., str]: ...

    def check(self, model: Path, recipe: str | None = None) -> list[str]: ...

    def write(self, model: Path, path: Path, port: int = 8000, recipe: str | None = None) -> Path: ...


# Another runtime is one row here and a file of recipes. Sources of the parsers' names: vLLM's documentation, "Tool Calling", and
# SGLang's, "Tool Parser", both read on 2026-11-23.
RECIPE_RUNTIMES = (
    RecipeRuntime("vllm", "vLLM", ("vllm", "serve"), {"hermes": "hermes", "llama_json": "llama3_json"}),
    RecipeRuntime("sglang", "SGLang", (), {"hermes": "qwen25", "llama_json": "llama3"}),
)
RUNTIMES: dict[str, Runtime] = {r.name: r for r in (LlamaCpp(), *RECIPE_RUNTIMES)}


def start(
    model_path: str | os.PathLike,
    runtime: str = "llama.cpp",
    port: int = 0,
    log: str | os.PathLike | None = None,
    timeout_s: float | None = None,
    progress: Progress = SILENT,
    **options: Any,
) -> Server:
    """Start a server and return it when it responds.

    port       0: a free one
    log        file for the server's own output; None: a temporary file
    timeout_s  None: the runtime's default (two minutes for llama.cpp, fifteen for a container)
    progress   gets a message per start phase

    Raises ServerError (port in use, ended while starting, not ready in time) with the log line that has the cause.
    """
    if timeout_s is not None:
        options["timeout_s"] = timeout_s
    return find_runtime(runtime).start(Path(model_path), port=port, log=log, progress=progress, **options)


def command(model_path: str | os.PathLike, runtime: str = "llama.cpp", port: int = 8000, **options: Any) -> str:
    """Return the shell command that serves this model."""
    return find_runtime(runtime).command(Path(model_path), port=port, **options)


def check(model_path: str | os.PathLike, runtime: str = "llama.cpp", recipe: str | None = None) -> list[str]:
    """Check a model for one runtime; a model folder is audited, which reads every tensor. Returns notes for the user.

    recipe: its name; None: the newest. llama.cpp has none.

    Raises UsageError where the model is not what the runtime serves, CheckpointError where the runtime does not load it.
    """
    return find_runtime(runtime).check(Path(model_path), recipe)


def write_recipe(
    model_path: str | os.PathLike, path: str | os.PathLike, runtime: str = "vllm", port: int = 8000, **options: Any
) -> Path:
    """Write the recipe as YAML. Raises UsageError for a runtime without such recipes (llama.cpp)."""
    return find_runtime(runtime).write(Path(model_path), Path(path), port=port, **options)


def find_runtime(name: str) -> Runtime:
    """Return a runtime; "llama_cpp" is llama.cpp too. Raises UsageError for an unknown one, with the names there are."""
    runtime = RUNTIMES.get(name.replace("_", "."))
    if runtime is None:
        raise UsageError(f"there is no runtime called {name!r}", f"choose one of: {', '.join(sorted(RUNTIMES))}")
    return runtime
