"""Rows of conversations: read them from JSON lines, logs or datasets, and check that sets are apart.

check_apart          no user text of one set is in another: train, calibration and gate prompts never overlap
check_prompt_hash    the rows have the system prompt that is served now

row_rules.py has the form of a row. A row that cannot be read is left out and named, up to MAX_UNREADABLE_SHARE of a file.
"""

from __future__ import annotations

import codecs
import functools
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from annie_quant import judge
from annie_quant.core.errors import UsageError
from annie_quant.core.files import exists, is_folder, sha256_text, write_text
from annie_quant.core.untrusted import JsonObject, decode_json
from annie_quant.data.conversations import row_of
from annie_quant.data.duplicates import DuplicateFinder
from annie_quant.data.logs import Problems, read_logs
from annie_quant.data.row_rules import Row, check_readable, form_report, spread, text_of, user_text
from annie_quant.documents.persona import Persona, built_in, load_persona

_log = logging.getLogger(__name__)

Rows = str | os.PathLike[str] | Sequence[Row]  # a file, or rows in memory


DATASET_SUFFIXES = (".parquet", ".arrow", ".gz")
MAX_UNREADABLE_SHARE = 0.1  # of a file's rows
# A row with one of these is a log's record: its answer is not among its messages.
LOG_FIELDS = frozenset(("request", "response", "response_body", "choices", "output", "call_type"))


class FileRow(dict[str, Any]):
    """A row of a file. place: the file's name and the line."""

    def __init__(self, row: Row, place: str) -> None:
        super().__init__(row)
        self.place = place


def store_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def place_of(row: Row) -> str:
    """Return where a row stands; "" where it is not of a file."""
    return row.place if isinstance(row, FileRow) else ""


def read_rows(rows: Rows) -> list[JsonObject]:
    """Return copies of the rows, or the rows of a file.

    Raises UsageError that names the file and the line.

    A file that has not changed is read once; its rows are shared by all callers, and none of them
    changes a row.
    """
    if not isinstance(rows, (str, os.PathLike)):
        return [row if isinstance(row, FileRow) else dict(row) for row in rows]
    path = Path(rows)
    if is_folder(path):
        return dataset_rows(path)
    hint = f"annie-quant data --persona annie --output {path}"
    try:
        status = path.stat()
        return list(_rows_of_file(path, status.st_mtime_ns, status.st_size))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", hint) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint) from error


@functools.lru_cache(maxsize=2)
def _rows_of_file(path: Path, modified_ns: int, size_bytes: int) -> Sequence[JsonObject]:
    if path.suffix in DATASET_SUFFIXES:
        return dataset_rows(path)
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if content.lstrip()[:1] == b"[":
        return dataset_rows(path)
    result: list[JsonObject] = []
    problems = Problems()
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"{path.name}, line {number}"
        try:
            row = decode_json(line)
            if not result and _is_of_log(row):
                return dataset_rows(path)
            check_readable(row)
        except (ValueError, msgspec.ValidationError, RecursionError) as error:
            problems.add(f"not a conversation: {str(error)[:200]}", place)
            continue
        result.append(FileRow(row, place))
    unreadable = sum(problems.counts.values())
    if unreadable > MAX_UNREADABLE_SHARE * (len(result) + unreadable):
        raise UsageError(
            f"{path}: {'; '.join(problems.lines())}",
            "each line is a JSON object with messages: [{role, content}, ...]",
        )
    _report(path, problems)
    return result


def _is_of_log(row: object) -> bool:
    """Return whether a line has a conversation in the form of a log (data/logs.py)."""
    return isinstance(row, dict) and ("messages" not in row or bool(LOG_FIELDS & row.keys()))


def _report(path: Path, problems: Problems) -> None:
    if problems.counts:
        _log.warning("annie-quant: %s: left out: %s", path, "; ".join(problems.lines()))


def dataset_rows(path: Path) -> list[JsonObject]:
    """Return the rows of a log or a chat dataset in another form: Parquet, Arrow, ShareGPT, a folder (see data/logs.py).

    Where none has an answer they are prompts. Raises UsageError where it has no conversation.
    """
    problems = Problems()
    every = list(read_logs([path], problems))
    conversations = [c for c in every if c.has_answer] or every
    rows: list[JsonObject] = [
        FileRow(row_of(conversation, index), conversation.place)
        for index, conversation in enumerate(conversations)
    ]
    if not rows:
        reasons = "; ".join(problems.lines()) or "it is empty"
        raise UsageError(
            f"{path} has no conversation: {reasons}",
            "annie-quant data --persona annie",
        )
    _report(path, problems)
    return rows


def read_conversations(conversations: Rows, limit: int | None = None) -> list[JsonObject]:
    """Return the rows of a file, or rows, at most `limit` of them.

    Raises UsageError for a file without rows.

    They are taken evenly over the file, which is sorted by category: the first 100 rows would all
    be greetings.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"{limit} conversations are too few", "choose 1 or more")
    rows = read_rows(conversations)
    if not rows and isinstance(conversations, (str, os.PathLike)):
        raise UsageError(
            f"{conversations} has no conversations",
            f"annie-quant data --persona annie --output {conversations}",
        )
    return rows if limit is None else spread(rows, limit)


def gate_texts(persona: Persona | None = None) -> Iterator[tuple[str, str]]:
    """Yield (name, user text) of every prompt that gates are judged with: those of Annie, or of another persona."""
    from annie_quant.data.workloads import stored_workloads

    for workload in stored_workloads(persona) if persona is not None else judge.load_workloads():
        for case in workload.cases:
            users = [text_of(m.get("content")) for m in case.messages if m["role"] == "user"]
            turns = [turn for turn in case.turns if isinstance(turn, str)]
            yield f"{workload.name}/{case.id}", "\n".join(users or turns)


def prompts_of_others(
    others: Iterable[Rows], gates: bool, persona: Persona | None
) -> DuplicateFinder:
    """Return a finder for the prompts of other sets and, if `gates`, of the persona's gates."""
    texts = [
        (f"row {row.get('id')}", user_text(row)) for other in others for row in read_rows(other)
    ]
    return DuplicateFinder([*texts, *(gate_texts(persona) if gates else ())])


def check_apart(
    rows: Rows, *others: Rows, gates: bool = True, persona: Persona | None = None
) -> None:
    """Raise UsageError if `rows` shares a prompt with another set or, if `gates`, with a gate's prompts of the persona."""
    finder = prompts_of_others(others, gates, persona)
    matches = [(row.get("id"), finder.find(user_text(row))) for row in read_rows(rows)]
    duplicates = [(name, match) for name, match in matches if match is not None]
    if duplicates:
        raise UsageError(
            f"{len(duplicates)} conversations overlap with another set: {duplicates[0][0]} is {duplicates[0][1]}",
            "train, calibration and gate prompts must not be shared: remove these rows",
        )


def check_prompt_hash(
    rows: Rows, persona: str | Path | Persona | None = None, allow: bool = False
) -> str | None:
    """Check, before quantizing or evaluating, that conversations have the system prompt that is served now.

    That prompt is that of `persona`, else that of the persona named in the rows' provenance. Rows
    without provenance are compared only with a given persona.

    Returns None where all agree, else a description of the mismatch if `allow` is set. Raises
    UsageError otherwise.
    """
    stale: list[str] = []
    checked = 0
    current = ""
    load = functools.cache(load_persona)
    for row in read_rows(rows):
        provenance = row.get("provenance") or {}
        source: Any = persona if persona is not None else provenance.get("persona")
        if source is None or (
            persona is None and str(source) not in built_in() and not exists(Path(source))
        ):
            continue  # nothing to compare with: no provenance, or that of another folder or machine
        current = (source if isinstance(source, Persona) else load(source)).system_prompt
        first = row["messages"][0]
        prompt = text_of(first.get("content")) if first["role"] == "system" else ""
        checked += 1
        recorded = provenance.get("prompt_sha256") or sha256_text(prompt)
        is_current = recorded == sha256_text(current)
        # Each log has its own prompt; the persona's is in the provenance.
        is_log = provenance.get("teacher") == "log" and bool(provenance.get("prompt_sha256"))
        if not is_current or not (is_log or prompt == current):
            stale.append(sha256_text(prompt)[:12])
    if not stale:
        return None
    difference = (
        f"the data's system prompt ({stale[0]}, {len(stale)} of {checked} conversations) differs from production's "
        f"({sha256_text(current)[:12]}): a stale prompt in the data spoils calibration and training"
    )
    if not allow:
        raise UsageError(
            difference, "make the data again (annie-quant data), or add --allow-prompt-mismatch"
        )
    return difference


def check_calibration(
    conversations: Path | None,
    persona: str | None = None,
    allow: bool = False,
    needs_answer: bool = True,
) -> list[str]:
    """Return notes about a file of conversations: rows whose form is invalid, and with `allow` a stale system prompt.

    needs_answer: prompts that the model has to answer first are invalid, too.
    Raises UsageError for a system prompt other than the served one, unless `allow`.
    """
    if conversations is None:
        return []
    rows = read_rows(conversations)
    notes = [check_prompt_hash(rows, persona, allow=allow)]
    invalid = form_report(rows, load_persona(persona) if persona else None, needs_answer)
    if invalid:
        command = f"annie-quant data --check --persona {persona or 'FILE'} --output {conversations}"
        notes.append(f"{invalid} ({command})")
    return [note for note in notes if note]
