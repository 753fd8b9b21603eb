"""The original plan's table for one model: strategies A (awq_lite), B (mlp_only) and C (auto_mixed), by our engine or ModelOpt's.

    python tests/perf/plan_strategies.py --model BF16 --calib-data F --output runs/plan --engine own
    python tests/perf/plan_strategies.py --model BF16 --calib-data F --output runs/plan --engine modelopt    # A and C take a GPU

Each row is quantized, audited and evaluated without a server (n prompts per gate), and is one line of OUTPUT/rows.jsonl; the table
has all rows so far, of both engines. A row that cannot be made has the reason. --exclude: the plan's layers, of A and B; another
model than one with 32 layers needs others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from annie_quant import checkpoint, quantize
from annie_quant.checkpoint.size import folder_size
from annie_quant.core.errors import AnnieError
from annie_quant.core.progress import SILENT
from annie_quant.data.workloads import resolve
from annie_quant.offline import evaluation
from annie_quant.offline.pair import EvaluationJob

STRATEGIES = {"A": "awq_lite", "B": "mlp_only", "C": "auto_mixed"}
PLAN_EXCLUDES = "linear_attn,layers.0,layers.31"


def made(letter: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one strategy, or {"error": reason}."""
    output = arguments.output / "models" / f"{letter}-{arguments.engine}"
    try:
        run = quantize.run(
            STRATEGIES[letter],
            arguments.model,
            output,
            calib_data=arguments.calib_data,
            calib_samples=arguments.samples,
            engine=arguments.engine,
            exclude="" if letter == "C" else arguments.exclude,
            allow_prompt_mismatch=True,
            force=True,
        )
    except AnnieError as error:
        return {"error": error.message}
    size = folder_size(checkpoint.ModelFolder(output))
    job = EvaluationJob(
        checkpoint=output,
        reference=arguments.model,
        workloads=resolve(None, None),
        n_per_gate=arguments.n,
        cache=arguments.output / "eval",
    )
    result = evaluation.run(job, SILENT)
    row: dict[str, Any] = {
        "size_bytes": size.size_bytes,
        "bits": size.bits_per_weight,
        "sound": checkpoint.audit(output, source=arguments.model).ok,
        "quantize_s": run.seconds,
        "verdict": result.verdict.sentence if result.verdict else "",
        "gates": {},
    }
    for kind, side in result.numerics.items():
        row["gates"][kind] = {
            gate: f"{x.passes}/{x.n}" for gate, x in side.gates.items() if not x.advisory
        }
    return row


def table(file: Path) -> str:
    rows = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        rows[row["strategy"], row["engine"]] = row  # the newest
    lines = [
        "| strategy | engine | MB | bits per weight | audit | tool calls W4A4, W4A16 | quantize, s | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (letter, engine), row in sorted(rows.items()):
        start = f"| {letter}: {STRATEGIES[letter]} | {engine} |"
        if "error" in row:
            lines.append(f"{start} – | – | – | – | – | {row['error']} |")
            continue
        calls = ", ".join(gates.get("tool_call", "–") for gates in row["gates"].values())
        sound = "sound" if row["sound"] else "findings"
        lines.append(
            f"{start} {row['size_bytes'] / 1e6:,.1f} | {row['bits']:.2f} | {sound} | {calls} | "
            f"{row['quantize_s']:.0f} | {row['verdict']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--calib-data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--engine", choices=("own", "modelopt"), default="own")
    parser.add_argument("--strategies", default="A,B,C")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--exclude", default=PLAN_EXCLUDES)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "rows.jsonl"
    for letter in arguments.strategies.split(","):
        row = {"strategy": letter, "engine": arguments.engine, **made(letter, arguments)}
        with file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
    print(table(file))


if __name__ == "__main__":
    main()
