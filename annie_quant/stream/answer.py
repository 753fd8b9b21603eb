"""What is decoded of one answer, whatever API it came through: text, reasoning, tool calls, counts, and their stamps."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from annie_quant.core.text import printable
from annie_quant.core.untrusted import JsonObject, integer

MAX_TOOL_CALLS = 1000
MAX_NAME = 200  # characters of an id, a name, a reason


class StreamedCall(msgspec.Struct):
    """A tool call that is assembled from its pieces. arguments: JSON text."""

    id: str | None = None
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Frame:
    """One event: its stamp on the chosen clock, kind and flags of sse.h, the number of its network read, its bytes."""

    stamp_ns: int
    kind: int
    flags: int
    read: int
    raw: bytes
    data: bytes


@dataclass
class StreamedAnswer:
    """The decoded content of one request's frames. Stamps are None for what was not received."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, StreamedCall] = field(default_factory=dict)
    arguments: dict[int, list[str]] = field(default_factory=dict)  # pieces of each call's arguments
    finish_reason: str | None = None
    usage: JsonObject | None = None
    server_timings: JsonObject | None = None
    model: str | None = None
    first: dict[str, int] = field(default_factory=dict)  # event, reasoning, content, tool
    token_stamps: list[int] = field(default_factory=list)
    token_counts: list[int | None] = field(default_factory=list)  # the server's count after each of these events
    done_ns: int | None = None
    merged_reads: int = 0
    fault: tuple[str, str] | None = None
    warnings: list[str] = field(default_factory=list)
    item_numbers: dict[str, int] = field(default_factory=dict)  # of the Responses API's output items, by id
    _read: int = -1
    _read_merged: bool = False

    def fail(self, cause: str, message: str) -> None:
        self.fault = self.fault or (cause, message)

    def warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)

    def token(self, frame: Frame, count: int | None = None) -> None:
        """Note an event that has tokens. count: all tokens of the answer so far, where the event has the server's count."""
        if frame.read == self._read and not self._read_merged:
            self.merged_reads += 1
        self._read_merged = frame.read == self._read
        self._read = frame.read
        self.token_stamps.append(frame.stamp_ns)
        self.token_counts.append(count)

    def add_text(self, content: str, stamp: int) -> bool:
        """Add a piece of the answer's text. Returns whether it has any."""
        if content:
            self.first.setdefault("content", stamp)
            self.text.append(content)
        return bool(content)

    def add_reasoning(self, content: str, stamp: int) -> bool:
        if content:
            self.first.setdefault("reasoning", stamp)
            self.reasoning.append(content)
        return bool(content)

    def add_call(self, index: int, call_id: str | None, name: str | None, arguments: object, stamp: int) -> bool:
        """Add one piece of the tool call `index`. arguments: text, or a whole object. Returns whether it has any content.

        Raises ValueError for more than MAX_TOOL_CALLS calls.
        """
        if index not in self.calls and len(self.calls) >= MAX_TOOL_CALLS:
            raise ValueError(f"more than {MAX_TOOL_CALLS} tool calls")
        call = self.calls.setdefault(index, StreamedCall())
        if isinstance(arguments, dict):
            arguments = msgspec.json.encode(arguments).decode()
        call.id = call.id or call_id
        call.name = call.name or name or ""
        if text := text_of(arguments):
            self.arguments.setdefault(index, []).append(text)
        has_content = bool(call_id or name or arguments)
        if has_content:
            self.first.setdefault("tool", stamp)
        return has_content

    def add_usage(self, usage: JsonObject) -> None:
        """Add what an event reports of usage: later figures replace earlier ones, null does not."""
        if usage:
            self.usage = {**(self.usage or {}), **{k: v for k, v in usage.items() if v is not None}}


def usage_as_chat(usage: JsonObject | None) -> JsonObject | None:
    """Return usage with chat completions' names added where an API names them otherwise.

    These are prompt_tokens, completion_tokens and prompt_tokens_details.cached_tokens. The server's own fields stay.

    Responses and Anthropic's messages have input_tokens and output_tokens; Anthropic's input_tokens is without the tokens that
    were read from, or written to, its cache. Ollama has prompt_eval_count and eval_count.
    """
    if not usage or "completion_tokens" in usage:
        return usage
    out = dict(usage)
    read, written = (integer(usage.get(f"cache_{name}_input_tokens")) for name in ("read", "creation"))
    details = usage.get("input_tokens_details")
    cached = integer(details.get("cached_tokens")) if isinstance(details, dict) else read
    prompt = integer(usage.get("input_tokens", usage.get("prompt_eval_count")))
    generated = integer(usage.get("output_tokens", usage.get("eval_count")))
    if prompt is not None:
        out["prompt_tokens"] = prompt + (read or 0) + (written or 0)
    if generated is not None:
        out["completion_tokens"] = generated
    if cached is not None:
        out["prompt_tokens_details"] = {"cached_tokens": cached}
    return out


# ---- fields of a server's JSON, which may have any type


def text_of(value: object) -> str:
    """Return the text of a string or of OpenAI's list of parts; "" for any other value."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str))
    return ""


def object_field(parent: JsonObject, name: str) -> JsonObject:
    """Return a field that is an object; {} if it is missing or null. Raises ValueError for any other type."""
    value = parent.get(name)
    if value is None or isinstance(value, dict):
        return value or {}
    raise ValueError(f"{name} is not an object: {printable(str(value)[:200], 60)}")


def object_list(parent: JsonObject, name: str) -> list[JsonObject]:
    """Return a field that is a list of objects, as `object_field` does."""
    value = parent.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name} is not a list of objects: {printable(str(value)[:200], 60)}")
    return value


def name_field(parent: JsonObject, name: str) -> str | None:
    """Return a field that is a short text: an id, a name, a reason. Numbers are read as text."""
    value = parent.get(name)
    if value is None:
        return None
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise ValueError(f"{name} is not text: {printable(str(value)[:200], 60)}")
    return str(value)[:MAX_NAME]
