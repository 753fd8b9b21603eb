"""Give every conversation of a calibration file the model's own greedy answer instead of its label.

    python tests/perf/own_answers.py DIR rows.jsonl own.jsonl --n 256 --max-tokens 256

The last assistant's message of each of the first --n conversations is replaced by the answer's text, with its calls as the model
writes them. An answer that the limit cuts is left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from annie_quant.data.rows import read_conversations
from annie_quant.offline.decoding import generate
from annie_quant.offline.engine import Engine
from annie_quant.offline.loading import load
from annie_quant.offline.prompts import Template


def own_rows(model: Path, rows: list[dict[str, Any]], max_tokens: int) -> list[dict[str, Any]]:
    template = Template(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = Engine(
        load(model, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device)
    )
    lasts = [max(i for i, m in enumerate(r["messages"]) if m["role"] == "assistant") for r in rows]
    prompts = [
        template.ids(template.render(r["messages"][:last], r.get("tools"), bool(r.get("thinking"))))
        for r, last in zip(rows, lasts, strict=True)
    ]
    answers = generate(engine, prompts, [max_tokens] * len(prompts), template.end_tokens)
    result = []
    for row, last, answer in zip(rows, lasts, answers, strict=True):
        if not answer.finished:
            continue
        text = template.tokenizer.decode(answer.tokens, skip_special_tokens=False)
        result.append(
            {**row, "messages": [*row["messages"][:last], {"role": "assistant", "content": text}]}
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument("rows", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=256)
    arguments = parser.parse_args()
    rows = read_conversations(arguments.rows)[: arguments.n]
    own = own_rows(arguments.model, rows, arguments.max_tokens)
    arguments.output.write_text("".join(json.dumps(row) + "\n" for row in own))
    print(f"{len(own)} of {len(rows)} answers ended within {arguments.max_tokens} tokens")


if __name__ == "__main__":
    main()
