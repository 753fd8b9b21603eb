"""The llama.cpp server from the xllamacpp wheel: no build, no GPU, one process per model.

The server renders chat templates with Jinja and parses tool calls and reasoning, as in production.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

from annie_quant.checkpoint.gguf.reader import (
    BLACKWELL_PROMPTS,
    check_served_by_llama_cpp,
    has_weights_only_nvfp4,
)
from annie_quant.core.errors import EnvironmentFault, UsageError, need
from annie_quant.core.progress import SILENT, Progress
from annie_quant.ops import server as process

NAME = "llama.cpp"
# A server of such a model has one thread by default: per layer there is so little work that a second thread mostly waits for the
# first. tiny-annie's NVFP4 file (5 MB), 2026-11-22, two cores: 110 ms per request with a tool call with one thread, 385 with two.
SMALL_FILE_BYTES = 64_000_000


class LlamaCpp:
    """The runtime `llama.cpp` (serving.Runtime)."""

    name = NAME

    def start(
        self,
        model: Path,
        port: int = 0,
        log: str | os.PathLike | None = None,
        timeout_s: float = 120.0,
        context: int = 4096,
        parallel: int = 1,
        threads: int = 0,
        drafts: int = 0,
        kv_type: str = "f16",
        template: Path | None = None,
        parse_calls: bool = True,
        progress: Progress = SILENT,
        guard: process.Guard = process.NO_GUARD,
    ) -> process.Server:
        """Serve a GGUF file.

        context   tokens per slot
        parallel  slots
        threads   0: llama.cpp's default, or one for a file of under SMALL_FILE_BYTES
        drafts    tokens that the file's MTP head drafts per step; 0: the head is not used
        kv_type   ggml's type of cached keys and values: f16, bf16, q8_0, q4_0 ...
        template  file with a chat template that replaces the model's
        parse_calls  False: tool calls and thinking stay in the text
        guard     kills the server where the machine's memory runs out
        """
        need("xllamacpp", "serve")
        check_file(model)
        process.check_port(port)
        handle, address_file = tempfile.mkstemp(prefix="annie-quant-address-")
        os.close(handle)
        address = Path(address_file)
        options = {
            "model": str(model.resolve()),
            "port": port,
            "context": context,
            "parallel": parallel,
            "threads": threads or int(model.stat().st_size < SMALL_FILE_BYTES),
            "drafts": drafts,
            "kv_type": kv_type,
            "template": template.read_text(encoding="utf-8") if template else "",
            "parse_calls": parse_calls,
            "address_file": address_file,
        }
        server = process.spawn(
            [sys.executable, "-m", "annie_quant.ops.llama_cpp_child", json.dumps(options)],
            log,
            NAME,
            environment(),
            guard=guard,
        )
        try:
            process.wait_ready(server, lambda: address.read_text() or None, timeout_s, progress)
        finally:
            address.unlink(missing_ok=True)
        return server

    def command(self, model: Path, port: int = 8000, drafts: int = 0, **_: object) -> str:
        """Return the same server as a llama-server command, for a machine where that is installed."""
        words = [
            "llama-server",
            "--model",
            str(model),
            "--port",
            str(port),
            "--jinja",
            "--reasoning-format",
            "auto",
        ]
        if drafts:
            words += [
                "--spec-type",
                "draft-mtp",
                "--spec-draft-n-max",
                str(drafts),
                "--spec-draft-p-min",
                "0",
            ]
        return shlex.join(words)

    def check(self, model: Path, recipe: str | None = None) -> list[str]:
        """Raise an AnnieError unless `model` is a GGUF file that its reader takes. Return notes; llama.cpp has no recipes."""
        check_file(model)
        return [BLACKWELL_PROMPTS] if has_weights_only_nvfp4(model) else []

    def write(self, model: Path, path: Path, port: int = 8000, recipe: str | None = None) -> Path:
        raise UsageError("llama.cpp has no recipe files", "choose vllm or sglang")


def environment() -> dict[str, str]:
    """Return this process's environment with this copy of the package on PYTHONPATH.

    The package sets OMP_WAIT_POLICY to "passive" for its own process (a user may write "PASSIVE"). In llama.cpp, which waits after
    every operation, that costs 400 us per layer, so it does not inherit it.
    """
    home = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    inherited = {k: v for k, v in os.environ.items() if (k, v) != ("OMP_WAIT_POLICY", "passive")}
    return {
        **inherited,
        "PYTHONPATH": f"{home}{os.pathsep}{path}" if path else home,
        "PYTHONUNBUFFERED": "1",
    }


def check_file(model: Path) -> None:
    """Raise an AnnieError unless `model` is a GGUF file, by its first four bytes, whose header fits in it."""
    if model.is_dir():
        raise UsageError(
            f"{model} is a folder, llama.cpp needs a GGUF file",
            f"annie-quant convert {shlex.quote(str(model))} --to gguf",
        )
    try:
        with model.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise EnvironmentFault(
            f"{model}: {str(error.strerror).lower()}", "give the path of a GGUF file"
        ) from None
    if magic != b"GGUF":
        raise UsageError(
            f"{model} is not a GGUF file", "annie-quant convert CHECKPOINT --to gguf writes one"
        )
    check_served_by_llama_cpp(model)
