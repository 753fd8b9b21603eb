"""gptq with each layer rounded in stages, against one pass that observes the whole layer: CPU seconds, mean KL, flips.

    python tests/perf/gptq_stages.py --output runs/stages --seeds 3,4,5
    python tests/perf/gptq_stages.py --output runs/stages --table runs/stages/pairs.jsonl

One line of pairs.jsonl per model, seed and way. "whole": the Hessians of a layer come from its source weights on the rounded
layers' outputs, as before stages; "staged": from the rounded linears before each one in the layer, too. Held-out answers and
figures are those of quantize_peers.py. The seconds are CPU seconds of one thread, with reading the text and writing the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import time
from pathlib import Path

import quantize_peers as peers
import torch

from annie_quant import quantize
from annie_quant.data import generate
from annie_quant.quantize import layer_stages

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))
WAYS = {"whole": lambda layer: None, "staged": layer_stages.blocks_of}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", default=",".join(peers.MODELS))
    parser.add_argument("--seeds", default="3,4,5", help="of the calibration conversations")
    parser.add_argument("--samples", type=int, default=64, help="calibration conversations")
    parser.add_argument("--answers", type=int, default=200, help="held-out answers")
    parser.add_argument(
        "--table", type=Path, help="print the comparison of a finished file and stop"
    )
    arguments = parser.parse_args()
    if arguments.table:
        print(comparison(arguments.table))
        return
    torch.set_num_threads(1)
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    gate, file = output / "gate.jsonl", output / "pairs.jsonl"
    if not gate.is_file():
        generate("annie", teacher="offline", n=400, output=gate, seed=77, split="gate")
    held_out: dict[str, peers.HeldOut] = {}
    for seed in map(int, arguments.seeds.split(",")):
        for name in arguments.models.split(","):
            source = peers.source_of(name, output)
            conversations, _ = peers.calibration_text(source, seed, arguments.samples, output)
            held_out[name] = held_out.get(name) or peers.HeldOut.of(source, gate, arguments.answers)
            for way, blocks_of in WAYS.items():
                layer_stages.blocks_of = blocks_of
                target = output / "models" / way
                shutil.rmtree(target, ignore_errors=True)
                start = time.process_time()
                samples = {"calib_data": conversations, "calib_samples": arguments.samples}
                quantize.run("gptq", source, target, seed=seed, **samples)
                line = {
                    "model": name,
                    "seed": seed,
                    "way": way,
                    "cpu_s": round(time.process_time() - start, 2),
                }
                for kind in peers.NUMERICS:
                    line |= held_out[name].compare(target, kind)
                with file.open("a") as stream:
                    stream.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
    print(comparison(file))


def comparison(file: Path) -> str:
    """Return the ratios staged / whole over pairs of one model and seed, with 95 % intervals of their geometric means."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    ways = {way: {(r["model"], r["seed"]): r for r in rows if r["way"] == way} for way in WAYS}
    pairs = [
        (ways["whole"][key], ways["staged"][key]) for key in ways["whole"] if key in ways["staged"]
    ]
    lines = [f"{len(pairs)} pairs"]
    for figure in ("cpu_s", "w4a4_kl", "w4a16_kl"):
        logs = [math.log(staged[figure] / whole[figure]) for whole, staged in pairs]
        mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
        low, high = (math.exp(mean + sign * student_t(len(logs) - 1) * error) for sign in (-1, 1))
        lower = sum(x < 0 for x in logs)
        lines.append(
            f"{figure}: ratio {math.exp(mean):.3f} ({low:.3f} to {high:.3f}), lower in {lower}, "
            f"sign test p {sign_test(lower, len(logs)):.2f}"
        )
    for figure in ("w4a4_flips", "w4a16_flips"):
        whole, staged = (sum(pair[i][figure] for pair in pairs) for i in range(2))
        lines.append(f"{figure}: {whole} whole, {staged} staged")
    return "\n".join(lines)


def student_t(freedom: int) -> float:
    """Return the 97.5 % point of Student's t, by the first terms of its expansion: 2.20 for 11 degrees of freedom."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def sign_test(successes: int, n: int) -> float:
    """Return the two-sided p of a sign test."""
    tail = sum(math.comb(n, i) for i in range(max(successes, n - successes), n + 1))
    return min(1.0, 2 * tail / 2**n)


if __name__ == "__main__":
    main()
