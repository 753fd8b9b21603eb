"""One answer: a server's parsed message, or a model's raw text.

Raw text is parsed in the form of Qwen's chat templates: the generation prompt ends in `<think>\\n` when thinking is on
and in `<think>\\n\\n</think>\\n\\n` when it is off, a turn ends with `<|im_end|>`. The forms of tool calls: tool_markup.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from annie_quant.judge.tool_markup import Form, split_calls
from annie_quant.schema import ChatMessage, RequestRecord, ToolCall

END_MARKS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>")
LEAST_CONSTANT, CONSTANT_SHARE = 10, 0.2  # of prompts without a label


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    tool_calls: id, name and arguments (a JSON string, as sent). error: empty where the request succeeded. finish_reason:
    "stop", "tool_calls", "length", or None where it is unknown. completion_tokens: None where unknown.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    completion_tokens: int | None = None

    @property
    def silent(self) -> bool:
        """Whether there is neither visible text nor a tool call."""
        return not self.text.strip() and not self.tool_calls


def from_record(record: Mapping[str, Any]) -> Answer:
    """Return the answer in one record of the stream client (`Timings.records()`)."""
    return Answer(
        text=record.get("text") or "",
        reasoning=record.get("reasoning") or "",
        tool_calls=list(record.get("tool_calls") or []),
        finish_reason=str(reason)[:200] if (reason := record.get("finish_reason")) else None,
        error=record.get("error") or "",
        completion_tokens=record.get("completion_tokens"),
    )


def constant_answer(own: Sequence[Answer | RequestRecord], other: Sequence[Answer | RequestRecord]) -> str:
    """Return a description of the answer that `own` gives to many prompts and `other` does not; both in the prompts' order."""
    texts, others = ([(a.text, *(str(c["arguments"]) for c in a.tool_calls)) for a in side] for side in (own, other))
    [(text, n)] = Counter(texts).most_common(1) or [(("",), 0)]
    same = Counter(theirs for ours, theirs in zip(texts, others, strict=True) if ours == text).most_common(1)
    if not any(text) or n < max(LEAST_CONSTANT, CONSTANT_SHARE * len(texts)) or 2 * same[0][1] > n:
        return ""
    return f"one answer to {n} of {len(texts)} prompts ({' '.join(text).strip()[:60]!r})"


def assistant_message(text: str, tool_calls: Sequence[ToolCall] = ()) -> ChatMessage:
    """Return an answer as the message that the next turn's request contains."""
    message: ChatMessage = {"role": "assistant", "content": text}
    if tool_calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}} for c in tool_calls
        ]
    return message


def parse_raw(
    raw_text: str,
    thinking: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    finish_reason: str | None = None,
    completion_tokens: int | None = None,
    form: Form = "qwen_xml",
) -> Answer:
    """Parse generated text (what follows the generation prompt) into an answer.

    With thinking off, think tags stay in the text: they are a leak. With thinking on and no closing tag, all of it is
    reasoning. tools: the types of arguments; without it every argument is a string. form: of tool calls (tool_markup.py).
    An end mark in the text gives finish_reason "stop" (or "tool_calls"); without one it is the argument `finish_reason`.
    """
    ends = [at for at in (raw_text.find(mark) for mark in END_MARKS) if at >= 0]
    body = raw_text[: min(ends)] if ends else raw_text
    reasoning = ""
    if thinking:
        reasoning, closed, body = body.lstrip().removeprefix("<think>").partition("</think>")
        if not closed:
            body = ""
    calls, text = split_calls(body, form, tools)
    if finish_reason is None and ends:
        finish_reason = "tool_calls" if calls else "stop"
    return Answer(text.strip(), reasoning.strip(), calls, finish_reason, "", completion_tokens)


def raw_view(answer: Answer, tools: Sequence[Mapping[str, Any]] | None = None) -> Answer:
    """Return the answer with the tool calls that its server left in the text.

    Where a call is right here and missing in `answer`, the fault is the server's parser, not the model.
    """
    if answer.tool_calls or "<tool_call>" not in answer.text:
        return answer
    parsed = parse_raw(answer.text, thinking=False, tools=tools)
    return replace(answer, text=parsed.text, tool_calls=parsed.tool_calls) if parsed.tool_calls else answer
