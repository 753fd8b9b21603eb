"""Read log files of any size as a stream of conversations.

OpenAI chat       JSON lines with `messages` (and `tools`), or a request with its `response`: of proxies, batches, `record`
OpenAI responses  requests with `input` and their responses
ShareGPT, Hermes  `conversations` of {from, value}; tools in the system prompt, calls and results in tags
Claude Code       sessions, one event per line
Codex             rollouts, one event per line
OpenTelemetry     spans and log records in OTLP JSON, one export per file or per line (data/otel.py)
LiteLLM           its standard logging payload and spend logs
Langfuse          observations of type GENERATION, alone or in traces
llama.cpp         log_server_r: request:  {...} and response: {...} (--verbose)
datasets          Parquet, Arrow and JSON files of Hugging Face chat datasets, also with gzip, and folders of all of these

A file has the form of its first row that a source recognises (sources.py, transcripts.py). A row outside that form is
counted and named with the place of the first one; it never becomes content.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from annie_quant.core.errors import UsageError, need
from annie_quant.core.untrusted import JsonObject, decode_json
from annie_quant.data import otel
from annie_quant.data.conversations import Conversation, Note, Unusable
from annie_quant.data.sources import LLAMA_CPP, SOURCES, Source
from annie_quant.data.transcripts import TRANSCRIPTS, Draft, Skipped, Transcript

SUFFIXES = (".jsonl", ".ndjson", ".json", ".log", ".txt", ".parquet", ".arrow", ".gz")
MAX_LOG_LINE_BYTES = 16_000_000
MAX_CONVERSATION_CHARACTERS = 2_000_000  # over 256k tokens, more than any model reads
_BATCH_ROWS = 256
_GZIP = b"\x1f\x8b"
# First bytes of files that are no text.
_ARCHIVES = {
    b"\x28\xb5\x2f\xfd": "a Zstandard file",
    b"BZh": "a bzip2 file",
    b"\xfd7zX": "an xz file",
    b"PK\x03\x04": "a ZIP archive",
    b"SQLi": "an SQLite database",
}
ROW_LISTS = ("data", "train", "batch")  # fields of an object that is a file of rows
PlacedRow = tuple[str, object]  # its place (file and line), and its content
MAX_ROWS_BEFORE_FORM = 100  # that no source recognises


@dataclass
class Problems:
    """What logs have that cannot be used.

    counts: (unit, such as "rows"; reason) → number.
    first: the same → file and line of the first.
    """

    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    first: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, reason: str, where: str = "", n: int = 1, unit: str = "rows") -> None:
        key = unit, reason
        self.counts[key] = self.counts.get(key, 0) + n
        self.first.setdefault(key, where)

    def lines(self) -> Iterator[str]:
        """Yield one line per reason, the most frequent first."""
        for (unit, reason), n in sorted(self.counts.items(), key=lambda item: -item[1]):
            place = self.first[unit, reason]
            where = f", first in {place}" if place else ""
            yield f"{n:,} {unit if n > 1 else unit.removesuffix('s')} ({reason}{where})"


def read_logs(
    paths: Iterable[str | os.PathLike[str]],
    problems: Problems | None = None,
) -> Iterator[Conversation]:
    """Yield the conversations of log files. At most one record (Parquet: _BATCH_ROWS) is in memory.

    problems: counts what cannot be used, also conversations of more than
        MAX_CONVERSATION_CHARACTERS.
    Raises UsageError for a path that does not exist or cannot be read.
    """
    problems = Problems() if problems is None else problems
    for path in itertools.chain.from_iterable(map(files_of, map(Path, paths))):
        try:
            yield from _File(path, problems).conversations()
        except Unusable as reason:
            problems.add(str(reason), path.name, unit="files")
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


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


class _File:
    """One log file. Its form is that of its first row that a source recognises."""

    def __init__(self, path: Path, problems: Problems) -> None:
        self.path = path
        self.problems = problems
        self.source: Source | None = None
        self.transcript: Transcript | None = None

    def conversations(self) -> Iterator[Conversation]:
        waiting: list[tuple[str, JsonObject]] = []
        place = self.path.name
        for place, row in self._whole_rows():
            if not isinstance(row, dict):
                self.problems.add("not a JSON object", place)
                continue
            waiting.append((place, row))
            if self._knows_form(row) or len(waiting) > MAX_ROWS_BEFORE_FORM:
                yield from self._read(waiting)
                waiting.clear()
        yield from self._read(waiting)
        if self.transcript is not None:
            yield from self._completed(self.transcript.end(), place)

    def _knows_form(self, row: JsonObject) -> bool:
        """Return whether the file's form is known, with this row at the latest."""
        if self.source is None and self.transcript is None:
            transcripts = (kind() for kind in TRANSCRIPTS if kind.matches(row))
            self.transcript = next(transcripts, None)
            if self.transcript is None:
                self.source = next((s for s in SOURCES if s.matches(row)), None)
        return self.source is not None or self.transcript is not None

    def _read(self, rows: Iterable[tuple[str, JsonObject]]) -> Iterator[Conversation]:
        for place, row in rows:
            with self._counted(place):
                if self.transcript is not None:
                    yield from self._completed(self.transcript.add(row), place)
                elif self.source is not None and not self.source.matches(row):
                    raise Unusable(f"not a row of {self.source.name}")
                elif self.source is not None:
                    yield from self._completed([partial(self.source.read, row)], place)
                else:
                    names = ", ".join(sorted(row)[:6])[:80]
                    raise Unusable(f"a form of log that is not read, with the fields {names}")
            if self.transcript is not None:
                self._note(self.transcript.notes, place)
                self.transcript.notes.clear()

    @contextlib.contextmanager
    def _counted(self, place: str) -> Iterator[None]:
        try:
            yield
        except (Unusable, Skipped) as reason:
            self.problems.add(str(reason), place)

    def _note(self, notes: Iterable[Note], place: str) -> None:
        for unit, reason in notes:
            self.problems.add(reason, place, unit=unit)

    def _completed(self, drafts: Iterable[Draft], place: str) -> Iterator[Conversation]:
        """Yield conversations with their origin."""
        for draft in drafts:
            with self._counted(place):
                conversation = draft()
                self._note(conversation.notes, place)
                if conversation.characters > MAX_CONVERSATION_CHARACTERS:
                    raise Unusable(f"longer than {MAX_CONVERSATION_CHARACTERS:,} characters")
                kind = self.source or self.transcript
                conversation.format = kind.name if kind else ""
                conversation.source = self.path.name
                conversation.place = place
                yield conversation

    def _whole_rows(self) -> Iterator[PlacedRow]:
        """Yield the rows up to where compressed data are damaged, which is counted."""
        try:
            yield from self._rows()
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.problems.add("compressed data that end early or are damaged", self.path.name)

    def _rows(self) -> Iterator[PlacedRow]:
        suffix = self.path.suffix
        if suffix == ".gz":
            suffix = Path(self.path.stem).suffix
        if suffix in (".parquet", ".arrow"):
            yield from _table_rows(self.path, suffix)
            return
        document = _document(self.path) if suffix == ".json" or _is_indented(self.path) else None
        if document is None:
            yield from self._lines()
            return
        for number, entry in enumerate(_entries(document), 1):
            yield f"{self.path.name}, entry {number}", entry

    def _lines(self) -> Iterator[PlacedRow]:
        text = TextLog()
        with _open(self.path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LOG_LINE_BYTES), b""), 1):
                place = f"{self.path.name}, line {number}"
                with self._counted(place):
                    if len(line) >= MAX_LOG_LINE_BYTES and not line.endswith(b"\n"):
                        _skip_line(file)
                        size = MAX_LOG_LINE_BYTES // 1_000_000
                        raise Unusable(f"a line of more than {size} MB")
                    line = line.strip().removeprefix(codecs.BOM_UTF8)  # of files that were joined
                    if line[:1] in (b"{", b"["):
                        yield from ((place, row) for row in _entries(_decoded(line)))
                    elif line:
                        yield from text.add(line.decode("utf-8", "replace"), place)
        yield from text.rest()
        text.report(self.problems)


def _document(path: Path) -> object:
    """Return the value of a JSON file; None where the file is not one JSON document, such as JSON lines."""
    text = _open(path).read()
    try:
        return decode_json(text)
    except ValueError:
        return None


def _is_indented(path: Path) -> bool:
    """Return whether a file's first line opens a JSON document that goes on in the next lines."""
    with _open(path) as file:
        return file.readline(MAX_LOG_LINE_BYTES).strip() in (b"{", b"[")


def _entries(document: object) -> list[object]:
    """Return the rows of a JSON value: a list of messages is a row, of a list of rows, an export or a trace each part."""
    if otel.is_export(document):
        return list(otel.records(document))
    if isinstance(document, dict):
        for name in ROW_LISTS:
            if isinstance(document.get(name), list):
                return _entries(document[name])
        observations = document.get("observations")
        if isinstance(observations, list):
            trace = {"traceId": document.get("id")}
            return [{**trace, **o} for o in observations if isinstance(o, dict)]
    if not isinstance(document, list):
        return [document]
    if document and isinstance(document[0], dict) and "role" in document[0]:
        return [{"messages": document}]
    rows: list[object] = []
    for item in document:
        rows += [item] if isinstance(item, list) else _entries(item)
    return rows


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
        raise Unusable(f"a line that is not {'JSON' if _is_utf8(line) else 'UTF-8'}") from None
    try:
        json.dumps(record, allow_nan=False)
    except ValueError:
        raise Unusable("NaN or infinity, which JSON does not have") from None
    return record


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _open(path: Path) -> IO[bytes]:
    """Open a log as UTF-8, whatever its name says: gzip and UTF-16 are recognised by their first bytes.

    Raises Unusable for another kind of archive.
    """
    file: Any = path.open("rb")
    if file.peek(4).startswith(_GZIP):
        file = gzip.GzipFile(fileobj=file)
    head = file.peek(4)[:4]
    kind = next((name for magic, name in _ARCHIVES.items() if head.startswith(magic)), None)
    if kind is not None:
        file.close()
        raise Unusable(f"{kind}, which is not read: unpack it")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return cast(IO[bytes], codecs.EncodedFile(file, "utf-8", "utf-16", "replace"))
    if head.startswith(codecs.BOM_UTF8):
        file.read(len(codecs.BOM_UTF8))
    return cast(IO[bytes], file)


def _table_rows(path: Path, suffix: str) -> Iterator[PlacedRow]:
    """Yield the rows of a Parquet or Arrow file."""
    need("pyarrow", "notebooks")
    import pyarrow

    rows = itertools.count(1)
    try:
        for batch in _batches(path, suffix):
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                for row in batch.slice(start, _BATCH_ROWS).to_pylist():
                    yield f"{path.name}, row {next(rows)}", _without_none(row)
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def _batches(path: Path, suffix: str) -> Iterable[Any]:
    """Return the record batches of a Parquet file, or of an Arrow file of either form."""
    import pyarrow.parquet

    if suffix == ".parquet":
        batches: Iterable[Any] = pyarrow.parquet.ParquetFile(path).iter_batches(_BATCH_ROWS)
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


# A line of llama.cpp's log with --verbose.
_LLAMA = re.compile(r"log_server_r\w*:\s+(request|response):\s+(\{.*\})\s*$")
# Lines of vLLM's and SGLang's text logs: they have prompts as rendered text, and answers in pieces or without their calls.
_OTHER_SERVER = re.compile(
    r"(?P<vllm>Received request \S+: |Request \S+ details: prompt: |Generated response )|(?P<sglang>obj=GenerateReqInput)"
)


class TextLog:
    """The text lines of a file: llama.cpp's requests and answers, or a log that has no conversations.

    report: counts the lines of the latter.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._other = ""
        self._n_lines = 0
        self._first = ""
        self._request: tuple[str, JsonObject] | None = None

    def add(self, line: str, place: str) -> Iterator[PlacedRow]:
        """Yield the row that a line completes. Raises Unusable for a body that cannot be parsed."""
        match = _LLAMA.search(line)
        if match is None:
            self._n_lines += 1
            self._first = self._first or place
            other = _OTHER_SERVER.search(line)
            if other and not self._other:
                self._other = "vLLM's" if other["vllm"] else "SGLang's"
            return
        self._is_known = True
        try:
            body = decode_json(match[2])
        except ValueError:
            raise Unusable("a request in the server's log is not JSON") from None
        if match[1] == "request":
            yield from self.rest()
            self._request = (place, body) if "messages" in body else None
        elif self._request is not None:
            self._request[1]["response"] = body
            yield from self.rest()

    def rest(self) -> Iterator[PlacedRow]:
        """Yield the request that is waiting for its answer."""
        request = self._request
        self._request = None
        if request is not None:
            yield request[0], {LLAMA_CPP: request[1]}

    def report(self, problems: Problems) -> None:
        if self._is_known or not self._n_lines:
            return
        if not self._other:
            problems.add("a line that is not JSON", self._first, self._n_lines)
            return
        reason = (
            f"{self._other} text log, which loses calls and parts of answers: put `annie-quant record --upstream URL` "
            "in front of the server, or export OpenTelemetry spans with gen_ai.input.messages"
        )
        problems.add(reason, self._first, self._n_lines, "lines")
