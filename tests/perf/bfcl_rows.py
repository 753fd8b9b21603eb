"""Calibration conversations of real users: BFCL v4's live prompts, each answered by its first accepted call.

    python tests/perf/bfcl_rows.py rows.jsonl                 # needs the package bfcl-eval
    python tests/perf/bfcl_rows.py rows.jsonl --data DIR/data
    python tests/perf/bfcl_rows.py rows.jsonl --declines      # and the prompts that no tool fits

Every row has one user's prompt, its tools, and the call with the first accepted value of each argument; an argument whose first
value is "" is left out. With --declines the prompts of live_irrelevance follow, answered by a refusal.
The workload bfcl (annie_quant/judge/bfcl.py) has other categories, so no prompt is in both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from annie_quant.judge import bfcl

CATEGORIES = ("live_simple", "live_multiple")
REFUSAL = "None of my tools can do that."


def first_accepted(value: Any) -> Any:
    """Return the first accepted value of a ground truth; in objects each field again has a list of accepted values."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, dict):
        return {k: first_accepted(v) for k, v in first.items() if v and first_accepted(v) != ""}
    if isinstance(first, list):
        return [
            {k: first_accepted(v) for k, v in x.items()} if isinstance(x, dict) else x
            for x in first
        ]
    return first


def rows(root: Path) -> Iterator[dict[str, Any]]:
    for category in CATEGORIES:
        file = f"BFCL_v4_{category}.json"
        truth = {
            row["id"]: row["ground_truth"] for row in bfcl._rows(root / "possible_answer" / file)
        }
        for row in bfcl._rows(root / file):
            calls = []
            for call in truth[row["id"]]:
                for name, values in call.items():
                    arguments = {
                        k: first_accepted(v) for k, v in values.items() if first_accepted(v) != ""
                    }
                    calls.append(
                        {
                            "function": {
                                "name": bfcl._name(name),
                                "arguments": json.dumps(arguments, ensure_ascii=False),
                            }
                        }
                    )
            for number, call in enumerate(calls):
                call |= {"id": f"call_{number}", "type": "function"}
            messages = [
                *row["question"][0],
                {"role": "assistant", "content": "", "tool_calls": calls},
            ]
            yield {
                "messages": messages,
                "tools": [bfcl._tool(f) for f in row["function"]],
                "category": category,
            }


def declines(root: Path) -> Iterator[dict[str, Any]]:
    """Yield the prompts that none of their tools fits, with a refusal."""
    for row in bfcl._rows(root / "BFCL_v4_live_irrelevance.json"):
        yield {
            "messages": [*row["question"][0], {"role": "assistant", "content": REFUSAL}],
            "tools": [bfcl._tool(f) for f in row["function"]],
            "category": "live_irrelevance",
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--data", type=Path, help="the package's folder data")
    parser.add_argument("--declines", action="store_true", help="also live_irrelevance")
    arguments = parser.parse_args()
    root = arguments.data or bfcl._package_data()
    chosen = [*rows(root), *(declines(root) if arguments.declines else ())]
    lines = [json.dumps(row, ensure_ascii=False) for row in chosen]
    arguments.output.write_text("\n".join(lines) + "\n")
    print(f"{arguments.output}: {len(lines)} conversations")


if __name__ == "__main__":
    main()
