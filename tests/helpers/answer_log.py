"""A server's greedy answers as JSON lines, each written when it is complete, so that a run that was cut off continues.

An answer: {"cut": "16", "index": prompt, "answer": [token ids, ended, ...]}. Other lines describe a start of the server.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

Answers = dict[int, list[Any]]  # index of the prompt → [token ids, ended, ...]


def read(path: Path) -> dict[str, Answers]:
    """Return the answers by cut, in the order of their first answers. A last line that a kill cut short is left out."""
    cuts: dict[str, Answers] = {}
    for text in path.read_text().split("\n")[:-1] if path.exists() else ():
        line = json.loads(text)
        if "answer" in line:
            cuts.setdefault(line["cut"], {})[line["index"]] = line["answer"]
    return cuts


def missing(path: Path, cuts: str, n: int, again: int | None = None) -> dict[str, list[int]]:
    """Return for each cut which of the prompts 0 to n - 1 have no answer yet, in the order in which they are asked.

    Each cut after the first takes them in reverse order, and only the first `again` of them (None: all).
    """
    answered = read(path)
    first, *others = cuts.split(",")
    later = range(n if again is None else min(n, again))[::-1]
    orders: dict[str, range] = {first: range(n), **dict.fromkeys(others, later)}
    return {
        cut: [i for i in order if i not in answered.get(cut, {})] for cut, order in orders.items()
    }


class AnswerLog:
    """Appends lines to a file; may be used by several threads."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
        self.file = path.open("r+b" if path.exists() else "w+b")
        self.file.truncate(len(whole[0] + whole[1]))
        self.file.seek(0, 2)
        self.lock = threading.Lock()

    def write(self, **line: Any) -> None:
        with self.lock:
            self.file.write(json.dumps(line).encode() + b"\n")
            self.file.flush()

    def add(self, cut: str, index: int, answer: list[Any]) -> None:
        self.write(cut=cut, index=index, answer=answer)
