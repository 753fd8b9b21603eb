"""Personas: the assistant as a JSON file with name, system_prompt and optional tools, rules and examples.

`annie-quant init` writes one from a system prompt and a list of tools. `markdown` states whether
answers may have markdown; without it, a system prompt or rules that mention markdown forbid it.
`categories` is optional: [{"name", "tool"?, "turns"?, "about"?}]. Without it a persona has
greeting, factual, one category per tool (search_memory: memory,
web_search: web, any other tool by its own name) and multi_turn with five turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from annie_quant.core.errors import UsageError
from annie_quant.core.files import ASSETS, exists, is_folder, sha256_text
from annie_quant.core.json_schema import schema_fault

PERSONAS_FOLDER = ASSETS / "personas"
PERSONA_FILE = "persona.json"
MULTI_TURN_TURNS = 5
Tool = Mapping[str, Any]  # an OpenAI function tool, or its `function`
TOOL_CATEGORIES = {
    "search_memory": ("memory", "the user asks about something from an earlier conversation"),
    "web_search": ("web", "the user asks about current events, news, weather or prices"),
}


class Category(msgspec.Struct, frozen=True):
    """A kind of conversation.

    about: what it is about, for the teacher's prompt.
    tool: the tool that must be called; None: none may be called.
    turns: number of user turns.
    """

    name: str
    about: str | None = None
    tool: str | None = None
    turns: Annotated[int, msgspec.Meta(ge=1)] = 1


class Persona(msgspec.Struct, frozen=True):
    """A persona file as it was read.

    tools: OpenAI function tools.
    examples: conversations that show the style.
    sha256: of the file, recorded with data made for it.
    source: the name or path that it was loaded by.
    """

    name: str
    system_prompt: str
    tools: tuple[Tool, ...] = ()
    rules: tuple[str, ...] = ()
    examples: tuple[Mapping[str, Any], ...] = ()
    markdown: bool | None = None
    categories: Annotated[tuple[Category, ...], msgspec.Meta(min_length=1)] = ()
    sha256: str = ""
    source: str = ""

    @property
    def prompt_sha256(self) -> str:
        """SHA-256 of the system prompt.

        Rows record it: data with an outdated prompt spoils a fine-tune.
        """
        return sha256_text(self.system_prompt)

    @property
    def forbids_markdown(self) -> bool:
        if self.markdown is not None:
            return not self.markdown
        return any("markdown" in text.lower() for text in (self.system_prompt, *self.rules))

    @property
    def is_built_in(self) -> bool:
        return "/" not in self.source and exists(PERSONAS_FOLDER / f"{self.source}.json")

    @property
    def folder(self) -> Path | None:
        """The folder of the persona's file, where `annie-quant init` puts its workloads; None for a built-in persona."""
        if not self.source or self.is_built_in:
            return None
        path = Path(self.source)
        return path if is_folder(path) else path.parent

    def tool(self, name: str) -> Tool | None:
        """Return the `function` object of the tool called `name`, or None."""
        return next((t["function"] for t in self.tools if t["function"]["name"] == name), None)

    def category(self, name: str) -> Category | None:
        return next((c for c in self.categories if c.name == name), None)


def built_in() -> list[str]:
    """Return the names of the personas of this package."""
    return sorted(file.stem for file in PERSONAS_FOLDER.glob("*.json"))


def load_persona(persona: str | Path) -> Persona:
    """Return a built-in persona by name, or the persona of a JSON file, or of a folder that has a persona.json.

    Raises UsageError that names the file and the field.
    """
    path = Path(persona)
    if is_folder(path):
        path = path / PERSONA_FILE
    elif path.suffix != ".json" and len(path.parts) == 1:
        path = PERSONAS_FOLDER / f"{persona}.json"
        if path.stem not in built_in():
            hint = f"choose one of: {', '.join(built_in())}; or a JSON file, or a folder (annie-quant init)"
            raise UsageError(f"unknown persona {persona!r}", hint)
    try:
        modified_ns = path.stat().st_mtime_ns
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"persona file {path} cannot be read: {reason}") from error
    return _read(path, modified_ns, str(persona))


@lru_cache(maxsize=16)
def _read(path: Path, modified_ns: int, source: str) -> Persona:
    try:
        text = path.read_text(encoding="utf-8")
        persona = msgspec.json.decode(text, type=Persona)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"persona file {path.name}: {error}",
            f"compare it with {PERSONAS_FOLDER / 'annie.json'}",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"persona file {path} is not JSON: {error}") from error
    for index, tool in enumerate(persona.tools):
        _check_tool(path, index, tool)
    tools = [tool["function"]["name"] for tool in persona.tools]
    categories = _check_categories(path, persona.categories, tools) or default_categories(tools)
    return msgspec.structs.replace(
        persona, categories=categories, sha256=sha256_text(text), source=source
    )


def _check_tool(path: Path, index: int, tool: Tool) -> None:
    function = tool.get("function")
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        message = f"persona file {path.name}: tools[{index}] is not an OpenAI function tool"
        raise UsageError(
            message, '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
        )
    fault = schema_fault(function.get("parameters") or {})
    if fault:
        raise UsageError(
            f"persona file {path.name}: tools[{index}]: the parameters of {function['name']} are not a JSON schema: "
            f"{fault}"
        )


def default_categories(tools: list[str]) -> tuple[Category, ...]:
    """Return the categories of a persona that names none."""
    categories = [
        Category("greeting", "greetings and small talk about the day"),
        Category("factual", "questions of general knowledge that have one short, certain answer"),
    ]
    for tool in tools:
        name, about = TOOL_CATEGORIES.get(
            tool, (tool, f"the user asks for something that only {tool} can do")
        )
        categories.append(Category(name, about, tool))
    about = "a longer conversation in which each turn depends on the turns before"
    return (*categories, Category("multi_turn", about, turns=MULTI_TURN_TURNS))


def _check_categories(
    path: Path, categories: tuple[Category, ...], tools: list[str]
) -> tuple[Category, ...]:
    names: set[str] = set()
    for index, category in enumerate(categories):
        where = f"persona file {path.name}: categories[{index}]"
        if category.tool is not None and category.tool not in tools:
            raise UsageError(
                f"{where}: the persona has no tool {category.tool!r}",
                f"its tools: {', '.join(tools)}",
            )
        if category.name in names:
            raise UsageError(
                f"{where}: the name {category.name!r} is used twice",
                "give each category its own name",
            )
        names.add(category.name)
    return tuple(msgspec.structs.replace(c, about=c.about or c.name) for c in categories)
