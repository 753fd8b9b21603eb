"""How much of what a checkpoint loses is the draw of its calibration rows: gates lost and won over many draws.

    python tests/perf/calibration_lottery.py run MODEL rows.jsonl --output lottery.jsonl --draws 0,1,2,3,4,5,6,7
    python tests/perf/calibration_lottery.py table lottery.jsonl

MODEL is a bf16 folder and rows.jsonl a pool of conversations, of which each draw takes --rows by its number. Every draw is
quantized by --strategy with the file's answers and with the model's own, and judged by --workloads under --numerics, in one
arithmetic, on prompts that no row has. One JSON line per checkpoint, written at once; a killed run goes on.

`table` prints per gate the answers that are lost and won against bf16 in each draw, the mean of lost - won with its standard
deviation over the draws, and the standard deviation that sampling alone would give (the root of lost + won).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from annie_quant import quantize
from annie_quant.core.resume import JsonLines
from annie_quant.data.rows import read_conversations
from annie_quant.offline.evaluation import evaluate

SOURCES = ("given", "own")
KEYS = ("model", "strategy", "settings", "answers", "draw", "rows")


def drawn_rows(pool: list[dict[str, Any]], draw: int, n: int) -> list[dict[str, Any]]:
    """Return n conversations of the pool, another choice per draw."""
    return random.Random(draw).sample(pool, min(n, len(pool)))


def measure(
    arguments: argparse.Namespace, rows: Path, key: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Quantize one draw, evaluate it, and return the row of the table."""
    start = time.monotonic()
    settings = dict(item.split("=", 1) for item in arguments.set)
    result = quantize.run(
        arguments.strategy,
        arguments.model,
        folder,
        calib_data=rows,
        calib_samples=arguments.rows,
        answers=key["answers"],
        allow_prompt_mismatch=True,
        force=True,
        **settings,
    )
    made = time.monotonic()
    document = evaluate(
        folder,
        arguments.model,
        workloads=arguments.workloads.split(","),
        numerics=arguments.numerics.split(","),
        n_per_gate=arguments.n,
        with_ensemble=False,
    )
    recipe = json.loads((folder / "annie_quant.json").read_text())
    row = key | {
        "calibration": recipe.get("calibration"),
        "megabytes": result.size_bytes / 1e6,
        "quantize_s": made - start,
        "evaluate_s": time.monotonic() - made,
        "numerics": {},
    }
    for name, side in document["numerics"].items():
        kl = side["kl"]
        decisions = kl.get("decisions") or {}
        row["numerics"][name] = {
            "kl": kl["mean"],
            "flips": kl["flips"],
            "decision_flips": decisions.get("flips"),
            "decisions": decisions.get("n_tokens"),
            "gates": {
                gate: [pair["n"], pair["lost"], pair["won"]]
                for gate, pair in side["paired"].items()
            },
        }
    return row


def run(arguments: argparse.Namespace) -> None:
    pool = read_conversations(arguments.pool)
    log = JsonLines(arguments.output)
    done = [{k: row[k] for k in KEYS} for row in log.values(lambda line, _: json.loads(line))]
    work = arguments.output.with_suffix(".work")
    work.mkdir(parents=True, exist_ok=True)
    for draw in (int(number) for number in arguments.draws.split(",")):
        rows = work / f"rows-{draw}.jsonl"
        chosen = drawn_rows(pool, draw, arguments.rows)
        rows.write_text("".join(json.dumps(row) + "\n" for row in chosen))
        for source in arguments.answers.split(","):
            key = {
                "model": arguments.model.name,
                "strategy": arguments.strategy,
                "settings": sorted(arguments.set),
                "answers": source,
                "draw": draw,
                "rows": arguments.rows,
            }
            if key in done:
                continue
            row = measure(arguments, rows, key, work / "checkpoint")
            log.append(json.dumps(row).encode())
            print(draw, source, f"{row['quantize_s']:.0f} s, {row['evaluate_s']:.0f} s", flush=True)
    shutil.rmtree(work, ignore_errors=True)


def table(arguments: argparse.Namespace) -> None:
    rows = [json.loads(line) for file in arguments.files for line in file.read_text().splitlines()]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["draw"]):
        for name, side in row["numerics"].items():
            settings = ",".join(row["settings"])
            n_rows = f"{row['rows']} rows {row.get('pool', '')}".strip()
            key = (row["model"], row["strategy"], settings, row["answers"], n_rows, name)
            groups.setdefault(key, []).append(side)
    for key, sides in groups.items():
        print(f"\n**{', '.join(filter(None, key))}**, {len(sides)} draws\n")
        kl = [1000 * side["kl"] for side in sides]
        flips = [side["decision_flips"] for side in sides]
        print(f"KL {min(kl):.2f} to {max(kl):.2f}e-3 nats; flips at decisions {flips}\n")
        print("| gate | n | lost-won per draw | mean | sd over draws | sd of sampling |")
        print("|---|---|---|---|---|---|")
        for gate in sides[0]["gates"]:
            cells = [side["gates"][gate] for side in sides if gate in side["gates"]]
            net = [lost - won for _, lost, won in cells]
            spread = statistics.stdev(net) if len(net) > 1 else math.nan
            sampling = math.sqrt(statistics.mean(lost + won for _, lost, won in cells))
            pairs = ", ".join(f"{lost}-{won}" for _, lost, won in cells)
            mean = statistics.mean(net)
            print(
                f"| {gate} | {cells[0][0]} | {pairs} | {mean:+.1f} | {spread:.1f} | {sampling:.1f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("model", type=Path)
    one.add_argument("pool", type=Path)
    one.add_argument("--output", type=Path, required=True)
    one.add_argument("--draws", default="0,1,2,3,4,5,6,7")
    one.add_argument("--answers", default=",".join(SOURCES))
    one.add_argument("--rows", type=int, default=256)
    one.add_argument("--strategy", default="gptq")
    one.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    one.add_argument("--workloads", default="bfcl")
    one.add_argument("--numerics", default="w4a16")
    one.add_argument("--n", type=int, default=200)
    one.set_defaults(command=run)
    other = commands.add_parser("table")
    other.add_argument("files", type=Path, nargs="+")
    other.set_defaults(command=table)
    arguments = parser.parse_args()
    arguments.command(arguments)


if __name__ == "__main__":
    main()
