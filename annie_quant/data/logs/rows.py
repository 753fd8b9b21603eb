"""A logged conversation as a row for calibration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from annie_quant.data.logs.conversation import Conversation
from annie_quant.schema import ChatCall, ChatMessage, ChatRow


def row_of(
    conversation: Conversation,
    index: int,
    system: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> ChatRow:
    """Return the conversation up to its last answer. system, tools: used where the log has none."""
    last = max(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant")
    system = conversation.system if conversation.system is not None else system or ""
    head: list[ChatMessage] = [{"role": "system", "content": system}] if system.strip() else []
    row: ChatRow = {
        "id": f"log-{index:05d}",
        "messages": head + [with_text_arguments(m) for m in conversation.messages[: last + 1]],
        "thinking": conversation.thinking,
        "provenance": {"teacher": "log", "model": conversation.format, "source": conversation.source},
        "split": "calibration",
    }
    if offered := conversation.tools if conversation.tools is not None else tools:
        row["tools"] = [dict(t) for t in offered]
    return row


def with_text_arguments(message: ChatMessage) -> ChatMessage:
    """Return the message with its calls' arguments as JSON strings, as OpenAI's requests have them."""
    result = message.copy()
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [_with_text_arguments(call) for call in calls]
    return result


def _with_text_arguments(call: ChatCall) -> ChatCall:
    text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}
