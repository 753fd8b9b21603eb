"""Do larger limits of 4-bit inputs help? KL against the source with every input scale multiplied by a factor.

    python tests/perf/input_limits.py SOURCE CHECKPOINT --conversations other.jsonl --factors 1,8

An input above its tensor's limit (2,688 times the input scale, which calibration sets to the largest input) is cut. The assistant's
answers of the conversations are scored, which should not be those of the calibration.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from annie_quant.data.rows import read_conversations
from annie_quant.offline.engine import Engine, Row
from annie_quant.offline.linears import nvfp4_linears
from annie_quant.offline.loading import load
from annie_quant.offline.prompts import Template, conversation_answers


def scores(model: torch.nn.Module, rows: list[Row]) -> dict[int, torch.Tensor]:
    """Return row -> log-probabilities of its answer's positions [tokens, vocabulary]."""
    with torch.inference_mode():
        return {
            i: torch.log_softmax(logits.float(), -1) for i, logits in Engine(model).scores(rows)
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=16, help="conversations")
    parser.add_argument("--factors", default="1,2,4,8")
    arguments = parser.parse_args()
    conversations = read_conversations(arguments.conversations, arguments.samples)
    rows = [
        Row(a.prompt, a.target)
        for a in conversation_answers(Template(arguments.source), conversations)
    ]
    source = scores(load(arguments.source, cache="float32", dtype=torch.float32), rows)
    model = load(arguments.checkpoint, cache="float32", dtype=torch.float32)
    linears = [linear for linear in nvfp4_linears(model).values() if linear.has_input_scale]
    scales = [(linear.scalars(), linear.scalars().input_scale or 0.0) for linear in linears]
    print("| factor | KL, 1e-3 nats per token | of the first token | flips |\n|---|---|---|---|")
    for factor in map(float, arguments.factors.split(",")):
        for linear, (before, input_scale) in zip(linears, scales, strict=True):
            linear._scalars = before._replace(input_scale=input_scale * factor)
        tokens = flips = 0
        total = first = 0.0
        for i, rounded in scores(model, rows).items():
            kl = (source[i].exp() * (source[i] - rounded)).sum(-1)
            tokens, total, first = tokens + len(kl), total + float(kl.sum()), first + float(kl[0])
            flips += int((source[i].argmax(-1) != rounded.argmax(-1)).sum())
        print(
            f"| {factor:g} | {1e3 * total / tokens:.2f} | {1e3 * first / len(rows):.1f} | {flips} of {tokens} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
