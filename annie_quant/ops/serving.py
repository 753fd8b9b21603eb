"""Serving runtimes: start a server and wait until it is ready, stop it, or print the command that starts it.

server = start("model.gguf", runtime="llama.cpp")     a process; server.url, server.pid, server.stop()
print(command(model, runtime="vllm"))                 the recipe as a shell command; nothing is started
check(model, runtime="vllm")                          an error if the runtime does not load the model
write_recipe(model, "annie.yaml", runtime="vllm")     the recipe as a file for sparkrun and spark-vllm-docker
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

from annie_quant.core import registry
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.ops import runtimes
from annie_quant.ops.server import Server

__all__ = ["Server", "check", "command", "start", "write_recipe"]


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
    """Audit a model for one runtime; reads every tensor of a model folder. recipe: its name; None: the newest. llama.cpp has none.

    Returns notes for the user: the recipe with its date and who ran it, and findings that the runtime tolerates.
    Raises UsageError where it is not what the runtime serves (llama.cpp: a GGUF file), CheckpointError where it is not loaded by
    the rules of annie_quant.checkpoint.loader_support.
    """
    from annie_quant import checkpoint
    from annie_quant.ops import recipes

    model, module = Path(model_path), find_runtime(runtime)
    if not hasattr(module, "write"):
        module.check_file(model)
        return []
    name, chosen = recipes.choose(module.NAME, recipe)
    quoted = shlex.quote(str(model))
    if not (model / "config.json").is_file():
        raise UsageError(f"{model} is not a model folder", f"{module.NAME} serves a safetensors checkpoint")
    audit = checkpoint.audit(model)
    support = next((s for s in audit.summary.servers if s.server.lower() == module.NAME), None)
    if support is None:  # its files cannot be read
        first = f": {audit.findings[0].message}" if audit.findings else ""
        raise CheckpointError(f"{model} cannot be served{first}", f"annie-quant audit {quoted}")
    if support.loads == "no":
        raise CheckpointError(f"{module.NAME} does not load {model}: {support.note}", f"annie-quant audit {quoted}")
    notes = [f"recipe {module.NAME} {name}: {chosen.note} (source: {chosen.source})"]
    if chosen.image and chosen.tag_moves:
        notes.append(
            f"the tag of {chosen.image} moves to newer images; the one that is here: "
            f"docker inspect --format '{{{{index .RepoDigests 0}}}}' {chosen.image}"
        )
    if support.note:
        notes.append(f"{module.NAME} loads it: {str(support).partition(': ')[2]}")
    if audit.findings:
        notes.append(f"{len(audit.findings)} findings in {model}: annie-quant audit {quoted}")
    return notes


def write_recipe(
    model_path: str | os.PathLike, path: str | os.PathLike, runtime: str = "vllm", port: int = 8000, **options: Any
) -> Path:
    """Write the recipe as YAML. Raises UsageError for a runtime without such recipes (llama.cpp)."""
    module = find_runtime(runtime)
    if not hasattr(module, "write"):
        raise UsageError(f"{runtime} has no recipe files", "choose vllm or sglang")
    return module.write(Path(model_path), Path(path), port=port, **options)


def find_runtime(name: str) -> ModuleType:
    """Return the runtime's module from annie_quant.ops.runtimes."""
    return registry.find(runtimes, name, "runtime", lambda part: part.replace("_", "."))
