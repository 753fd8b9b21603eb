"""Ladders: the same requests at graded levels of one difficulty; bench/cliffs.py finds the level at which a server breaks.

    ladder("tools", n)      5 to 52 tools on offer, the right one among them at any place
    ladder("tokens", n)     0 to 131,072 tokens of notes before the request
    ladder("poisoned", n)   four calls before the request, of which the last 0 to 4 are malformed
    ladder("steps", n)      chains of twelve calls; the level is the step

A level is one workload, ladder_AXIS_LEVEL, with the same cases as the others; a chain is one workload. Tools are those of a
persona, and those of the workload agent_loop where it has fewer. The answers decide no verdict:
one question at several levels is not several.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

from annie_quant import judge
from annie_quant.core.errors import UsageError
from annie_quant.core.files import sha256_text
from annie_quant.core.untrusted import JsonObject
from annie_quant.data.tool_exchanges import DrawnCall, ToolExchange, action_of, draw_exchange, flattened
from annie_quant.data.workloads import MAX_DRAWS, MAX_TOKENS, SPLIT, expected_call
from annie_quant.documents import ChatCall, ChatMessage, ContextFile
from annie_quant.documents.persona import Persona
from annie_quant.judge.answers import Tool
from annie_quant.judge.workloads import Case, Turn, Workload

STEPS = 12
HISTORY = 4  # calls before the request, on the axis `poisoned`
OFFERED = 16  # tools, on the axes that do not vary them
LEVELS: dict[str, tuple[int, ...]] = {
    "tools": (5, 8, 12, 16, 20, 26, 32, 40, 46, 52),
    "tokens": (0, *(1024 << i for i in range(8))),
    "poisoned": (0, 1, 2, HISTORY),
    "steps": (STEPS,),
}
GATES = ("tool_call", "tool_arguments")
BATTERY = "agent_loop"  # the workload with 52 tools


def ladder(axis: str, n: int, persona: Persona | None = None, seed: int = 0) -> list[Workload]:
    """Return the workloads of one axis, with n cases each. Raises UsageError for an unknown axis."""
    if axis not in LEVELS:
        raise UsageError(f"there is no ladder {axis!r}", f"choose of {', '.join(LEVELS)}")
    battery = judge.load_workloads([BATTERY])[0]
    own = () if persona is None else persona.tools
    names = {tool["function"]["name"] for tool in own}
    shared = battery.tools if isinstance(battery.tools, tuple) else ()
    tools = (*own, *(tool for tool in shared if tool["function"]["name"] not in names))
    who = Persona(
        name=persona.name if persona else "Annie",
        system_prompt=persona.system_prompt if persona else battery.system or "",
        tools=tools,
        source=persona.source if persona else "",
    )
    draws = [_Draw(who, own or tools, axis, index, seed) for index in range(n)]
    return [
        replace(
            battery,
            name="ladder_steps" if axis == "steps" else f"ladder_{axis}_{level}",
            description=f"The same requests at level {level} of the axis {axis}",
            system=who.system_prompt,
            tools=None,
            max_tokens=MAX_TOKENS,
            gates=GATES,
            cases=tuple(draw.case(level) for draw in draws),
            context=ContextFile(tokens=level) if axis == "tokens" and level else None,
            sha256=sha256_text(json.dumps([axis, level, n, seed, who.tools, who.system_prompt], default=dict)),
        )
        for level in LEVELS[axis]
    ]


class _Draw:
    """One case of a ladder: what is the same at all its levels."""

    def __init__(self, persona: Persona, tools: Sequence[Tool], axis: str, index: int, seed: int) -> None:
        rng = random.Random(f"{seed}/{axis}/{index}")
        before = STEPS - 1 if axis == "steps" else HISTORY if axis == "poisoned" else 0
        order = rng.sample(list(tools), len(tools)) if before else tools[index % len(tools) :]
        chosen = [order[i % len(order)] for i in range(before + 1)]
        self.axis, self.id, self.rng = axis, f"{index:02d}", rng
        self.exchanges = [_one_call(persona, tool["function"]["name"], rng) for tool in chosen]
        called = {e.calls[0].name for e in self.exchanges}
        self.called = [tool for tool in persona.tools if tool["function"]["name"] in called]
        self.others = [tool for tool in persona.tools if tool["function"]["name"] not in called]
        rng.shuffle(self.others)

    def case(self, level: int) -> Case:
        count = level if self.axis == "tools" else max(OFFERED, len(self.called))
        offered = [*self.called, *self.others[: count - len(self.called)]]
        random.Random(f"{self.id}/{level if self.axis == 'tools' else ''}").shuffle(offered)
        calls = [e.calls[0] for e in self.exchanges]
        if self.axis == "steps":
            results = [{"name": c.name, "arguments": c.arguments, "content": c.result} for c in calls[:-1]]
            turns: list[Turn] = [_script(calls, offered), *({"results": [row]} for row in results)]
            return Case(
                self.id, turns=tuple(turns), expect={"turns": [expected_call(c) for c in calls]}, tools=tuple(offered)
            )
        history = [_exchanged(e, number, number >= HISTORY - level) for number, e in enumerate(self.exchanges[:-1])]
        asked = [*(m for messages in history for m in messages), {"role": "user", "content": self.exchanges[-1].user}]
        return Case(self.id, messages=tuple(asked), expect=expected_call(calls[-1]), tools=tuple(offered))


def _one_call(persona: Persona, tool: str, rng: random.Random) -> ToolExchange:
    for _ in range(MAX_DRAWS):
        exchange = draw_exchange(persona, tool, rng, SPLIT)
        if len(exchange.calls) == 1:
            break
    return exchange


def _exchanged(exchange: ToolExchange, number: int, malformed: bool) -> list[ChatMessage]:
    """Return an earlier request with its answer; malformed: the call is text and its JSON has no end."""
    drawn = exchange.calls[0]
    user: ChatMessage = {"role": "user", "content": exchange.user}
    if malformed:
        text = json.dumps({"name": drawn.name, "arguments": drawn.arguments})[:-2]
        return [user, {"role": "assistant", "content": f"<tool_call>\n{text}"}]
    call: ChatCall = {**drawn.openai(), "id": f"call_{number}"}
    result: ChatMessage = {"role": "tool", "content": drawn.result, "name": drawn.name, "tool_call_id": call["id"]}
    reply: ChatMessage = {"role": "assistant", "content": exchange.reply}
    return [user, {"role": "assistant", "content": "", "tool_calls": [call]}, result, reply]


def _script(calls: Sequence[DrawnCall], tools: Sequence[Tool]) -> str:
    """Return the request for a chain of calls."""
    documents: dict[str, JsonObject] = {tool["function"]["name"]: tool["function"] for tool in tools}
    lines = [
        f"{number}. {action_of(documents[call.name])}"
        + "".join(f", {name} {value}" for name, value in flattened(call.arguments))
        for number, call in enumerate(calls, 1)
    ]
    return "Do these steps in this order, with one call each, the next one after each result:\n" + "\n".join(lines)
