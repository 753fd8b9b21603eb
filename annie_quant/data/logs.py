"""Read log files of any size as a stream of conversations.

    OpenAI chat       JSON lines with `messages` (and `tools`), or a request with its `response`, as proxies and batches log them
    ShareGPT, Hermes  `conversations` of {from, value}; tools in the system prompt, calls and results in tags
    OpenClaw          session transcripts: one event per line, tool calls as content blocks
    vLLM              Received request ID: prompt: '...', params: ... (--enable-log-requests; since 0.11 at level DEBUG, as
                      Request ID details: prompt: '...', ...), Generated response ID: output: '...' (--enable-log-outputs)
    llama.cpp         log_server_r: request:  {...} and response: {...} (--verbose)
    OpenTelemetry     spans and log records in OTLP JSON, one export per file or per line (data/otel.py)
    datasets          Parquet, Arrow and JSON files of Hugging Face chat datasets, also with gzip, and folders of all of these

vLLM logs the rendered prompt; prompts of ChatML templates (Qwen, Hermes) are parsed back into messages.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import dataclasses
import gzip
import itertools
import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from annie_quant.core.errors import UsageError, need
from annie_quant.core.untrusted import JsonObject, decode_json
from annie_quant.data import log_records, otel
from annie_quant.documents import ChatMessage

SUFFIXES = (".jsonl", ".ndjson", ".json", ".log", ".txt", ".parquet", ".arrow", ".gz")
MAX_LINE = 16_000_000  # bytes
MAX_CHARACTERS = 60_000  # of one conversation
BATCH_ROWS = 256


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
    most_characters: int = MAX_CHARACTERS,
) -> Iterator[log_records.Conversation]:
    """Yield the conversations of log files. At most one record (Parquet: BATCH_ROWS) is in memory.

    problems: counts what cannot be used.
    most_characters: larger conversations are counted in `problems`.
    Raises UsageError for a path that does not exist or cannot be read.
    """
    problems = problems if problems is not None else Problems()
    for path in itertools.chain.from_iterable(map(files_of, map(Path, paths))):
        for conversation in _read_file(path, problems):
            if conversation.characters > most_characters:
                problems.add(
                    f"longer than {most_characters:,} characters", conversation.source or path.name
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


def _read_file(path: Path, problems: Problems) -> Iterator[log_records.Conversation]:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    try:
        if suffix in (".parquet", ".arrow"):
            yield from _records(
                ((f"{path.name}, row {i}", row) for i, row in _columns(path, suffix)), problems
            )
        elif suffix == ".json" and (documents := _whole(path)) is not None:
            yield from _records(
                ((f"{path.name}, entry {i}", d) for i, d in enumerate(documents, 1)), problems
            )
        else:
            yield from _lines(path, problems)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


def _records(
    records: Iterable[tuple[str, object]], problems: Problems
) -> Iterator[log_records.Conversation]:
    for where, record in records:
        try:
            conversation = log_records.conversation_of(record)
        except log_records.Unusable as reason:
            problems.add(str(reason), where)
            continue
        conversation.format, conversation.source = _format(record), where
        yield conversation


def _whole(path: Path) -> list[object] | None:
    """Return the entries of a JSON file; None where the file is not one JSON document, such as JSON lines."""
    try:
        document = decode_json(_open(path).read())
    except ValueError:
        return None
    if otel.is_export(document):
        return list(otel.records(document))
    if isinstance(document, list) and not (
        document and isinstance(document[0], dict) and "role" in document[0]
    ):
        return document
    if isinstance(document, dict) and isinstance(
        rows := document.get("data") or document.get("train"), list
    ):
        return rows
    return [document]


def _lines(path: Path, problems: Problems) -> Iterator[log_records.Conversation]:
    """Read JSON lines, a transcript with one event per line, or a server's text log."""
    server, transcript = ServerLog(), Transcript()
    text_lines, first_text = 0, ""
    with _open(path) as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE)
            if not line:
                break
            where = f"{path.name}, line {number}"
            if len(line) >= MAX_LINE and not line.endswith(b"\n"):
                problems.add(f"a line of more than {MAX_LINE // 1_000_000} MB", where)
                while (line := file.readline(MAX_LINE)) and not line.endswith(b"\n"):
                    pass
                continue
            if not (line := line.strip()):
                continue
            try:
                if line[:1] not in (b"{", b"["):
                    text_lines, first_text = text_lines + 1, first_text or where
                    yield from server.add(line.decode("utf-8", "replace"))
                    continue
                record = _decoded(line)
                if isinstance(record, dict) and transcript.takes(record):
                    yield from transcript.add(record)
                else:
                    found = otel.records(record) if otel.is_export(record) else [record]
                    yield from _records(((where, r) for r in found), problems)
            except log_records.Unusable as reason:
                problems.add(str(reason), where)
    for rest in (server.rest(), transcript.rest()):
        try:
            yield from rest
        except log_records.Unusable as reason:
            problems.add(str(reason), path.name)
    if text_lines and not server.format:
        problems.add("a line that is not JSON", first_text, text_lines)


def _decoded(line: bytes) -> object:
    with contextlib.suppress(ValueError):
        return decode_json(line)
    try:
        record = decode_json(line, lenient=True)
    except ValueError:
        raise log_records.Unusable("a line that is not JSON") from None
    try:
        json.dumps(record, allow_nan=False)
    except ValueError:
        raise log_records.Unusable("NaN or infinity, which JSON does not have") from None
    return record


def _open(path: Path) -> IO[bytes]:
    """Open a log, positioned after its byte order mark where it has one."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    file: IO[bytes] = opener(path, "rb")
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)
    return file


def _columns(path: Path, suffix: str) -> Iterator[tuple[int, object]]:
    """Yield (row number, row) of a Parquet or Arrow file."""
    need("pyarrow", "notebooks")
    import pyarrow
    import pyarrow.parquet

    try:
        if suffix == ".parquet":
            batches: Any = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=BATCH_ROWS)
        else:
            source = pyarrow.memory_map(str(path))
            try:
                batches = pyarrow.ipc.open_stream(source)
            except pyarrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        slices = (
            batch.slice(at, BATCH_ROWS)
            for batch in batches
            for at in range(0, batch.num_rows, BATCH_ROWS)
        )
        for number, row in enumerate(
            itertools.chain.from_iterable(part.to_pylist() for part in slices), 1
        ):
            yield number, _without_none(row)
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def _without_none(value: object) -> object:
    """Return a row without the null fields that a column format adds to nested objects."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value


def _format(record: object) -> str:
    if isinstance(record, dict):
        if "conversations" in record or "conversation" in record:
            return "ShareGPT"
        if "span" in record:
            return "OpenTelemetry"
        if "response" in record or "choices" in record:
            return "request and response"
    return "OpenAI chat"


class Transcript:
    """A transcript of OpenClaw or a similar agent: one event or message per line, one conversation per session."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._fault = ""

    @staticmethod
    def takes(record: JsonObject) -> bool:
        """Return whether a line is an event of a transcript."""
        if any(
            key in record
            for key in ("messages", "conversations", "conversation", "request", "response", "body")
        ):
            return False
        return ("type" in record and ("id" in record or "timestamp" in record)) or (
            str(record.get("role")).lower() in log_records.ROLES and "content" in record
        )

    def add(self, record: JsonObject) -> Iterator[log_records.Conversation]:
        if record.get("type") == "session":
            yield from self.rest()
            return
        message = record.get("message") if isinstance(record.get("message"), dict) else None
        message = message or (record if "role" in record else None)
        if message is None:
            return
        try:
            self._messages += log_records.parsed_message(message)
        except log_records.Unusable as reason:
            self._fault = self._fault or str(reason)

    def rest(self) -> Iterator[log_records.Conversation]:
        """Yield the session so far. Raises Unusable where a message of it cannot be used."""
        messages, fault, self._messages, self._fault = self._messages, self._fault, [], ""
        if fault:
            raise log_records.Unusable(fault)
        if messages:
            yield dataclasses.replace(log_records.finished(messages, None), format="transcript")


_LITERAL = r"('(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\")"
_VLLM_PROMPT = re.compile(
    rf"(?:Received request|Request) (\S+?):?(?: details)?: prompt: {_LITERAL}"
)
_VLLM_OUTPUT = re.compile(rf"Generated response (\S+?)(?: \([^)]*\))?: output: {_LITERAL}")
_LLAMA = re.compile(r"log_server_r\w*:\s+(request|response):\s+(\{.*\})\s*$")
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_TOOL_BLOCK = re.compile(r"# Tools\b.*?<tools>\s*(.*?)\s*</tools>", re.DOTALL)
_TOOL_END = ("</IMPORTANT>", "</tool_call>")
MAX_WAITING = 10_000  # requests whose answer has not been logged yet


class ServerLog:
    """The requests in the text log of one server. format: the name of the log's format, once it is known."""

    def __init__(self) -> None:
        self.format = ""
        self._prompts: OrderedDict[str, str] = OrderedDict()  # vLLM: request → prompt
        self._request: JsonObject | None = None  # llama.cpp

    def add(self, line: str) -> Iterator[log_records.Conversation]:
        """Yield the conversations that a line completes. Raises Unusable for a prompt or body that cannot be parsed."""
        if match := _VLLM_PROMPT.search(line):
            self.format = "vLLM log"
            self._prompts[match[1]] = ast.literal_eval(match[2])
            if len(self._prompts) > MAX_WAITING:
                yield chatml(self._prompts.popitem(last=False)[1], "")
        elif match := _VLLM_OUTPUT.search(line):
            self.format = "vLLM log"
            prompt = self._prompts.pop(match[1], None)
            if prompt is not None:
                yield chatml(prompt, ast.literal_eval(match[2]))
        elif match := _LLAMA.search(line):
            self.format = "llama.cpp log"
            try:
                body = json.loads(match[2])
            except (ValueError, RecursionError):
                raise log_records.Unusable("a request in the server's log is not JSON") from None
            if match[1] == "request":
                yield from self.rest()
                self._request = body if "messages" in body else None
            elif self._request is not None:
                request, self._request = self._request, None
                yield self._conversation({**request, "response": body})

    def rest(self) -> Iterator[log_records.Conversation]:
        """Yield the requests whose answer was not logged."""
        prompts, self._prompts = self._prompts, OrderedDict()
        request, self._request = self._request, None
        if request is not None:
            yield self._conversation(request)
        for prompt in prompts.values():
            yield chatml(prompt, "")

    def _conversation(self, request: JsonObject) -> log_records.Conversation:
        return dataclasses.replace(log_records.conversation_of(request), format=self.format)


def chatml(prompt: str, answer: str) -> log_records.Conversation:
    """Return the conversation in a prompt after a ChatML template, with its answer. Raises Unusable for other templates."""
    turns = _TURN.findall(prompt)
    if not turns:
        raise log_records.Unusable("a prompt in the server's log is not in ChatML")
    messages: list[ChatMessage] = []
    tools = None
    opened = (
        turns[-1][1]
        if turns[-1][0] == "assistant" and not prompt.rstrip().endswith("<|im_end|>")
        else None
    )
    for role, text in turns[:-1] if opened is not None else turns:
        if role == "system":
            system, tools = _system(text)
            messages.append({"role": "system", "content": system})
        else:
            messages += log_records.parsed_message({"role": role, "content": text.strip()})
    thinking = opened is not None and opened.rstrip().endswith("<think>")
    if answer.strip():
        text = answer.split("<|im_end|>")[0]
        text = "<think>\n" + text if thinking and "</think>" in text else text
        messages += log_records.parsed_message({"role": "assistant", "content": text})
    return dataclasses.replace(
        log_records.finished(messages, tools), thinking=thinking, format="vLLM log"
    )


def _system(text: str) -> tuple[str, list[log_records.Tool] | None]:
    """Return the system prompt and the tools of a rendered system message."""
    block = _TOOL_BLOCK.search(text)
    if block is None:
        return text.strip(), None
    before, after = text[: block.start()].strip(), text[block.end() :]
    ends = [after.rfind(end) + len(end) for end in _TOOL_END if end in after]
    return before or (after[max(ends) :].strip() if ends else ""), log_records.tools_of(block[1])
