"""Assembling the tool calls of a streamed answer from fragments, for every form in which servers send them.

A fragment has some of: index, id, name, arguments. OpenAI's rule is that the index identifies a call. What servers send:

| server | index | id | name | arguments |
|---|---|---|---|---|
| OpenAI, vLLM, llama.cpp, OpenRouter | per call | first fragment; later absent or "" | first fragment | pieces |
| vLLM before 0.10 | per call | a new one in each fragment | first fragment | pieces |
| vLLM and LMDeploy with some parsers | always 0 | first fragment; later absent or "" | first fragment | pieces |
| SGLang | always 0, or per call | in each fragment | first fragment | pieces |
| proxies that count fragments | per fragment | in each fragment, or first only | first fragment | pieces |
| TGI | per call | "" | first fragment, or each | pieces; one object in place of the list |
| Mistral | absent or per call | each call's own | each fragment | whole, as text or object |
| Gemini | absent or always 0 | "" or each call's own | each fragment | whole |
| Ollama | absent or always 0 | absent or each call's own | each fragment | whole |
| OpenAI's function_call | absent | absent | first fragment | pieces |
| DashScope (older) | per call | each fragment | each fragment | all until now |

So a fragment refers to a call by its id, else by its index, else by its position in the list, else to the latest call. It begins
a new call if it refers to none, or if it has a name and is not a part of the call that it refers to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from annie_quant.core.untrusted import JsonObject, decode_json, integer
from annie_quant.stream.texts import joined, name_field, object_field

MAX_TOOL_CALLS = 1000
MAX_BYTES_EXAMINED = 1 << 26  # of arguments, where names are repeated: no server needs that many


class StreamedCall(msgspec.Struct):
    """A tool call that is assembled from its pieces. arguments: JSON text."""

    id: str | None = None
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class _Call:
    """A call whose fragments are being received. ids: all that its fragments had."""

    index: int | None
    ids: set[str] = field(default_factory=set)
    id: str | None = None
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    has_arguments: bool = False  # a fragment had the field, also if it was empty
    is_echo: bool = False  # begun by a fragment that may only repeat the call before it

    def arguments(self) -> str:
        """Return the arguments: the pieces joined, or the last one where each repeats all before it."""
        whole = joined(self.pieces)
        grows = all(b.startswith(a) for a, b in zip(self.pieces, self.pieces[1:], strict=False))
        repeats = len(self.pieces) > 1 and grows and _is_object(self.pieces[-1])
        return joined(self.pieces[-1:]) if repeats and not _is_object(whole) else whole


@dataclass(slots=True)
class _Fragment:
    index: int | None
    id: str | None
    name: str | None
    arguments: str | None  # None: the fragment has no such field
    position: int  # in its list
    siblings: int  # length of the list


def _is_object(text: str) -> bool:
    try:
        return isinstance(decode_json(text, lenient=True), dict)
    except ValueError:
        return False


class CallAssembler:
    """The tool calls of one answer."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._by_id: dict[str, _Call] = {}
        self._examined = 0

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, fragments: list[JsonObject]) -> bool:
        """Add the fragments of one chunk. Returns whether they have any content.

        Raises ValueError for a field of another type, and for more than MAX_TOOL_CALLS calls.
        """
        has_content = False
        for position, value in enumerate(fragments):
            fragment = _fragment(value, position, len(fragments))
            call = self._call_of(fragment)
            self._extend(call, fragment)
            has_content |= bool(fragment.id or fragment.name or fragment.arguments)
        return has_content

    def result(self) -> list[StreamedCall]:
        """Return the calls, in the order of their indices where these tell them apart, else as they began."""
        calls = [c for c in self._calls if c.pieces or not c.is_echo]
        indices = [c.index for c in calls if c.index is not None]
        if len(set(indices)) == len(calls):
            calls.sort(key=lambda call: call.index or 0)
        return [StreamedCall(c.id, joined([c.name]), c.arguments()) for c in calls]

    def _call_of(self, fragment: _Fragment) -> _Call:
        call = self._referred_call(fragment)
        if call is None or self._begins_another(call, fragment):
            return self._begin(fragment)
        return call

    def _referred_call(self, fragment: _Fragment) -> _Call | None:
        by_index = self._by_index.get(fragment.index) if fragment.index is not None else None
        by_id = self._by_id.get(fragment.id) if fragment.id is not None else None
        latest = self._calls[-1] if self._calls else None
        if by_id is not None:
            shares_id = by_index is not None and fragment.id in by_index.ids
            return by_index if shares_id else by_id
        if by_index is not None:
            return by_index
        if latest is None or (fragment.name and fragment.index is not None):
            return None
        if fragment.id is not None or fragment.index is not None:
            # the id that the latest call lacks, or an index that counts fragments
            is_start = fragment.name or self._is_complete(latest) or (fragment.id and latest.ids)
            return None if is_start else latest
        if fragment.siblings == 1:
            return latest
        return self._calls[fragment.position] if fragment.position < len(self._calls) else None

    def _begins_another(self, call: _Call, fragment: _Fragment) -> bool:
        """Return whether a fragment that refers to `call` begins another one."""
        is_named_again = fragment.name is not None and call.name != ""
        if not is_named_again:
            return False
        has_same_name = fragment.name == call.name
        if fragment.id is not None and fragment.id in call.ids:
            has_own_index = fragment.index is not None and fragment.index not in self._by_index
            if has_own_index or not has_same_name:
                return True
            return self._is_complete(call) and not self._is_repeated(call, fragment)
        if fragment.id is not None and call.ids:
            return True
        is_piece_of_name = (
            fragment.id is None
            and fragment.index is not None
            and fragment.arguments is None
            and not call.has_arguments
        )
        return self._is_complete(call) if has_same_name else not is_piece_of_name

    def _is_complete(self, call: _Call) -> bool:
        self._examined += sum(map(len, call.pieces))
        if self._examined > MAX_BYTES_EXAMINED:
            raise ValueError("a tool call's name is repeated in too many fragments")
        return _is_object(call.arguments())

    def _is_repeated(self, call: _Call, fragment: _Fragment) -> bool:
        """Return whether a fragment with the call's own name has nothing more than the call, which is complete."""
        return fragment.arguments in (None, "", call.arguments())

    def _begin(self, fragment: _Fragment) -> _Call:
        if len(self._calls) >= MAX_TOOL_CALLS:
            raise ValueError(f"more than {MAX_TOOL_CALLS} tool calls")
        before = self._calls[-1] if self._calls else None
        is_new_index = fragment.index is not None and fragment.index not in self._by_index
        has_own = bool(fragment.id or fragment.arguments) or is_new_index
        repeats_name = before is not None and before.name == fragment.name
        call = _Call(fragment.index, is_echo=repeats_name and not has_own)
        self._calls.append(call)
        return call

    def _extend(self, call: _Call, fragment: _Fragment) -> None:
        is_named_again = bool(call.name) and fragment.name == call.name
        is_new = bool(fragment.arguments) and not (
            is_named_again and self._is_complete(call) and self._is_repeated(call, fragment)
        )
        if fragment.name and fragment.name != call.name:
            call.name += fragment.name
        if fragment.id is not None:
            call.id = call.id or fragment.id
            call.ids.add(fragment.id)
            self._by_id[fragment.id] = call
        if fragment.index is not None:
            self._by_index[fragment.index] = call
        call.has_arguments |= fragment.arguments is not None
        if is_new and fragment.arguments:
            call.pieces.append(fragment.arguments)


def _fragment(value: JsonObject, position: int, siblings: int) -> _Fragment:
    function = object_field(value, "function") or value
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    index = value.get("index")
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    return _Fragment(
        integer(index),
        name_field(value, "id") or None,
        name_field(function, "name") or None,
        arguments,
        position,
        siblings,
    )
