"""Personas: who the assistant is, as a JSON file: name, system_prompt, tools, rules, examples, and optionally categories.

categories: [{"name", "tool"?, "turns"?, "about"?}]. Left out, they are the founding ones as far as the tools go: greeting,
factual, one a tool (search_memory: memory, web_search: web, any other by its own name) and multi_turn of five turns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from annie_quant.errors import UsageError
from annie_quant.files import ASSETS, sha256_text

FOLDER = ASSETS / "personas"
TURNS = 5
_FIELDS = {"name": str, "system_prompt": str, "tools": list, "rules": list, "examples": list}
_OF_TOOL = {
    "search_memory": ("memory", "the user asks about something that was said in earlier talks"),
    "web_search": ("web", "the user asks about current events, news, weather or prices"),
}


@dataclass(frozen=True)
class Category:
    """A kind of conversation: the tool that must be called in it (None: none may be), its user turns, what it is about."""

    name: str
    about: str
    tool: str | None = None
    turns: int = 1


@dataclass(frozen=True)
class Persona:
    """sha256: of the file's text, so that data can say exactly which persona it was made with. source: name or path."""

    name: str
    system_prompt: str
    tools: tuple[Mapping[str, Any], ...]
    rules: tuple[str, ...]
    examples: tuple[Mapping[str, Any], ...]
    sha256: str
    categories: tuple[Category, ...] = ()
    source: str = ""

    @property
    def prompt_sha256(self) -> str:
        """Of the system prompt alone: a stale prompt in the data spoils a fine-tune, so rows carry it."""
        return sha256_text(self.system_prompt)

    def tool(self, name: str) -> Mapping[str, Any] | None:
        """The function schema (OpenAI form, less the wrapper) of the tool called `name`."""
        return next((t["function"] for t in self.tools if t["function"]["name"] == name), None)

    def category(self, name: str) -> Category | None:
        return next((c for c in self.categories if c.name == name), None)


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
    return _read(path, stamp, str(persona))


@lru_cache(maxsize=16)
def _read(path: Path, stamp: int, source: str) -> Persona:
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
        _check_tool(path, index, tool)
    names = [t["function"]["name"] for t in data["tools"]]
    return Persona(
        name=data["name"],
        system_prompt=data["system_prompt"],
        tools=tuple(data["tools"]),
        rules=tuple(data["rules"]),
        examples=tuple(data["examples"]),
        sha256=sha256_text(text),
        categories=_categories(path, data["categories"], names) if "categories" in data else _founding(names),
        source=source,
    )


def _check_tool(path: Path, index: int, tool: Any) -> None:
    import jsonschema

    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not function.get("name"):
        raise UsageError(
            f"persona file {path.name}: tools[{index}] is no OpenAI function tool",
            '{"type": "function", "function": {"name": ..., "parameters": {...}}}',
        )
    try:
        jsonschema.Draft202012Validator.check_schema(function.get("parameters") or {})
    except jsonschema.SchemaError as error:
        raise UsageError(
            f"persona file {path.name}: the parameters of {function['name']} are no JSON schema: {error.message}"
        ) from error


def _founding(tools: list[str]) -> tuple[Category, ...]:
    found = [
        Category("greeting", "greetings and small talk about the day"),
        Category("factual", "questions of general knowledge that have one short, certain answer"),
    ]
    for tool in tools:
        name, about = _OF_TOOL.get(tool, (tool, f"the user asks for what only {tool} can do"))
        found.append(Category(name, about, tool))
    return (*found, Category("multi_turn", "a talk that goes on, each turn leaning on the ones before", turns=TURNS))


def _categories(path: Path, entries: Any, tools: list[str]) -> tuple[Category, ...]:
    where = f"persona file {path.name}: categories"
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{where}: should be a list that is not empty", '[{"name": ..., "tool": ..., "about": ...}]')
    found: list[Category] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise UsageError(f"{where}[{index}] has no 'name'", '{"name": ..., "tool": ..., "turns": 1, "about": ...}')
        tool, turns = entry.get("tool"), entry.get("turns", 1)
        if tool is not None and tool not in tools:
            raise UsageError(f"{where}[{index}]: the tool {tool!r} is not among the persona's", ", ".join(tools))
        if not isinstance(turns, int) or turns < 1:
            raise UsageError(f"{where}[{index}]: 'turns' should be a whole number above 0, seen {turns!r}")
        if any(c.name == entry["name"] for c in found):
            raise UsageError(f"{where}[{index}]: {entry['name']!r} stands twice")
        found.append(Category(entry["name"], str(entry.get("about") or entry["name"]), tool, turns))
    return tuple(found)
