"""Write the conversations that train.py reads: train.jsonl and held_out.jsonl.

    python training/real_annie/conversations.py DIR [--n 1000] [--seed 1]

train.jsonl      n conversations per persona (annie, home, support) by the offline teacher, split "train": {messages, tools}
held_out.jsonl   prompts of the built-in workloads, split "gate": {id, group, messages, tools, expect, max_tokens}

group: tool_call (one call is expected: a name and its arguments), no_tool (no tool fits), talk. No user text and no free
value of an argument (a word, name or topic; not numbers, times of day and values of an enum) is in both splits. The same arguments
give the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from annie_quant import data
from annie_quant.data.rows import read_conversations
from annie_quant.data.workloads import resolve

PERSONAS = ("annie", "home", "support")
GROUPS = {
    "tool_call": ("tool_memory", "tool_web", "tool_calls"),
    "no_tool": ("abstention", "no_tool"),
    "talk": ("greeting", "factual", "conversational", "reasoning", "thinking_off", "talk"),
}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    print(f"{path.name}: {len(rows)} rows")


def with_decoded_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its calls as JSON values: chat templates print text with its quotes."""
    calls = [c["function"] for c in message.get("tool_calls") or ()]
    if not calls:
        return message
    decoded = [{"name": f["name"], "arguments": json.loads(f["arguments"])} for f in calls]
    return message | {"tool_calls": [{"type": "function", "function": f} for f in decoded]}


def training_rows(folder: Path, n: int, seed: int) -> list[dict[str, Any]]:
    """Return n conversations per persona, without those that think, in the order of a seeded shuffle."""
    rows: list[dict[str, Any]] = []
    for name in PERSONAS:
        file = folder / f"{name}.jsonl"
        data.generate(name, n=n, output=file, split="train", seed=seed, force=True)
        rows += [
            {
                "messages": [with_decoded_arguments(m) for m in r["messages"]],
                "tools": r.get("tools"),
            }
            for r in read_conversations(file)
            if not r.get("thinking")
        ]
        file.unlink()
    random.Random(seed).shuffle(rows)
    return rows


def held_out_rows(each: int) -> list[dict[str, Any]]:
    """Return up to `each` prompts of each workload of one turn."""
    rows = []
    for persona in PERSONAS:
        for workload in resolve(persona=persona):
            group = next((g for g, names in GROUPS.items() if workload.name in names), None)
            for case in workload.cases[:each] if group else ():
                tools = workload.tools_for(case)
                rows.append(
                    {
                        "id": f"{persona}/{case.id}",
                        "group": group,
                        "messages": [dict(m) for m in workload.messages(case)],
                        "tools": None if tools is None else [dict(t) for t in tools],
                        "expect": dict(case.expect),
                        "max_tokens": workload.max_tokens_for(case),
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--n", type=int, default=1000, help="conversations per persona")
    parser.add_argument(
        "--each", type=int, default=100, help="held-out prompts per workload, at most"
    )
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    write(a.folder / "train.jsonl", training_rows(a.folder, a.n, a.seed))
    write(a.folder / "held_out.jsonl", held_out_rows(a.each))


if __name__ == "__main__":
    main()
