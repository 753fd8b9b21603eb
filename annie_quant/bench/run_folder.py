"""The files of a run directory that hold a benchmark's requests and their records.

inputs.json       its settings and prompts, written first and compared when the run is resumed
records.jsonl     one line per request, written as soon as it is finished, so that a killed run loses nothing
unanswered.jsonl  requests that a backend left unanswered when it hung; a resumed run sends them again
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from annie_quant import documents
from annie_quant.core.errors import AnnieError, UsageError
from annie_quant.core.files import replacing, sha256_text
from annie_quant.core.resume import JsonLines, read_lines
from annie_quant.documents import BenchConfig, Inputs, RequestRecord, SentWorkload, WorkloadSettings
from annie_quant.judge.workloads import Workload

RUN_FILES = (
    "records.jsonl",
    "unanswered.jsonl",
    "inputs.json",
    "bench.json",
    "memory.json",
    "reference.jsonl",
    "context.json",
    "memory_trace.json",  # of version 0.3.0 or older
    "machine.jsonl",
)


def workload_settings(workload: Workload) -> WorkloadSettings:
    """Return what a run records of a workload, with a hash of all that is sent and expected."""
    content: list[Any] = [
        [list(case.turns) or workload.request(case), dict(case.expect)] for case in workload.cases
    ]
    if workload.context is not None:  # runs of versions without contexts stay resumable
        content.append(msgspec.to_builtins(workload.context))
    settings = msgspec.convert(workload, WorkloadSettings, from_attributes=True)
    settings.asked_sha256 = sha256_text(
        json.dumps([workload.name, workload.gates, content], sort_keys=True, default=str)
    )
    return settings


def prepare_folder(
    folder: Path, config: BenchConfig, workloads: Sequence[Workload], resume: bool
) -> None:
    """Write inputs.json. Without `resume`, delete the earlier run in the folder.

    Raises UsageError where the folder has records of a benchmark with other settings and `resume` is set. A benchmark that
    ended before its first record (no server answered) left nothing to resume, so its settings are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    inputs = folder / "inputs.json"
    if not resume:
        shutil.rmtree(folder / "streams", ignore_errors=True)
        for name in RUN_FILES:
            (folder / name).unlink(missing_ok=True)
    elif inputs.exists() and _has_records(folder):
        try:
            changed = config.differences(documents.decode(Inputs, inputs).config)
        except AnnieError:
            changed = ["inputs.json cannot be read"]
        if changed:
            paths = (folder / name for name in ("records.jsonl", "streams"))
            old = shlex.join(str(path) for path in paths if path.exists())
            raise UsageError(
                f"{folder} holds a benchmark with other settings ({', '.join(changed)})",
                f"choose another --output, or delete its records to start again: rm -r {old}",
            )
    documents.write(
        inputs, Inputs(config=config, workloads=[complete_workload(w) for w in workloads])
    )


def _has_records(folder: Path) -> bool:
    records = folder / "records.jsonl"
    return records.is_file() and records.stat().st_size > 0


def complete_workload(workload: Workload) -> SentWorkload:
    """Return all that a run sends and expects."""
    cases = tuple(
        replace(case, tools=tuple(workload.tools_for(case) or ()) or None)
        for case in workload.cases
    )
    sent = replace(workload, system=workload.system_prompt, cases=cases)
    return msgspec.convert(sent, SentWorkload, from_attributes=True)


_HINT = "delete that line, or start again with another --output"


class RecordLog:
    """The records of a run directory: those of earlier runs, and an append-only log for new ones."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._log = JsonLines(path)
        try:
            self.rows = self._log.values(_decode)
        except BaseException:
            self._log.close()
            raise

    def append(self, record: RequestRecord) -> None:
        self._log.append(documents.encode_record(record))
        self.rows.append(record)

    def close(self) -> None:
        self._log.close()

    def rewrite(self) -> None:
        """Write all rows again, after close, because their checks have changed."""
        write_records(self._log.path, self.rows)


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    with replacing(path) as file:
        file.writelines(documents.encode_record(record) + b"\n" for record in records)


def read_records(path: str | os.PathLike[str], every: bool = False) -> list[RequestRecord]:
    """Return the valid records of a records.jsonl, without a last line that a kill cut short; the file is not changed.

    every: return also those that were measured again. Raises EnvironmentFault that names the line for one that is not a record.
    """
    rows = read_lines(path, _decode)
    return rows if every else valid_records(rows)


def valid_records(rows: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return the records without those that were measured again: the last one with an id counts."""
    last = {row.id: index for index, row in enumerate(rows)}
    return [row for index, row in enumerate(rows) if row.warmup or last[row.id] == index]


def _decode(line: bytes, where: str) -> RequestRecord:
    return documents.decode_record(line, where, _HINT)


UNANSWERED = "unanswered.jsonl"
UNANSWERED_CAUSES = (  # RequestRecord.cause and .error: of the request that hung, and of those that were not sent
    ("hung", "it had no answer when the time budget ended"),
    ("not_sent", "it was not sent: an earlier request had no answer when the time budget ended"),
)


def write_unanswered(folder: Path, records: Iterable[RequestRecord]) -> None:
    """Write the records of a run's unanswered requests; without any, remove those of an earlier part of the run."""
    rows = list(records)
    if rows:
        write_records(folder / UNANSWERED, rows)
    else:
        (folder / UNANSWERED).unlink(missing_ok=True)


def read_unanswered(folder: Path) -> list[RequestRecord]:
    path = folder / UNANSWERED
    return read_records(path) if path.is_file() else []
