"""The recipes of NVIDIA and Red Hat on the gates, against naive and gptq: several calibration seeds, the paired rule.

python tests/perf/recipes.py --output runs/recipes --seeds 3 --n 30          # finished rows are skipped
python tests/perf/recipes.py --output runs/recipes --table

A row is one recipe under one numerics. Each seed draws other calibration conversations; the prompts are the same. Pooled: lost and
won answers of all seeds, and the 95 % interval of the difference over the seeds' means (Student's t), which has the spread of the
calibration and none of the prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from scipy.stats import t

import annie_quant
from annie_quant import checkpoint, judge, quantize, runtime
from annie_quant.core.files import read_json, write_json
from annie_quant.data import generate

TINY = Path(annie_quant.__file__).parent / "assets/tiny-annie"
NVIDIA = {
    "scale": "amax",
    "kv_cache": "fp8_cast",
}  # w4a16_nvfp4-fp8_attn-kv_fp8_cast of ModelOpt 0.47
# Row → (strategy, settings, numerics).
RECIPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "naive": ("naive", {}, "w4a4"),
    "gptq": ("gptq", {}, "w4a4"),
    "NVIDIA's": ("w4a16_mixed", NVIDIA, "w4a16"),
    "NVIDIA's, FP8 KV cast": ("w4a16_mixed", NVIDIA, "w4a16-fp8kv"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--output", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--n", type=int, default=30, help="prompts per gate")
    parser.add_argument("--calib-samples", type=int, default=64)
    parser.add_argument("--only", default="", help="rows, separated by semicolons")
    parser.add_argument(
        "--table", action="store_true", help="print the table of finished rows and stop"
    )
    arguments = parser.parse_args()
    rows = arguments.only.split(";") if arguments.only else list(RECIPES)
    if not arguments.table:
        arguments.output.mkdir(parents=True, exist_ok=True)
        for seed in range(arguments.seeds):
            for row in rows:
                measure(row, seed, arguments)
    print(table(arguments.output, rows))


def file_name(row: str) -> str:
    return row.replace(" ", "_").replace(",", "")


def measure(row: str, seed: int, arguments: argparse.Namespace) -> None:
    """Quantize with the calibration of one seed, evaluate, and store what the table needs."""
    file = arguments.output / f"{file_name(row)}-{seed}.json"
    if file.is_file():
        return
    calibration = arguments.output / f"calibration-{seed}.jsonl"
    if not calibration.is_file():
        generate("annie", teacher="offline", n=200, output=calibration, seed=seed)
    strategy, settings, numerics = RECIPES[row]
    label = "-".join([strategy, *(f"{v}" for v in settings.values())])
    target, start = arguments.output / "models" / f"{label}-{seed}", time.monotonic()
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        samples = arguments.calib_samples
        quantize.run(
            strategy,
            arguments.model,
            target,
            calib_data=calibration,
            calib_samples=samples,
            **settings,
        )
    audit = checkpoint.audit(target, source=arguments.model)
    result = runtime.evaluate(
        target,
        arguments.model,
        judge.sample(judge.load_workloads(), arguments.n),
        numerics=[numerics],
        cache=arguments.output / "reference",
        with_ensemble=False,
    )
    side = result["numerics"][numerics]
    document = {
        "row": row,
        "seed": seed,
        "bits": audit.summary.bits_per_weight,
        "findings": [f.code for f in audit.findings],
        "paired": side["paired"],
        "kl": side["kl"]["mean"],
        "verdict": result["verdict"]["verdict"],
        "seconds": time.monotonic() - start,
    }
    write_json(file, document)
    print(
        json.dumps({k: document[k] for k in ("row", "seed", "verdict", "kl", "seconds")}),
        flush=True,
    )


def table(output: Path, rows: list[str]) -> str:
    """Return the finished rows as a markdown table."""
    lines = [
        "| recipe | bits per weight | mean KL by seed | lost / won by seed (of n) | difference, 95 % over seeds | verdicts |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        files = sorted(output.glob(f"{file_name(row)}-*.json"))
        documents = [read_json(file) for file in files]
        if not documents:
            continue
        totals = []
        for d in documents:
            gates = d["paired"].values()
            totals.append([sum(g[key] for g in gates) for key in ("lost", "won", "n")])
        shares = [(won - lost) / n for lost, won, n in totals]
        mean, half = statistics.fmean(shares), 0.0
        if len(shares) > 1:
            half = (
                float(t.ppf(0.975, len(shares) - 1)) * statistics.stdev(shares) / len(shares) ** 0.5
            )
        interval = f"{mean:+.1%} ± {half:.1%}" if len(shares) > 1 else f"{mean:+.1%} (one seed)"
        cells = [
            row,
            f"{documents[0]['bits']:.2f}",
            ", ".join(f"{d['kl']:.3g}" for d in documents),
            ", ".join(f"{lost} / {won}" for lost, won, _ in totals) + f" (of {totals[0][2]})",
            interval,
            ", ".join(d["verdict"] for d in documents),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
