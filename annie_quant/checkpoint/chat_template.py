"""The programs in a checkpoint.

Its chat template is rendered in another process with limits, its Python code is never run.

transformers is always called with trust_remote_code=False; its refusal becomes one line that names
the code (auto_map).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from annie_quant.checkpoint.shards import CLASS_FILES
from annie_quant.core.errors import AnnieError, CheckpointError
from annie_quant.core.text import printable
from annie_quant.core.untrusted import JsonObject

WORKER = Path(__file__).with_name("template_worker.py")
# Of the processor, for one rendering; Qwen3.5's template needs less than 10 ms for a long
# conversation.
MAX_SECONDS = 10.0
MAX_LINT_SECONDS = 3.0  # for the conversations of a lint together
MAX_MEMORY_BYTES = 1_000_000_000
MAX_TEMPLATE = 1_000_000  # characters
MAX_TEXT = 4_000_000  # characters of a rendered conversation
MAX_REPLY_BYTES = 6 * MAX_TEXT + 1000  # a character takes at most six bytes in JSON


class ConversationRefused(CheckpointError):
    """The chat template works, and raises an error for this conversation. reason: its error."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(
            f"{where}: its chat template cannot render this conversation: {reason}",
            "leave the conversation out; or, for every conversation, restore chat_template.jinja from the source checkpoint",
        )
        self.reason = reason


class Rendered(NamedTuple):
    """A rendered conversation with the lines of the template that wrote it, or the template's error.

    lines: (line, characters) per piece of the text.
    line: of the error.
    """

    text: str = ""
    lines: Sequence[tuple[int, int]] = ()
    error: str = ""
    line: int = 0

    def line_at(self, offset: int) -> int:
        """Return the line that wrote the character at an offset, or before the end of the text."""
        line = 0
        end = 0
        for number, length in self.lines:
            line = number if length else line
            end += length
            if end > offset:
                break
        return line


class _Refused(ValueError):
    """A template's own error."""


class TemplateTokenizer(Protocol):
    """The part of a transformers tokenizer that is needed here."""

    @property
    def special_tokens_map(self) -> Mapping[str, object]: ...

    def get_chat_template(self, chat_template: None, tools: Any, /) -> str:
        """Return the source of the template for a conversation with these tools.

        Raises ValueError where there is none.
        """


class ChatTemplate:
    """A tokenizer's chat template. where: names the checkpoint in messages."""

    def __init__(self, tokenizer: TemplateTokenizer, where: str) -> None:
        self._tokenizer = tokenizer
        self._where = where

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        generation_prompt: bool = False,
        **variables: object,
    ) -> str:
        """Return the text of a conversation.

        Raises ConversationRefused where the template raises an error, CheckpointError where it exceeds a limit.

        messages: in OpenAI's form; arguments of tool calls are objects or JSON text.
        """
        worker = _worker_of(self._source(tools))
        special = self._special_tokens()
        decoded = [with_decoded_calls(message) for message in messages]
        fields = {"messages": decoded, "tools": tools or None, "documents": None}
        try:
            return worker.render(
                fields | {"add_generation_prompt": generation_prompt} | special | variables
            )
        except _Refused as error:
            raise ConversationRefused(self._where, str(error)) from None
        except ValueError as error:
            raise self._unusable(error) from None

    def render_all(self, conversations: Sequence[Mapping[str, object]]) -> list[Rendered]:
        """Render several conversations in one call, as they are: arguments are not decoded.

        Raises CheckpointError where the template cannot be compiled or exceeds a limit.

        conversations: the variables of each: messages, tools, add_generation_prompt, others.
        """
        worker = _worker_of(self._source([{"type": "function"}]), MAX_LINT_SECONDS)
        special = self._special_tokens()
        try:
            replies = worker.render_all([special | dict(fields) for fields in conversations])
        except ValueError as error:
            raise self._unusable(error) from None
        return [Rendered(**reply) for reply in replies]

    def _unusable(self, error: ValueError) -> CheckpointError:
        hint = "restore chat_template.jinja from the source checkpoint"
        return CheckpointError(f"{self._where}: its chat template {error}", hint)

    def _special_tokens(self) -> dict[str, object]:
        return {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}

    def with_tools(self) -> str:
        """Return the source of the template that renders tools.

        "" where there is none or it is refused.
        """
        try:
            return self._source([{"type": "function"}])
        except CheckpointError:
            return ""

    def _source(self, tools: object) -> str:
        try:
            source = self._tokenizer.get_chat_template(None, tools or None)
        except ValueError as error:
            raise CheckpointError(
                f"{self._where}: {printable(str(error), 300)}", "copy chat_template.jinja"
            ) from None
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE:
            raise CheckpointError(
                f"{self._where}: its chat template is not text of at most {MAX_TEMPLATE} characters"
            )
        return source


def with_decoded_calls(message: Mapping[str, Any]) -> JsonObject:
    """Return the message with the arguments of its tool calls as objects.

    Qwen3.5's template needs them.

    Text that is not JSON becomes the object {"arguments": text}, empty text an empty object. A call
    that has its fields directly also gets them as `function`, as other templates read it.
    """
    message = dict(message)
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or call)
        text = function.get("arguments")
        if isinstance(text, str):
            try:
                function["arguments"] = json.loads(text or "{}")
            except (ValueError, RecursionError):
                function["arguments"] = {"arguments": text}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


# Processes that stay: starting one takes a tenth of a second, and a program uses few templates in
# turn
MAX_WORKERS = 4
_workers: dict[tuple[object, ...], _Worker] = {}  # the least recently used first
_choosing = threading.Lock()


def _worker_of(source: str, max_seconds: float | None = None) -> _Worker:
    """Return the process of a template.

    A forked child does not use its parent's: two would read one pipe.
    """
    seconds = MAX_SECONDS if max_seconds is None else max_seconds
    key = (os.getpid(), source, seconds, MAX_MEMORY_BYTES)
    with _choosing:
        worker = _workers.pop(key, None)
        if worker is None or not worker.alive:
            worker = _Worker(source, seconds)
        _workers[key] = worker
        while len(_workers) > MAX_WORKERS:
            del _workers[next(iter(_workers))]
    return worker


class _Worker:
    """One process with one template; it ends with this object, or with this process."""

    def __init__(self, source: str, seconds: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._finish = weakref.finalize(self, _end, self._process, os.getpid())
        self._lock = threading.Lock()
        self._settings = {
            "template": source,
            "memory_bytes": MAX_MEMORY_BYTES,
            "seconds": seconds,
        }
        self._seconds = seconds

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def render(self, variables: Mapping[str, object]) -> str:
        """Return the text.

        Raises ValueError with the end of a sentence that begins with "its chat template".
        """
        reply = self._ask(variables)
        if "text" not in reply:
            raise _Refused(printable(str(reply.get("error")), 300))
        if len(reply["text"]) > MAX_TEXT:
            raise ValueError(
                f"renders {len(reply['text'])} characters, expected at most {MAX_TEXT}"
            )
        return str(reply["text"])

    def render_all(self, conversations: Sequence[Mapping[str, object]]) -> list[JsonObject]:
        """Return the reply to each conversation.

        Raises ValueError with the end of a sentence that begins with "its chat template".
        """
        replies = self._ask(conversations)
        if not isinstance(replies, list):  # the template cannot be compiled
            error = printable(str(replies.get("error")), 300)
            raise ValueError(f"cannot be compiled: {error}")
        return replies

    def _ask(self, request: object) -> Any:
        """Send one request and return the reply. Raises ValueError, with the end of a sentence, for none."""
        with self._lock:
            lines = json.dumps(request, default=str) + "\n"
            if self._settings:
                lines = json.dumps(self._settings) + "\n" + lines
                self._settings = {}
            try:
                return json.loads(self._answer(lines.encode()))
            except (OSError, ValueError) as error:
                self._finish()
                raise ValueError(str(error) or "ended its process") from None

    def _answer(self, request: bytes) -> bytes:
        """Write a request and return the line that answers it.

        The process ends itself at its limits of time and memory.
        """
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(request)
        self._process.stdin.flush()
        reply = self._process.stdout.readline(MAX_REPLY_BYTES)
        if len(reply) == MAX_REPLY_BYTES:
            raise ValueError(f"renders more than {MAX_TEXT} characters")
        if not reply.endswith(b"\n"):
            raise ValueError(
                f"needs more than {self._seconds:g} s or {MAX_MEMORY_BYTES // 1_000_000} MB"
            )
        return reply


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a forked child
        return
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


# ---- Python code

MAX_FILE_BYTES = 100 << 20


@contextlib.contextmanager
def loading_tokenizer(folder: Path) -> Iterator[None]:
    """Raise CheckpointError for the many errors that transformers raises for tokenizer files."""
    try:
        with refusing_own_code(folder):
            yield
    except (AnnieError, MemoryError):
        raise
    except BaseException as error:  # the tokenizers library panics with a type outside Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            raise
        reason = printable(f"{type(error).__name__}: {error}", 300)
        hint = "copy the tokenizer's files from the source checkpoint"
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be loaded ({reason})", hint
        ) from error


@contextlib.contextmanager
def refusing_own_code(folder: Path) -> Iterator[None]:
    """Raise CheckpointError where a call inside would need the checkpoint's code.

    The call has trust_remote_code=False.
    """
    try:
        yield
    except AnnieError:
        raise
    except Exception as error:
        if "trust_remote_code" not in str(error):
            raise
        code = ", ".join(auto_map(folder)) or "auto_map"
        raise CheckpointError(
            f"{folder.name} brings Python code of its own ({code}), which annie_quant never runs",
            "use a checkpoint of an architecture that transformers has itself, or remove auto_map from its JSON files",
        ) from error


def auto_map(folder: Path) -> list[str]:
    """Return the auto_map entries of the folder's JSON files as "file: class → code"."""
    entries = []
    for name in ("config.json", *CLASS_FILES):
        try:
            if (folder / name).stat().st_size > MAX_FILE_BYTES:
                continue
            mapping = json.loads((folder / name).read_bytes()).get("auto_map")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        if isinstance(mapping, dict):
            entries += [
                f"{name}: {printable(str(auto), 80)} → {printable(str(code), 80)}"
                for auto, code in list(mapping.items())[:4]
            ]
    return entries
