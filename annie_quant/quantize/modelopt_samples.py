"""Calibration text: conversations rendered by the model's own chat template into token ids."""

from __future__ import annotations

import copy
import json
from typing import Any


def template_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row's messages as Qwen3.5's template wants them: tool arguments are a dict (a JSON string on disk)."""
    messages = copy.deepcopy(row["messages"])
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
    return messages


def token_ids(tokenizer: Any, rows: list[dict[str, Any]], max_tokens: int = 2048) -> list[list[int]]:
    """One list of token ids a conversation, cut at max_tokens."""
    ids = []
    for row in rows:
        text = tokenizer.apply_chat_template(
            template_messages(row),
            tools=row.get("tools") or None,
            tokenize=False,
            enable_thinking=bool(row.get("thinking", False)),
        )
        ids.append(tokenizer(text, add_special_tokens=False)["input_ids"][:max_tokens])
    return ids
