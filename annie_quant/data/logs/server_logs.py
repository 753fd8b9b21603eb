"""Request logs that servers write as text: vLLM's and llama.cpp's.

    vLLM       Received request ID: prompt: '...', params: ...      (--enable-log-requests; since 0.11 at level DEBUG, as
               Request ID details: prompt: '...', ...)              Generated response ID: output: '...' (--enable-log-outputs)
    llama.cpp  log_server_r: request:  {...} and response: {...}    (--verbose)

vLLM logs the prompt after the chat template; it is parsed back here for templates in ChatML (Qwen, Hermes).
"""

from __future__ import annotations

import ast
import json
import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from annie_quant.data.logs.conversation import Conversation, Unusable
from annie_quant.data.logs.records import conversation_of, finished, parsed_message, tools_of
from annie_quant.schema import ChatMessage

_LITERAL = r"('(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\")"
_VLLM_PROMPT = re.compile(rf"(?:Received request|Request) (\S+?):?(?: details)?: prompt: {_LITERAL}")
_VLLM_OUTPUT = re.compile(rf"Generated response (\S+?)(?: \([^)]*\))?: output: {_LITERAL}")
_LLAMA = re.compile(r"log_server_r\w*:\s+(request|response):\s+(\{.*\})\s*$")
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_TOOL_BLOCK = re.compile(r"# Tools\b.*?<tools>\s*(.*?)\s*</tools>", re.DOTALL)
_TOOL_END = ("</IMPORTANT>", "</tool_call>")
MAX_WAITING = 10_000  # requests whose answer has not been logged yet


class ServerLog:
    """The requests in one log; add returns the conversations that a line completes."""

    def __init__(self) -> None:
        self.format = ""
        self._prompts: OrderedDict[str, str] = OrderedDict()  # vLLM: request → prompt
        self._request: dict[str, Any] | None = None  # llama.cpp

    def add(self, line: str) -> Iterator[Conversation]:
        """Raises Unusable for a prompt or body that cannot be parsed."""
        if match := _VLLM_PROMPT.search(line):
            self.format = "vLLM log"
            self._prompts[match[1]] = ast.literal_eval(match[2])
            if len(self._prompts) > MAX_WAITING:
                yield chatml(self._prompts.popitem(last=False)[1], "")
        elif match := _VLLM_OUTPUT.search(line):
            self.format = "vLLM log"
            prompt = self._prompts.pop(match[1], None)
            if prompt is not None:
                yield chatml(prompt, ast.literal_eval(match[2]))
        elif match := _LLAMA.search(line):
            self.format = "llama.cpp log"
            try:
                body = json.loads(match[2])
            except (ValueError, RecursionError):
                raise Unusable("a request in the server's log is not JSON") from None
            if match[1] == "request":
                yield from self.rest()
                self._request = body if "messages" in body else None
            elif self._request is not None:
                request, self._request = self._request, None
                yield conversation_of({**request, "response": body})

    def rest(self) -> Iterator[Conversation]:
        """Yield the requests whose answer was not logged."""
        prompts, self._prompts = self._prompts, OrderedDict()
        request, self._request = self._request, None
        if request is not None:
            yield conversation_of(request)
        for prompt in prompts.values():
            yield chatml(prompt, "")


def chatml(prompt: str, answer: str) -> Conversation:
    """Return the conversation in a prompt after a ChatML template, with its answer. Raises Unusable for other templates."""
    turns = _TURN.findall(prompt)
    if not turns:
        raise Unusable("a prompt in the server's log is not in ChatML")
    messages: list[ChatMessage] = []
    tools = None
    opened = turns[-1][1] if turns[-1][0] == "assistant" and not prompt.rstrip().endswith("<|im_end|>") else None
    for role, text in turns[:-1] if opened is not None else turns:
        if role == "system":
            system, tools = _system(text)
            messages.append({"role": "system", "content": system})
        else:
            messages += parsed_message({"role": role, "content": text.strip()})
    thinking = opened is not None and opened.rstrip().endswith("<think>")
    if answer.strip():
        text = answer.split("<|im_end|>")[0]
        text = "<think>\n" + text if thinking and "</think>" in text else text
        messages += parsed_message({"role": "assistant", "content": text})
    conversation = finished(messages, tools)
    conversation.thinking = thinking
    return conversation


def _system(text: str) -> tuple[str, list[dict[str, Any]] | None]:
    """Return a rendered system message as the prompt and the tools in it."""
    block = _TOOL_BLOCK.search(text)
    if block is None:
        return text.strip(), None
    before, after = text[: block.start()].strip(), text[block.end() :]
    ends = [after.rfind(end) + len(end) for end in _TOOL_END if end in after]
    return before or (after[max(ends) :].strip() if ends else ""), tools_of(block[1])
