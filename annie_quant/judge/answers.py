r"""One answer, from a server's parsed message or from a model's raw text, and the tool calls in raw text.

Raw text has the form of Qwen's chat templates: the generation prompt ends in `<think>\n` when
thinking is on and in `<think>\n\n</think>\n\n` when it is off, and a turn ends with `<|im_end|>`.
Tool calls have the form that the template shows:

qwen_xml    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>    Qwen3.5, Qwen3-Coder
hermes      <tool_call>{"name": NAME, "arguments": {...}}</tool_call>                            Qwen2.5, Qwen3, Hermes
llama_json  {"name": NAME, "parameters": {...}} as the whole answer, several separated by ";"    Llama 3
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from annie_quant.core.untrusted import decode_json
from annie_quant.documents import Answer

if TYPE_CHECKING:
    from annie_quant.documents import ChatMessage, ToolCall
    from annie_quant.documents.prompts import CalledFunction

Form = Literal["qwen_xml", "hermes", "llama_json"]
THINK = "<think>"  # in the chat template of a model that thinks
Tool = Mapping[str, Any]  # an OpenAI function tool
Tools = Sequence[Tool] | None

_XML = re.compile(r"<tool_call>\s*<function=([^>\n]+)>(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_HERMES = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def form_of(template: str) -> Form:
    """Return the form that a chat template shows the model; Qwen3.5's where it shows none of them."""
    if "<function=" in template:
        return "qwen_xml"
    if "<tool_call>" in template:
        return "hermes"
    is_llama = PYTHON_TAG in template or "<|start_header_id|>" in template
    return "llama_json" if is_llama else "qwen_xml"


def split_calls(text: str, form: Form, tools: Tools = None) -> tuple[list[ToolCall], str]:
    """Return the calls in an answer, and its text without them. A call that cannot be read stays in the text.

    tools: the types of arguments in qwen_xml; without it each of them is a string. llama_json has
    no marks, so without tools an answer has no calls.
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


def _numbered(call: tuple[str, object], index: int) -> ToolCall:
    name, arguments = call
    return {
        "id": f"raw_{index}",
        "name": name,
        "arguments": json.dumps(arguments, ensure_ascii=False),
    }


def _json_call(text: str) -> tuple[str, object] | None:
    try:
        return _call_of(decode_json(text), "arguments")
    except ValueError:
        return None


def _call_of(value: object, *keys: str) -> tuple[str, object] | None:
    """Return the name and the arguments of a call, or None.

    keys: alternative names of the field with the arguments.
    """
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
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        call = _call_of(value, "parameters", "arguments")
        if call is None:
            return []
        calls.append(_numbered(call, len(calls)))
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return [] if rest else calls


def _xml_call(match: re.Match[str], tools: Tools) -> tuple[str, object]:
    name = match[1].strip()
    types = _types(name, tools)
    arguments = {}
    for key, value in _PARAMETER.findall(match[2]):
        key = key.strip()
        # The template adds one newline on each side of a value; further white space is part of the
        # value.
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, types.get(key))
    return name, arguments


def _types(name: str, tools: Tools) -> dict[str, str | list[str] | None]:
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {
                key: schema.get("type")
                for key, schema in properties.items()
                if isinstance(schema, Mapping)
            }
    return {}


def _typed(value: str, kind: object) -> object:
    """Return a parameter's text as its schema's type; text that does not parse stays text (and fails the schema)."""
    kinds = kind if isinstance(kind, list) else [kind]
    if "string" in kinds or kinds == [None]:
        return value
    try:
        return decode_json(value)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)


# ---- answers

END_MARKS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>")
# of prompts without a label
MIN_CONSTANT_ANSWERS = 10
MIN_CONSTANT_SHARE = 0.2  # of prompts without a label


def constant_answer(own: Sequence[Answer], other: Sequence[Answer]) -> str:
    """Return a description of the answer that `own` gives to many prompts and `other` does not; both in the prompts' order."""
    if not own:
        return ""
    texts = [_content(answer) for answer in own]
    [(text, n)] = Counter(texts).most_common(1)
    if n < max(MIN_CONSTANT_ANSWERS, MIN_CONSTANT_SHARE * len(texts)):
        return ""
    others = Counter(
        _content(theirs) for ours, theirs in zip(texts, other, strict=True) if ours == text
    )
    if 2 * max(others.values()) > n:
        return ""
    return f"one answer to {n} of {len(texts)} prompts ({' '.join(text).strip()[:60]!r})"


def _content(answer: Answer) -> tuple[str, ...]:
    return answer.text, *(str(call["arguments"]) for call in answer.tool_calls)


def assistant_message(text: str, tool_calls: Sequence[ToolCall] = ()) -> ChatMessage:
    """Return an answer as the message that the next turn's request contains."""
    message: ChatMessage = {"role": "assistant", "content": text}
    for call in tool_calls:
        function: CalledFunction = {"name": call["name"], "arguments": call["arguments"]}
        message.setdefault("tool_calls", []).append({"type": "function", "function": function})
    return message


def parse_raw(
    raw_text: str,
    thinking: bool,
    tools: Tools = None,
    completion_tokens: int | None = None,
    form: Form = "qwen_xml",
) -> Answer:
    """Parse generated text (what follows the generation prompt) into an answer.

    With thinking off, think tags stay in the text: they are a leak. With thinking on and no closing
    tag, all of it is reasoning.

    tools: the types of arguments; without it every argument is a string.
    form: of tool calls.
    """
    ends = [at for at in (raw_text.find(mark) for mark in END_MARKS) if at >= 0]
    body = raw_text[: min(ends)] if ends else raw_text
    reasoning = ""
    if thinking:
        reasoning, closed, body = body.lstrip().removeprefix("<think>").partition("</think>")
        if not closed:
            body = ""
    calls, text = split_calls(body, form, tools)
    finish_reason = None
    if ends:
        finish_reason = "tool_calls" if calls else "stop"
    return Answer(
        text=text.strip(),
        reasoning=reasoning.strip(),
        tool_calls=calls,
        finish_reason=finish_reason,
        completion_tokens=completion_tokens,
    )


def raw_view(answer: Answer, tools: Tools = None) -> Answer:
    """Return the answer with the tool calls that its server left in the text.

    Where a call is right here and missing in `answer`, the fault is the server's parser, not the
    model.
    """
    if answer.tool_calls or "<tool_call>" not in answer.text:
        return answer
    parsed = parse_raw(answer.text, thinking=False, tools=tools)
    if not parsed.tool_calls:
        return answer
    return msgspec.structs.replace(answer, text=parsed.text, tool_calls=parsed.tool_calls)
