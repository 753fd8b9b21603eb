r"""The forms in which models write tool calls, and how a server's parser reads each of them.

qwen_xml    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
hermes      <tool_call>{"name": NAME, "arguments": {...}}</tool_call>
llama_json  {"name": NAME, "parameters": {...}} as the whole answer, several separated by ";"
gemma4      <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:3}<tool_call|>
mistral     [TOOL_CALLS]NAME[ARGS]{...}, or [TOOL_CALLS][{"name": NAME, "arguments": {...}}]
granite     <|tool_call|>[{"name": NAME, "arguments": {...}}]
glm_xml     <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
pythonic    [NAME(KEY=VALUE)], between <|tool_call_start|> and <|tool_call_end|> or as the whole answer
harmony     to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>

Which model writes which form, and which parser a server needs for it, is in server_parsers.py.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from annie_quant.core.untrusted import decode_json

CallForm = Literal[
    "",  # a form that is not known here: no call is read
    "qwen_xml",
    "hermes",
    "llama_json",
    "gemma4",
    "mistral",
    "granite",
    "glm_xml",
    "pythonic",
    "harmony",
]
Tool = Mapping[str, Any]  # an OpenAI function tool
Tools = Sequence[Tool] | None
PYTHON_TAG = "<|python_tag|>"
# Text with which an answer's calls begin. llama_json has none.
OPENING_MARKS: dict[CallForm, tuple[str, ...]] = {
    "qwen_xml": ("<tool_call>", "<function="),
    "hermes": ("<tool_call>",),
    "gemma4": ("<|tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "granite": ("<|tool_call|>",),
    "glm_xml": ("<tool_call>", "<arg_key>"),
    "pythonic": ("<|tool_call_start|>",),
    "harmony": ("<|channel|>commentary",),
}


class CallSpan(NamedTuple):
    """A call, and the part of the text that it takes.

    The spans of several calls of one block begin where the block begins; only the first takes text.
    """

    name: str
    arguments: dict[str, Any]
    start: int
    end: int


def read_calls(text: str, form: CallForm, tools: Tools = None) -> tuple[list[CallSpan], str]:
    """Return the calls of a text in their order, and the text without them.

    A call that cannot be read, or that is cut, stays in the text.

    tools: the types of arguments where the form writes them without quotes. Without it such an argument is
        a string. Forms whose calls have no mark are read only where there are tools.
    """
    reader = _READERS.get(form)
    calls = list(reader(text, tools)) if reader else []
    rest = []
    at = 0
    for call in calls:
        rest.append(text[at : call.start])
        at = max(at, call.end)
    return calls, "".join(rest) + text[at:]


# ---- JSON objects

_SPACE = re.compile(r"\s*")


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _decode_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `at`, and where it ends. Raises ValueError where there is none."""
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _named(value: object, *keys: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a call that is a JSON object, or None. keys: names of the arguments' field."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    for key in keys:
        if isinstance(value.get(key), dict):
            return value["name"], value[key]
    return None


_HERMES = re.compile(r"<tool_call>\s*(?=\{)")


def _hermes(text: str, tools: Tools) -> Iterator[CallSpan]:
    """Yield JSON calls. A tag inside a JSON string does not end the call."""
    at = 0
    while opening := _HERMES.search(text, at):
        at = opening.end()
        try:
            value, end = _decode_at(text, at)
        except ValueError:
            continue
        call = _named(value, "arguments")
        end = _skip_space(text, end)
        if call is not None and text.startswith("</tool_call>", end):
            at = end + len("</tool_call>")
            yield CallSpan(*call, opening.start(), at)


def _llama(text: str, tools: Tools) -> Iterator[CallSpan]:
    """Yield the calls that an answer consists of; none where anything else is in it."""
    at = _skip_space(text, 0)
    if text.startswith(PYTHON_TAG, at):
        at = _skip_space(text, at + len(PYTHON_TAG))
    calls = []
    while tools and text.startswith("{", at):
        try:
            value, end = _decode_at(text, at)
        except ValueError:
            return
        call = _named(value, "parameters", "arguments")
        if call is None:
            return
        calls.append(CallSpan(*call, 0, len(text)))
        at = _skip_space(text, end)
        if text.startswith(";", at):
            at = _skip_space(text, at + 1)
    if at == len(text):
        yield from calls


def _json_list(text: str, start: int, at: int) -> Iterator[CallSpan]:
    """Yield the calls of a JSON list that begins at `at`. start: where its mark begins."""
    try:
        value, end = _decode_at(text, at)
    except ValueError:
        return
    calls = [_named(item, "arguments") for item in value] if isinstance(value, list) else []
    if calls and None not in calls:
        for call in calls:
            if call is not None:
                yield CallSpan(*call, start, end)


def _granite(text: str, tools: Tools) -> Iterator[CallSpan]:
    mark = "<|tool_call|>"
    start = text.find(mark)
    if start >= 0:
        yield from _json_list(text, start, _skip_space(text, start + len(mark)))


_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*")
_MISTRAL_NAME = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


def _mistral(text: str, tools: Tools) -> Iterator[CallSpan]:
    for mark in _MISTRAL.finditer(text):
        if text.startswith("[", mark.end()):
            yield from _json_list(text, mark.start(), mark.end())
            continue
        at = mark.end()
        start = mark.start()
        while name := _MISTRAL_NAME.match(text, at):
            try:
                arguments, at = _decode_at(text, name.end())
            except ValueError:
                break
            yield CallSpan(name[1], arguments, start, at)
            start = at


_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? ?to=functions\.(?P<name>[\w.-]+)"
    r"(?: ?<\|channel\|>\w+)?(?: ?<\|constrain\|>)? ?(?:json)? ?<\|message\|>(?=\{)"
)


def _harmony(text: str, tools: Tools) -> Iterator[CallSpan]:
    for head in _HARMONY.finditer(text):
        try:
            arguments, end = _decode_at(text, head.end())
        except ValueError:
            continue
        if text.startswith("<|call|>", end):
            yield CallSpan(head["name"], arguments, head.start(), end + len("<|call|>"))


# ---- values without quotes, typed by the tool's schema

_FUNCTION = re.compile(r"(?P<opened><tool_call>\s*)?<function=(?P<name>[^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
# A value ends at the first end tag that is followed by another tag, so it may have end tags inside. Without
# one it ends before the line of the next parameter.
_VALUE_END = re.compile(
    r"</parameter>(?=\s*(?:<parameter=|</parameter>|</function>|</tool_call>))"
    r"|\n(?=<parameter=[^>\n]+>\n)"
)
_EXTRA_END = re.compile(r"(?:\s*</parameter>)+")
_FUNCTION_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_CALL_END = re.compile(r"\s*(?:</function>\s*)?(?:</tool_call>|(?=<function=))")


def _qwen_xml(text: str, tools: Tools) -> Iterator[CallSpan]:
    """Yield XML calls, with or without <tool_call>, which models leave out at times.

    A call without <tool_call> needs </function>, and one with it </tool_call>.
    """
    value_ends = [match.span() for match in _VALUE_END.finditer(text)]
    at = 0
    for head in _FUNCTION.finditer(text):
        if head.start() < at:  # inside a value
            continue
        name = head["name"].strip()
        arguments, end = _xml_arguments(text, head.end(), value_ends, argument_types(name, tools))
        needed = _CALL_END if head["opened"] else _FUNCTION_END
        last = needed.match(text, end)
        if last is not None:
            at = last.end()
            yield CallSpan(name, arguments, head.start(), at)


def _xml_arguments(
    text: str, at: int, value_ends: list[tuple[int, int]], types: Mapping[str, list[str]]
) -> tuple[dict[str, Any], int]:
    """Return the arguments of an XML call from `at` on, and where they end."""
    arguments = {}
    parameter = _PARAMETER.match(text, at)
    while parameter is not None:
        index = bisect_left(value_ends, (parameter.end(), 0))
        if index == len(value_ends):
            break
        end, at = value_ends[index]
        # The template adds one newline on each side of a value.
        value = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
        key = parameter[1].strip()
        arguments[key] = _typed(value, types.get(key))
        parameter = _PARAMETER.match(text, at)
    extra = _EXTRA_END.match(text, at)
    return arguments, extra.end() if extra else at


_GLM = re.compile(
    r"<tool_call>\s*(?P<name>[^\s<{]+)\s*(?P<arguments>(?:<arg_key>.*?</arg_value>\s*)*)</tool_call>",
    re.DOTALL,
)
_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _glm(text: str, tools: Tools) -> Iterator[CallSpan]:
    for call in _GLM.finditer(text):
        types = argument_types(call["name"], tools)
        arguments = {
            key.strip(): _typed(value, types.get(key.strip()))
            for key, value in _GLM_ARGUMENT.findall(call["arguments"])
        }
        yield CallSpan(call["name"], arguments, call.start(), call.end())


def argument_types(name: str, tools: Tools) -> dict[str, list[str]]:
    """Return argument → the JSON types that the tool's schema names; none for an unknown tool."""
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {
                key: _types_of(schema)
                for key, schema in properties.items()
                if isinstance(schema, Mapping)
            }
    return {}


def _types_of(schema: Mapping[str, Any]) -> list[str]:
    stated = schema.get("type")
    types = list(stated) if isinstance(stated, list) else [stated]
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or ():
            if isinstance(choice, Mapping):
                types += _types_of(choice)
    return [name for name in types if name]


_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def _typed(value: str, types: list[str] | None) -> object:
    """Return a value as its schema's type; text that does not parse stays text, and fails the schema."""
    if not types or "string" in types:
        return value
    try:
        return decode_json(value)
    except ValueError:
        return _PYTHON_WORDS.get(value.strip(), value)


# ---- Gemma 4

_GEMMA_HEAD = re.compile(r"<\|tool_call>\s*call:(?P<name>[^{]+)(?=\{)")
_GEMMA_TEXT = '<|"|>'
_GEMMA_KEY = re.compile(r"\s*([^:,{}\[\]]+?)\s*:")
_GEMMA_WORD = re.compile(r"[^,{}\[\]]*")


def _gemma4(text: str, tools: Tools) -> Iterator[CallSpan]:
    for head in _GEMMA_HEAD.finditer(text):
        try:
            arguments, end = _gemma_value(text, head.end())
        except (ValueError, RecursionError):
            continue
        if text.startswith("<tool_call|>", end):
            yield CallSpan(head["name"].strip(), arguments, head.start(), end + len("<tool_call|>"))


def _gemma_value(text: str, at: int) -> tuple[Any, int]:
    """Return the value that begins at `at`, and where it ends. Raises ValueError for a malformed one."""
    at = _skip_space(text, at)
    if text.startswith(_GEMMA_TEXT, at):
        start = at + len(_GEMMA_TEXT)
        end = text.index(_GEMMA_TEXT, start)
        return text[start:end], end + len(_GEMMA_TEXT)
    if text.startswith("{", at):
        return _gemma_object(text, at + 1)
    if text.startswith("[", at):
        return _gemma_list(text, at + 1)
    word = _GEMMA_WORD.match(text, at)
    if word is None or not word[0].strip():
        raise ValueError("no value")
    try:
        return decode_json(word[0]), word.end()
    except ValueError:
        return word[0].strip(), word.end()


def _gemma_object(text: str, at: int) -> tuple[dict[str, Any], int]:
    result: dict[str, Any] = {}
    while not text.startswith("}", at):
        if text.startswith(_GEMMA_TEXT, at):
            key, at = _gemma_value(text, at)
            at = text.index(":", at) + 1
        else:
            bare = _GEMMA_KEY.match(text, at)
            if bare is None:
                raise ValueError("no key")
            key = bare[1]
            at = bare.end()
        result[key], at = _gemma_value(text, at)
        at = _after_comma(text, at)
    return result, at + 1


def _gemma_list(text: str, at: int) -> tuple[list[Any], int]:
    result = []
    while not text.startswith("]", at):
        value, at = _gemma_value(text, at)
        result.append(value)
        at = _after_comma(text, at)
    return result, at + 1


def _after_comma(text: str, at: int) -> int:
    return _skip_space(text, at + text.startswith(",", at))


# ---- calls of Python functions

_PYTHONIC = re.compile(r"<\|tool_call_start\|>(.*?)<\|tool_call_end\|>", re.DOTALL)
MAX_PYTHON_CHARACTERS = 100_000  # ast.parse needs much memory for long texts


def _pythonic(text: str, tools: Tools) -> Iterator[CallSpan]:
    blocks = [(m[1], m.start(), m.end()) for m in _PYTHONIC.finditer(text)]
    if not blocks and tools and text.strip().startswith("["):
        blocks = [(text, 0, len(text))]
    for source, start, end in blocks:
        for name, arguments in _python_calls(source.strip()):
            yield CallSpan(name, arguments, start, end)


class _JsonWords(ast.NodeTransformer):
    """Replace JSON's constants, which are names in Python."""

    WORDS = {"true": True, "false": False, "null": None}  # noqa: RUF012 - not changed

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.WORDS:
            return ast.copy_location(ast.Constant(self.WORDS[node.id]), node)
        return node


def _python_calls(source: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of a list such as [f(a=1), g()]; none where it is anything else."""
    if len(source) > MAX_PYTHON_CHARACTERS:
        return []
    try:
        tree = ast.parse(source, mode="eval").body
        calls = []
        for call in tree.elts if isinstance(tree, ast.List) else []:
            if not isinstance(call, ast.Call) or call.args:
                return []
            arguments = {}
            for keyword in call.keywords:
                if keyword.arg is None:
                    return []
                value = _JsonWords().visit(keyword.value)
                arguments[keyword.arg] = ast.literal_eval(value)
            calls.append((ast.unparse(call.func), arguments))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return calls


_READERS: dict[CallForm, Callable[[str, Tools], Iterator[CallSpan]]] = {
    "qwen_xml": _qwen_xml,
    "hermes": _hermes,
    "llama_json": _llama,
    "gemma4": _gemma4,
    "mistral": _mistral,
    "granite": _granite,
    "glm_xml": _glm,
    "pythonic": _pythonic,
    "harmony": _harmony,
}
