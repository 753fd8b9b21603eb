"""The real llama.cpp server, from the xllamacpp wheel: no build, no GPU, one process a model.

Chat templates are rendered with Jinja, tool calls and reasoning are parsed by the server, as in production.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from annie_quant.errors import EnvironmentFault, ServerError, UsageError, need
from annie_quant.serve import server as process

NAME = "llama.cpp"
HEALTH = "/health"


def start(
    model: Path,
    port: int = 0,
    log: str | os.PathLike | None = None,
    timeout_s: float = 120.0,
    context: int = 4096,
    parallel: int = 1,
    threads: int = 0,
    say: Callable[[str], None] | None = None,
) -> process.Server:
    """Serve a GGUF file. context: tokens a slot; parallel: slots; threads: 0 leaves it to llama.cpp."""
    need("xllamacpp", "serve")
    check_file(model)
    process.check_port(port)
    handle, said = tempfile.mkstemp(prefix="annie-quant-address-")
    os.close(handle)
    said_path = Path(said)
    options = {
        "model": str(model.resolve()),
        "port": port,
        "context": context,
        "parallel": parallel,
        "threads": threads,
        "address_file": said,
    }
    server = process.spawn(
        [sys.executable, "-m", "annie_quant.serve.llama_cpp_child", json.dumps(options)], log, NAME, environment()
    )
    try:
        process.wait_ready(server, lambda: said_path.read_text() or None, HEALTH, timeout_s, say)
    finally:
        said_path.unlink(missing_ok=True)
    return server


def environment() -> dict[str, str]:
    """This environment, with the package on the path wherever it is run from."""
    home = str(Path(__file__).resolve().parents[3])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{path}" if path else home, "PYTHONUNBUFFERED": "1"}


def check_file(model: Path) -> None:
    """A GGUF file by its first four bytes, or a plain word on what it is."""
    if model.is_dir():
        raise UsageError(
            f"{model} is a folder and llama.cpp serves a GGUF file",
            f"annie-quant convert {shlex.quote(str(model))} --to gguf",
        )
    try:
        with model.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise EnvironmentFault(f"{model}: {str(error.strerror).lower()}", "give the path of a GGUF file") from None
    if magic != b"GGUF":
        raise ServerError(f"{model} is no GGUF file", f"annie-quant convert {shlex.quote(str(model.parent))} --to gguf")


def command(model: Path, port: int = 8000, **_: Any) -> str:
    """The same server as a llama-server command, for a machine where that is installed."""
    return shlex.join(
        ["llama-server", "--model", str(model), "--port", str(port), "--jinja", "--reasoning-format", "auto"]
    )
