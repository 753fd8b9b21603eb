"""Calibration text: conversations rendered by the model's own chat template into token ids."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from annie_quant.errors import EnvironmentFault, UsageError


def read_conversations(path: str | Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file (see annie_quant.data), at most `limit`, taken evenly over the file.

    Evenly, because the founding files are sorted by category: the first 100 rows would all be greetings.
    """
    path = Path(path)
    if not path.is_file():
        raise EnvironmentFault(f"{path}: no such calibration file", f"annie-quant data --persona annie --output {path}")
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                row["messages"][0]["role"]
            except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
                raise UsageError(
                    f"{path}, line {number}: no conversation ({type(error).__name__}: {error})",
                    "a row is a JSON object with messages: [{role, content}, ...]",
                ) from None
            rows.append(row)
    if not rows:
        raise UsageError(f"{path}: no conversation in it", f"annie-quant data --persona annie --output {path}")
    if limit is None or limit >= len(rows):
        return rows
    return [rows[i * len(rows) // limit] for i in range(limit)]


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
