"""Gate cases and calibration rows from logged conversations.

Every answer in a conversation is one case: the messages before it, with the logged calls and results, are the prompt. So a
conversation of several turns with tools is replayed up to each answer, the same for bf16 and for the quantized model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from annie_quant.data.logs import Conversation
from annie_quant.data.logs.conversation import row_of, with_text_arguments
from annie_quant.data.rows import DuplicateFinder
from annie_quant.data.validate import form_faults
from annie_quant.documents import CaseFile, ChatMessage, ChatRow, WorkloadFile
from annie_quant.documents.persona import Persona
from annie_quant.judge.gates import NAMED_REFERENCE_GATES

CASES_PER_CONVERSATION = 4
MIN_TOKENS, MAX_TOKENS = 64, 1024
CHARACTERS_PER_TOKEN = 3.0
HEADROOM = 1.5  # of max_tokens over the longest usual answer
USUAL_SHARE = 0.95
DESCRIPTIONS = {
    "calls": "prompts that production answered with a tool call",
    "answers": "prompts that production answered in words",
    "results": "answers from a tool's result",
}


class GateCases:
    """Cases per kind. behaviours: cases per tool, answers in words, answers from results. shared: cases that are left out
    because the calibration rows have nearly the same prompt.
    """

    def __init__(self, persona: Persona, calibration: Sequence[Mapping[str, Any]]) -> None:
        self.persona = persona
        self.behaviours: Counter[str] = Counter()
        self.shared = 0
        self._cases: dict[tuple[str, bool], list[CaseFile]] = {}
        self._lengths: dict[tuple[str, bool], list[int]] = {}
        self._calibration = DuplicateFinder((str(row["id"]), text) for row in calibration for text in prompts_of(row))
        self._prompts = {kind: DuplicateFinder() for kind in DESCRIPTIONS}

    def add(self, conversation: Conversation) -> None:
        positions = answer_positions(conversation)
        for at in positions:
            prompt = conversation.messages[:at]
            logged = conversation.messages[at] if at < len(conversation.messages) else None
            kind = (
                "results"
                if prompt[-1]["role"] == "tool"
                else "calls"
                if logged is not None and logged.get("tool_calls")
                else "answers"
            )
            text = prompt_text(prompt)
            if self._calibration.find(text) is not None:
                self.shared += 1
                continue
            if self._prompts[kind].find(text) is not None:
                continue
            self._prompts[kind].add("", text)
            self._store(kind, conversation, prompt, logged)

    def _store(
        self,
        kind: str,
        conversation: Conversation,
        prompt: Sequence[ChatMessage],
        logged: ChatMessage | None,
    ) -> None:
        key = (kind, conversation.thinking)
        cases = self._cases.setdefault(key, [])
        messages = [plain(m) for m in prompt]
        if conversation.system is not None and conversation.system.strip() != self.persona.system_prompt:
            messages.insert(0, {"role": "system", "content": conversation.system})
        case = CaseFile(id=f"{kind}-{len(cases):04d}", messages=messages)
        if conversation.tools is not None and conversation.tools != list(self.persona.tools):
            case.tools = conversation.tools
        if logged is not None:
            calls = [str(c["function"]["name"]) for c in logged.get("tool_calls") or ()]
            case.expect = {"logged": {"calls": calls}}
            arguments = [c["function"]["arguments"] for c in logged.get("tool_calls") or ()]
            length = len(logged["content"]) + len(str(arguments)) + len(logged.get("reasoning_content") or "")
            self._lengths.setdefault(key, []).append(length)
            self.behaviours.update({f"calls {name}" for name in calls})
        if kind == "results":
            self.behaviours["answers from a result"] += 1
        elif kind == "answers":
            self.behaviours["answers in words"] += 1
        if sum(m["role"] == "user" for m in prompt) > 1:
            self.behaviours["several turns"] += 1
        cases.append(case)

    def documents(self, persona: Persona) -> Iterator[WorkloadFile]:
        """Yield the workloads, one per kind of answer."""
        for (kind, thinking), cases in sorted(self._cases.items()):
            yield WorkloadFile(
                name=f"{kind}_thinking" if thinking else kind,
                description=f"{DESCRIPTIONS[kind]}, from logs",
                persona="..",
                tools="persona" if persona.tools else None,
                thinking=thinking,
                max_tokens=max_tokens(self._lengths.get((kind, thinking), ())),
                gates=[*NAMED_REFERENCE_GATES, *(["logged_tool"] if persona.tools else [])],
                cases=cases,
            )


def answer_positions(conversation: Conversation) -> list[int]:
    """Return the positions of at most CASES_PER_CONVERSATION answers: calls first, then answers after results, then others.

    A conversation that ends with a question has the position after it.
    """
    messages = conversation.messages
    positions = [
        i for i, m in enumerate(messages) if m["role"] == "assistant" and messages[i - 1]["role"] != "assistant"
    ]
    if messages[-1]["role"] in ("user", "tool"):
        positions.append(len(messages))

    def rank(i: int) -> int:
        if i < len(messages) and messages[i].get("tool_calls"):
            return 0
        return 1 if messages[i - 1]["role"] == "tool" else 2

    return sorted(sorted(positions, key=lambda i: (rank(i), i))[:CASES_PER_CONVERSATION])


def calibration_row(conversation: Conversation, persona: Persona, index: int) -> ChatRow | None:
    """Return a conversation as a calibration row; None if its form is invalid, as with arguments that fit no schema."""
    row = row_of(conversation, index, persona.system_prompt, persona.tools)
    row["provenance"] |= {"persona": persona.source, "prompt_sha256": persona.prompt_sha256}
    return None if form_faults(row) else row


def prompts_of(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the prompt before each answer of a row."""
    messages = [m for m in row["messages"] if m["role"] != "system"]
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            yield prompt_text(messages[:at])


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what identifies a prompt: the users' texts, and the last result where the answer follows one."""
    texts = [str(m["content"]) for m in messages if m["role"] == "user"]
    return "\n".join(texts + [str(m["content"]) for m in messages[-1:] if m["role"] == "tool"])


def plain(message: ChatMessage) -> ChatMessage:
    """Return a message of a prompt: earlier thinking is not part of it."""
    result = with_text_arguments(message)
    result.pop("reasoning_content", None)
    return result


def max_tokens(lengths: Sequence[int]) -> int:
    """Return a token limit that nearly all logged answers (lengths in characters) fit into."""
    if not lengths:
        return 256
    usual = sorted(lengths)[int(USUAL_SHARE * (len(lengths) - 1))]
    return max(MIN_TOKENS, min(MAX_TOKENS, int(HEADROOM * usual / CHARACTERS_PER_TOKEN) + 32))
