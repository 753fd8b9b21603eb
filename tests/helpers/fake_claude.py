"""A fake `claude` program for tests: it records how it is called and answers as its test's script defines.

FAKE_CLAUDE is a folder: script.json has a list of behaviours, one per call (the last one repeats); calls.jsonl receives argv,
stdin and the working folder's files of each call.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

HELP = """Usage: claude [options] [command] [prompt]
  -p, --print                     Print response and exit
  --model <model>                 Model for the current session
  --output-format <format>        text, json or stream-json
"""
NEWER = """  --json-schema <schema>          JSON Schema
  --max-budget-usd <amount>       Maximum dollar amount
  --no-session-persistence        Do not keep the session
"""
OLD = "Usage: claude [options]\n  -p, --print   Print response\n  --model <model>\n"


def conversation(number: int, turns: int, tool: str | None) -> dict:
    """Return a conversation that is unlike all others: its words are made from its number."""
    word = "".join(chr(97 + (number * 7919 + 104729 * k) % 26) for k in range(7)) + str(number)
    result = []
    for turn in range(turns):
        one = {
            "user": f"Please {word} the {word[::-1]} of part{turn}",
            "assistant": f"That is {word}, gladly.",
        }
        if tool:
            one |= {
                "call": {"name": tool, "arguments": {"query": word}},
                "result": f"{word} was found.",
            }
        result.append(one)
    return {"turns": result}


def main() -> None:
    folder = Path(os.environ["FAKE_CLAUDE"])
    script = json.loads((folder / "script.json").read_text())
    if "--help" in sys.argv:
        help_text = {"old": OLD, "plain": HELP}.get(script.get("help", ""), HELP + NEWER)
        print(help_text)
        return
    prompt = sys.stdin.read()
    log = folder / "calls.jsonl"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    with log.open("a") as file:
        file.write(
            json.dumps(
                {"argv": sys.argv[1:], "stdin": prompt, "cwd": [p.name for p in Path().iterdir()]}
            )
            + "\n"
        )
    steps = script["steps"]
    step = steps[min(before, len(steps) - 1)]
    count = int(re.search(r"Write (\d+) different", prompt)[1])
    turns = int(re.search(r"exactly (\d+) turn", prompt)[1])
    tool = re.search(r"calls (\w+) without any other text", prompt)
    conversations = [conversation(before * 100 + i, turns, tool and tool[1]) for i in range(count)]
    text = json.dumps({"conversations": conversations})
    result = {
        "type": "result",
        "subtype": "success",
        "is_error": False,
        "total_cost_usd": script.get("cost", 0.01),
    }
    result |= {
        "usage": {"output_tokens": 500},
        "stop_reason": "end_turn",
        **script.get("fields", {}),
    }
    kind = step["do"]
    if kind == "hang":
        time.sleep(600)
    if kind == "fences":
        text = "Here they are:\n```json\n" + text + "\n```\nEnjoy!"
    if kind == "lines":
        text = "\n".join(json.dumps(c) for c in conversations)
    if kind == "cut":
        text, result["stop_reason"] = text[: len(text) * 2 // 3], "max_tokens"
    if kind == "broken":
        text = text.replace('"turns"', "turns")
    if kind == "not_json":
        print("Segmentation fault (core dumped)")
        return
    if kind == "exit":
        print(step.get("out", ""))
        print(step.get("err", ""), file=sys.stderr)
        sys.exit(step.get("code", 1))
    if kind == "error":
        error = {"is_error": True, "subtype": "error_during_execution", "result": step["text"]}
        print(json.dumps(result | error | script.get("fields", {})))
        sys.exit(step.get("code", 1))
    if kind == "markdown":
        text = text.replace("That is", "**That** is")
    if kind == "structured":
        print(json.dumps(result | {"result": "", "structured_output": json.loads(text)}))
        return
    if kind == "verbose":
        print(json.dumps([{"type": "system"}, result | {"result": text}]))
        return
    print(json.dumps(result | {"result": text}))


main()
