"""Settings of gptq or best next to each other, on the same conversations and held-out answers: mean KL, flips, CPU seconds.

    python tests/perf/gptq_settings.py --output runs/settings --settings "prompt=0;prompt=0.01"
    python tests/perf/gptq_settings.py --output runs/settings --strategy best --settings "prompt=0;prompt=0.01" --models robust
    python tests/perf/gptq_settings.py --output runs/settings --settings "prompt=0;prompt=0.01" --table

One line of settings.jsonl per model, seed and setting; finished ones are skipped. Each setting after the first is compared with the
first over pairs of one model and one seed. Answers and figures are those of quantize_peers.py; the seconds are CPU seconds of one
thread, with reading the text and writing the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import quantize_peers as peers
import torch

from annie_quant import quantize
from annie_quant.data import generate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--strategy", default="gptq")
    parser.add_argument("--settings", required=True, help="NAME=VALUE,... separated by semicolons")
    parser.add_argument("--models", default=",".join(peers.MODELS))
    parser.add_argument("--seeds", default="0,1,2", help="of the calibration conversations")
    parser.add_argument("--samples", type=int, default=64, help="calibration conversations")
    parser.add_argument("--answers", type=int, default=120, help="held-out answers")
    parser.add_argument("--numerics", default=",".join(peers.NUMERICS))
    parser.add_argument(
        "--table", action="store_true", help="print the comparison of the finished runs and stop"
    )
    arguments = parser.parse_args()
    settings, file = arguments.settings.split(";"), arguments.output / "settings.jsonl"
    if not arguments.table:
        torch.set_num_threads(1)
        arguments.output.mkdir(parents=True, exist_ok=True)
        for model in arguments.models.split(","):
            run_model(model, settings, file, arguments)
    print(comparison(file, arguments.strategy, settings))


def run_model(name: str, settings: list[str], file: Path, arguments: argparse.Namespace) -> None:
    """Run a model's seeds and settings that are not finished."""
    output, strategy = arguments.output, arguments.strategy
    finished = {(r["model"], r["seed"], r["strategy"], r["setting"]) for r in peers.stored(file)}
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    todo = [
        (seed, s) for seed in seeds for s in settings if (name, seed, strategy, s) not in finished
    ]
    if not todo:
        return
    source, gate = peers.source_of(name, output), output / "gate.jsonl"
    if not gate.is_file():
        generate("annie", teacher="offline", n=400, output=gate, seed=77, split="gate")
    held_out = peers.HeldOut.of(source, gate, arguments.answers)
    for seed, setting in todo:
        conversations, _ = peers.calibration_text(source, seed, arguments.samples, output)
        target = output / "models" / f"{name}-{seed}-{strategy}-{setting}"
        shutil.rmtree(target, ignore_errors=True)
        options: dict[str, Any] = dict(item.split("=", 1) for item in setting.split(",") if item)
        start = time.process_time()
        quantize.run(
            strategy,
            source,
            target,
            conversations,
            arguments.samples,
            seed=seed,
            scale=options.pop("scale", None),
            **options,
        )
        seconds = time.process_time() - start
        line = {
            "model": name,
            "seed": seed,
            "strategy": strategy,
            "setting": setting,
            "cpu_s": round(seconds, 2),
        }
        for kind in arguments.numerics.split(","):
            line |= held_out.compare(target, kind)
        with file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def comparison(file: Path, strategy: str, settings: list[str]) -> str:
    """Return a table of each setting against the first, as quantize_peers.py compares with a peer."""
    rows = [r for r in peers.stored(file) if r["strategy"] == strategy]
    by_setting = {
        s: {(r["model"], r["seed"]): r for r in rows if r["setting"] == s} for s in settings
    }
    names = (*peers.FIGURES, "cpu_s")
    lines = [
        "| setting, first | pairs | " + " | ".join(f"{n}: lower, ratio, p" for n in names) + " |"
    ]
    lines.append("|---" * (len(names) + 2) + "|")
    first = by_setting[settings[0]]
    for setting in settings[1:]:
        pairs = [
            (by_setting[setting][key], first[key]) for key in first if key in by_setting[setting]
        ]
        if pairs:
            cells = [compared(pairs, name) for name in names]
            lines.append(f"| {setting}, {settings[0]} | {len(pairs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compared(pairs: list[tuple[dict[str, Any], dict[str, Any]]], name: str) -> str:
    """Return peers.compared of a figure over the pairs that have it."""
    both = [(a[name], b[name]) for a, b in pairs if name in a and name in b]
    return peers.compared(both) if both else "–"


if __name__ == "__main__":
    main()
