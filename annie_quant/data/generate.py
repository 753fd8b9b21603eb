"""`annie-quant data`: conversations written by a teacher, evenly over a persona's categories, one row per line.

A row has id, category, messages, tools (where offered), thinking, provenance and split. Tool arguments are a JSON string on
disk, as in OpenAI's format; chat templates need them decoded. A conversation that breaks a rule, or that repeats another row
or a gate's prompt, is dropped and requested again.

The log of an unfinished `annie-quant data` run, next to its output, so that a killed run loses at most one batch.

First line: {"key": the run's settings}. Then one line per requested batch: {"batch": ..., "rows": [...]} with its cost and the
rows that were kept, so that a budget holds over several runs. The log is deleted when the output is complete.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from annie_quant import __version__
from annie_quant.core import registry
from annie_quant.core.errors import AnnieError, ServerError, UsageError
from annie_quant.core.files import write_text
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.resume import JsonLines
from annie_quant.data import teachers
from annie_quant.data.rows import DuplicateFinder, gate_texts, read_rows, user_text
from annie_quant.data.teachers._base import Batch, BatchFailed, Options, RateLimited, Teacher
from annie_quant.data.validate import MIN_VALID, Validation, faults, validate
from annie_quant.documents.persona import Category, Persona, load_persona


class JournalBatch(msgspec.Struct):
    """A requested batch. failed: why it failed, or ""."""

    category: str
    cost_usd: float | None = None
    tokens: int = 0
    failed: str = ""


class JournalLine(msgspec.Struct, omit_defaults=True):
    """One line; `row` (one line per row, before its batch) was written up to version 0.1.0."""

    key: dict[str, Any] | None = None
    batch: JournalBatch | None = None
    rows: list[dict[str, Any]] | None = None
    row: dict[str, Any] | None = None


def journal_path(output: Path) -> Path:
    return output.with_name(f".{output.name}.journal")


class Journal:
    """Rows and costs of a run. output: None keeps them in memory only. restart: discard an earlier, unfinished run.

    Raises UsageError if another process writes the same output, or if an unfinished run had other settings.
    """

    def __init__(self, output: Path | None, key: dict[str, Any], restart: bool = False) -> None:
        self.rows: list[dict[str, Any]] = []
        self.batches: Counter[str] = Counter()  # category → number of requested batches
        self.cost_usd, self.tokens = 0.0, 0
        self._log: JsonLines | None = None
        if output is None:
            return
        self._log = JsonLines(journal_path(output), sync=True, exclusive=True, restart=restart)
        lines = list(self._decoded(self._log))
        if not lines:
            self._log.append(msgspec.json.encode(JournalLine(key=key)))
        elif lines[0].key != key:
            different = [k for k in key if (lines[0].key or {}).get(k) != key[k]]
            raise UsageError(
                f"{self._log.path}: an unfinished run with another {', '.join(different)} is stored there",
                "repeat that run's command, or add --force to start again",
            )
        rows: list[dict[str, Any]] = []
        for line in lines[1:]:
            if line.row is not None:
                rows.append(line.row)
            elif line.batch is not None:
                self._count(line.batch, rows if line.rows is None else line.rows)
                rows = []

    def _decoded(self, log: JsonLines) -> Iterator[JournalLine]:
        for number, line in log.lines():
            try:
                yield msgspec.json.decode(line, type=JournalLine)
            except msgspec.DecodeError as error:
                raise UsageError(
                    f"{log.path}, line {number}: {error}", "add --force to start again without its conversations"
                ) from error

    def add(
        self, category: str, rows: list[dict[str, Any]], cost_usd: float | None, tokens: int, failed: str = ""
    ) -> None:
        """Record one batch: the rows of it that are kept, and its cost."""
        batch = JournalBatch(category, cost_usd, tokens, failed)
        if self._log is not None:
            self._log.append(msgspec.json.encode(JournalLine(batch=batch, rows=rows)))
        self._count(batch, rows)

    def _count(self, batch: JournalBatch, rows: list[dict[str, Any]]) -> None:
        self.rows += rows
        self.batches[batch.category] += 1
        self.cost_usd += batch.cost_usd or 0.0
        self.tokens += batch.tokens

    def close(self, finished: bool) -> None:
        """Close the log, and delete it if the run has finished."""
        if self._log is not None:
            self._log.close()
            if finished:
                self._log.path.unlink(missing_ok=True)


CATEGORIES = ("greeting", "factual", "memory", "web", "multi_turn")
SPLITS = ("train", "calibration", "gate")
MAX_FRUITLESS = 3  # a category is given up after so many batches in a row without a new conversation
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 120.0
MIN_BUDGET_USD = 0.005


@dataclass(frozen=True)
class Limits:
    """retries: of one failed batch. max_wait_s: total wait for one batch's rate limit. Budgets include resumed runs."""

    retries: int = 3
    max_wait_s: float = 900.0
    max_usd: float | None = None
    max_tokens: int | None = None


class Generation(Validation, kw_only=True, omit_defaults=True):
    """The result of a run. dropped: number of conversations per reason. failed: batches that were given up.

    done_before: the output was complete already, and nothing was requested.
    """

    dropped: dict[str, int]
    failed: list[str]
    cost_usd: float
    tokens: int
    output: str | None
    done_before: bool = False


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
) -> Generation:
    """Make n conversations, evenly over the categories, and write the valid ones to `output` (JSON lines).

    The offline teacher gives the same rows for the same seed, except for the time in provenance (set SOURCE_DATE_EPOCH to
    fix it). An interrupted run resumes from its journal. apart_from: files whose prompts must not be repeated. force: start
    again, and overwrite a finished output.

    Raises AnnieError if fewer than four fifths could be made; what was made is kept for the next run.
    """
    who = persona if isinstance(persona, Persona) else load_persona(persona)
    if n < len(who.categories):
        raise UsageError(f"n is {n}; each of the {len(who.categories)} categories needs at least one conversation")
    if split not in SPLITS:
        raise UsageError(f"unknown split {split!r}", f"choose one of: {', '.join(SPLITS)}")
    module = registry.find(teachers, teacher, "teacher", lambda part: part.replace("_", "-"))
    target = Path(output) if output is not None else None
    finished = _finished(target, who, module.NAME, n) if target is not None and not force else None
    if finished is not None:
        return finished
    run = _Run(who, module, n, target, seed, split, apart_from, options or Options(), limits or Limits(), force, sleep)
    return run.run(progress or SILENT)


class _Run:
    def __init__(
        self,
        persona: Persona,
        module: ModuleType,
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
        self.persona, self.n, self.output, self.seed, self.split = persona, n, output, seed, split
        self.limits, self.sleep, self.teacher_name = limits, sleep, module.NAME
        options = dataclasses.replace(options, max_usd=self.remaining_usd)
        self.teacher: Teacher = module.open_teacher(options, split)
        self.teacher.check(persona)
        key = {
            "version": __version__,
            "teacher": module.NAME,
            "model": self.teacher.model,
            "persona": persona.sha256,
            "n": n,
            "seed": seed,
            "split": split,
        }
        self.journal = Journal(output, key, restart=force)
        texts = [(f"row {r.get('id')}", user_text(r)) for file in apart_from for r in read_rows(file)]
        self.forbidden = DuplicateFinder([*texts, *(gate_texts(persona) if split != "gate" else ())])
        self.finders: dict[str, DuplicateFinder] = {}  # category → user texts of its rows
        self.dropped: Counter[str] = Counter()
        self.failed: list[str] = []
        self.exhausted: dict[str, int] = {}  # category → number of its rows, where the offline teacher has no more
        self.n_missing = 0
        for row in self.journal.rows:
            self.finder(row["category"]).add(row["id"], user_text(row))

    def finder(self, category: str) -> DuplicateFinder:
        return self.finders.setdefault(category, DuplicateFinder())

    def remaining_usd(self) -> float | None:
        return None if self.limits.max_usd is None else max(0.0, self.limits.max_usd - self.journal.cost_usd)

    def run(self, progress: Progress) -> Generation:
        finished = False
        try:
            for index, category in enumerate(self.persona.categories):
                count = self.n // len(self.persona.categories) + (index < self.n % len(self.persona.categories))
                self.fill(category, count, progress)
                self.check_exhausted(category, count)
            result = self.write()
            finished = True
        finally:
            self.journal.close(finished)
        return result

    def check_exhausted(self, category: Category, count: int) -> None:
        """Raise UsageError as soon as the offline teacher's templates cannot give enough; no later category can help."""
        have = len(self.rows_of(category))
        if self.teacher_name != "offline" or have >= count:
            return
        self.exhausted[category.name] = have
        self.n_missing += count - have
        if self.n_missing > (1 - MIN_VALID) * self.n:
            self.journal.close(True)  # the same command would end in the same way
            counts = ", ".join(f"{name} {n}" for name, n in self.exhausted.items())
            raise UsageError(
                f"the offline teacher has not enough different conversations for {self.persona.name}: {counts}, "
                f"and --n {self.n} needs {count} of each category",
                f"--n {len(self.persona.categories) * min(self.exhausted.values())}, or --teacher claude-cli or openai",
            )

    def rows_of(self, category: Category) -> list[dict[str, Any]]:
        return [row for row in self.journal.rows if row["category"] == category.name]

    def fill(self, category: Category, count: int, progress: Progress) -> None:
        """Request batches until the category has `count` conversations, or until batches bring nothing new."""
        fruitless = 0
        while (have := len(self.rows_of(category))) < count and fruitless < MAX_FRUITLESS:
            progress.update(len(self.journal.rows), self.n, category.name)
            batch = self.request(category, min(self.teacher.batch_size, count - have))
            if batch is None:
                return
            fruitless = 0 if self.keep_new(category, batch, progress) else fruitless + 1

    def request(self, category: Category, count: int) -> Batch | None:
        """Return one batch, repeated if it fails and after a wait if the teacher is limited; None after the last retry."""
        avoid = [user_text(r).replace("\n", " / ") for r in self.rows_of(category)]
        tries, waited_s = 0, 0.0
        while True:
            self.check_budget()
            number = self.journal.batches[category.name]
            seed = f"{self.seed}:{category.name}" + (f":{number}" if number else "")
            try:
                return self.teacher.batch(self.persona, category, count, seed, avoid)
            except RateLimited as limit:
                wait_s = limit.wait_s if limit.wait_s is not None else min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**tries)
                if waited_s + wait_s > self.limits.max_wait_s:
                    raise self.stopped(f"{limit}; it requires another {wait_s:.0f} s", ServerError) from None
                self.sleep(wait_s)
                waited_s, tries = waited_s + wait_s, tries + 1
            except BatchFailed as failure:
                tries += 1
                self.journal.add(category.name, [], failure.cost_usd, failure.tokens, str(failure))
                if tries > self.limits.retries:
                    self.failed.append(f"{category.name}: {failure}")
                    return None

    def check_budget(self) -> None:
        remaining = self.remaining_usd()
        if remaining is not None and remaining < MIN_BUDGET_USD:
            raise self.stopped(f"the budget of {self.limits.max_usd:.2f} USD is spent ({self.journal.cost_usd:.2f})")
        if self.limits.max_tokens is not None and self.journal.tokens >= self.limits.max_tokens:
            raise self.stopped(f"the budget of {self.limits.max_tokens} tokens is spent ({self.journal.tokens})")

    def stopped(self, reason: str, kind: type[AnnieError] = AnnieError) -> AnnieError:
        stored = f"{len(self.journal.rows)} of {self.n} conversations are kept"
        return kind(f"{reason}; {stored}", "run the same command again to resume")

    def keep_new(self, category: Category, batch: Batch, progress: Progress) -> int:
        """Record the batch's valid, new conversations in the journal, and return their number."""
        if self.limits.max_usd is not None and batch.cost_usd is None:
            raise UsageError(f"{self.teacher_name} does not report its costs", "use --max-budget-tokens")
        provenance = {
            "teacher": self.teacher_name,
            "model": batch.model or self.teacher.model,
            "persona": self.persona.source,
            "prompt_sha256": self.persona.prompt_sha256,
            "persona_sha256": self.persona.sha256,
            "seed": self.seed,
            "time": _now(),
        }
        finder = self.finder(category.name)
        first = len(self.rows_of(category))
        rows: list[dict[str, Any]] = []
        for conversation in batch.rows:
            row: dict[str, Any] = {
                "id": f"{category.name}-{first + len(rows):04d}",
                "category": category.name,
                **conversation,
            }
            row |= {"provenance": provenance, "split": self.split}
            reason = self.drop_reason(row, finder)
            if reason:
                self.dropped[reason] += 1
                continue
            finder.add(row["id"], user_text(row))
            rows.append(row)
            progress.update(len(self.journal.rows) + len(rows), self.n, category.name)
        self.journal.add(category.name, rows, batch.cost_usd, batch.tokens)
        return len(rows)

    def drop_reason(self, row: dict[str, Any], finder: DuplicateFinder) -> str | None:
        if row_faults := faults(row, self.persona):
            return row_faults[0]
        text = user_text(row)
        if finder.find(text) is not None:
            return "it repeats another conversation"
        return "it repeats a prompt of another split" if self.forbidden.find(text) is not None else None

    def write(self) -> Generation:
        order = {c.name: i for i, c in enumerate(self.persona.categories)}
        rows = sorted(self.journal.rows, key=lambda r: (order[r["category"]], r["id"]))
        result = Generation(
            **msgspec.structs.asdict(validate(rows, self.persona, self.n)),
            dropped=dict(self.dropped),
            failed=self.failed,
            cost_usd=round(self.journal.cost_usd, 4),
            tokens=self.journal.tokens,
            output=str(self.output) if self.output is not None else None,
        )
        if not result.ok:
            failure = f" (last failure: {self.failed[-1]})" if self.failed else ""
            raise self.stopped(f"too few valid conversations, expected four in five{failure}")
        if self.output is not None:
            write_text(self.output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return result


def _finished(output: Path, persona: Persona, teacher: str, n: int) -> Generation | None:
    """Return the result of a finished output of a paid teacher, so that it is not paid for again.

    Raises UsageError if such an output was made with other settings: it is not overwritten without --force.
    """
    if not output.is_file() or journal_path(output).is_file():
        return None
    rows = read_rows(output)
    paid = {(r.get("provenance") or {}).get("teacher") for r in rows} - {"offline"}
    if not paid:
        return None
    validation = validate(rows, persona, n)
    if paid == {teacher} and validation.ok and all(r["provenance"]["persona_sha256"] == persona.sha256 for r in rows):
        return Generation(
            **msgspec.structs.asdict(validation),
            dropped={}, failed=[], cost_usd=0.0, tokens=0, output=str(output), done_before=True,
        )  # fmt: skip
    raise UsageError(
        f"{output} has {len(rows)} conversations by {', '.join(map(str, paid))} that were made with other settings",
        "choose another --output, or add --force to make them again",
    )


def _now() -> str:
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    utc = datetime.timezone.utc
    moment = datetime.datetime.fromtimestamp(int(epoch), utc) if epoch else datetime.datetime.now(utc)
    return moment.isoformat(timespec="seconds")
