"""Processes that quantize, forked from one that has imported the trainer: its imports take longer than a short training."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path


def quantize(
    strategy: str,
    model: Path,
    output: Path,
    settings: Mapping[str, object],
    env: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start a process that runs a strategy. env: variables that differ."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.trainer", "annie_quant.quantize.distillation"])
    process = context.Process(
        target=_quantize, args=(strategy, model, output, dict(settings), dict(env or {}))
    )
    process.start()
    return process


def _quantize(
    strategy: str, model: Path, output: Path, settings: dict, env: dict[str, str]
) -> None:
    os.environ.update(env)
    from annie_quant import quantize

    quantize.run(strategy, model, output, **settings)
