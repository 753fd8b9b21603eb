"""A chat request and its answer, copied by the proxy: one line of JSON that `annie-quant init` reads, without secrets.

    {"time": ..., "model": ..., "messages": [...], "tools": [...], "finish_reason": ...}

Only what init uses is kept: no headers, no address, no sampling settings. An answer that is
incomplete is left out; its request is kept, because it is a prompt that users send.

ChatLog is the file of these lines.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from annie_quant.core.errors import EnvironmentFault
from annie_quant.core.resume import JsonLines
from annie_quant.core.secrets import Redactor
from annie_quant.core.untrusted import JsonObject, changed_texts, decode_json
from annie_quant.data.conversations import Unusable, with_text_arguments
from annie_quant.data.logged_answers import (
    NO_COMPLETION,
    LoggedAnswer,
    message_of_events,
    read_answer,
)
from annie_quant.data.masking import MASK, Scanner
from annie_quant.data.sources import conversation_of
from annie_quant.documents import LoggedChat
from annie_quant.stream.texts import MAX_NAME

_T = TypeVar("_T")

MAX_REQUEST_BYTES = 8_000_000
MAX_ANSWER_BYTES = 16_000_000  # also after decompression
MAX_CHAT_BYTES = 1_000_000
MAX_MODEL = 200  # characters of a model's name
REQUEST_FIELDS = ("messages", "tools", "functions", "tool_choice")  # that are read
READABLE_CODINGS = ("", "identity", "gzip", "x-gzip", "deflate")


@dataclass
class CopiedExchange:
    """A request and its answer.

    request, answer: bodies; answer is None where there is none to record.
    is_stream: whether the answer is server-sent events.
    coding: the answer's Content-Encoding.
    time: of the request, ISO 8601.
    secrets: the values of the request's secret headers and query parameters.
    """

    request: bytes
    answer: bytes | None
    is_stream: bool
    coding: str
    time: str
    secrets: Redactor


@dataclass
class ChatLine:
    """One line of the file.

    has_answer: whether the model's answer is in `data`.
    fault: why an answer that was received is not in `data`.
    """

    data: bytes
    has_answer: bool
    fault: str = ""


def line_of(exchange: CopiedExchange, scanner: Scanner) -> ChatLine:
    """Return the line of an exchange.

    Raises Unusable with the reason where it has no chat that init could use.
    """
    request = _object(exchange.request)
    if request is None:
        raise Unusable("a request that is not a JSON object")
    message = None
    reason = None
    fault = ""
    if exchange.answer is not None:
        read = message_of_events if exchange.is_stream else answer_of_body
        try:
            message, reason = read(decompressed(exchange.answer, exchange.coding))
        except Unusable as error:
            fault = str(error)
    record: JsonObject = {name: request.get(name) for name in REQUEST_FIELDS}
    if message is not None:
        # Here, because joining reasoning and content would hide a secret, and the scanner would
        # mask only a part of it.
        record["response"] = {"choices": [{"message": without_keys(message, exchange.secrets)}]}
    conversation = conversation_of(record)
    size = sum(len(str(m)) for m in conversation.messages) + len(str(conversation.tools))
    if size > MAX_CHAT_BYTES:  # checked first, because masking takes time in proportion to the size
        raise Unusable(f"longer than {MAX_CHAT_BYTES // 1_000_000} MB")
    messages = conversation.messages
    if conversation.system:
        messages = [{"role": "system", "content": conversation.system}, *messages]
    parts: JsonObject = {
        "messages": messages,
        "tools": conversation.tools,
        "reason": reason,
        "model": str(request.get("model") or "")[:MAX_MODEL],
    }
    data = json.dumps(
        masked_row(without_keys(parts, exchange.secrets), exchange.time, scanner),
        ensure_ascii=False,
    ).encode("utf-8", "replace")
    if len(data) > MAX_CHAT_BYTES:
        raise Unusable(f"longer than {MAX_CHAT_BYTES // 1_000_000} MB")
    return ChatLine(data, message is not None, fault)


def masked_row(parts: JsonObject, time: str, scanner: Scanner) -> LoggedChat:
    """Return a chat's row without secrets, and without personal data where the scanner masks it."""
    messages = [with_text_arguments(m) for m in scanner.conversation(parts["messages"])]
    row: LoggedChat = {"time": time, "model": scanner.masked(parts["model"]), "messages": messages}
    if parts["tools"]:
        row["tools"] = scanner.masked(parts["tools"])
    if parts["reason"]:
        row["finish_reason"] = parts["reason"]
    return row


def _object(body: bytes) -> JsonObject | None:
    try:
        document = decode_json(body, lenient=True)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def decompressed(body: bytes, coding: str) -> bytes:
    """Return a body without its Content-Encoding.

    Raises Unusable for another coding, or more than MAX_ANSWER_BYTES.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in READABLE_CODINGS:
        raise Unusable("an answer in a coding that cannot be read")
    # zlib or gzip with a header; deflate without one, as some servers send it
    for window_bits in (47, -15):
        reader = zlib.decompressobj(window_bits)
        try:
            text = reader.decompress(body, MAX_ANSWER_BYTES + 1)
        except zlib.error:
            continue
        if len(text) > MAX_ANSWER_BYTES:
            raise Unusable(f"an answer of more than {MAX_ANSWER_BYTES // 1_000_000} MB")
        if reader.eof:
            return text
        break
    raise Unusable("an answer that cannot be decompressed")


def answer_of_body(body: bytes) -> LoggedAnswer:
    """Return message and finish reason of a chat completion.

    Raises Unusable where there is none, and where it was cut.
    """
    answer = read_answer(_object(body))
    if answer is None:
        raise Unusable(NO_COMPLETION)
    message, reason = answer
    return message, reason[:MAX_NAME] if reason else None


def without_keys(value: _T, secrets: Redactor) -> _T:
    """Return a JSON value without the given secrets, also where they are encoded or spread over texts, and in names."""
    if not secrets:
        return value
    texts: list[bytes] = []

    def collected(text: str) -> str:
        texts.append(text.encode("utf-8", "surrogatepass"))
        return text

    changed_texts(value, collected)
    spans: dict[int, list[tuple[int, int]]] = {}
    for index, start, end in secrets.spans_in(texts):
        spans.setdefault(index, []).append((start, end))
    positions = itertools.count()

    def masked(text: str) -> str:
        i = next(positions)
        return _cut(texts[i], spans[i]) if i in spans else text

    return cast("_T", changed_texts(value, masked))


def _cut(text: bytes, spans: list[tuple[int, int]]) -> str:
    at = 0
    parts = []
    for start, end in spans:
        if start >= at:
            parts += [text[at:start], MASK.encode()]
        at = max(at, end)
    return b"".join([*parts, text[at:]]).decode("utf-8", "replace")


class ChatLog(JsonLines):
    """The file of chats: readable by its owner only, and never larger than most_bytes.

    stopped: why nothing more is written; "" while lines are written.
    Raises UsageError where another process writes to the file, EnvironmentFault where it cannot be
    opened.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        super().__init__(path, exclusive=True, private=True)
        self.most_bytes = most_bytes
        self.stopped = ""

    def keep(self, line: bytes) -> bool:
        """Write one line.

        Return False, with nothing of the line in the file, where the limit is reached or the disk
        is full.
        """
        if not self.stopped and self.size_bytes + len(line) + 1 > self.most_bytes:
            self.stopped = f"{self.path} has reached {self.most_bytes / 1e6:,.0f} MB (--max-mb)"
        if self.stopped:
            return False
        try:
            self.append(line)
        except EnvironmentFault as fault:
            self.stopped = fault.message
        return not self.stopped


class Recorded(msgspec.Struct, kw_only=True):
    """What was recorded.

    requests: number of all requests that were passed on.
    lines: number of chats in the file.
    with_answer: number of chats in the file with their answer.
    left_out: reason → number of chats that are not in the file, or without their answer.
    masked: number of masked places per kind of secret.
    stopped: why recording stopped while traffic went on; "" if it did not.
    """

    output: str
    requests: int = 0
    lines: int = 0
    with_answer: int = 0
    left_out: dict[str, int] = {}
    masked: dict[str, int] = {}
    size_bytes: int = 0
    stopped: str = ""


# ---- what the proxy passes on: copies of bodies within a limit of memory, and headers

# Headers of one connection (RFC 9110, section 7.6.1); Host and Expect are those of the client's
# connection.
HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "host",
    "expect",
}


class HeldBytes:
    """The bytes that all copies hold together."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.now = 0


@dataclass
class BodyCopy:
    """A copy of one body while it is passed on. fault: why it is not kept; "" while it is."""

    held: HeldBytes
    most: int
    name: str
    fault: str = ""
    size: int = 0
    _pieces: list[bytes] = field(default_factory=list)

    def add(self, piece: bytes) -> None:
        if self.fault:
            return
        if self.size + len(piece) > self.most:
            self.drop(f"{self.name} of more than {self.most // 1_000_000} MB")
        elif self.held.now + len(piece) > self.held.most:
            self.drop(f"more than {self.held.most // 1_000_000} MB in flight")
        else:
            self.size += len(piece)
            self.held.now += len(piece)
            self._pieces.append(piece)

    def drop(self, fault: str = "") -> None:
        self.held.now -= self.size
        self.size = 0
        self.fault = self.fault or fault
        self._pieces = []

    def body(self) -> bytes:
        return b"".join(self._pieces)


def forwarded(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a request's headers as they are passed on."""
    return [(n, _codings(v) if n.lower() == "accept-encoding" else v) for n, v in returned(headers)]


def returned(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return an answer's headers as they are passed back: those of one connection are left out."""
    named = ",".join(v for k, v in headers.items() if k.lower() == "connection")
    hop_by_hop = {name.strip().lower() for name in named.split(",")} | HOP_BY_HOP
    return [(name, value) for name, value in headers.items() if name.lower() not in hop_by_hop]


def _codings(value: str) -> str:
    """Return Accept-Encoding with only those codings that can be read here."""
    names = [item.strip() for item in value.split(",")]
    readable = [n for n in names if n.partition(";")[0].strip().lower() in READABLE_CODINGS[1:]]
    return ", ".join(readable) or "identity"
