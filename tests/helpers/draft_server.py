"""Greedy answers of llama.cpp with a checkpoint's MTP head, and how many of its drafts were accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from llama_cpp_answers import complete

import annie_quant as aq


class Served(NamedTuple):
    """One answer: its tokens, drafted tokens and accepted ones."""

    tokens: list[int]
    drafts: int
    accepted: int


def served(file: Path, prompts: Iterable[Sequence[int]], drafts: int, limit: int) -> list[Served]:
    """Return an answer per prompt, one request at a time. drafts: tokens per step, 0: without the head. limit: tokens."""
    answers = []
    with aq.serve.start(file, drafts=drafts) as server:
        for prompt in prompts:
            document = complete(server.url, prompt, limit, timeout_s=300)
            timings = document["timings"]
            answers.append(
                Served(
                    document["tokens"],
                    timings.get("draft_n", 0),
                    timings.get("draft_n_accepted", 0),
                )
            )
    return answers
