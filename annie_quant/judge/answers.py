r"""One answer, from a server's parsed message or from a model's raw text.

Raw text has the form of Qwen's chat templates: the generation prompt ends in `<think>\n` when
thinking is on and in `<think>\n\n</think>\n\n` when it is off, and a turn ends with `<|im_end|>`.
Tool calls have the form that the template shows (annie_quant.models.call_forms).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from annie_quant.core.untrusted import decode_json
from annie_quant.documents import Answer
from annie_quant.models.call_forms import OPENING_MARKS, CallForm, CallSpan, Tool, Tools, read_calls
from annie_quant.models.server_parsers import THINK

if TYPE_CHECKING:
    from annie_quant.documents import ChatMessage, ToolCall
    from annie_quant.documents.prompts import CalledFunction

__all__ = [
    "Tool",
    "Tools",
    "assistant_message",
    "constant_answer",
    "has_call_markup",
    "parse_raw",
    "parser_fault",
    "raw_view",
]
THINK_END = "</think>"

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
    form: CallForm = "qwen_xml",
) -> Answer:
    """Parse generated text (what follows the generation prompt) into an answer.

    With thinking off, think tags stay in the text: they are a leak. With thinking on and no closing
    tag, a call ends the thinking, as for vLLM from 0.24, SGLang from 0.5.14 and llama.cpp; without a
    call all of it is reasoning.

    tools: the types of arguments; without it every argument is a string.
    form: of tool calls.
    """
    ends = [at for at in (raw_text.find(mark) for mark in END_MARKS) if at >= 0]
    body = raw_text[: min(ends)] if ends else raw_text
    reasoning = ""
    if thinking:
        reasoning, body = _split_thinking(body, form, tools)
    calls, text = read_calls(body, form, tools)
    finish_reason = None
    if ends:
        finish_reason = "tool_calls" if calls else "stop"
    return Answer(
        text=text.strip(),
        reasoning=reasoning.strip(),
        tool_calls=_numbered(calls),
        finish_reason=finish_reason,
        completion_tokens=completion_tokens,
    )


def _split_thinking(body: str, form: CallForm, tools: Tools) -> tuple[str, str]:
    """Return the thinking of an answer, and the rest."""
    reasoning, closed, rest = body.lstrip().removeprefix(THINK).partition(THINK_END)
    if closed:
        return reasoning, rest
    calls, _ = read_calls(reasoning, form, tools)
    if not calls:
        return reasoning, ""
    return reasoning[: calls[0].start], reasoning[calls[0].start :]


def _numbered(calls: Iterable[CallSpan]) -> list[ToolCall]:
    return [
        {
            "id": f"raw_{index}",
            "name": call.name,
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
        }
        for index, call in enumerate(calls)
    ]


# ---- what a server's parser did to the calls

# Which tools there are does not matter for whether a text has a call.
SOME_TOOL: Tools = [{"type": "function", "function": {}}]
CALL_VANISHED = "a call vanished"
CALL_MARKS = tuple(itertools.chain.from_iterable(OPENING_MARKS.values()))
MIN_LOST_TOKENS = 8  # of an answer that shows nothing: fewer can be an end of turn with its marks


def has_call_markup(answer: Answer) -> bool:
    """Return whether a mark of a tool call is left in the text."""
    return any(mark in answer.text for mark in CALL_MARKS)


def raw_view(answer: Answer, tools: Tools = None) -> Answer:
    """Return the answer with the tool calls that its server left in the text or in the thinking.

    Calls of every form are read, also XML calls without <tool_call>, and arguments get the closing brace that
    a server lost. A call that is cut, or that vanished, cannot be restored.

    Where a call is right here and missing in `answer`, the fault is the server's parser, not the
    model.
    """
    calls = [_with_last_brace(call) for call in answer.tool_calls]
    if answer.finish_reason == "length":
        calls = answer.tool_calls
    hidden, text = _calls_in(answer.text, tools)
    reasoning = answer.reasoning
    if answer.silent and not hidden:
        hidden, reasoning = _calls_in(reasoning, tools)
    if not hidden and calls == answer.tool_calls:
        return answer
    return msgspec.structs.replace(
        answer,
        text=text.strip(),
        reasoning=reasoning.strip(),
        tool_calls=[*calls, *_numbered(hidden)],
    )


def parser_fault(answer: Answer) -> str:
    """Return what the server's parser did wrong in a complete answer to a request with tools.

    Returns "" where the answer does not show it.
    """
    if answer.fault:
        return ""
    if any(not _is_json(call.get("arguments")) for call in answer.tool_calls):
        return "arguments of a call are not JSON"
    if _calls_in(answer.text, SOME_TOOL)[0]:
        return "a call is left in the text"
    if not answer.silent:
        return ""
    if _calls_in(answer.reasoning, SOME_TOOL)[0]:
        return "a call is left in the thinking"
    lost = (answer.completion_tokens or 0) > MIN_LOST_TOKENS and not answer.reasoning.strip()
    if answer.finish_reason == "tool_calls" or lost:
        return CALL_VANISHED
    return ""


def _calls_in(text: str, tools: Tools) -> tuple[list[CallSpan], str]:
    """Return the calls of any form in a text, and the text without them. Leaked thinking has none."""
    thinking = ""
    end = text.find(THINK_END)
    if end >= 0 and not any(call.start < end < call.end for call in _marked_calls(text, tools)[0]):
        end += len(THINK_END)
        thinking = text[:end]
    calls, rest = _marked_calls(text[len(thinking) :], tools)
    if '"parameters"' in rest and not calls:  # "arguments" without marks: no parser reads it
        calls, rest = read_calls(rest, "llama_json", tools)
    return calls, thinking + rest


def _marked_calls(text: str, tools: Tools) -> tuple[list[CallSpan], str]:
    """Return the calls of the forms that have marks, and the text without them."""
    calls: list[CallSpan] = []
    for form, marks in OPENING_MARKS.items():
        if any(mark in text for mark in marks):
            own, text = read_calls(text, form, tools)
            calls += own
    return calls, text


def _with_last_brace(call: ToolCall) -> ToolCall:
    """Return the call with a complete object as its arguments, if only the last brace is missing.

    After a digit more than the brace may be missing.
    """
    arguments = call.get("arguments")
    if not isinstance(arguments, str) or arguments[-1:].isdigit() or _is_json(arguments):
        return call
    if _is_json(arguments + "}"):
        return {**call, "arguments": arguments + "}"}
    return call


def _is_json(arguments: object) -> bool:
    if not isinstance(arguments, str):
        return arguments is not None
    try:
        decode_json(arguments)
    except ValueError:
        return False
    return True
