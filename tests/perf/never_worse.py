"""Is `best` ever worse than `gptq` or `naive`? Models x draws x sizes of calibration, held-out KL and the noise of its difference.

    python tests/perf/never_worse.py --output runs/never_worse --results never_worse.jsonl
    python tests/perf/never_worse.py --output runs/never_worse --models tiny-annie,DIR --samples 16,64,256 --seeds 0,1,2
    python tests/perf/never_worse.py --table tests/perf/never_worse.jsonl

Text and held-out answers are those of quantize_peers.py. The three strategies get the same conversations; best rounds all inputs
(`activations=4`), as the other two do, so its held-out look decides alone. KL is the mean over the answers' tokens; the
noise of a difference is its standard error over answers. A finished run is not made again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from quantize_peers import HeldOut, calibration_text, source_of

from annie_quant import quantize
from annie_quant.data import generate
from annie_quant.offline.engine import Engine
from annie_quant.offline.loading import load

STRATEGIES = ("naive", "gptq", "best")
BEST = "activations=4"
NUMERICS = ("w4a4", "w4a16")


def divergences(held_out: HeldOut, checkpoint: Path, numerics: str) -> torch.Tensor:
    """Return the summed KL of each answer, [answers] float64, nats."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(checkpoint, numerics, cache="float32", dtype=torch.float32, device=device)
    sums = torch.zeros(len(held_out.rows), dtype=torch.float64)
    for i, logits in Engine(model).scores(held_out.rows):
        p, q = held_out.reference[i], torch.log_softmax(logits, -1).cpu()
        sums[i] = (p.exp() * (p - q)).sum(-1).clamp_min(0).double().sum()
    return sums


def difference(a: torch.Tensor, b: torch.Tensor, tokens: int) -> tuple[float, float]:
    """Return the mean of a - b per token and its standard error over answers."""
    per_answer = a - b
    return float(per_answer.sum()) / tokens, float(per_answer.std()) * len(
        per_answer
    ) ** 0.5 / tokens


def run(
    source: Path, seed: int, samples: int, held_out: HeldOut, output: Path, best: str
) -> dict[str, object]:
    conversations, _ = calibration_text(source, seed, samples, output)
    line: dict[str, object] = {
        "model": source.name,
        "seed": seed,
        "samples": samples,
        "tokens": held_out.tokens,
    }
    found: dict[str, dict[str, torch.Tensor]] = {}
    for strategy in STRATEGIES:
        options: dict[str, Any] = (
            dict(x.split("=") for x in best.split()) if strategy == "best" else {}
        )
        target = output / "checkpoint"
        shutil.rmtree(target, ignore_errors=True)
        quantize.run(
            strategy,
            source,
            target,
            calib_data=conversations,
            calib_samples=samples,
            seed=seed,
            **options,
        )
        found[strategy] = {n: divergences(held_out, target, n) for n in NUMERICS}
        line[strategy] = {n: float(x.sum()) / held_out.tokens for n, x in found[strategy].items()}
        if strategy == "best":
            line["ingredients"] = json.loads((target / "annie_quant.json").read_text()).get(
                "ingredients"
            )
    for other in ("naive", "gptq"):
        line[f"best-{other}"] = {
            n: difference(found["best"][n], found[other][n], held_out.tokens) for n in NUMERICS
        }
    return line


def table(lines: list[dict]) -> None:
    print(
        "| model | conversations | runs | KL W4A4, W4A16: naive | gptq | best | worse than naive | worse than gptq |"
    )
    print("|---|---|---|---|---|---|---|---|")
    totals = {"naive": 0, "gptq": 0}
    for model, samples in dict.fromkeys((x["model"], x["samples"]) for x in lines):
        own = [x for x in lines if (x["model"], x["samples"]) == (model, samples)]
        cells = [
            ", ".join(f"{1e3 * sum(x[s][n] for x in own) / len(own):.2f}" for n in NUMERICS)
            for s in STRATEGIES
        ]
        for other in totals:
            pairs = [x[f"best-{other}"][n] for x in own for n in NUMERICS]
            worse = sum(mean > 2 * noise and mean > 0 for mean, noise in pairs)
            totals[other] += worse
            cells.append(f"{worse} of {len(pairs)}")
        print(f"| {model} | {samples} | {len(own)} | " + " | ".join(cells) + " |")
    print(
        f"\nWorse by more than two standard errors: {totals} of {2 * len(lines)} comparisons each, {len(lines)} runs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/never_worse"))
    parser.add_argument("--results", type=Path, default=Path("runs/never_worse/results.jsonl"))
    parser.add_argument("--models", default="tiny-annie,thin-1,thin-2,robust")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--samples", default="16,64,256")
    parser.add_argument("--answers", type=int, default=120)
    parser.add_argument("--best", default=BEST, help="settings of best")
    parser.add_argument("--table", type=Path)
    a = parser.parse_args()
    if a.table:
        return table([json.loads(x) for x in a.table.read_text().splitlines()])
    a.output.mkdir(parents=True, exist_ok=True)
    gate = a.output / "gate.jsonl"
    if not gate.is_file():
        generate("annie", teacher="offline", n=400, output=gate, seed=77, split="gate")
    lines = (
        [json.loads(x) for x in a.results.read_text().splitlines()] if a.results.is_file() else []
    )
    done = {(x["model"], x["seed"], x["samples"]) for x in lines}
    for samples in map(int, a.samples.split(",")):
        for seed in map(int, a.seeds.split(",")):
            for name in a.models.split(","):
                source = source_of(name, a.output)
                if (source.name, seed, samples) in done:
                    continue
                line = run(
                    source, seed, samples, HeldOut.of(source, gate, a.answers), a.output, a.best
                )
                with a.results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
    return None


if __name__ == "__main__":
    main()
