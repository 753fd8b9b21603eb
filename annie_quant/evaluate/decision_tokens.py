"""The characters of an answer that decide: where one other token is another call, or none.

They are the first character of an answer (a call or not), the opening of every tool call, the whole name of its function, the
first character of each argument's name and value (for a string the first one inside its quotes, too), and the ends of arguments
and of a call. A token decides that has one of them, or that ends the turn. A call that is cut or malformed has the points before
its fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from annie_quant.judge.answers import PYTHON_TAG, Form

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_XML = re.compile(r"<function=(?P<name>[^>\n]+)|<parameter=(?P<key>.)[^>\n]*>\n?(?P<value>.)|</function>", re.DOTALL)
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)', re.DOTALL)  # its end may be missing: the answer was cut
_SPACE = re.compile(r"\s*")
_THOUGHTS = re.compile(r".*</think>\s*", re.DOTALL)
_DECODER = json.JSONDecoder()
ARGUMENTS = ("arguments", "parameters")


def deciding(text: str, form: Form) -> set[int]:
    """Return the positions of an answer's characters that decide. form: of its tool calls."""
    answer = match.end() if (match := _THOUGHTS.match(text)) else 0
    points = {0, answer}
    if form == "llama_json":
        points.update(_llama_calls(text, answer))
        return points
    for call in _CALL.finditer(text, answer):
        body, end = call.span(1)
        points.update((call.start(), end))
        points.update(_xml_call(text, body, end) if form == "qwen_xml" else _json_call(text, body))
    return points


def covers(points: Iterable[int], pieces: Sequence[str], start: int = 0) -> list[bool]:
    """Return for each piece of a text whether it has one of the points. start: the position of the first piece."""
    inside, result = set(points), []
    for piece in pieces:
        result.append(any(at in inside for at in range(start, start + len(piece))))
        start += len(piece)
    return result


def _xml_call(text: str, start: int, end: int) -> Iterator[int]:
    for match in _XML.finditer(text, start, end):
        if match["name"]:
            yield from range(*match.span("name"))
        elif match["key"]:
            yield from (match.start("key"), match.start("value"))
        else:
            yield match.start()


def _llama_calls(text: str, start: int) -> Iterator[int]:
    """Yield the points of calls that are the whole answer, several separated by ";"."""
    at = _space(text, start)
    if text.startswith(PYTHON_TAG, at):
        at = _space(text, at + len(PYTHON_TAG))
    while text.startswith("{", at):
        points = list(_json_call(text, at))
        yield from (at, *points)
        try:
            at = _space(text, _DECODER.raw_decode(text, at)[1])
        except (ValueError, RecursionError):
            return
        if text.startswith(";", at):
            at = _space(text, at + 1)


def _json_call(text: str, start: int) -> Iterator[int]:
    """Yield the points of {"name": NAME, "arguments": {...}}, whose brace follows at `start` or after white space."""
    for key, _, value in _members(text, _space(text, start)):
        if key == "name":
            function = _STRING.match(text, value)
            yield from range(*function.span(1)) if function else ()
        elif key in ARGUMENTS:
            for name, at, argument in _members(text, value):
                if name is None:
                    yield at
                    break
                yield from (at + 1, argument)
                if text.startswith('"', argument):
                    yield argument + 1


def _members(text: str, at: int) -> Iterator[tuple[str | None, int, int]]:
    """Yield each member of a JSON object: its key, where that begins, and where its value begins; at last None and the closing
    brace's place twice. Malformed JSON ends it before.
    """
    if not text.startswith("{", at):
        return
    at = _space(text, at + 1)
    try:
        while text.startswith('"', at):
            key, end = _DECODER.raw_decode(text, at)
            value = _space(text, end)
            if not text.startswith(":", value):
                return
            value = _space(text, value + 1)
            if value >= len(text):
                return
            yield key, at, value
            at = _space(text, _end(text, value))
            if text.startswith(",", at):
                at = _space(text, at + 1)
    except (ValueError, RecursionError):
        return
    if text.startswith("}", at):
        yield None, at, at


def _end(text: str, at: int) -> int:
    """Return where the JSON value that begins at `at` ends. Raises ValueError for malformed JSON."""
    return int(_DECODER.raw_decode(text, at)[1])


def _space(text: str, at: int) -> int:
    """Return the position of the first character from `at` on that is not white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at
