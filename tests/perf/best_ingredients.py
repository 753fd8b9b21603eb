"""What each ingredient of `best` does: model x draw x recipe, KL (mean and at decisions) under W4A4 and W4A16, flips, seconds.

    python tests/perf/best_ingredients.py DIR --calibration rows.jsonl --output results.jsonl               # all rows, draw 0
    python tests/perf/best_ingredients.py DIR --calibration rows.jsonl --output results.jsonl --draws 0,1,2 --rows gptq,gptq+p.1
    python tests/perf/best_ingredients.py --table results.jsonl

A row is a strategy with settings (RECIPES) or another library's recipe (PEERS); "best =published" is best within the bytes of the
finished row "ModelOpt published". Draw d takes --samples of the calibration rows in
random order with seed d. KL is over the bf16 model's own greedy answers to --cases prompts of the workloads (default: bfcl, whose
prompts are others than those of bfcl_rows.py). Each result is appended to the output at once and is not computed again, so a killed
run continues. --share 1/3 takes every third row from the second on, for several processes with one output. --limit: start no row
after so many seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import quantize_peers
import torch

from annie_quant import judge, quantize
from annie_quant.checkpoint.shards import PROMPT_FILES, ModelFolder
from annie_quant.data.rows import read_conversations
from annie_quant.data.workloads import resolve
from annie_quant.judge import Workload
from annie_quant.offline.divergence import token_labels
from annie_quant.offline.emulation import emulate
from annie_quant.offline.loading import numerics_of
from annie_quant.offline.pair import EvaluationJob, open_pair
from annie_quant.offline.profiles import find_profile

RECIPES = {
    "gptq": "gptq prompt=0",
    **{f"gptq+p{p}": f"gptq prompt={p}" for p in (".01", ".03", ".1", ".3", "1")},
    "gptq+p.1+d.01": "gptq prompt=.1 damping=.01",
    "gptq+p.1+d.1": "gptq prompt=.1 damping=.1",
    "gptq16+p.1": "gptq prompt=.1 activations=16",
    "best": "best",
    "best all": "best activations=4",
    "awq_lite": "awq_lite",
    "mlp_only": "mlp_only",
    "naive": "naive",
}
PEERS = (  # rows of peer_recipes.py; each needs its library in this environment
    "ModelOpt MSE", "ModelOpt local Hessian", "ModelOpt AWQ", "llm-compressor GPTQ", "llm-compressor AWQ + GPTQ",
    "AutoRound light", "AutoRound", "AutoRound with extension",
    "ModelOpt published", "ModelOpt AutoQuantize 5", "ModelOpt AutoQuantize 6", "ModelOpt AutoQuantize 7",
)  # fmt: skip
NUMERICS = ("w4a4", "w4a16")
EQUAL = {  # best under the bytes of another finished row
    f"={x.removeprefix('ModelOpt ').replace(' ', '')}": x for x in (*PEERS, "naive")
}


def chosen_workloads(names: str, cases: int) -> list[Workload]:
    """Return the workloads with at most `cases` cases each, evenly spread over their order."""
    result = []
    for workload in judge.distinct_prompts(resolve(workloads=names))[0]:
        count = min(cases, len(workload.cases))
        some = tuple(workload.cases[i * len(workload.cases) // count] for i in range(count))
        result.append(replace(workload, cases=some, sha256=f"{workload.sha256}-{count}"))
    return result


def measure(
    checkpoint: Path, source: Path, workloads: list[Workload], cache: Path, dtype: str | None
) -> dict[str, Any]:
    """Return the KL figures of a checkpoint by numerics; for "w4a4" those of W4A16 where it rounds no input."""
    figures: dict[str, Any] = {}
    with open_pair(
        EvaluationJob(checkpoint=checkpoint, reference=source, cache=cache, dtype=dtype)
    ) as pair:
        own = pair.scored(pair.reference.answer(workloads, pair.progress))
        labels = token_labels(pair.template, own)
        for name in NUMERICS:
            with emulate(
                pair.model, find_profile(name if name in numerics_of(pair.model) else "w4a16")
            ):
                kl = pair.compare(own).summary(labels)
            assert kl.decisions is not None
            figures[name] = {
                "kl": kl.mean, "median": kl.median, "flips": kl.flips, "tokens": kl.n_tokens, "decisions": kl.decisions.mean,
                "decision_flips": kl.decisions.flips, "decision_tokens": kl.decisions.n_tokens,
                "tool_markup": kl.by_class["tool_markup"].mean if "tool_markup" in kl.by_class else None,
            }  # fmt: skip
    return figures


@contextlib.contextmanager
def checkpoint_folder(row: str, draw: int, arguments: argparse.Namespace) -> Iterator[Path]:
    """Give the place of a checkpoint, in --keep or a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=arguments.work) as folder:
        output = Path(folder) / "out"
        if arguments.keep:
            output = arguments.keep / f"{re.sub(r'[^a-zA-Z0-9.]+', '-', row)}-{draw}"
            shutil.rmtree(output, ignore_errors=True)
            output.parent.mkdir(parents=True, exist_ok=True)
        yield output


def quantized(row: str, draw: int, arguments: argparse.Namespace, output: Path) -> float:
    """Write the checkpoint of a row and a draw to `output`. Returns the seconds that quantizing took."""
    rows = read_conversations(arguments.calibration)
    random.Random(draw).shuffle(rows)
    calibration = output.with_name(f"{output.name}-rows.jsonl")
    calibration.write_text("".join(json.dumps(r) + "\n" for r in rows[: arguments.samples]))
    if row in PEERS:
        return quantized_by_peer(row, draw, arguments, calibration, output)
    settings = RECIPES.get(row, row).split()
    if settings[-1] in EQUAL:
        settings[-1] = f"max_gb={bytes_of(EQUAL[settings[-1]], draw, arguments) / 1e9:.6f}"
    strategy, *settings = settings
    options: dict[str, Any] = dict(item.split("=", 1) for item in settings)
    start = time.monotonic()
    quantize.run(
        strategy,
        arguments.model,
        output,
        calib_data=calibration,
        calib_samples=arguments.samples,
        seed=draw,
        **options,
    )
    return time.monotonic() - start


def bytes_of(row: str, draw: int, arguments: argparse.Namespace) -> int:
    """Return the bytes of a finished row of the same model, draw and samples."""
    wanted = (arguments.model.name, draw, row, arguments.samples)
    return next(
        int(x["bytes"])
        for x in reversed(finished(arguments.output))
        if "error" not in x and key(x) == wanted
    )


def quantized_by_peer(
    row: str, draw: int, arguments: argparse.Namespace, calibration: Path, output: Path
) -> float:
    """As quantized(), by another library in a process of its own, on the token sequences of the same conversations."""
    text = output.with_name(f"{output.name}-ids.jsonl")
    quantize_peers.write_sequences(arguments.model, read_conversations(calibration), text)
    command = [
        sys.executable,
        Path(__file__).with_name("peer_recipes.py"),
        row,
        arguments.model,
        output,
        "--text",
        text,
    ]
    command += ["--conversations", calibration, "--samples", arguments.samples, "--seed", draw]
    command += ["--device", "cuda" if torch.cuda.is_available() else "cpu"]
    done = subprocess.run([str(c) for c in command], capture_output=True, check=False, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1])
    for name in PROMPT_FILES:  # a library may leave some out
        if (arguments.model / name).exists() and not (output / name).exists():
            shutil.copy(arguments.model / name, output / name)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def run(
    row: str, draw: int, arguments: argparse.Namespace, workloads: list[Workload]
) -> dict[str, Any]:
    with checkpoint_folder(row, draw, arguments) as output:
        start = time.monotonic()
        seconds = quantized(row, draw, arguments, output)
        figures = measure(output, arguments.model, workloads, arguments.cache, arguments.dtype)
        size = sum(f.stat().st_size for f in output.glob("*.safetensors"))
        four_bits = sum(n.endswith(".input_scale") for n in ModelFolder(output))
        recipe = {} if row in PEERS else json.loads((output / "annie_quant.json").read_text())
    return {
        "model": arguments.model.name, "draw": draw, "row": row, "samples": arguments.samples, "settings": RECIPES.get(row),
        **figures,
        "seconds": round(seconds, 1), "eval_seconds": round(time.monotonic() - start - seconds, 1), "bytes": size,
        "date": date.today().isoformat(),
        "w4a4_linears": four_bits, "held_out": recipe.get("held_out"), "ingredients": recipe.get("ingredients"),
    }  # fmt: skip


def finished(output: Path) -> list[dict[str, Any]]:
    lines = output.read_text().splitlines() if output.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["model"], line["draw"], line["row"], line["samples"]


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield one row per model, sample count, day and recipe: means over the draws, 1e-3 nats. Another day may be another engine."""
    numerics = "KL, decisions | flips, at them"
    yield f"| model | rows | date | recipe | draws | W4A4 {numerics} | W4A16 {numerics} | s |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    groups: dict[tuple[str, int, str, str], list[dict[str, Any]]] = {}
    for line in lines:
        if "error" not in line:
            groups.setdefault(
                (line["model"], line["samples"], line["date"], line["row"]), []
            ).append(line)
    for (model, samples, day, row), own in groups.items():
        cells = [model, str(samples), day, row, ",".join(str(x["draw"]) for x in own)]
        for name in NUMERICS:
            kl, decisions, flips, decision_flips = (
                sum(x[name][k] for x in own) / len(own)
                for k in ("kl", "decisions", "flips", "decision_flips")
            )
            cells += [
                f"{1e3 * kl:.2f}, {1e3 * decisions:.2f}",
                f"{flips:.0f}, {decision_flips:.0f}",
            ]
        cells.append(f"{sum(x['seconds'] for x in own) / len(own):.0f}")
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", metavar="DIR")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--rows", default=",".join(RECIPES))
    parser.add_argument("--draws", default="0")
    parser.add_argument("--samples", type=int, default=256, help="calibration conversations")
    parser.add_argument("--workloads", default="bfcl")
    parser.add_argument("--cases", type=int, default=400, help="prompts of each workload")
    parser.add_argument("--cache", type=Path, default=Path("runs/ingredients-cache"))
    parser.add_argument("--work", type=Path, help="folder for checkpoints; default: the system's")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the checkpoints, as DIR/ROW-DRAW"
    )
    parser.add_argument("--dtype", help="of the evaluation: float32 or bfloat16")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--limit", type=float, default=float("inf"))
    arguments = parser.parse_args()
    if arguments.table:
        print("\n".join(table(finished(arguments.table))))
        return
    start = time.monotonic()
    workloads = chosen_workloads(arguments.workloads, arguments.cases)
    done = {key(line) for line in finished(arguments.output) if "error" not in line}
    if unknown := {r for r in arguments.rows.split(",") if r.split()[-1] not in EQUAL} - {
        *RECIPES,
        *PEERS,
    }:
        parser.error(f"no row {unknown.pop()!r}; choose from: {', '.join([*RECIPES, *PEERS])}")
    every = [
        (d, r) for d in map(int, arguments.draws.split(",")) for r in arguments.rows.split(",")
    ]
    index, count = map(int, arguments.share.split("/"))
    for draw, row in every[index::count]:
        if (arguments.model.name, draw, row, arguments.samples) in done:
            continue
        if time.monotonic() - start > arguments.limit:
            sys.exit("time is over; the same command continues")
        try:
            line = run(row, draw, arguments, workloads)
        except Exception as error:  # one failed row must not end the others
            line = {
                "model": arguments.model.name,
                "draw": draw,
                "row": row,
                "samples": arguments.samples,
                "error": repr(error),
            }
        with arguments.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
