"""The built-in teacher: templates and seeded choices, without a model or a network.

Every row's provenance names it.

Built-in personas have their own templates (data/exchanges.py). Of any other persona only the forms of calls are written,
made from each tool's JSON schema (data/tool_exchanges.py): its prompt's rules about words are not known to templates.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from annie_quant.core.errors import UsageError
from annie_quant.data import exchanges
from annie_quant.data.conversations import tool_names
from annie_quant.data.teachers import Options, TeacherBatch
from annie_quant.data.tool_exchanges import (
    NO_ARGUMENTS_HINT,
    calls_alone,
    draw_exchange,
    impossible_request,
    messages_of,
    with_drawn_tools,
)
from annie_quant.documents import ChatMessage, ChatRow
from annie_quant.documents.persona import Category, Persona

NAME = "offline"
TEMPLATES_MODEL = "annie_quant templates"
BATCH_SIZE = 500
MAX_CONVERSATION_ATTEMPTS = 200  # attempts to draw a new conversation
TEMPLATE_CATEGORIES = (*exchanges.ANNIE_CATEGORIES, "multi_turn")
ANNIE_TOOLS = (None, "search_memory", "web_search")


class Offline:
    """A teacher that draws from the phrasings and topics of one split; train, calibration and gate share none."""

    model = TEMPLATES_MODEL
    batch_size = BATCH_SIZE

    def __init__(self, split: str = "calibration") -> None:
        self.split = split

    def categories(self, persona: Persona) -> tuple[Category, ...]:
        """Return the categories that this teacher can write: of a persona that is not built in, single calls.

        Its own rules decide about talk, and templates do not read them. Raises UsageError where
        nothing is left.
        """
        chosen = []
        drawn, reasons = with_drawn_tools(persona, self.split)
        for category in persona.categories:
            has_templates = persona.is_built_in and category.name in TEMPLATE_CATEGORIES
            is_call = category.tool is not None and (persona.is_built_in or category.turns == 1)
            if category.tool is not None and drawn.tool(category.tool) is None:
                continue
            if is_call or has_templates:
                chosen.append(category)
        if not chosen and reasons:
            raise UsageError(reasons[0], NO_ARGUMENTS_HINT)
        if not chosen:
            names = ", ".join(category.name for category in persona.categories)
            raise UsageError(
                f"the offline teacher has no templates for {persona.name}'s categories without a tool ({names})",
                "init --model BF16, or --teacher claude-cli or --teacher openai",
            )
        return tuple(chosen)

    def batch(
        self, persona: Persona, category: Category, count: int, seed: str, avoid: Sequence[str] = ()
    ) -> TeacherBatch:
        return TeacherBatch(list(self.conversations(persona, category, count, seed)))

    def conversations(
        self, persona: Persona, category: Category, n: int, seed: str
    ) -> Iterator[ChatRow]:
        """Yield at most n different conversations of a category, the same for the same seed; fewer where there are no more."""
        rng = random.Random(seed)
        drawn: set[str] = set()
        for _ in range(n):
            for _ in range(MAX_CONVERSATION_ATTEMPTS):
                messages, has_call = self.draw(persona, category, rng)
                key = "\n".join(m["content"].lower() for m in messages if m["role"] == "user")
                if key not in drawn:
                    break
            else:
                return
            drawn.add(key)
            row: ChatRow = {
                "messages": [{"role": "system", "content": persona.system_prompt}, *messages],
                "thinking": False,
            }
            # Annie's two tools are offered only where one is called.
            offered = {*tool_names(persona.tools)}
            if has_call or (offered and offered != {*ANNIE_TOOLS} - {None}):
                row["tools"] = [dict(t) for t in persona.tools]
            yield row

    def draw(
        self, persona: Persona, category: Category, rng: random.Random
    ) -> tuple[list[ChatMessage], bool]:
        """Return the messages of one conversation after its system prompt, and whether a tool is called."""
        messages: list[ChatMessage] = []
        if category.tool is not None and not persona.is_built_in:
            return calls_alone(persona, category.tool, rng, self.split), True
        if category.tool is not None and not (
            category.name in TEMPLATE_CATEGORIES and category.tool in ANNIE_TOOLS
        ):
            for _ in range(category.turns):
                messages += draw_exchange(persona, category.tool, rng, self.split).messages()
            return messages, True
        if category.name == "abstention":
            refusal = impossible_request(persona, rng, self.split)
            if refusal is not None:
                user, reply = refusal
                messages.append({"role": "user", "content": user})
                messages.append({"role": "assistant", "content": reply})
                return messages, False
        if category.name == "multi_turn":
            turns = exchanges.conversation(rng, self.split)
        else:
            turns = [exchanges.draw_category(category.name, rng, self.split)]
        for turn in turns:
            messages += messages_of(turn, persona)
        return messages, bool(turns[0].tool)


def open_teacher(options: Options, split: str = "calibration") -> Offline:
    return Offline(split)
