"""Write annie_quant/assets/workloads from the gate split of the built-in conversations. The same files at every run.

python training/tiny_annie/workloads.py
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import surface  # noqa: E402

from annie_quant.core.files import write_json  # noqa: E402
from annie_quant.data import exchanges, load_persona  # noqa: E402
from annie_quant.data.exchanges import PHRASES, Exchange  # noqa: E402

FOLDER = ROOT / "annie_quant" / "assets" / "workloads"
HARDENED = (
    "You are Annie. CRITICAL RULES (violations cause errors):\n1. NEVER output thinking, reasoning, or analysis text\n"
    "2. NEVER use markdown: no **, no #, no -, no backticks, no numbered lists\n"
    "3. When tools are needed, emit ONLY the tool_call with no explanatory text\n"
    "4. Respond in 1-3 sentences maximum\n5. Be warm and conversational"
)
BRIEFING_NOTES = 90


def briefing(rng: random.Random, split: str) -> str:
    """Return the persona's prompt with about 2,000 tokens of notes, as at the start of a day."""
    notes = []
    for _ in range(BRIEFING_NOTES):
        topic, day = rng.choice(exchanges.MY_TOPICS[split]), rng.choice(exchanges.WORDS.days)
        line = rng.choice(PHRASES.memory_results).format(t=topic, day=day, n=rng.randint(2, 9))
        notes.append(exchanges.capitalized(line) + ".")
    return load_persona("annie").system_prompt + "\n\nNotes from past talks:\n" + "\n".join(notes)


def distinct(
    make: Callable[[random.Random], Exchange], n: int, seed: str, first: tuple[Exchange, ...] = ()
) -> list[Exchange]:
    """Return n exchanges with different user texts: `first`, then drawn ones.

    Raises ValueError where `make` has too few of them: a gate of fewer prompts could not be decided.
    """
    rng, by_text = random.Random(seed), {t.user: t for t in first}
    for _ in range(200 * n):
        if len(by_text) >= n:
            break
        exchange = make(rng)
        by_text.setdefault(exchange.user, exchange)
    if len(by_text) < n:
        raise ValueError(
            f"{seed}: {len(by_text)} different prompts in {200 * n} draws, expected {n}"
        )
    return list(by_text.values())


def cases(
    prefix: str,
    drawn: list[Exchange],
    keep: tuple[str, ...] = ("contains", "tool", "arguments", "no_tool"),
) -> list[dict]:
    return [
        {
            "id": f"{prefix}-{i:03d}",
            "messages": [{"role": "user", "content": t.user}],
            "expect": {k: v for k, v in t.expect.items() if k in keep},
        }
        for i, t in enumerate(drawn)
    ]


def mixed(*categories: str) -> Callable[[random.Random], Exchange]:
    return lambda rng: exchanges.draw_category(rng.choice(categories), rng, "gate")


def workload(
    name: str, description: str, rows: list[dict], gates: str, max_tokens: int = 80, **more: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "persona": "annie",
        "system": None,
        "tools": None,
        "thinking": False,
        "max_tokens": max_tokens,
        "temperature": 0,
        "gates": gates.split(),
        **more,
        "cases": rows,
    }


MANNERS = "non_empty no_markdown thinking_leak repetition stop"


def build() -> list[dict[str, Any]]:
    draw = exchanges.draw_category
    tokyo = exchanges.fact("capital", "Japan", "Tokyo", "What is the capital of Japan?")
    boxes = Exchange(
        "reasoning",
        "I have 3 boxes with 5 balls each. How many balls do I have?",
        "",
        "",
        "balls",
        "15",
        {"contains": ["15"]},
    )
    conversations = []
    for i in range(40):
        conversation = exchanges.conversation(random.Random(f"multi_turn:{i}"), "gate")
        expect = [dict(t.expect) for t in conversation]
        conversations.append(
            {
                "id": f"multi_turn-{i:03d}",
                "turns": [t.user for t in conversation],
                "expect": {"turns": expect},
            }
        )
    notes = briefing(random.Random("briefing"), "gate")
    return [
        workload(
            "greeting",
            "Hello and small talk",
            cases("greeting", distinct(mixed("greeting"), 120, "greeting")),
            MANNERS,
        ),
        workload(
            "factual",
            "One known fact",
            cases("factual", distinct(mixed("factual"), 160, "factual", (tokyo,))),
            MANNERS + " factual",
        ),
        workload(
            "conversational",
            "A feeling, and a kind answer",
            cases("conversational", distinct(mixed("conversational"), 120, "conversational")),
            MANNERS,
        ),
        workload(
            "reasoning",
            "A small sum in words",
            cases("reasoning", distinct(mixed("reasoning"), 160, "reasoning", (boxes,))),
            MANNERS + " reasoning",
        ),
        workload(
            "long_response",
            "Seven sentences in plain prose",
            cases("long_response", distinct(mixed("long_response"), 100, "long")),
            MANNERS,
            max_tokens=240,
        ),
        workload(
            "tool_memory",
            "Past talks: search_memory must be called, on topics that no training row holds",
            cases("tool_memory", distinct(mixed("memory"), 120, "memory")),
            "non_empty thinking_leak tool_call tool_arguments tool_call_raw",
            tools="persona",
        ),
        workload(
            "tool_web",
            "Current events: web_search must be called, on topics that no training row holds",
            cases("tool_web", distinct(mixed("web"), 120, "web")),
            "non_empty thinking_leak tool_call tool_arguments tool_call_raw",
            tools="persona",
        ),
        workload(
            "multi_turn",
            "Five turns: hello, a question, one that leans on it, small talk or a sum, goodbye",
            conversations,
            MANNERS + " recall",
        ),
        workload(
            "briefing",
            "A system prompt of some 2,000 tokens",
            cases(
                "briefing",
                distinct(
                    lambda r: draw(r.choice(("factual", "greeting", "conversational")), r, "gate"),
                    100,
                    "briefing",
                ),
                keep=(),
            ),
            MANNERS,
            system=notes,
        ),
        workload(
            "thinking_on",
            "Thinking allowed: it stays in its own field",
            cases(
                "thinking_on",
                distinct(
                    mixed("factual", "reasoning", "greeting", "conversational"), 120, "thinking_on"
                ),
                keep=(),
            ),
            MANNERS,
            max_tokens=160,
            thinking=True,
        ),
        workload(
            "thinking_off",
            "Questions that tempt to think aloud, with thinking switched off",
            cases(
                "thinking_off",
                distinct(mixed("reasoning", "conversational", "factual"), 120, "thinking_off"),
                keep=(),
            ),
            MANNERS,
            max_tokens=160,
        ),
        workload(
            "abstention",
            "Requests that no tool on offer can fill",
            cases("abstention", distinct(mixed("abstention"), 120, "abstention")),
            "non_empty no_markdown thinking_leak abstention",
            tools="persona",
        ),
        workload(
            "hardened_prompt",
            "The original plan's quick test: rules in capitals",
            cases(
                "hardened_prompt",
                distinct(
                    mixed("factual", "reasoning", "greeting", "conversational"),
                    120,
                    "hardened",
                    (tokyo,),
                ),
                keep=(),
            ),
            MANNERS,
            system=HARDENED,
        ),
        *surface.build(workload),
    ]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for document in build():
        write_json(FOLDER / f"{document['name']}.json", document)
        print(f"{document['name']}: {len(document['cases'])} cases")


if __name__ == "__main__":
    main()
