"""Tool calls in a model's raw text, in the form that its chat template asks for.

qwen_xml    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>    Qwen3.5, Qwen3-Coder
hermes      <tool_call>{"name": NAME, "arguments": {...}}</tool_call>                            Qwen2.5, Qwen3, Hermes
llama_json  {"name": NAME, "parameters": {...}} as the whole answer, several separated by ";"    Llama 3
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from annie_quant.schema import ToolCall

Form = Literal["qwen_xml", "hermes", "llama_json"]
THINK = "<think>"  # in the chat template of a model that thinks
Tools = Sequence[Mapping[str, Any]] | None

_XML = re.compile(r"<tool_call>\s*<function=([^>\n]+)>(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_HERMES = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"


def form_of(template: str) -> Form:
    """Return the form that a chat template shows the model; Qwen3.5's where it shows none of them."""
    if "<function=" in template:
        return "qwen_xml"
    if "<tool_call>" in template:
        return "hermes"
    return "llama_json" if PYTHON_TAG in template or "<|start_header_id|>" in template else "qwen_xml"


def split_calls(text: str, form: Form, tools: Tools = None) -> tuple[list[ToolCall], str]:
    """Return the calls in an answer, and its text without them. A call that cannot be read stays in the text.

    tools: the types of arguments in qwen_xml; without it each of them is a string. llama_json has no marks, so without tools
    an answer has no calls.
    """
    if form == "llama_json":
        calls = _llama_calls(text) if tools else []
        return calls, "" if calls else text
    calls = []

    def take(match: re.Match[str]) -> str:
        call = _xml_call(match, tools) if form == "qwen_xml" else _json_call(match[1])
        if call is None:
            return match[0]
        calls.append(_numbered(call, len(calls)))
        return ""

    rest = (_XML if form == "qwen_xml" else _HERMES).sub(take, text)
    return calls, rest


def _numbered(call: tuple[str, Any], index: int) -> ToolCall:
    name, arguments = call
    return {"id": f"raw_{index}", "name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _json_call(text: str) -> tuple[str, Any] | None:
    try:
        return _call_of(json.loads(text), "arguments")
    except (ValueError, RecursionError):
        return None


def _call_of(value: Any, *keys: str) -> tuple[str, Any] | None:
    """Return the name and the arguments of a call, or None. keys: of which one has the arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = next((value[key] for key in keys if isinstance(value.get(key), dict)), None)
    return None if arguments is None else (value["name"], arguments)


def _llama_calls(text: str) -> list[ToolCall]:
    """Return the calls that an answer consists of; none where anything else is in it."""
    rest = text.strip().removeprefix(PYTHON_TAG).strip()
    calls: list[ToolCall] = []
    while rest.startswith("{"):
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        call = _call_of(value, "parameters", "arguments")
        if call is None:
            return []
        calls.append(_numbered(call, len(calls)))
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return [] if rest else calls


def _xml_call(match: re.Match[str], tools: Tools) -> tuple[str, Any]:
    name = match[1].strip()
    types = _types(name, tools)
    arguments = {}
    for key, value in _PARAMETER.findall(match[2]):
        key = key.strip()
        # The template adds one newline on each side of a value; further white space is part of the value.
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, types.get(key))
    return name, arguments


def _types(name: str, tools: Tools) -> dict[str, str | list[str] | None]:
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: schema.get("type") for key, schema in properties.items() if isinstance(schema, Mapping)}
    return {}


def _typed(value: str, kind: Any) -> Any:
    """A parameter's text as its schema's type; text that does not parse stays text (and fails the schema)."""
    kinds = kind if isinstance(kind, list) else [kind]
    if "string" in kinds or kinds == [None]:
        return value
    try:
        return json.loads(value)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)
