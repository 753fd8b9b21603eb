"""vLLM from its container image, by a dated recipe."""

from __future__ import annotations

import os
from pathlib import Path

from annie_quant.serve import docker
from annie_quant.serve.server import Server

NAME = "vllm"


def start(
    model: Path,
    port: int = 0,
    log: str | os.PathLike | None = None,
    timeout_s: float = 900.0,
    recipe: str | None = None,
) -> Server:
    return docker.start(NAME, model, port, log, timeout_s, recipe)


def command(model: Path, port: int = 8000, recipe: str | None = None) -> str:
    return docker.command(NAME, model, port, recipe)
