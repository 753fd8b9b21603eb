"""Reading conversations (JSON lines), and two checks on them.

check_apart          no user text of one set is in another: train, calibration and gate prompts never overlap
check_prompt_hash    the data was made with the system prompt that is served now
"""

from __future__ import annotations

import codecs
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from annie_quant import judge
from annie_quant.data.duplicates import DuplicateFinder, text_of, user_text
from annie_quant.errors import UsageError
from annie_quant.files import exists, is_folder, sha256_text
from annie_quant.persona import Persona, built_in, load_persona
from annie_quant.untrusted import decode_json

Rows = str | os.PathLike[str] | Sequence[Mapping[str, Any]]  # a file, or rows in memory


DATASET_SUFFIXES = (".parquet", ".arrow", ".gz")
LOG_KEYS = {"conversations", "conversation", "prompt", "chosen", "request", "body"}


class Function(msgspec.Struct):
    """The function of a tool or of a call; `arguments` is JSON text, or its value."""

    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    """A tool. name: a tool has a function with a name."""

    function: Function


class Call(Function):
    """A call of a tool, with its fields in `function` or directly."""

    function: Function | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Call] | None = None


class Provenance(msgspec.Struct):
    persona: str | None = None
    prompt_sha256: str | None = None


class RowShape(msgspec.Struct):
    """What is required of a row so that it can be read; `validate` checks the rest."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    tools: list[Tool] | None = None
    provenance: Provenance | None = None
    thinking: bool | None = None
    category: str | int | None = None


def read_rows(rows: Rows) -> list[dict[str, Any]]:
    """Return copies of the rows, or the rows of a file. Raises UsageError that names the file and the line."""
    if not isinstance(rows, (str, os.PathLike)):
        return [dict(row) for row in rows]
    path = Path(rows)
    if is_folder(path) or path.suffix in DATASET_SUFFIXES:
        return dataset_rows(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", f"annie-quant data --persona annie --output {path}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", f"annie-quant data --output {path}") from error
    content = content.removeprefix(codecs.BOM_UTF8)
    if content.lstrip()[:1] == b"[":
        return dataset_rows(path)
    result: list[dict[str, Any]] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = decode_json(line)
            if not result and isinstance(row, dict) and "messages" not in row and LOG_KEYS & row.keys():
                return dataset_rows(path)
            msgspec.convert(row, RowShape)
        except (ValueError, msgspec.ValidationError, RecursionError) as error:
            raise UsageError(
                f"{path}, line {number}: not a conversation: {str(error)[:200]}",
                "each line is a JSON object with messages: [{role, content}, ...]",
            ) from None
        result.append(row)
    return result


def dataset_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a chat dataset in another form: Parquet, Arrow, ShareGPT, a folder (data/logs has them all).

    Raises UsageError where it has no conversation with an answer.
    """
    from annie_quant.data.logs import Problems, read_logs
    from annie_quant.data.logs.conversation import row_of

    problems = Problems()
    rows: list[dict[str, Any]] = [{**row_of(c, i)} for i, c in enumerate(read_logs([path], problems)) if c.has_answer]
    if not rows:
        reasons = "; ".join(problems.lines()) or "it is empty"
        raise UsageError(f"{path} has no conversation with an answer: {reasons}", "annie-quant data --persona annie")
    return rows


def read_conversations(path: str | os.PathLike[str], limit: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file, at most `limit`, taken evenly over it. Raises UsageError for a file without rows.

    Evenly, because such files are sorted by category: the first 100 rows would all be greetings.
    """
    rows = read_rows(path)
    if not rows:
        raise UsageError(f"{path} has no conversations", f"annie-quant data --persona annie --output {path}")
    if limit is None or limit >= len(rows):
        return rows
    return [rows[i * len(rows) // limit] for i in range(limit)]


def gate_texts(persona: Persona | None = None) -> Iterator[tuple[str, str]]:
    """Yield (name, user text) of every prompt that gates are judged with: those of Annie, or of another persona."""
    from annie_quant.data.resolve import stored_workloads

    for workload in stored_workloads(persona) if persona is not None else judge.load_workloads():
        for case in workload.cases:
            users = [text_of(m.get("content")) for m in case.messages if m["role"] == "user"]
            turns = [turn for turn in case.turns if isinstance(turn, str)]
            yield f"{workload.name}/{case.id}", "\n".join(users or turns)


def overlaps(rows: Rows, others: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return (row id, name of the other) for each row whose user text duplicates one of `others` (name, text)."""
    finder = DuplicateFinder(others)
    matches = ((str(row.get("id")), finder.find(user_text(row))) for row in read_rows(rows))
    return [(name, match) for name, match in matches if match is not None]


def check_apart(rows: Rows, *others: Rows, gates: bool = True, persona: Persona | None = None) -> None:
    """Raise UsageError if `rows` shares a prompt with another set or, if `gates`, with a gate's prompts of the persona."""
    texts = [(f"row {r.get('id')}", user_text(r)) for other in others for r in read_rows(other)]
    duplicates = overlaps(rows, [*texts, *(gate_texts(persona) if gates else ())])
    if duplicates:
        raise UsageError(
            f"{len(duplicates)} conversations overlap with another set: {duplicates[0][0]} is {duplicates[0][1]}",
            "train, calibration and gate prompts must not be shared: remove these rows",
        )


def check_prompt_hash(
    rows: Rows, persona: str | Path | Persona | None = None, system_prompt: str | None = None, allow: bool = False
) -> str | None:
    """Check that conversations have the system prompt that is served now. Call it before quantizing and evaluating.

    The current prompt is `system_prompt`, else that of `persona`, else that of the persona named in the rows' provenance.
    Rows without provenance are only compared with a given prompt or persona. Returns None if they agree, a description of
    the mismatch if `allow` is set, and raises UsageError otherwise.
    """
    stale: list[str] = []
    checked, current = 0, ""
    load = functools.cache(load_persona)
    for row in read_rows(rows):
        provenance = row.get("provenance") or {}
        source: Any = persona if persona is not None else provenance.get("persona")
        if system_prompt is None and source is None:
            continue
        if persona is None and system_prompt is None and not _is_readable(source):
            continue  # the data came from another folder or machine
        if system_prompt is not None:
            current = system_prompt
        else:
            current = (source if isinstance(source, Persona) else load(source)).system_prompt
        first = row["messages"][0]
        prompt = text_of(first.get("content")) if first["role"] == "system" else ""
        checked += 1
        if provenance.get("teacher") == "log":  # each log has its own prompt; the persona's is in the provenance
            prompt = current if provenance.get("prompt_sha256") == sha256_text(current) else prompt
        if prompt != current or (provenance.get("prompt_sha256") or sha256_text(prompt)) != sha256_text(current):
            stale.append(sha256_text(prompt)[:12])
    if not stale:
        return None
    mismatch = (
        f"the data's system prompt ({stale[0]}, {len(stale)} of {checked} conversations) differs from production's "
        f"({sha256_text(current)[:12]}): a stale prompt in the data spoils calibration and training"
    )
    if not allow:
        raise UsageError(mismatch, "make the data again (annie-quant data), or add --allow-prompt-mismatch")
    return mismatch


def _is_readable(persona: str | Path) -> bool:
    """Return whether a persona that rows name is built in, or a file or folder that exists here."""
    name = str(persona)
    return exists(Path(name)) or name in built_in()
