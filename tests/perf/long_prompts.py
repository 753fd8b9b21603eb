"""Quantize with conversations whose prompts are long: which rows are used, and what time and memory that takes.

    python tests/perf/long_prompts.py --model annie_quant/assets/tiny-annie --prompt-tokens 2500,8000,16000 --rows 400 \
        --strategies naive,gptq,awq_lite,best --output runs/long_prompts

Rows come from a seed: a system prompt, eight tools with nested schemas, and one to three turns, of which some call a tool. All
rows but each tenth share the prompt and the tools; the others have a prompt of their own with a quarter of the length.
--prompt-tokens 300 is the same rows with a short prompt, for the ratio of times: its tools are the first of the eight alone.

Each strategy runs in a process of its own. Seconds are those of the process, and peak memory is its largest resident set, on a GPU
also torch's largest allocation. The estimate is that of `quantize --dry-run`. The table is printed, and rows.jsonl has its numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHORT = 600  # tokens of a prompt that has one tool
MARGIN_TOKENS = 512  # by which a model's own answer may be longer
OTHER_PROMPT = 10  # each row of this many has a prompt of its own
NOUNS = """
account address answer appointment archive booking branch budget calendar cancel channel
client confirm contract currency customer date deadline default delay delivery depot device
document draft entry event export field file folder form group history holiday hour
identifier import index invoice item label language ledger limit list location manager
member message meter minute month name notice number office option order owner package page
partner payment period person phone plan position price priority process product profile
project question queue reading reason receipt record refund region report request
reservation result return review route row schedule section sender service session shipment
site slot source staff status step store summary supplier table target task team template
ticket time title total transfer unit update user value vehicle version visit volume
warehouse week weight window year zone
"""
WORDS = NOUNS.split()
TOOLS = (
    "create_booking",
    "find_customer",
    "move_shipment",
    "list_invoices",
    "send_reminder",
    "read_meter",
    "plan_route",
    "close_ticket",
)


def sentence(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count)).capitalize() + "."


def tool(rng: random.Random, name: str) -> dict[str, Any]:
    """Return a tool whose arguments are nested objects and lists."""

    def field(depth: int) -> dict[str, Any]:
        kind = rng.choice(
            ("string", "integer", "boolean", "object", "array") if depth else ("string", "integer")
        )
        schema: dict[str, Any] = {"type": kind, "description": sentence(rng, 6)}
        if kind == "object":
            schema["properties"] = {name: field(depth - 1) for name in rng.sample(WORDS, 3)}
        if kind == "array":
            schema["items"] = field(depth - 1)
        return schema

    names = rng.sample(WORDS, 4)
    properties = {name: field(2) for name in names} | {"identifier": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": ["identifier"]}
    return {
        "type": "function",
        "function": {"name": name, "description": sentence(rng, 12), "parameters": parameters},
    }


def conversation(
    rng: random.Random, number: int, system: str, tools: list[dict[str, Any]]
) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": sentence(rng, rng.randint(8, 40))})
        if rng.random() < 0.5:
            name = rng.choice(tools)["function"]["name"]
            arguments = json.dumps({"identifier": rng.choice(WORDS)})
            call = {
                "id": "call_1",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": "call_1",
                    "content": json.dumps({"status": sentence(rng, 8)}),
                }
            )
        messages.append({"role": "assistant", "content": sentence(rng, rng.randint(6, 30))})
    return {
        "id": f"long-{number:04d}",
        "category": f"kind {number % 5}",
        "messages": messages,
        "tools": tools,
    }


def system_of_length(
    rng: random.Random, template: Any, tools: list[dict[str, Any]], tokens: int
) -> str:
    """Return a system prompt that, with the tools, is rendered to about `tokens` tokens, at least the tools' own."""
    text = sentence(rng, 12)
    while True:
        messages = [{"role": "system", "content": text}, {"role": "user", "content": ""}]
        missing = tokens - len(template.tokenize(template.render(messages, tools, False, False)))
        if missing < 20:
            return text
        text += " " + " ".join(sentence(rng, 12) for _ in range(max(1, missing // 40)))


def write_rows(model: Path, tokens: int, count: int, seed: int, file: Path) -> None:
    """Write `count` conversations whose prompts have about `tokens` tokens."""
    from annie_quant.offline.prompts import Template

    rng = random.Random(seed)
    template = Template(model)
    tools = [tool(rng, name) for name in TOOLS]
    tools = tools if tokens > SHORT else tools[:1]
    shared = system_of_length(rng, template, tools, tokens)
    # The turns of a row do not depend on the prompt's length.
    rows = []
    for number in range(count):
        system = shared
        if number % OTHER_PROMPT == OTHER_PROMPT - 1:
            own = random.Random(f"{seed} {number}")
            system = system_of_length(own, template, tools, tokens // 4)
        rows.append(conversation(random.Random(f"{seed} row {number}"), number, system, tools))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def longest_row(model: Path, file: Path) -> int:
    """Return about how many tokens the longest conversation has, with a margin."""
    from annie_quant.data.rows import read_conversations
    from annie_quant.offline.prompts import Template

    template = Template(model)
    rows = read_conversations(file)
    texts = [template.render(row["messages"], row.get("tools"), False, False) for row in rows]
    return max(len(template.ids(text)) for text in texts) + MARGIN_TOKENS


def quantize_once(
    arguments: argparse.Namespace, tokens: int, strategy: str, file: Path
) -> dict[str, Any]:
    """Quantize in this process, and return the row of the table."""
    import torch

    from annie_quant import quantize
    from annie_quant.quantize import estimates

    calib_tokens = longest_row(arguments.model, file)
    expected = estimates.estimate(
        arguments.model, strategy, arguments.rows, calib_data=file, calib_tokens=calib_tokens
    )
    output = arguments.output / f"{strategy}-{tokens}"
    start, processor = time.monotonic(), time.process_time()
    quantize.run(
        strategy, arguments.model, output, calib_data=file, calib_samples=arguments.rows, calib_tokens=calib_tokens, force=True,
        report=lambda line: print(f"  {line}", file=sys.stderr, flush=True) if arguments.verbose else None,
    )  # fmt: skip
    recipe = json.loads((output / "annie_quant.json").read_text())
    use = recipe["calibration"]
    return {
        "prompt_tokens": tokens,
        "strategy": strategy,
        "rows": f"{use['conversations']} of {use['of']}",
        "tokens": use["tokens"],
        "computed": use["computed"],
        "longest": use["longest"],
        "prefix": use["prefix"],
        "seconds": round(time.monotonic() - start, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
        "estimated_seconds": round(sum(expected.seconds.values()), 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000),
        "gpu_peak_mb": round(torch.cuda.max_memory_allocated() / 1e6)
        if torch.cuda.is_available()
        else 0,
        "estimated_mb": round(expected.peak_bytes / 1e6),
    }


def in_own_process(tokens: int, strategy: str) -> dict[str, Any]:
    """Run quantize_once in a process of its own, so that its peak is its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", f"{tokens} {strategy}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {
            "prompt_tokens": tokens,
            "strategy": strategy,
            "error": f"exit code {done.returncode}",
        }
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompt-tokens", default="300,2500,8000,16000")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--strategies", default="naive,gptq,awq_lite,best")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/long_prompts"))
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.one:
        tokens, strategy = arguments.one.split()
        file = arguments.output / f"rows-{tokens}.jsonl"
        print(json.dumps(quantize_once(arguments, int(tokens), strategy, file)))
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rows = []
    for tokens in map(int, arguments.prompt_tokens.split(",")):
        file = arguments.output / f"rows-{tokens}.jsonl"
        write_rows(arguments.model, tokens, arguments.rows, arguments.seed, file)
        for strategy in arguments.strategies.split(","):
            rows.append(in_own_process(tokens, strategy))
            with (arguments.output / "rows.jsonl").open("a") as out:
                out.write(json.dumps(rows[-1]) + "\n")
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
