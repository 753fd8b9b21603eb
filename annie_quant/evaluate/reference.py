"""What the bf16 reference says, kept: its greedy answers on disk, its distributions in memory while they fit."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from annie_quant.evaluate.decoding import Decoded, generate_together
from annie_quant.evaluate.engine import Engine, Row
from annie_quant.evaluate.process_group import ALONE, Team
from annie_quant.evaluate.prompts import Ask

WHOLE_BYTES = 256 << 20  # files up to here are hashed whole
SAMPLES, SAMPLE_BYTES = 256, 64 << 10
KEPT_BYTES = 1 << 30  # of the reference's logits, in memory
SAVED_ANSWERS = 512  # answers are written after so many


def fingerprint(folder: str | os.PathLike) -> str:
    """SHA-256 of what decides a model's answers: its config, template, tokenizer and weights.

    Of weight files above 256 MB the size, the header's end of the file and 256 pieces of 64 KB spread evenly are
    hashed: two trainings of one model differ everywhere.
    """
    digest = hashlib.sha256()
    folder = Path(folder)
    named = ["config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for path in [folder / n for n in named if (folder / n).is_file()] + sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                digest.update(file.read())
                continue
            for i in range(SAMPLES):
                file.seek(i * (size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def default_cache(folder: Path) -> Path:
    """Beside the reference where that can be written, else in the user's cache folder."""
    if os.access(folder, os.W_OK):
        return folder / ".annie_quant"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "annie_quant"


class Answers:
    """Greedy answers in a JSON-lines file, found by the hash of the prompt's tokens and the limit; a killed run goes
    on."""

    def __init__(self, path: Path, team: Team = ALONE) -> None:
        self.path, self.team = path, team
        self.known: dict[str, Decoded] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                    self.known[row["key"]] = Decoded(row["tokens"], row["finished"])
                except (ValueError, KeyError):
                    continue  # the last line of a killed run; that answer is made again
        self.known = team.gather(self.known)

    def complete(
        self,
        asks: Sequence[Ask],
        ends: Sequence[int],
        engine: Callable[[], Engine],
        tell: Callable[..., None],
    ) -> list[Decoded]:
        """Answers to all asks, in order; those that are not known are generated and written."""
        keys = [answer_key(a, ends) for a in asks]
        new = {k: a for k, a in zip(keys, asks, strict=True) if k not in self.known}
        todo = sorted(new.items(), key=lambda item: -item[1].workload.max_tokens)
        ended = 0

        def tick(n: int) -> None:
            nonlocal ended
            ended += n
            tell(ended, len(todo), "the reference answers")

        for at in range(0, len(todo), SAVED_ANSWERS):
            part = todo[at : at + SAVED_ANSWERS]
            prompts = [list(a.prompt) for _, a in part]
            found = generate_together(engine(), prompts, [a.workload.max_tokens for _, a in part], ends, tick)
            self.write({key: decoded for (key, _), decoded in zip(part, found, strict=True)})
        return [self.known[k] for k in keys]

    def write(self, found: dict[str, Decoded]) -> None:
        self.known |= found
        if self.team.rank:
            return
        if not self.path.parent.is_dir():
            self.path.parent.mkdir(parents=True)
            if self.path.parent.name == ".annie_quant":
                (self.path.parent / ".gitignore").write_text("*\n")
        with self.path.open("a", encoding="utf-8") as file:
            for key, decoded in found.items():
                file.write(json.dumps({"key": key, "tokens": decoded.tokens, "finished": decoded.finished}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def answer_key(ask: Ask, ends: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps([ask.prompt, ask.workload.max_tokens, list(ends)]).encode()).hexdigest()[:32]


class Distributions:
    """The reference's logits for rows that several passes score: kept up to 1 GB, run again beside the other model
    above."""

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self.engine = engine
        self.kept: dict[int, torch.Tensor] = {}
        self.rows: Sequence[Row] | None = None
        self.whole = False  # every row of this process is kept

    def beside(self, engine: Engine, rows: Sequence[Row]) -> Iterator[tuple[int, Any, Any]]:
        """(row index, the model's logits, the reference's logits), float32 [len(target), V] both."""
        if self.rows != rows:
            self.kept, self.rows, self.whole = {}, rows, False
        if self.whole:
            for i, ours in engine.scores(rows):
                yield i, ours, self.kept[i]
            return
        size = 0
        for (i, ours), (j, theirs) in zip(engine.scores(rows), self.engine().scores(rows), strict=True):
            assert i == j
            size += theirs.nbytes
            if size <= KEPT_BYTES:
                self.kept[i] = theirs.clone()
            yield i, ours, theirs
        self.whole = size <= KEPT_BYTES
        if not self.whole:
            self.kept = {}
