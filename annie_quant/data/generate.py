"""`annie-quant data`: conversations by a teacher, evenly over a persona's categories, a row a line.

A row: id, category, messages, tools (where offered), thinking, provenance, split. Tool arguments are a JSON string on
disk, as OpenAI's format has them; chat templates want them decoded. What is not valid, or repeats another row or a gate's
prompt, is dropped and asked for again.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from annie_quant import __version__, registry
from annie_quant.data import teachers
from annie_quant.data.card import write_card
from annie_quant.data.journal import Journal, journal_path
from annie_quant.data.near import Near, user_text
from annie_quant.data.rows import gate_texts, read_rows
from annie_quant.data.teachers._base import Batch, Failed, Limited, Options, Teacher
from annie_quant.data.validate import faults, validate
from annie_quant.errors import AnnieError, ServerError, UsageError
from annie_quant.files import replacing
from annie_quant.persona import Category, Persona, load_persona

CATEGORIES = ("greeting", "factual", "memory", "web", "multi_turn")
SPLITS = ("train", "calibration", "gate")
FRUITLESS = 3  # batches of a category that bring nothing new before it is given up
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 120.0
Progress = Callable[..., Any]


@dataclass(frozen=True)
class Limits:
    """retries: of one failed batch. max_wait_s: spent waiting on a rate limit at a stretch. Budgets hold over resumed runs."""

    retries: int = 3
    max_wait_s: float = 900.0
    max_usd: float | None = None
    max_tokens: int | None = None


def generate(
    persona: str | Path | Persona = "annie",
    teacher: str = "offline",
    n: int = 500,
    output: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    split: str = "calibration",
    apart_from: Sequence[str | Path] = (),
    options: Options | None = None,
    limits: Limits | None = None,
    force: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Make n conversations, evenly over the categories, and write those that are valid to `output` (JSON lines).

    Returns a summary: total, valid, with_tools, by_category, dropped (reasons), failed (batches), cost_usd, tokens, ok.
    The offline teacher gives the same rows for the same seed, times in provenance apart (SOURCE_DATE_EPOCH fixes those).
    A run that was ended goes on from its journal. apart_from: files whose prompts must not come again.
    Raises AnnieError where fewer than four fifths could be made; what was made is kept for the next run.
    """
    who = persona if isinstance(persona, Persona) else load_persona(persona)
    if n < len(who.categories):
        raise UsageError(f"n is {n}; each of the {len(who.categories)} categories needs at least one conversation")
    if split not in SPLITS:
        raise UsageError(f"there is no split {split!r}", f"choose one of: {', '.join(SPLITS)}")
    part = registry.find(teachers, teacher, "teacher")
    target = Path(output) if output is not None else None
    before = _kept(target, who, part.NAME, n) if target is not None and not force else None
    if before is not None:
        return before
    run = _Run(who, part, n, target, seed, split, apart_from, options or Options(), limits or Limits(), force, sleep)
    return run.all(progress or (lambda *a: None))


class _Run:
    def __init__(
        self,
        who: Persona,
        part: Any,
        n: int,
        output: Path | None,
        seed: int,
        split: str,
        apart_from: Sequence[str | Path],
        options: Options,
        limits: Limits,
        force: bool,
        sleep: Callable[[float], None],
    ) -> None:
        self.who, self.n, self.output, self.seed, self.split = who, n, output, seed, split
        self.limits, self.sleep, self.teacher_name = limits, sleep, part.NAME
        self.teacher: Teacher = part.open(dataclasses.replace(options, max_usd=self.usd_left), split)
        key = {
            "version": __version__,
            "teacher": part.NAME,
            "model": self.teacher.model,
            "persona": who.sha256,
            "n": n,
            "seed": seed,
            "split": split,
        }
        self.journal = Journal(output, key, anew=force)
        texts = [(f"row {r.get('id')}", user_text(r)) for file in apart_from for r in read_rows(file)]
        self.apart = Near([*texts, *(gate_texts() if split != "gate" else ())])
        self.near: dict[str, Near] = {}
        self.dropped: dict[str, int] = {}
        self.failed: list[str] = []
        for row in self.journal.rows:
            self.near.setdefault(row["category"], Near()).add(row["id"], user_text(row))

    def usd_left(self) -> float | None:
        return None if self.limits.max_usd is None else max(0.0, self.limits.max_usd - self.journal.cost_usd)

    def all(self, progress: Progress) -> dict[str, Any]:
        done = False
        try:
            for index, category in enumerate(self.who.categories):
                count = self.n // len(self.who.categories) + (index < self.n % len(self.who.categories))
                self.fill(category, count, progress)
            summary = self.write()
            done = True
        finally:
            self.journal.close(done)
        return summary

    def have(self, category: Category) -> list[dict[str, Any]]:
        return [row for row in self.journal.rows if row["category"] == category.name]

    def fill(self, category: Category, count: int, progress: Progress) -> None:
        """Ask for batches until the category has `count` conversations, or nothing new comes any more."""
        fruitless = 0
        while (have := len(self.have(category))) < count and fruitless < FRUITLESS:
            wanted = min(self.teacher.batch_size, count - have)
            progress(len(self.journal.rows), self.n, category.name)
            batch = self.ask(category, wanted)
            if batch is None:
                return
            kept = self.keep(category, batch, progress)
            fruitless = 0 if kept else fruitless + 1

    def ask(self, category: Category, wanted: int) -> Batch | None:
        """One batch: asked again when it fails, waited for when the teacher wants a pause; None when it is given up."""
        avoid = [user_text(r).replace("\n", " / ") for r in self.have(category)]
        tries, waited = 0, 0.0
        while True:
            self.check_budget()
            number = self.journal.batches.get(category.name, 0)
            seed = f"{self.seed}:{category.name}" + (f":{number}" if number else "")
            try:
                return self.teacher.batch(self.who, category, wanted, seed, avoid)
            except Limited as limited:
                wait = limited.wait_s if limited.wait_s is not None else min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**tries)
                if waited + wait > self.limits.max_wait_s:
                    raise self.stop(f"{limited}; it wants {wait:.0f} s more", ServerError) from None
                self.sleep(wait)
                waited, tries = waited + wait, tries + 1
            except Failed as failure:
                tries += 1
                self.journal.add(category.name, [], failure.cost_usd, failure.tokens, str(failure))
                if tries > self.limits.retries:
                    self.failed.append(f"{category.name}: {failure}")
                    return None

    def check_budget(self) -> None:
        left = self.usd_left()
        if left is not None and left < 0.005:
            raise self.stop(f"the budget of {self.limits.max_usd:.2f} USD is spent ({self.journal.cost_usd:.2f})")
        if self.limits.max_tokens is not None and self.journal.tokens >= self.limits.max_tokens:
            raise self.stop(f"the budget of {self.limits.max_tokens} tokens is spent ({self.journal.tokens})")

    def stop(self, why: str, kind: type[AnnieError] = AnnieError) -> AnnieError:
        kept = f"{len(self.journal.rows)} of {self.n} conversations are kept"
        return kind(f"{why}; {kept}", "run the same command again to go on")

    def keep(self, category: Category, batch: Batch, progress: Progress) -> int:
        """Put the batch's valid, new conversations into the journal; returns how many."""
        if self.limits.max_usd is not None and batch.cost_usd is None:
            raise UsageError(f"{self.teacher_name} does not say what it costs", "use --max-budget-tokens")
        provenance = {
            "teacher": self.teacher_name,
            "model": batch.model or self.teacher.model,
            "persona": self.who.source,
            "prompt_sha256": self.who.prompt_sha256,
            "persona_sha256": self.who.sha256,
            "seed": self.seed,
            "time": _now(),
        }
        near = self.near.setdefault(category.name, Near())
        number = len(self.have(category))
        kept: list[dict[str, Any]] = []
        for made in batch.rows:
            row = {"id": f"{category.name}-{number + len(kept):04d}", "category": category.name, **made}
            row |= {"provenance": provenance, "split": self.split}
            wrong = self.wrong(row, near)
            if wrong:
                self.dropped[wrong] = self.dropped.get(wrong, 0) + 1
                continue
            near.add(row["id"], user_text(row))
            kept.append(row)
            progress(len(self.journal.rows) + len(kept), self.n, category.name)
        self.journal.add(category.name, kept, batch.cost_usd, batch.tokens)
        return len(kept)

    def wrong(self, row: dict[str, Any], near: Near) -> str | None:
        found = faults(row, self.who)
        if found:
            return found[0]
        text = user_text(row)
        if near.find(text) is not None:
            return "it repeats another conversation"
        return "it repeats a prompt of another split" if self.apart.find(text) is not None else None

    def write(self) -> dict[str, Any]:
        order = {c.name: i for i, c in enumerate(self.who.categories)}
        rows = sorted(self.journal.rows, key=lambda r: (order[r["category"]], r["id"]))
        summary = validate(rows, self.who, self.n) | {
            "dropped": self.dropped,
            "failed": self.failed,
            "cost_usd": round(self.journal.cost_usd, 4),
            "tokens": self.journal.tokens,
            "output": str(self.output) if self.output is not None else None,
        }
        if not summary["ok"]:
            why = f" (last failure: {self.failed[-1]})" if self.failed else ""
            raise self.stop(f"too few valid conversations for the founding rule of four in five{why}")
        if self.output is not None:
            with replacing(self.output, "w") as file:
                for row in rows:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            summary["card"] = str(write_card(self.output, self.who, rows, summary))
        return summary


def _kept(output: Path, who: Persona, teacher: str, n: int) -> dict[str, Any] | None:
    """The summary of a finished output that a paid teacher made; it is never made again by accident, nor overwritten."""
    if not output.is_file() or journal_path(output).is_file():
        return None
    rows = read_rows(output)
    makers = {(r.get("provenance") or {}).get("teacher") for r in rows} - {"offline"}
    if not makers:
        return None
    summary = validate(rows, who, n)
    if makers == {teacher} and summary["ok"] and all(r["provenance"]["persona_sha256"] == who.sha256 for r in rows):
        return summary | {"output": str(output), "done_before": True}
    raise UsageError(
        f"{output} holds {len(rows)} conversations by {', '.join(map(str, makers))}, made otherwise",
        "choose another --output, or add --force to make them anew",
    )


def _now() -> str:
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    utc = datetime.timezone.utc
    moment = datetime.datetime.fromtimestamp(int(epoch), utc) if epoch else datetime.datetime.now(utc)
    return moment.isoformat(timespec="seconds")
