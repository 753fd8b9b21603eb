"""`annie-quant data`: conversations by a teacher, evenly over a persona's categories, as one row per line.

A row has id, category, messages, tools (where offered), thinking, provenance and split. Tool
arguments are a JSON string on disk, as in OpenAI's format; chat templates need them decoded. A
conversation that breaks a rule, or that repeats another row or a gate's prompt, is dropped and
requested again.
"""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep, time

import msgspec

from annie_quant import __version__, documents
from annie_quant.core.errors import AnnieError, ServerError, UsageError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.resume import JsonLines
from annie_quant.core.untrusted import JsonObject
from annie_quant.data import teachers
from annie_quant.data.duplicates import DuplicateFinder
from annie_quant.data.exchanges import SPLITS
from annie_quant.data.row_rules import MIN_VALID, ValidatedRows, faults, user_text, validate
from annie_quant.data.rows import prompts_of_others, read_rows, store_rows
from annie_quant.data.teachers import BatchFailed, Options, RateLimited, Teacher, TeacherBatch
from annie_quant.documents.persona import Category, Persona, load_persona


class JournalLine(msgspec.Struct, omit_defaults=True):
    """One line: the run's settings (the first line), or a batch.

    rows: those of the batch that are kept.
    failed: why the batch failed, or "".
    """

    key: dict[str, object] | None = None
    category: str = ""
    rows: list[JsonObject] = []
    cost_usd: float | None = None
    tokens: int = 0
    failed: str = ""


def _journal_line(line: bytes, where: str) -> JournalLine:
    hint = "add --force to start again without its conversations"
    return documents.decode(JournalLine, line, where, error=UsageError, hint=hint)


def journal_path(output: Path) -> Path:
    return output.with_name(f".{output.name}.journal")


class Journal:
    """The log of an unfinished run, next to its output.

    A killed run loses at most one batch, and a budget includes all continuations. The log is
    deleted when the output is complete.

    output: None keeps rows and costs in memory only.
    key: the run's settings.
    restart: discard an earlier, unfinished run.
    Raises UsageError if another process writes the same output, or if an unfinished run had other
    settings.
    """

    def __init__(self, output: Path | None, key: dict[str, object], restart: bool = False) -> None:
        self.rows: list[JsonObject] = []
        self.batches: Counter[str] = Counter()  # category → number of requested batches
        self.cost_usd = 0.0
        self.tokens = 0
        self._log: JsonLines | None = None
        if output is None:
            return
        self._log = JsonLines(journal_path(output), sync=True, exclusive=True, restart=restart)
        try:
            self._continue(self._log, key)
        except BaseException:
            self._log.close()
            raise

    def _continue(self, log: JsonLines, key: dict[str, object]) -> None:
        """Take over what an earlier run of the same settings stored."""
        first, *lines = log.values(_journal_line) or [JournalLine(key=key)]
        if not log.size_bytes:
            log.append(msgspec.json.encode(first))
        elif first.key != key:
            different = [k for k in key if (first.key or {}).get(k) != key[k]]
            raise UsageError(
                f"{log.path}: an unfinished run with another {', '.join(different)} is stored there",
                "repeat that run's command, or add --force to start again",
            )
        for line in lines:
            self._count(line)

    def add(self, line: JournalLine) -> None:
        """Record one batch."""
        if self._log is not None:
            self._log.append(msgspec.json.encode(line))
        self._count(line)

    def _count(self, line: JournalLine) -> None:
        self.rows += line.rows
        self.batches[line.category] += 1
        self.cost_usd += line.cost_usd or 0.0
        self.tokens += line.tokens

    def close(self, finished: bool) -> None:
        """Close the log, and delete it if the run has finished."""
        if self._log is not None:
            self._log.close()
            if finished:
                self._log.path.unlink(missing_ok=True)


CATEGORIES = ("greeting", "factual", "memory", "web", "multi_turn")
# Consecutive batches without a new conversation, after which a category is given up.
MAX_FRUITLESS = 3
MAX_RETRIES = 3  # of one failed batch
# for a rate limit; the last one is the sum for one batch
FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 120.0
MAX_TOTAL_WAIT_S = 900.0
MIN_BUDGET_USD = 0.005


class GenerationResult(ValidatedRows, kw_only=True, omit_defaults=True):
    """The result of a run.

    dropped: number of conversations per reason.
    failed: batches that were given up.
    done_before: whether the output was complete already, so that nothing was requested.
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
    force: bool = False,
) -> GenerationResult:
    """Make n conversations, evenly over the categories, and write the valid ones to `output` (JSON lines).

    The offline teacher gives the same rows for the same seed, except for the time in provenance,
    which SOURCE_DATE_EPOCH fixes. An interrupted run resumes from its journal.

    apart_from: files whose prompts must not be repeated.
    force: start again, and overwrite a finished output.
    Raises AnnieError if fewer than four fifths could be made; what was made is kept for the next
    run.
    """
    who = persona if isinstance(persona, Persona) else load_persona(persona)
    if split not in SPLITS:
        raise UsageError(f"unknown split {split!r}", f"choose one of: {', '.join(SPLITS)}")
    module = teachers.find_teacher(teacher)
    target = Path(output) if output is not None else None
    finished = _finished(target, who, module.NAME, n) if target is not None and not force else None
    if finished is not None:
        return finished
    options = options or Options()
    opened: Teacher = module.open_teacher(options, split)
    all_categories = who.categories
    who = msgspec.structs.replace(who, categories=opened.categories(who))
    left_out = [category.name for category in all_categories if category not in who.categories]
    if left_out and progress is not None:
        progress.message(
            f"{module.NAME} writes no {', '.join(left_out)}: {who.name}'s prompt decides"
        )
    if n < len(who.categories):
        raise UsageError(
            f"n is {n}; each of the {len(who.categories)} categories needs at least one conversation"
        )
    forbidden = prompts_of_others(apart_from, split != "gate", who)
    # The rows depend on all of this.
    key: dict[str, object] = {"version": __version__, "teacher": module.NAME, "model": opened.model}
    key |= {"persona": who.sha256, "n": n, "seed": seed, "split": split}
    journal = Journal(target, key, restart=force)
    run = _Run(
        who,
        module.NAME,
        opened,
        n,
        target,
        seed,
        split,
        options.max_usd,
        journal,
        forbidden,
        progress or SILENT,
    )
    return run.run()


@dataclass
class _Run:
    """What is to be made, continued from the journal.

    max_usd: budget of the whole run, including resumed runs.
    forbidden: texts that no row may repeat.
    finders: category → user texts of its rows.
    """

    persona: Persona
    teacher_name: str
    teacher: Teacher
    n: int
    output: Path | None
    seed: int
    split: str
    max_usd: float | None
    journal: Journal
    forbidden: DuplicateFinder
    progress: Progress
    finders: dict[str, DuplicateFinder] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for row in self.journal.rows:
            self.finder(row["category"]).add(row["id"], user_text(row))

    def finder(self, category: str) -> DuplicateFinder:
        return self.finders.setdefault(category, DuplicateFinder())

    def run(self) -> GenerationResult:
        finished = False
        base, remainder = divmod(self.n, len(self.persona.categories))
        is_offline = self.teacher_name == "offline"
        n_missing = 0
        try:
            for index, category in enumerate(self.persona.categories):
                count = base + (index < remainder)
                self.fill(category, count)
                n_missing += max(0, count - len(self.rows_of(category)))
                if is_offline and self.persona.is_built_in:
                    self.check_enough(n_missing)
            if is_offline and not self.persona.is_built_in:
                self.fill_up()
                self.check_enough(self.n - len(self.journal.rows))
            result = self.write()
            finished = True
        finally:
            self.journal.close(finished)
        return result

    def fill_up(self) -> None:
        """Let categories that have more conversations replace what others lack: a tool without arguments has few."""
        for category in self.persona.categories:
            missing = self.n - len(self.journal.rows)
            if missing > 0:
                self.fill(category, len(self.rows_of(category)) + missing)

    def check_enough(self, n_missing: int) -> None:
        """Raise UsageError as soon as the offline teacher's templates cannot give enough conversations."""
        if self.n - n_missing >= MIN_VALID * self.n:
            return
        self.journal.close(True)  # the same command would fail again
        counts = Counter(row["category"] for row in self.journal.rows)
        possible = counts.total()
        if self.persona.is_built_in:  # each category needs as many as the others
            possible = len(self.persona.categories) * min(counts.values(), default=0)
        named = ", ".join(f"{name} {n}" for name, n in counts.items())
        raise UsageError(
            f"the offline teacher has not enough different conversations for {self.persona.name}: {named}, "
            f"and --n is {self.n}",
            f"--n {possible}, or --teacher claude-cli or openai",
        )

    def rows_of(self, category: Category) -> list[JsonObject]:
        return [row for row in self.journal.rows if row["category"] == category.name]

    def fill(self, category: Category, count: int) -> None:
        """Request batches until the category has `count` conversations, or until several in a row bring nothing new."""
        fruitless = 0
        while (have := len(self.rows_of(category))) < count and fruitless < MAX_FRUITLESS:
            self.progress.update(len(self.journal.rows), self.n, category.name)
            batch = self.request(category, min(self.teacher.batch_size, count - have))
            if batch is None:
                return
            fruitless = 0 if self.keep_new(category, batch) else fruitless + 1

    def request(self, category: Category, count: int) -> TeacherBatch | None:
        """Return one batch, repeated if it fails and after a wait if the teacher is limited; None after the last retry."""
        avoid = [user_text(r).replace("\n", " / ") for r in self.rows_of(category)]
        tries = 0
        waited_s = 0.0
        while True:
            self.check_budget()
            number = self.journal.batches[category.name]
            seed = f"{self.seed}:{category.name}" + (f":{number}" if number else "")
            try:
                return self.teacher.batch(self.persona, category, count, seed, avoid)
            except RateLimited as limit:
                wait_s = limit.wait_s
                if wait_s is None:
                    wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**tries)
                if waited_s + wait_s > MAX_TOTAL_WAIT_S:
                    raise self.stopped(
                        f"{limit}; it requires another {wait_s:.0f} s", ServerError
                    ) from None
                sleep(wait_s)
                waited_s += wait_s
                tries += 1
            except BatchFailed as failure:
                tries += 1
                self.journal.add(
                    JournalLine(
                        None, category.name, [], failure.cost_usd, failure.tokens, str(failure)
                    )
                )
                if tries > MAX_RETRIES:
                    self.failed.append(f"{category.name}: {failure}")
                    return None

    def check_budget(self) -> None:
        most = self.max_usd
        spent = self.journal.cost_usd
        if most is not None and most - spent < MIN_BUDGET_USD:
            raise self.stopped(f"the budget of {most:.2f} USD is spent ({spent:.2f})")

    def stopped(self, reason: str, kind: type[AnnieError] = AnnieError) -> AnnieError:
        stored = f"{len(self.journal.rows)} of {self.n} conversations are kept"
        return kind(f"{reason}; {stored}", "run the same command again to resume")

    def keep_new(self, category: Category, batch: TeacherBatch) -> int:
        """Record the batch's valid, new conversations in the journal, and return their number."""
        if self.max_usd is not None and batch.cost_usd is None:
            raise UsageError(
                f"{self.teacher_name} does not report its costs", "leave --max-budget-usd out"
            )
        provenance = {
            "teacher": self.teacher_name,
            "model": self.teacher.model,
            "persona": self.persona.source,
            "prompt_sha256": self.persona.prompt_sha256,
            "persona_sha256": self.persona.sha256,
            "seed": self.seed,
            "time": _now(),
        }
        finder = self.finder(category.name)
        first = len(self.rows_of(category))
        rows: list[JsonObject] = []
        for conversation in batch.rows:
            name = f"{category.name}-{first + len(rows):04d}"
            row: JsonObject = {"id": name, "category": category.name, **conversation}
            row |= {"provenance": provenance, "split": self.split}
            reason = self.drop_reason(row, finder)
            if reason:
                self.dropped[reason] += 1
                continue
            finder.add(row["id"], user_text(row))
            rows.append(row)
            self.progress.update(len(self.journal.rows) + len(rows), self.n, category.name)
        self.journal.add(JournalLine(None, category.name, rows, batch.cost_usd, batch.tokens))
        return len(rows)

    def drop_reason(self, row: JsonObject, finder: DuplicateFinder) -> str | None:
        row_faults = faults(row, self.persona)
        if row_faults:
            return row_faults[0]
        text = user_text(row)
        if finder.find(text) is not None:
            return "it repeats another conversation"
        if self.forbidden.find(text) is not None:
            return "it repeats a prompt of another split"
        return None

    def write(self) -> GenerationResult:
        order = {c.name: i for i, c in enumerate(self.persona.categories)}
        rows = sorted(self.journal.rows, key=lambda r: (order[r["category"]], r["id"]))
        result = GenerationResult(
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
            store_rows(self.output, rows)
        return result


def _finished(output: Path, persona: Persona, teacher: str, n: int) -> GenerationResult | None:
    """Return the result of a paid teacher's finished output, so that it is not paid for again; None where there is none.

    Raises UsageError for such an output with other settings: it is not overwritten without --force.
    """
    if not output.is_file() or journal_path(output).is_file():
        return None
    rows = read_rows(output)
    paid = {(r.get("provenance") or {}).get("teacher") for r in rows} - {"offline"}
    if not paid:
        return None
    validation = validate(rows, persona, n)
    if (
        paid == {teacher}
        and validation.ok
        and all(r["provenance"]["persona_sha256"] == persona.sha256 for r in rows)
    ):
        return GenerationResult(
            **msgspec.structs.asdict(validation),
            dropped={},
            failed=[],
            cost_usd=0.0,
            tokens=0,
            output=str(output),
            done_before=True,
        )
    raise UsageError(
        f"{output} has {len(rows)} conversations by {', '.join(map(str, paid))} that were made with other settings",
        "choose another --output, or add --force to make them again",
    )


def _now() -> str:
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or time()
    moment = datetime.datetime.fromtimestamp(int(epoch), datetime.timezone.utc)
    return moment.isoformat(timespec="seconds")
