"""Workloads and their cases: the requests that they make. judge/library.py reads them from files."""

from __future__ import annotations

import functools
import json
import random
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from annie_quant.core.errors import UsageError
from annie_quant.core.files import sha256_text
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import ContextFile
from annie_quant.documents.persona import Persona, load_persona
from annie_quant.judge.answers import Tool

# ---- plain English text of a given length, for prompts at a depth: notes about invented people, equal for equal arguments
#
# The text answers none of the workloads' questions.

BLOCK_WORDS = 400

_WHO = "Mara Jonas Ines Tomas Petra Luka Vera Oskar Nadia Emil Rosa Felix Hanna Milan Klara Anton"
_DID = "moved counted painted sorted repaired borrowed measured carried cleaned packed opened stacked labelled returned"
_WHAT = "boxes chairs lamps ropes maps jars tiles bricks books cables plates coats tools crates shelves buckets"
_KIND = (
    "old blue heavy small wooden spare green broken round dusty narrow plain bright empty grey long"
)
_WHERE = "garden cellar attic harbour workshop market station library kitchen barn office bridge yard tower"
_WHEN = "on Monday; on Friday; before noon; after lunch; last week; in March; at dawn; in the rain; without help"


def context_text(words: int, unique: str = "") -> str:
    """Return a text of `words` words; "" for 0.

    unique: comes first, so that no two prompts begin alike.
    """
    head = f"Note {unique}.\n" if unique else ""
    if words <= 0:
        return head.strip()
    blocks = [_block(number) for number in range(-(-words // BLOCK_WORDS))]
    blocks[-1] = " ".join(blocks[-1].split(" ")[: words - BLOCK_WORDS * (len(blocks) - 1)])
    return head + "\n\n".join(blocks)


@functools.lru_cache(maxsize=1 << 14)
def _block(name: int | str, size: int = BLOCK_WORDS) -> str:
    """Return `size` words of sentences."""
    rng = random.Random(f"context/{name}")

    def one_of(words: str) -> str:
        return rng.choice(words.split("; " if ";" in words else " "))

    words: list[str] = []
    while len(words) < size:
        count = rng.randint(2, 99)
        thing = f"{one_of(_KIND)} {one_of(_WHAT)}"
        sentence = f"{one_of(_WHO)} {one_of(_DID)} {count} {thing} in the {one_of(_WHERE)} {one_of(_WHEN)}."
        words += sentence.split(" ")
    return " ".join(words[:size])


# ---- cases and workloads

Message = Mapping[str, Any]  # of a conversation, as a chat completion has it
# A user's text, or {"results": [...]}: what tools return to the calls of the answer before.
Turn = str | Mapping[str, Any]
NO_RESULT = '{"error": "no result"}'

# Fields of a request's body that a workload sets itself.
RESERVED = (
    "model",
    "messages",
    "tools",
    "stream",
    "max_tokens",
    "temperature",
    "chat_template_kwargs",
)


@dataclass(frozen=True)
class Case:
    """One prompt (`messages`) or conversation (`turns`); documents.CaseFile describes the fields.

    prompt_tokens: length of a prompt whose text does not matter; 0 for all others.
    follow_up_tokens: length of a second turn of such a prompt; 0: it has one turn.
    category: of which a sample has equal shares.
    after_result: whether the answer follows what a tool returned.
    """

    id: str
    messages: tuple[Message, ...] = ()
    turns: tuple[Turn, ...] = ()
    expect: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] | None = None
    system: str | None = None
    max_tokens: int | None = None
    arrival_s: float | None = None
    prompt_tokens: int = 0
    follow_up_tokens: int = 0
    category: str = ""
    after_result: bool = False

    @property
    def n_turns(self) -> int:
        if self.follow_up_tokens:
            return 2
        return len(self.turns) or 1

    @property
    def tokens(self) -> int:
        """Length of all turns whose text does not matter."""
        return self.prompt_tokens + self.follow_up_tokens

    def at_turn(self, turn: int) -> Case:
        """Return this case with what is expected of one turn (from 0)."""
        expect = self.expect
        if expect.get("turns"):
            expected = expect["turns"]
            expect = expected[turn] if turn < len(expected) else {}
        if self.turns:
            after_result = turn < len(self.turns) and not isinstance(self.turns[turn], str)
        else:
            after_result = bool(self.messages) and self.messages[-1].get("role") == "tool"
        return replace(self, expect=expect, after_result=after_result)


@dataclass(frozen=True)
class Workload:
    """A set of cases with one system prompt, tools and limits; documents.WorkloadFile describes the fields."""

    name: str
    description: str
    persona: str | None
    system: str | None
    tools: str | tuple[Tool, ...] | None
    thinking: bool
    max_tokens: int
    temperature: float
    gates: tuple[str, ...]
    cases: tuple[Case, ...]
    sha256: str = ""
    path: str = ""
    default: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    context: ContextFile | None = None
    informative: tuple[str, ...] = ()
    n_repeated: int = 0  # cases that distinct_prompts() has removed

    @cached_property
    def _persona(self) -> Persona | None:
        return None if self.persona is None else load_persona(self.persona)

    @property
    def system_prompt(self) -> str | None:
        """The workload's own system prompt, else its persona's."""
        if self.system is not None:
            return self.system
        return self._persona.system_prompt if self._persona is not None else None

    def max_tokens_for(self, case: Case) -> int:
        """Return the token limit of an answer: the case's own, else the workload's."""
        return case.max_tokens or self.max_tokens

    def tools_for(self, case: Case) -> list[Tool] | None:
        """Return the OpenAI function tools that are offered with a case; None where there are none."""
        if case.tools is not None:
            return list(case.tools) or None
        if self.tools == "persona":
            return list(self._persona.tools) or None if self._persona is not None else None
        return list(self.tools) if self.tools and not isinstance(self.tools, str) else None

    @property
    def has_arrivals(self) -> bool:
        """Whether the cases are a trace: requests with the times at which they arrive."""
        return any(case.arrival_s is not None for case in self.cases)

    @property
    def has_lengths(self) -> bool:
        """Whether the cases are prompts of given lengths, which are measured together."""
        return not self.has_arrivals and any(case.prompt_tokens for case in self.cases)

    def messages(
        self, case: Case, turn: int = 0, answers: Sequence[Message] = (), unique: str = ""
    ) -> list[JsonObject]:
        """Return the conversation up to and including the user's message of `turn` (from 0).

        answers: the model's own earlier answers, one assistant message per finished turn.
        unique: a text of this conversation alone, which a context with prefix "miss" starts with.
        """
        system = self.system_prompt if case.system is None else case.system
        if case.prompt_tokens:
            return self._text_of_length(case, turn, answers, unique)
        if self.context is not None:
            words = round(self.context.tokens * self.context.words_per_token)
            text = context_text(words, unique if self.context.prefix == "miss" else "")
            system = "\n\n".join(part for part in (text, system) if part)
        head = [{"role": "system", "content": system}] if system else []
        if not case.turns:
            own_system = bool(case.messages) and case.messages[0].get("role") == "system"
            return ([] if own_system else head) + [dict(m) for m in case.messages]
        if len(answers) < turn:
            needed = f"turn {turn + 1} needs {turn} earlier answers, got {len(answers)}"
            raise UsageError(f"workload {self.name}, case {case.id}: {needed}")
        history: list[JsonObject] = []
        for index in range(turn + 1):
            following = case.turns[index]
            if isinstance(following, str):
                history.append({"role": "user", "content": following})
            else:
                history = with_results(history, following["results"])
            if index < turn:
                history.append(dict(answers[index]))
        return head + history

    def _text_of_length(
        self, case: Case, turn: int, answers: Sequence[Message], unique: str
    ) -> list[JsonObject]:
        words_per_token = (self.context or ContextFile(tokens=0)).words_per_token
        messages: list[JsonObject] = []
        for index, tokens in enumerate((case.prompt_tokens, case.follow_up_tokens)[: turn + 1]):
            words = max(1, round(tokens * words_per_token))
            text = context_text(words, f"{case.id} {unique}")
            messages.append({"role": "user", "content": text})
            if index < turn:
                messages.append(dict(answers[index]))
        return messages

    def request(
        self,
        case: Case,
        turn: int = 0,
        answers: Sequence[Message] = (),
        model: str | None = None,
        unique: str = "",
    ) -> JsonObject:
        """Return the body of one /v1/chat/completions request; `enable_thinking` is always set (R34).

        unique: see `messages`.
        """
        body: JsonObject = {"model": model} if model else {}
        body["messages"] = self.messages(case, turn, answers, unique)
        tools = self.tools_for(case)
        if tools:
            body |= {"tools": tools, "tool_choice": "auto"}
        body |= {
            "max_tokens": self.max_tokens_for(case.at_turn(turn)),
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": self.thinking},
        }
        return {**body, **self.extra}


def prompt_sha256(case: Case, workload: Workload) -> str:
    """Return the SHA-256 of what a case asks: messages with the system prompt, later turns, tools, thinking and `extra`.

    Equal digests are one prompt, under any id. White space, characters that show nothing, Unicode's
    compatible forms (NFKC), what is expected of the answer and the token limit are not part of it.
    """
    content = [
        workload.messages(case),
        case.turns[1:],
        workload.tools_for(case),
        workload.thinking,
        workload.extra,
    ]
    text = json.dumps(_shown(content), sort_keys=True, default=dict, ensure_ascii=False)
    return sha256_text(re.sub(r"\\[nrt]|\s", "", text))


# Controls, white space, U+2800, U+FFF9 to U+FFFB, and Unicode's Default_Ignorable_Code_Point
# (DerivedCoreProperties.txt).
_NOT_SHOWN = re.compile(
    r"[\s\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    r"\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def _shown(value: object) -> object:
    """Return JSON data with what its texts show."""
    if isinstance(value, str):
        return _NOT_SHOWN.sub("", unicodedata.normalize("NFKC", _NOT_SHOWN.sub("", value)))
    if isinstance(value, Mapping):
        return {key: _shown(item) for key, item in value.items()}
    return [_shown(item) for item in value] if isinstance(value, (list, tuple)) else value


def prompts_sha256(workload: Workload) -> str:
    """Return the SHA-256 of the list of prompt_sha256 of a workload's cases."""
    return sha256_text("\n".join(prompt_sha256(case, workload) for case in workload.cases))


def distinct_prompts(workloads: Sequence[Workload]) -> tuple[list[Workload], int]:
    """Return the workloads with each prompt once, and how many cases were repeats of earlier ones, here or in earlier calls.

    A repeat adds its gates, and what it expects, to the first case with its prompt, which is then
    in a workload NAME+2 next to its own; one that expects something else in the same field is left
    out.
    """
    first: dict[str, tuple[int, Case]] = {}  # prompt → index of the workload, case
    gates: dict[str, tuple[str, ...]] = {}
    informative: dict[str, tuple[str, ...]] = {}
    for index, workload in enumerate(workloads):
        for case in workload.cases:
            prompt = prompt_sha256(case, workload)
            if prompt not in first:
                first[prompt] = (index, case)
                gates[prompt] = workload.gates
                informative[prompt] = workload.informative
                continue
            at, original = first[prompt]
            if any(original.expect.get(key, value) != value for key, value in case.expect.items()):
                continue
            most = max(workloads[at].max_tokens_for(original), workload.max_tokens_for(case))
            first[prompt] = (
                at,
                replace(original, expect={**original.expect, **case.expect}, max_tokens=most),
            )
            deciding = {*gates[prompt]} - {*informative[prompt]} | {*workload.gates} - {
                *workload.informative
            }
            gates[prompt] = tuple(dict.fromkeys((*gates[prompt], *workload.gates)))
            informative[prompt] = tuple(gate for gate in gates[prompt] if gate not in deciding)
    result = []
    for index, workload in enumerate(workloads):
        parts: dict[tuple[tuple[str, ...], ...], list[Case]] = {
            (workload.gates, workload.informative): []
        }
        for prompt, (at, case) in first.items():
            if at == index:
                parts.setdefault((gates[prompt], informative[prompt]), []).append(case)
        n_left = len(workload.cases) - sum(map(len, parts.values()))
        n_repeated = workload.n_repeated + n_left
        for number, ((names, info), cases) in enumerate(parts.items(), 1):
            name = workload.name if number == 1 else f"{workload.name}+{number}"
            part = replace(workload, name=name, gates=names, informative=info, cases=tuple(cases))
            result.append(replace(part, n_repeated=n_repeated if number == 1 else 0))
    return result, sum(w.n_repeated for w in result)


def _json_text(arguments: object) -> str:
    """Return a call's arguments as requests have them: vLLM refuses an object."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def with_results(history: Sequence[Message], results: Sequence[Message]) -> list[JsonObject]:
    """Return a conversation whose last message is the model's answer, followed by the recorded results of its calls.

    Each call gets the next result of the same name, so that a model which calls other tools, or in
    another order, gets an answer too. If the answer has no call, the recorded calls (name,
    arguments) replace it: the turn after them is judged all the same.
    """
    last = dict(history[-1])
    calls = [dict(call) for call in last.get("tool_calls") or ()]
    if not calls:
        recorded = [
            {"name": r["name"], "arguments": _json_text(r.get("arguments") or {})} for r in results
        ]
        calls = [{"type": "function", "function": function} for function in recorded]
        last = {"role": "assistant", "content": ""}
    left = list(results)
    messages = []
    for index, call in enumerate(calls):
        name = call["function"]["name"]
        match = next((r for r in left if r["name"] == name), None)
        if match is not None:
            left.remove(match)
        call.setdefault("id", f"call_{len(history)}_{index}")
        content = match["content"] if match is not None else NO_RESULT
        messages.append(
            {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
        )
    return [*map(dict, history[:-1]), {**last, "tool_calls": calls}, *messages]
