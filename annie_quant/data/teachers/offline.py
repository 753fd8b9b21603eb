"""The built-in teacher: templates and seeded choices, without a model or a network.

Every row's provenance names it.

Annie's categories have their own templates (data/exchanges.py). A category of any other persona
that has a tool gets requests made from the tool's JSON schema (data/tool_exchanges.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from annie_quant.core.errors import UsageError
from annie_quant.data import exchanges
from annie_quant.data.teachers import Options, TeacherBatch
from annie_quant.data.tool_exchanges import draw_exchange, impossible_request, messages_of
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

    def check(self, persona: Persona) -> None:
        """Raise UsageError for a category that this teacher cannot write, before anything is written."""
        for category in persona.categories:
            if category.tool is None and category.name not in TEMPLATE_CATEGORIES:
                raise UsageError(
                    f"the offline teacher has no templates for {persona.name}'s category {category.name!r}, "
                    "which has no tool",
                    "use --teacher claude-cli or --teacher openai, or remove the category from the persona file",
                )
            if category.tool is not None:
                self.draw(persona, category, random.Random(0))

    def batch(
        self, persona: Persona, category: Category, count: int, seed: str, avoid: Sequence[str] = ()
    ) -> TeacherBatch:
        self.check(persona)
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
            offered = {t["function"]["name"] for t in persona.tools}
            if has_call or (offered and offered != {*ANNIE_TOOLS} - {None}):
                row["tools"] = [dict(t) for t in persona.tools]
            yield row

    def draw(
        self, persona: Persona, category: Category, rng: random.Random
    ) -> tuple[list[ChatMessage], bool]:
        """Return the messages of one conversation after its system prompt, and whether a tool is called."""
        messages: list[ChatMessage] = []
        if category.tool is not None and not (
            category.name in TEMPLATE_CATEGORIES and category.tool in ANNIE_TOOLS
        ):
            for _ in range(category.turns):
                messages += draw_exchange(persona, category.tool, rng, self.split).messages()
            return messages, True
        if category.name == "abstention" and (
            refusal := impossible_request(persona, rng, self.split)
        ):
            return [
                {"role": "user", "content": refusal[0]},
                {"role": "assistant", "content": refusal[1]},
            ], False
        if category.name == "multi_turn":
            turns = exchanges.conversation(rng, self.split)
        else:
            turns = [exchanges.draw_category(category.name, rng, self.split)]
        for turn in turns:
            messages += messages_of(turn, persona)
        return messages, bool(turns[0].tool)


def open_teacher(options: Options, split: str = "calibration") -> Offline:
    return Offline(split)
