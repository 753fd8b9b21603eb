"""Teachers: one module each, with NAME and open_teacher(options, split), which returns a Teacher.

A failed batch raises BatchFailed (the batch is repeated), RateLimited (it is repeated after a wait)
or an AnnieError, which ends the run; earlier batches are kept in each case.

PromptedTeacher is the base of teachers that are language models. A batch is one prompt and one
answer, a JSON object {"conversations": [{"turns": [...]}]}. Parsing is lenient (fences, text around
the object, JSON lines, a truncated end); the rows are validated strictly later.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from annie_quant.core.errors import UsageError
from annie_quant.core.templates import render_text
from annie_quant.core.untrusted import JsonObject
from annie_quant.data.prompt_rules import rules_of
from annie_quant.documents import ChatCall, ChatMessage, ChatRow
from annie_quant.documents.persona import Category, Persona

AnswerObject = Mapping[str, Any]  # an object in a model's answer, whose fields may have any type


def find_teacher(name: str) -> ModuleType:
    """Import and return the module of the teacher called `name`.

    Raises UsageError that lists all of them.
    """
    available = sorted(m.name for m in pkgutil.iter_modules(__path__))
    module = name.replace("-", "_")
    if module not in available:
        others = ", ".join(part.replace("_", "-") for part in available)
        raise UsageError(f"there is no teacher called {name!r}", f"choose one of: {others}")
    return importlib.import_module(f"{__name__}.{module}")


@dataclass(frozen=True)
class Options:
    """How a teacher is called.

    model, url: None for the teacher's default.
    timeout_s: per batch.
    batch_size: conversations per batch.
    max_usd: budget of the whole run; None without one.
    """

    model: str | None = None
    url: str | None = None
    timeout_s: float = 300.0
    batch_size: int = 10
    max_usd: float | None = None


@dataclass
class TeacherBatch:
    """rows: conversations with messages, tools (where offered) and thinking.

    cost_usd: None where it is not known.
    """

    rows: list[ChatRow]
    cost_usd: float | None = None
    tokens: int = 0


class Teacher(Protocol):
    """model: recorded in the provenance of each row."""

    model: str
    batch_size: int

    def categories(self, persona: Persona) -> tuple[Category, ...]:
        """Return the persona's categories that this teacher can write. Raises UsageError for none."""

    def batch(
        self, persona: Persona, category: Category, count: int, seed: str, avoid: Sequence[str]
    ) -> TeacherBatch:
        """Return at most `count` conversations of a category.

        avoid: user texts that must not be repeated.
        """


class BatchFailed(Exception):
    """One batch failed; a retry may succeed. It may have cost something."""

    def __init__(self, message: str, cost_usd: float | None = None, tokens: int = 0) -> None:
        super().__init__(message)
        self.cost_usd = cost_usd
        self.tokens = tokens


class RateLimited(Exception):
    """The teacher requires a pause. wait_s: its length, or None where it is not known."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


MAX_AVOID = 30  # earlier texts that a prompt lists as not to be repeated


@dataclass
class ModelReply:
    """A model's answer.

    value: the parsed object, where the program returns one; else the object is in `text`.
    truncated: whether the token limit ended the answer.
    """

    text: str
    value: Any = None
    truncated: bool = False
    cost_usd: float | None = None
    tokens: int = 0


class PromptedTeacher:
    """Base of a teacher that implements ask."""

    model: str
    batch_size: int

    def ask(self, prompt: str, schema: JsonObject) -> ModelReply:
        """Send the prompt. schema: JSON schema of the answer, for models that accept one."""
        raise NotImplementedError

    def categories(self, persona: Persona) -> tuple[Category, ...]:
        """Return all categories: the model reads the prompt."""
        return persona.categories

    def batch(
        self, persona: Persona, category: Category, count: int, seed: str, avoid: Sequence[str]
    ) -> TeacherBatch:
        reply = self.ask(prompt_for(persona, category, count, avoid), schema_for(persona, category))
        answers = conversations(reply.value if reply.value is not None else reply.text)
        candidates = [to_row(answer, persona, category) for answer in answers]
        rows = [row for row in candidates if row is not None]
        if not rows:
            start = f"it begins with {reply.text[:60]!r}" if reply.text else "it is empty"
            reason = "it is truncated" if reply.truncated else start
            raise BatchFailed(
                f"no conversation in the answer: {reason}", reply.cost_usd, reply.tokens
            )
        return TeacherBatch(rows[:count], reply.cost_usd, reply.tokens)


def prompt_for(persona: Persona, category: Category, count: int, avoid: Sequence[str]) -> str:
    """Return the prompt of a batch."""
    tool = persona.tool(category.tool) if category.tool else None
    turn: JsonObject = {"user": "the user's message"}
    if tool:
        arguments = "an object that fits the tool's parameters"
        turn |= {
            "call": {"name": tool["name"], "arguments": arguments},
            "result": "the text that the tool returns",
        }
    turn["assistant"] = f"{persona.name}'s answer" + (" after the result" if tool else "")
    return render_text(
        "teacher.txt",
        persona=persona,
        category=category,
        count=count,
        tool=tool,
        avoid=avoid[-MAX_AVOID:],
        confirmed=category.tool in rules_of(persona).confirmed,
        form={"conversations": [{"turns": [turn]}]},
    )


def schema_for(persona: Persona, category: Category) -> JsonObject:
    """Return the JSON schema of an answer. A call that must be confirmed has one more turn."""
    most = category.turns + (category.tool in rules_of(persona).confirmed)
    text: JsonObject = {"type": "string"}
    call = _object(
        ["name", "arguments"], name={"const": category.tool}, arguments={"type": "object"}
    )
    optional: dict[str, JsonObject] = {"call": call, "result": text} if category.tool else {}
    turn = _object(["user", "assistant"], user=text, assistant=text, **optional)
    turns = {"type": "array", "items": turn, "minItems": category.turns, "maxItems": most}
    conversations = {"type": "array", "items": _object(["turns"], turns=turns)}
    return _object(["conversations"], conversations=conversations)


def _object(required: list[str], **properties: JsonObject) -> JsonObject:
    return {"type": "object", "properties": properties, "required": required}


def conversations(answer: object) -> Iterator[AnswerObject]:
    """Yield every complete conversation in an answer: an object, or text that has such objects in it."""
    if isinstance(answer, str):
        decoder = json.JSONDecoder()
        at = 0
        while (at := answer.find("{", at)) >= 0:
            try:
                value, end = decoder.raw_decode(answer, at)
            except ValueError:
                at += 1  # the outer object of a truncated answer; complete objects inside it still count
                continue
            inner = list(conversations(value))
            yield from inner
            at = end if inner else at + 1
    elif isinstance(answer, list):
        for item in answer:
            yield from conversations(item)
    elif isinstance(answer, Mapping):
        if isinstance(answer.get("turns"), list):
            yield answer
        elif isinstance(answer.get("conversations"), list):
            yield from conversations(answer["conversations"])


def to_row(answer: AnswerObject, persona: Persona, category: Category) -> ChatRow | None:
    """Return a conversation as a row; None if it does not have the requested form."""
    messages: list[ChatMessage] = [{"role": "system", "content": persona.system_prompt}]
    try:
        for turn in answer["turns"]:
            messages += _turn(turn)
    except (KeyError, TypeError, AttributeError):
        return None
    row: ChatRow = {"messages": messages, "thinking": False}
    if category.tool:
        row["tools"] = [dict(t) for t in persona.tools]
    return row


def _turn(turn: AnswerObject) -> Iterator[ChatMessage]:
    yield {"role": "user", "content": str(turn["user"]).strip()}
    if turn.get("call"):
        yield {"role": "assistant", "content": "", "tool_calls": [_call(turn["call"])]}
        yield {"role": "tool", "content": str(turn["result"]).strip()}
    yield {"role": "assistant", "content": str(turn["assistant"]).strip()}


def _call(call: AnswerObject) -> ChatCall:
    function = call.get("function") or call
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", "function": {"name": str(function["name"]), "arguments": text}}
