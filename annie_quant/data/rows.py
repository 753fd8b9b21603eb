"""Reading conversations (JSON lines), and the two things that must hold between files and prompts.

check_apart          no user text of the one set is in the other: train, calibration and gate never overlap
check_prompt_hash    the data was made with the system prompt that production uses now
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from annie_quant.data.near import Near, user_text
from annie_quant.errors import UsageError
from annie_quant.files import sha256_text
from annie_quant.persona import load_persona

Rows = str | os.PathLike | Sequence[Mapping[str, Any]]


def read_rows(rows: Rows) -> list[dict[str, Any]]:
    """Rows as they are, or those of a file. Raises UsageError that names the line."""
    if not isinstance(rows, (str, os.PathLike)):
        return [dict(row) for row in rows]
    path = Path(rows)
    found = []
    try:
        whole = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path} is not there", f"annie-quant data --persona annie --output {path}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", f"annie-quant data --output {path}") from error
    for number, line in enumerate(whole.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            row["messages"][0]["role"]
            if not isinstance(row["messages"], list):
                raise TypeError("messages is no list")
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            said = f"{type(error).__name__}: {error}"[:200]
            raise UsageError(
                f"{path}, line {number}: no conversation ({said})",
                "a row is a JSON object with messages: [{role, content}, ...]",
            ) from None
        found.append(row)
    return found


def read_conversations(path: str | os.PathLike, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of a file, at most `limit`, taken evenly over it; there must be one.

    Evenly, because the founding files are sorted by category: the first 100 rows would all be greetings.
    """
    rows = read_rows(path)
    if not rows:
        raise UsageError(f"{path}: no conversation in it", f"annie-quant data --persona annie --output {path}")
    if limit is None or limit >= len(rows):
        return rows
    return [rows[i * len(rows) // limit] for i in range(limit)]


def gate_texts() -> Iterator[tuple[str, str]]:
    """(name, text) of every prompt that a gate judges with."""
    from annie_quant import judge

    for workload in judge.load_workloads():
        for case in workload.cases:
            users = [str(m["content"]) for m in case.messages if m["role"] == "user"]
            yield f"{workload.name}/{case.id}", "\n".join(users or case.turns)


def overlaps(rows: Rows, others: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(row id, name of the other) for each row whose user says nearly what one of `others` (name, text) says."""
    near = Near(others)
    hits = ((str(row.get("id")), near.find(user_text(row))) for row in read_rows(rows))
    return [(name, hit) for name, hit in hits if hit is not None]


def check_apart(rows: Rows, *others: Rows, gates: bool = True) -> None:
    """Raise UsageError where `rows` shares a prompt with another set, or with a gate's prompts."""
    named = [(f"row {r.get('id')}", user_text(r)) for other in others for r in read_rows(other)]
    hits = overlaps(rows, [*named, *(gate_texts() if gates else ())])
    if hits:
        raise UsageError(
            f"{len(hits)} conversations overlap with what they must be apart from: {hits[0][0]} is {hits[0][1]}",
            "train, calibration and gate prompts must not be shared: leave these rows out",
        )


def check_prompt_hash(
    rows: Rows, persona: str | Path | None = None, system_prompt: str | None = None, allow: bool = False
) -> str | None:
    """See that conversations carry the system prompt that production uses now; call it before quantizing and judging.

    The prompt of today is `system_prompt`, else that of `persona`, else that of the persona which the rows name. Rows that
    say nothing of where they come from are only compared with a prompt or persona that is given. Returns None when they
    agree, a sentence to keep when they do not and `allow` is set, and raises UsageError otherwise.
    """
    stale: list[str] = []
    checked = 0
    for row in read_rows(rows):
        named: Any = persona if persona is not None else (row.get("provenance") or {}).get("persona")
        if system_prompt is None and named is None:
            continue
        now = system_prompt if system_prompt is not None else load_persona(named).system_prompt
        first = row["messages"][0]
        seen = first["content"] if first["role"] == "system" else ""
        kept = (row.get("provenance") or {}).get("prompt_sha256", sha256_text(seen))
        checked += 1
        if kept != sha256_text(now) or seen != now:
            stale.append(sha256_text(seen)[:12])
    if not stale:
        return None
    said = (
        f"the data's system prompt ({stale[0]}, {len(stale)} of {checked} conversations) is not production's "
        f"({sha256_text(now)[:12]}): a stale prompt in the data spoils calibration and training"
    )
    if not allow:
        raise UsageError(said, "make the data anew (annie-quant data), or say --allow-prompt-mismatch")
    return said
