"""How many words of the context text make a token of the model's tokenizer, so that a workload reaches the depth it names.

The first server is asked once per run directory, with a prompt whose usage gives the count; all servers then get the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from annie_quant import schema
from annie_quant.judge.context_text import context_text
from annie_quant.judge.library import build_workload
from annie_quant.judge.workloads import Workload

SAMPLE_WORDS = 600
LOWEST, HIGHEST = 0.1, 2.0


class ContextSize(msgspec.Struct, kw_only=True):
    """context.json of a run directory."""

    words_per_token: float


def sized(
    workloads: Sequence[Workload], folder: Path, prompt_tokens: Callable[[dict[str, Any]], int | None]
) -> list[Workload]:
    """Return the workloads with words_per_token as measured, in this run or when it was started.

    prompt_tokens: sends a chat completion's body and returns usage.prompt_tokens; None leaves the workloads' own figure.
    """
    if not any(w.context is not None and (w.context.tokens or any(c.blocks for c in w.cases)) for w in workloads):
        return list(workloads)
    path = folder / "context.json"
    if path.exists():
        measured = schema.decode(ContextSize, path).words_per_token
    else:
        tokens = prompt_tokens(_sample())
        if not tokens:
            return list(workloads)
        measured = min(HIGHEST, max(LOWEST, SAMPLE_WORDS / tokens))
        schema.write(path, ContextSize(words_per_token=measured))
    return [
        w if w.context is None else replace(w, context=msgspec.structs.replace(w.context, words_per_token=measured))
        for w in workloads
    ]


def _sample() -> dict[str, Any]:
    """Return the request whose prompt is SAMPLE_WORDS words of the context text."""
    case = {"id": "words", "messages": [{"role": "user", "content": context_text(SAMPLE_WORDS)}]}
    workload = build_workload({"name": "context", "max_tokens": 1, "temperature": 0.0, "gates": [], "cases": [case]})
    return workload.request(workload.cases[0])
