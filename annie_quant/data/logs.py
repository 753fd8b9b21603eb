"""Read log files of any size as a stream of conversations.

OpenAI chat       JSON lines with `messages` (and `tools`), or a request with its `response`, as proxies and batches log them
ShareGPT, Hermes  `conversations` of {from, value}; tools in the system prompt, calls and results in tags
transcripts       sessions of agents (Claude Code, OpenClaw): one event per line, tool calls as content blocks
llama.cpp         log_server_r: request:  {...} and response: {...} (--verbose)
OpenTelemetry     spans and log records in OTLP JSON, one export per file or per line (data/otel.py)
datasets          Parquet, Arrow and JSON files of Hugging Face chat datasets, also with gzip, and folders of all of these
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import gzip
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from annie_quant.core.errors import UsageError, need
from annie_quant.core.untrusted import JsonObject, decode_json
from annie_quant.data import log_records, otel
from annie_quant.data.log_records import Conversation, Unusable
from annie_quant.documents import ChatMessage

SUFFIXES = (".jsonl", ".ndjson", ".json", ".log", ".txt", ".parquet", ".arrow", ".gz")
MAX_LOG_LINE_BYTES = 16_000_000  # bytes
MAX_CONVERSATION_CHARACTERS = (
    2_000_000  # of one conversation: over 256k tokens, more than any model reads
)
BATCH_ROWS = 256
PlacedRecord = tuple[str, object]  # its place (file and line), and its content


@dataclass
class Problems:
    """The records of logs that cannot be used.

    counts: reason → number of records.
    first: reason → file and line of its first record.
    """

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str = "", n: int = 1) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + n
        self.first.setdefault(reason, where)

    def lines(self) -> Iterator[str]:
        """Yield one line per reason, the most frequent first."""
        for reason, n in sorted(self.counts.items(), key=lambda item: -item[1]):
            where = f" (first: {self.first[reason]})" if self.first[reason] else ""
            yield f"{n:,} × {reason}{where}"


def read_logs(
    paths: Iterable[str | os.PathLike[str]],
    problems: Problems | None = None,
) -> Iterator[Conversation]:
    """Yield the conversations of log files. At most one record (Parquet: BATCH_ROWS) is in memory.

    problems: counts what cannot be used, also conversations of more than
        MAX_CONVERSATION_CHARACTERS.
    Raises UsageError for a path that does not exist or cannot be read.
    """
    problems = Problems() if problems is None else problems
    for path in itertools.chain.from_iterable(map(files_of, map(Path, paths))):
        for conversation in _read_file(path, problems):
            if conversation.characters > MAX_CONVERSATION_CHARACTERS:
                problems.add(
                    f"longer than {MAX_CONVERSATION_CHARACTERS:,} characters",
                    conversation.source or path.name,
                )
                continue
            conversation.source = path.name
            yield conversation


def files_of(path: Path) -> Iterator[Path]:
    """Yield a file, or the log files of a folder. Raises UsageError where there is none."""
    if path.is_dir():
        files = sorted(
            f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file() and f.stat().st_size
        )
        if not files:
            raise UsageError(f"{path} has no log files ({', '.join(SUFFIXES)})")
        yield from files
    elif path.is_file():
        yield path
    else:
        raise UsageError(f"{path} does not exist", "--logs takes files and folders")


def _read_file(path: Path, problems: Problems) -> Iterator[Conversation]:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    try:
        if suffix in (".parquet", ".arrow"):
            yield from _conversations(_rows(path, suffix), problems)
            return
        documents = _entries(path) if suffix == ".json" else None
        if documents is None:
            yield from _Lines(path, problems).conversations()
        else:
            named = ((f"{path.name}, entry {n}", entry) for n, entry in enumerate(documents, 1))
            yield from _conversations(named, problems)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


def _conversations(records: Iterable[PlacedRecord], problems: Problems) -> Iterator[Conversation]:
    for where, record in records:
        try:
            conversation = log_records.conversation_of(record)
        except Unusable as reason:
            problems.add(str(reason), where)
        else:
            yield dataclasses.replace(conversation, format=_format(record), source=where)


def _entries(path: Path) -> list[object] | None:
    """Return the entries of a JSON file; None where the file is not one JSON document, such as JSON lines."""
    try:
        document = decode_json(_open(path).read())
    except ValueError:
        return None
    if otel.is_export(document):
        return list(otel.records(document))
    if isinstance(document, dict):
        rows = document.get("data") or document.get("train")
        return rows if isinstance(rows, list) else [document]
    is_chat = isinstance(document, list) and document[:1] and "role" in _fields(document[0])
    return document if isinstance(document, list) and not is_chat else [document]


def _fields(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


class _Lines:
    """A file with JSON lines, a transcript with one event per line, or a server's text log."""

    def __init__(self, path: Path, problems: Problems) -> None:
        self.path = path
        self.problems = problems
        self.server = ServerLog()
        self.transcript = Transcript()
        self.text_lines = 0
        self.first_text = ""

    def conversations(self) -> Iterator[Conversation]:
        with _open(self.path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LOG_LINE_BYTES), b""), 1):
                where = f"{self.path.name}, line {number}"
                if len(line) >= MAX_LOG_LINE_BYTES and not line.endswith(b"\n"):
                    self.problems.add(
                        f"a line of more than {MAX_LOG_LINE_BYTES // 1_000_000} MB", where
                    )
                    _skip_line(file)
                elif line.strip():
                    yield from self._usable(self._line(line.strip(), where), where)
        for source in (self.server, self.transcript):
            yield from self._usable(source.rest(), self.path.name)
        if self.text_lines and not self.server.is_known:
            self.problems.add("a line that is not JSON", self.first_text, self.text_lines)

    def _usable(self, conversations: Iterator[Conversation], where: str) -> Iterator[Conversation]:
        try:
            yield from conversations
        except Unusable as reason:
            self.problems.add(str(reason), where)

    def _line(self, line: bytes, where: str) -> Iterator[Conversation]:
        if line[:1] not in (b"{", b"["):
            self.text_lines += 1
            self.first_text = self.first_text or where
            yield from self.server.add(line.decode("utf-8", "replace"))
            return
        record = _decoded(line)
        if isinstance(record, dict) and self.transcript.takes(record):
            yield from self.transcript.add(record)
            return
        records = otel.records(record) if otel.is_export(record) else [record]
        yield from _conversations(((where, each) for each in records), self.problems)


def _skip_line(file: IO[bytes]) -> None:
    """Read to the end of a line."""
    while True:
        line = file.readline(MAX_LOG_LINE_BYTES)
        if not line or line.endswith(b"\n"):
            return


def _decoded(line: bytes) -> object:
    with contextlib.suppress(ValueError):
        return decode_json(line)
    try:
        record = decode_json(line, lenient=True)
    except ValueError:
        raise Unusable("a line that is not JSON") from None
    try:
        json.dumps(record, allow_nan=False)
    except ValueError:
        raise Unusable("NaN or infinity, which JSON does not have") from None
    return record


def _open(path: Path) -> IO[bytes]:
    """Open a log, positioned after its byte order mark where it has one."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    file: IO[bytes] = opener(path, "rb")
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)
    return file


def _rows(path: Path, suffix: str) -> Iterator[PlacedRecord]:
    """Yield the rows of a Parquet or Arrow file."""
    need("pyarrow", "notebooks")
    import pyarrow

    rows = itertools.count(1)
    try:
        for batch in _batches(path, suffix):
            for start in range(0, batch.num_rows, BATCH_ROWS):
                for row in batch.slice(start, BATCH_ROWS).to_pylist():
                    yield f"{path.name}, row {next(rows)}", _without_none(row)
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def _batches(path: Path, suffix: str) -> Iterable[Any]:
    """Return the record batches of a Parquet file, or of an Arrow file of either form."""
    import pyarrow.parquet

    if suffix == ".parquet":
        batches: Iterable[Any] = pyarrow.parquet.ParquetFile(path).iter_batches(BATCH_ROWS)
        return batches
    source = pyarrow.memory_map(str(path))
    try:
        stream: Iterable[Any] = pyarrow.ipc.open_stream(source)
        return stream
    except pyarrow.ArrowInvalid:
        reader = pyarrow.ipc.open_file(source)
        return map(reader.get_batch, range(reader.num_record_batches))


def _without_none(value: object) -> object:
    """Return a row without the null fields that a column format adds to nested objects."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value


RECORD_FORMATS = {  # a field of a record → the name of the record's format
    "conversations": "ShareGPT",
    "conversation": "ShareGPT",
    "span": "OpenTelemetry",
    "response": "request and response",
    "choices": "request and response",
}


def _format(record: object) -> str:
    names = (name for key, name in RECORD_FORMATS.items() if key in _fields(record))
    return next(names, "OpenAI chat")


class Transcript:
    """A transcript of an agent: one event or message per line, one conversation per session."""

    NO_EVENT = ("messages", "conversations", "conversation", "request", "response", "body")

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._fault = ""

    def takes(self, record: JsonObject) -> bool:
        """Return whether a line is an event of a transcript."""
        if any(key in record for key in self.NO_EVENT):
            return False
        is_event = "type" in record and ("id" in record or "timestamp" in record)
        is_message = (
            str(record.get("role")).lower() in log_records.LOG_ROLES and "content" in record
        )
        return is_event or is_message

    def add(self, record: JsonObject) -> Iterator[Conversation]:
        if record.get("type") == "session":
            yield from self.rest()
            return
        message = _fields(record.get("message")) or (record if "role" in record else None)
        if message is None:
            return
        try:
            self._messages += log_records.parsed_message(message)
        except Unusable as reason:
            self._fault = self._fault or str(reason)

    def rest(self) -> Iterator[Conversation]:
        """Yield the session so far. Raises Unusable where a message of it cannot be used."""
        messages = self._messages
        fault = self._fault
        self._messages = []
        self._fault = ""
        if fault:
            raise Unusable(fault)
        if messages:
            yield dataclasses.replace(log_records.finished(messages, None), format="transcript")


_LLAMA = re.compile(r"log_server_r\w*:\s+(request|response):\s+(\{.*\})\s*$")


class ServerLog:
    """The requests in llama.cpp's text log. is_known: whether a line of it was seen."""

    def __init__(self) -> None:
        self.is_known = False
        self._request: JsonObject | None = None

    def add(self, line: str) -> Iterator[Conversation]:
        """Yield the conversations that a line completes.

        Raises Unusable for a body that cannot be parsed.
        """
        match = _LLAMA.search(line)
        if match is None:
            return
        self.is_known = True
        try:
            body = json.loads(match[2])
        except (ValueError, RecursionError):
            raise Unusable("a request in the server's log is not JSON") from None
        if match[1] == "request":
            yield from self.rest()
            self._request = body if "messages" in body else None
        elif self._request is not None:
            self._request["response"] = body
            yield from self.rest()

    def rest(self) -> Iterator[Conversation]:
        """Yield the request that is waiting for its answer."""
        request = self._request
        self._request = None
        if request is not None:
            conversation = log_records.conversation_of(request)
            yield dataclasses.replace(conversation, format="llama.cpp log")
