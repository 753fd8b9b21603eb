"""What a checkpoint's mean KL depends on: the input scales under W4A4, and a few answers.

    python tests/perf/kl_spread.py --source DIR --calibration runs/peers/calibration-0.jsonl CHECKPOINT...

One JSON line per checkpoint and numerics: mean KL against the source over held-out answers (those of quantize_peers.py), flips,
the share of the KL that the five largest tokens have, and the part of the mean KL that comes from answers whose prompt has a
word of --words. The first line has the number of calibration conversations with such a word. W4A4 is measured once per factor of
--scales, by which all input scales are multiplied: each is a valid choice of a server's scales, so the spread over them is that of
one measurement.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import quantize_peers as peers
import torch
from transformers import AutoTokenizer

from annie_quant.data import generate
from annie_quant.data.rows import read_conversations
from annie_quant.offline.engine import Engine
from annie_quant.offline.linears import nvfp4_linears
from annie_quant.offline.loading import load


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument(
        "--gate",
        type=Path,
        default=Path("runs/gate.jsonl"),
        help="held-out conversations, made if missing",
    )
    parser.add_argument(
        "--calibration", type=Path, help="conversations in which the words are counted"
    )
    parser.add_argument("--samples", type=int, default=64, help="calibration conversations")
    parser.add_argument("--answers", type=int, default=120, help="held-out answers")
    parser.add_argument("--scales", default="1,0.93,1.07", help="factors of the input scales")
    parser.add_argument("--words", default="afternoon")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    words = arguments.words.split(",")
    if not arguments.gate.is_file():
        generate("annie", teacher="offline", n=400, output=arguments.gate, seed=77, split="gate")
    held_out = peers.HeldOut.of(arguments.source, arguments.gate, arguments.answers)
    tokenizer = AutoTokenizer.from_pretrained(arguments.source)
    with_word = [
        i
        for i, row in enumerate(held_out.rows)
        if has_word(str(tokenizer.decode(list(row.prompt))), words)
    ]
    about = {
        "answers": len(held_out.rows),
        "tokens": held_out.tokens,
        "answers_with_word": len(with_word),
    }
    about["tokens_with_word"] = sum(len(held_out.rows[i].target) for i in with_word)
    if arguments.calibration:
        rows = read_conversations(arguments.calibration, arguments.samples)
        about["conversations_with_word"] = sum(
            has_word(json.dumps(row["messages"]), words) for row in rows
        )
    print(json.dumps(about), flush=True)
    for checkpoint in arguments.checkpoints:
        for numerics, factor in [
            ("w4a16", 1.0),
            *(("w4a4", float(f)) for f in arguments.scales.split(",")),
        ]:
            kl, flips = divergences(held_out, checkpoint, numerics, factor)
            every = torch.cat(kl)
            line = {"checkpoint": checkpoint.name, "numerics": numerics, "scale": factor}
            line["kl"] = round(float(every.sum()) / held_out.tokens, 6)
            line["flips"] = flips
            line["largest_five"] = round(float(every.topk(5).values.sum() / every.sum()), 3)
            line["median_kl"] = float(f"{float(every.median()):.3g}")
            line["kl_with_word"] = round(
                sum(float(kl[i].sum()) for i in with_word) / held_out.tokens, 6
            )
            print(json.dumps(line), flush=True)


def has_word(text: str, words: list[str]) -> bool:
    return any(word in text for word in words)


def divergences(
    held_out: peers.HeldOut, checkpoint: Path, numerics: str, factor: float
) -> tuple[list[torch.Tensor], int]:
    """Return the KL of every token, one float64 tensor per answer, and the flips. factor: of all input scales."""
    model = load(checkpoint, numerics, cache="float32", dtype=torch.float32, device="cpu")
    for linear in nvfp4_linears(model).values():
        stored = getattr(linear, linear.NAMES.input_scale)
        if numerics == "w4a4" and factor != 1:
            stored.data = stored.data / factor if linear.RECIPROCAL else stored.data * factor
    model.to("cpu")  # a linear reads its scales again after it was moved
    kl: dict[int, torch.Tensor] = {}
    flips = 0
    for i, logits in Engine(model).scores(held_out.rows):
        p, q = held_out.reference[i], torch.log_softmax(logits, -1)
        kl[i] = (p.exp() * (p - q)).sum(-1).clamp_min(0).double()
        flips += int((p.argmax(-1) != q.argmax(-1)).sum())
    return [kl[i] for i in range(len(held_out.rows))], flips


if __name__ == "__main__":
    main()
