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


def missing(path: Path, cut: str, n: int) -> list[int]:
    """Return the prompts of 0 to n - 1 without an answer under this cut."""
    answered = read(path).get(cut, {})
    return [i for i in range(n) if i not in answered]


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
