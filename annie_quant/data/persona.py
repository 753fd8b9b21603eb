"""Personas: who the assistant is, as a JSON file: name, system_prompt, tools, rules, examples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from annie_quant.errors import UsageError
from annie_quant.files import sha256_text

FOLDER = Path(__file__).resolve().parent.parent / "assets" / "personas"
_FIELDS = {"name": str, "system_prompt": str, "tools": list, "rules": list, "examples": list}


@dataclass(frozen=True)
class Persona:
    """sha256: of the file's text, so that data can say exactly which persona it was made with."""

    name: str
    system_prompt: str
    tools: tuple[Mapping[str, Any], ...]
    rules: tuple[str, ...]
    examples: tuple[Mapping[str, Any], ...]
    sha256: str

    @property
    def prompt_sha256(self) -> str:
        """Of the system prompt alone: a stale prompt in the data spoils a fine-tune, so rows carry it."""
        return sha256_text(self.system_prompt)

    def tool(self, name: str) -> Mapping[str, Any] | None:
        """The function schema (OpenAI form, less the wrapper) of the tool called `name`."""
        return next((t["function"] for t in self.tools if t["function"]["name"] == name), None)


def load_persona(persona: str | Path) -> Persona:
    """A built-in persona by name, or a JSON file by path. Raises UsageError that names the file and the field."""
    path = Path(persona)
    if path.suffix != ".json" and len(path.parts) == 1:
        path = FOLDER / f"{persona}.json"
        if not path.is_file():
            have = ", ".join(sorted(p.stem for p in FOLDER.glob("*.json")))
            raise UsageError(f"there is no persona called {persona!r}", f"choose one of: {have}; or give a JSON file")
    try:
        stamp = path.stat().st_mtime_ns
    except OSError as error:
        raise UsageError(f"persona file {path} cannot be read: {error.strerror}") from error
    return _read(path, stamp)


@lru_cache(maxsize=16)
def _read(path: Path, stamp: int) -> Persona:
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"persona file {path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"persona file {path.name}: expected a JSON object, got {type(data).__name__}")
    for field, kind in _FIELDS.items():
        if not isinstance(data.get(field), kind):
            seen = type(data[field]).__name__ if field in data else "nothing"
            raise UsageError(f"persona file {path.name}: {field!r} should be a {kind.__name__}, seen {seen}")
    for index, tool in enumerate(data["tools"]):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not function.get("name"):
            raise UsageError(
                f"persona file {path.name}: tools[{index}] is no OpenAI function tool",
                '{"type": "function", "function": {"name": ..., "parameters": {...}}}',
            )
    return Persona(
        name=data["name"],
        system_prompt=data["system_prompt"],
        tools=tuple(data["tools"]),
        rules=tuple(data["rules"]),
        examples=tuple(data["examples"]),
        sha256=sha256_text(text),
    )
