"""Two workloads that do not run by default: a growing number of tools, and random words of a fixed length."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from annie_quant.data import exchanges, load_persona

LEVELS = (1, 2, 4, 8, 16, 32, 64)
PROMPTS_PER_LEVEL = 15
RANDOM_CASES, RANDOM_WORDS, RANDOM_ANSWER = (
    100,
    100,
    256,
)  # 100 common words are some 128 tokens of Qwen3.5's

# Two words make a tool: 9 x 7 = 63 tools, none of which is about past conversations.
DEVICES = (
    "lamp",
    "heating",
    "oven",
    "alarm",
    "camera",
    "printer",
    "speaker",
    "garage",
    "sprinkler",
)
ACTIONS = {
    "start": "Turn the {d} on.",
    "stop": "Turn the {d} off.",
    "status": "Say what state the {d} is in.",
    "schedule": "Set the {d} to start at a given time.",
    "rename": "Give the {d} another name.",
    "repair": "Order a repair of the {d}.",
    "manual": "Open the manual of the {d}.",
}


def distractors() -> list[dict[str, Any]]:
    """Return 63 tools of a smart home, in a seeded order."""
    tools = []
    for device in DEVICES:
        for action, text in ACTIONS.items():
            argument = {"start": "minutes", "schedule": "time", "rename": "name"}.get(
                action, "room"
            )
            kind = "integer" if argument == "minutes" else "string"
            tools.append(
                {
                    "type": "function",
                    "function": {
                        "name": f"{device}_{action}",
                        "description": text.format(d=device),
                        "parameters": {
                            "type": "object",
                            "properties": {argument: {"type": kind}},
                            "required": [argument],
                        },
                    },
                }
            )
    random.Random("tools").shuffle(tools)
    return tools


def surface_cases() -> list[dict[str, Any]]:
    """Return the same memory requests for every level; `tools` is the number of tools that are offered."""
    rng, prompts = random.Random("tool_surface"), {}
    while len(prompts) < PROMPTS_PER_LEVEL:
        exchange = exchanges.draw_category("memory", rng, "gate")
        prompts.setdefault(exchange.user, exchange)
    return [
        {
            "id": f"tool_surface-{level:02d}-{i:02d}",
            "messages": [{"role": "user", "content": exchange.user}],
            "expect": {"tool": "search_memory", "arguments": exchange.expect.get("arguments", {})},
            "tools": level,
        }
        for level in LEVELS
        for i, exchange in enumerate(prompts.values())
    ]


def random_cases() -> list[dict[str, Any]]:
    rng = random.Random("random_128_256")
    words = sorted(
        {word for device in DEVICES for word in (device, *ACTIONS)} | set(_COMMON.split())
    )
    return [
        {
            "id": f"random-{i:03d}",
            "messages": [{"role": "user", "content": " ".join(rng.choices(words, k=RANDOM_WORDS))}],
        }
        for i in range(RANDOM_CASES)
    ]


_COMMON = (
    "water house river table garden music winter summer letter window number people morning evening market school "
    "doctor flower street friend mountain paper colour bridge story animal coffee orange silver travel village"
)


def build(workload: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    memory = [t for t in load_persona("annie").tools if t["function"]["name"] == "search_memory"]
    return [
        workload(
            "tool_surface",
            "The same request with 1 to 64 tools on offer: where do calls start to fail?",
            surface_cases(),
            "non_empty thinking_leak tool_call tool_arguments",
            tools=[*memory, *distractors()],
            default=False,
        ),
        workload(
            "random_128_256",
            "Some 128 tokens of random words in, 256 out whatever the model thinks of it: speed alone",
            random_cases(),
            "",
            max_tokens=RANDOM_ANSWER,
            persona=None,
            default=False,
            extra={"ignore_eos": True},
        ),
    ]
