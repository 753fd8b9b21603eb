"""`annie-quant data --behaviour`: prompts that ask for one behaviour, which the model itself answers before calibration.

They have the persona's system prompt and tools, the phrasings of the split "calibration", and no answer. None is a prompt of the
persona's gates, of the file that they are added to, or of another given file. What the model then does is counted in
annie_quant.json (data/behaviours.py): it may call a tool where a prompt asks for none.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from annie_quant.core.errors import UsageError
from annie_quant.core.untrusted import JsonObject
from annie_quant.data import exchanges
from annie_quant.data.behaviours import (
    ADDED_PROMPTS,
    CALLS,
    DECLINES,
    RESULT,
    SEVERAL,
    TALK,
    THINKS,
)
from annie_quant.data.conversations import tool_names
from annie_quant.data.prompt_rules import rules_of
from annie_quant.data.row_rules import PROMPT_TEACHER, user_text
from annie_quant.data.rows import Rows, prompts_of_others, read_rows, store_rows
from annie_quant.data.tool_exchanges import (
    draw_exchange,
    draw_second,
    impossible_request,
    up_to_result,
    with_drawn_tools,
)
from annie_quant.documents import ChatMessage
from annie_quant.documents.persona import Persona, load_persona
from annie_quant.judge import load_workloads

_SPLIT = "calibration"
_BATTERY = "agent_loop"  # the workload whose tools are asked for where a persona has none that fits
ATTEMPTS_PER_PROMPT = 30
TALK_CATEGORIES = ("greeting", "factual", "conversational")


class AddedPrompts(msgspec.Struct, kw_only=True):
    """What was written. added: number of prompts per behaviour. short: those with fewer than were asked for."""

    output: str
    rows: int
    added: dict[str, int]
    short: list[str]


def add_prompts(
    persona: str | Persona,
    behaviours: Sequence[str],
    output: Path,
    n: int = ADDED_PROMPTS,
    add_to: Path | None = None,
    apart_from: Sequence[Path] = (),
    seed: int = 0,
    force: bool = False,
) -> AddedPrompts:
    """Write n prompts per behaviour as JSON lines, after the rows of `add_to`.

    behaviours: "calls", "calls TOOL", "several calls", "answers from a result", "declines", "talk" or "thinks".
    Raises UsageError for another one, for one that no prompt of this persona asks for, and for an output that is in the way.
    """
    who = persona if isinstance(persona, Persona) else load_persona(persona)
    if output.exists() and not force:
        raise UsageError(f"{output} exists", "choose another --output, or add --force")
    rows = read_rows(add_to) if add_to is not None else []
    others: list[Rows] = [rows, *apart_from]
    known = prompts_of_others(others, True, who)
    added: dict[str, int] = {}
    short = []
    for behaviour in dict.fromkeys(behaviours):
        draw = _Draw(who, behaviour)
        rng = random.Random(f"{seed}:{behaviour}")
        prompts: list[JsonObject] = []
        for attempt in range(n * ATTEMPTS_PER_PROMPT):
            if len(prompts) == n:
                break
            row = draw.row(rng, attempt)
            text = "" if row is None else user_text(row)
            if row is not None and known.find(text) is None:
                row["id"] = f"prompt-{behaviour.replace(' ', '-')}-{len(prompts):04d}"
                known.add(row["id"], text)
                prompts.append(row)
        if not prompts:
            raise UsageError(
                f"there is no new prompt that asks {who.name} for {behaviour!r}",
                "annie-quant init --model BF16 writes other conversations",
            )
        if len(prompts) < n:
            short.append(behaviour)
        added[behaviour] = len(prompts)
        rows += prompts
    store_rows(output, rows)
    return AddedPrompts(output=str(output), rows=len(rows), added=added, short=short)


class _Draw:
    """Draws prompts that ask for one behaviour. Raises UsageError where the persona has none."""

    def __init__(self, persona: Persona, behaviour: str) -> None:
        self.persona = persona
        self.behaviour = behaviour
        drawn, undrawn = with_drawn_tools(persona, _SPLIT)
        self.tools = tool_names(drawn.tools)
        if behaviour.startswith(f"{CALLS} "):
            name = behaviour.removeprefix(f"{CALLS} ")
            if name not in self.tools:
                reasons = "; ".join(undrawn) if persona.tool(name) else f"it has no tool {name!r}"
                raise UsageError(
                    f"{persona.name}: no prompt asks for {behaviour!r}: {reasons}",
                    f"--behaviour {CALLS}, or {CALLS} TOOL with one of: {', '.join(self.tools)}",
                )
            self.tools = [name]
        elif behaviour not in (CALLS, SEVERAL, RESULT, DECLINES, TALK, THINKS):
            raise UsageError(
                f"--behaviour {behaviour!r} is not known",
                f'choose one of: {CALLS}, "{CALLS} TOOL", "{SEVERAL}", "{RESULT}", {DECLINES}, {TALK}, {THINKS}',
            )
        if behaviour in (CALLS, SEVERAL, RESULT) and not self.tools:
            raise UsageError(
                f"{persona.name}: no prompt asks for {behaviour!r}: "
                f"{'; '.join(undrawn) or 'it has no tools'}",
                f"--behaviour {TALK}",
            )
        if behaviour == DECLINES and not persona.tools:
            raise UsageError(
                f"{persona.name} has no tools, so there is nothing to decline",
                f"--behaviour {TALK}",
            )
        self.foreign = _foreign_tools(persona) if behaviour == DECLINES else None

    def row(self, rng: random.Random, number: int) -> JsonObject | None:
        """Return a row whose answer is missing; None where another behaviour was drawn.

        number: of the attempt; tools come in turn.
        """
        persona = self.persona
        messages = self._messages(rng, number)
        if not messages:
            return None
        row: JsonObject = {"messages": messages, "thinking": self.behaviour == THINKS}
        if persona.system_prompt:
            system: ChatMessage = {"role": "system", "content": persona.system_prompt}
            row["messages"] = [system, *messages]
        if persona.tools and self.behaviour not in (TALK, THINKS):
            row["tools"] = [dict(tool) for tool in persona.tools]
        row["provenance"] = {
            "teacher": PROMPT_TEACHER,
            "persona": persona.source,
            "prompt_sha256": persona.prompt_sha256,
        }
        row["split"] = _SPLIT
        return row

    def _messages(self, rng: random.Random, number: int) -> list[ChatMessage]:
        if self.behaviour in (TALK, THINKS):
            return [_user(self._talk(rng, number))]
        if self.behaviour == DECLINES:
            return [_user(self._nothing_to_call(rng, number))]
        tool = self.tools[number % len(self.tools)]
        exchange = draw_exchange(self.persona, tool, rng, _SPLIT)
        if self.behaviour == SEVERAL and len(exchange.calls) == 1:
            exchange = draw_second(self.persona, tool, rng, _SPLIT, exchange)
        if (self.behaviour == SEVERAL) != (len(exchange.calls) == 2) and self.behaviour != RESULT:
            return []
        messages = up_to_result(self.persona, exchange)
        if self.behaviour == RESULT:
            return messages
        calls = [at for at, message in enumerate(messages) if message.get("tool_calls")]
        return messages[: calls[0]]  # the user may have to confirm the call first

    def _talk(self, rng: random.Random, number: int) -> str:
        """Return a user's message that asks for words, in the prompt's language."""
        rules = rules_of(self.persona)
        if rules.language != "en" and not self.persona.is_built_in:
            greetings = rules.phrases.greetings[_SPLIT]
            if not greetings:
                raise UsageError(
                    f"there are no phrases in the language of {self.persona.name}'s prompt",
                    "annie-quant init --model BF16 writes conversations",
                )
            return rng.choice(greetings)
        category = TALK_CATEGORIES[number % len(TALK_CATEGORIES)]
        if self.behaviour == THINKS:
            category = ("factual", "reasoning")[number % 2]
        user = exchanges.draw_category(category, rng, _SPLIT).user
        return user.replace("Annie", self.persona.name)

    def _nothing_to_call(self, rng: random.Random, number: int) -> str:
        """Return a request that no tool on offer can fulfil, or talk."""
        if number % 2:
            return self._talk(rng, number)
        if self.foreign is not None:
            names = tool_names(self.foreign.tools)
            tool = names[number // 2 % len(names)]
            return draw_exchange(self.foreign, tool, rng, _SPLIT).user
        refusal = impossible_request(self.persona, rng, _SPLIT)
        if refusal is not None:
            return refusal[0]
        if self.persona.is_built_in:
            return exchanges.draw_category("abstention", rng, _SPLIT).user
        return self._talk(rng, number)


def _foreign_tools(persona: Persona) -> Persona | None:
    """Return the persona with tools that it does not have; None where its prompt is not English."""
    if persona.is_built_in or rules_of(persona).language != "en":
        return None
    battery = load_workloads([_BATTERY])[0].tools
    own = tool_names(persona.tools)
    others = tuple(t for t in battery or () if t["function"]["name"] not in own)  # type: ignore[index]
    drawn, _ = with_drawn_tools(msgspec.structs.replace(persona, tools=others), _SPLIT)
    return drawn if drawn.tools else None


def _user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}
