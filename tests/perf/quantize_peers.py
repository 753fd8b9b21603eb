"""Our strategies next to llm-compressor, AutoRound and ModelOpt: same conversations, same layers, one measure.

    python tests/perf/quantize_peers.py --output runs/peers --seeds 0,1,2 --llm-compressor PYTHON --auto-round PYTHON
    python tests/perf/quantize_peers.py --output runs/peers --models tiny-annie --only "gptq;llm-compressor GPTQ"
    python tests/perf/quantize_peers.py --output runs/peers --models DIR --samples 16 --results tests/perf/quantize_peers.jsonl
    python tests/perf/quantize_peers.py --output runs/peers --table          # quantize_peers.md's tables of the finished runs

--models: names of tiny models, and folders of other models.
--machine NAME: of runs on another machine, which get their own table of times. Append its runs.jsonl to the first machine's.

PYTHON is that of an environment with the library; ModelOpt and our strategies run in this one. A run is one process of
peer_recipes.py with one thread, and one line of runs.jsonl; finished runs are skipped. Every linear of the decoder but DeltaNet's
in_proj_a and in_proj_b is quantized to NVFP4 in every run; the head and the embedding are not.

Mean KL against the source and flips (tokens whose most probable choice changes) are over the answers of held-out conversations:
split `gate`, seed 77, with other prompts than those of calibration. Both are also given for the tokens that decide: what opens or
makes a call, and an answer's first and last token. Weights and inputs are rounded as the checkpoint states, all else is computed
in float32 by one reader. The reference is the source on the same answers.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import annie_quant
from annie_quant.checkpoint.dialects import linears
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data import generate
from annie_quant.data.rows import read_conversations
from annie_quant.offline.engine import Engine, Row
from annie_quant.offline.loading import load
from annie_quant.quantize import kl_trial
from annie_quant.quantize.calibration_text import samples_of_rows

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "helpers"))
TINY = Path(annie_quant.__file__).parent / "assets/tiny-annie"
MODELS = ("tiny-annie", "thin-1", "thin-2", "robust")
OURS, LLM_COMPRESSOR, AUTO_ROUND = "ours", "llm-compressor", "auto-round"
# Row of the table → environment.
ROWS = {
    "naive": OURS,
    "gptq": OURS,
    "best": OURS,
    "best, all W4A4": OURS,
    "ModelOpt max": OURS,
    "ModelOpt MSE": OURS,
    "ModelOpt local Hessian": OURS,
    "ModelOpt AWQ": OURS,
    "llm-compressor GPTQ": LLM_COMPRESSOR,
    "llm-compressor AWQ + GPTQ": LLM_COMPRESSOR,
    "AutoRound light": AUTO_ROUND,
    "AutoRound": AUTO_ROUND,
}
NUMERICS = ("w4a4", "w4a16")
MEASURES = ("kl", "flips", "decision_kl", "decision_flips")
FIGURES = tuple(f"{kind}_{what}" for kind in NUMERICS for what in MEASURES[:2])


@dataclass
class HeldOut:
    """Answers of held-out conversations, and the source's log-probabilities there, float32."""

    rows: list[Row]
    decides: list[torch.Tensor]  # bool, per token of a row
    reference: dict[int, torch.Tensor]

    @classmethod
    @functools.cache  # seeds share the answers
    def of(cls, model: Path, file: Path, answers: int) -> HeldOut:
        samples = samples_of_rows(model, read_conversations(file))
        samples = list(kl_trial.in_turn_by_category(samples))[:answers]
        rows = [Row(s.prompt, s.answer) for s in samples]
        source = load(model, dtype=torch.float32, device="cpu")
        decides = [torch.tensor(s.decides, dtype=torch.bool) for s in samples]
        return cls(
            rows, decides, {i: torch.log_softmax(x, -1) for i, x in Engine(source).scores(rows)}
        )

    @property
    def tokens(self) -> int:
        return sum(len(row.target) for row in self.rows)

    @property
    def decisions(self) -> int:
        return sum(int(decides.sum()) for decides in self.decides)

    def compare(self, checkpoint: Path, numerics: str) -> dict[str, float]:
        """Return the mean KL in nats per token and the flips, of all tokens and of those that decide, by NUMERICS_MEASURE."""
        model = load(checkpoint, numerics, cache="float32", dtype=torch.float32, device="cpu")
        sums = dict.fromkeys(MEASURES, 0.0)
        for i, logits in Engine(model).scores(self.rows):
            p, q = self.reference[i], torch.log_softmax(logits, -1)
            kl, flips = (
                (p.exp() * (p - q)).sum(-1).clamp_min(0).double(),
                p.argmax(-1) != q.argmax(-1),
            )
            decides = self.decides[i]
            for name, values in zip(
                MEASURES, (kl, flips, kl[decides], flips[decides]), strict=True
            ):
                sums[name] += float(values.sum())
        return {
            f"{numerics}_kl": sums["kl"] / self.tokens,
            f"{numerics}_flips": int(sums["flips"]),
            f"{numerics}_decision_kl": sums["decision_kl"] / self.decisions,
            f"{numerics}_decision_flips": int(sums["decision_flips"]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--models", default=",".join(MODELS), help="names of tiny models, or folders"
    )
    parser.add_argument("--results", type=Path, help="default: runs.jsonl in --output")
    parser.add_argument("--seeds", default="0,1,2", help="of the calibration conversations")
    parser.add_argument("--samples", type=int, default=128, help="calibration conversations")
    parser.add_argument("--answers", type=int, default=150, help="held-out answers")
    parser.add_argument("--only", default=";".join(ROWS), help="rows, separated by semicolons")
    parser.add_argument("--llm-compressor", type=Path, metavar="PYTHON")
    parser.add_argument("--auto-round", type=Path, metavar="PYTHON")
    parser.add_argument(
        "--faster-deltanet",
        action="store_true",
        help="in the peers' model; their times are then not their own",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--machine", default="", help="stored with each run; times are shown per machine"
    )
    parser.add_argument(
        "--table", action="store_true", help="print the tables of the finished runs and stop"
    )
    arguments = parser.parse_args()
    arguments.results = arguments.results or arguments.output / "runs.jsonl"
    if not arguments.table:
        pythons = {
            OURS: Path(sys.executable),
            LLM_COMPRESSOR: arguments.llm_compressor,
            AUTO_ROUND: arguments.auto_round,
        }
        chosen = [r for r in arguments.only.split(";") if pythons[ROWS[r]] is not None]
        arguments.output.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(arguments.threads)
        for seed in map(int, arguments.seeds.split(",")):
            for model in arguments.models.split(","):
                run_rows(model, seed, chosen, pythons, arguments)
    print(tables(arguments.results))


def run_rows(
    model: str, seed: int, rows: list[str], pythons: dict[str, Path], arguments: argparse.Namespace
) -> None:
    """Run the rows that are not finished, and append one line each to runs.jsonl."""
    output, file = arguments.output, arguments.results
    source = source_of(model, output)
    model = source.name
    finished = {
        (r["model"], r["seed"], r["row"], r["samples"]) for r in stored(file) if not r.get("error")
    }
    todo = [row for row in rows if (model, seed, row, arguments.samples) not in finished]
    if not todo:
        return
    conversations, text = calibration_text(source, seed, arguments.samples, output)
    gate = output / "gate.jsonl"
    if not gate.is_file():
        generate("annie", teacher="offline", n=400, output=gate, seed=77, split="gate")
    held_out = HeldOut.of(source, gate, arguments.answers)
    for row in todo:
        target = output / "models" / f"{model}-{seed}-{row.replace(' ', '_')}"
        line: dict[str, Any] = {
            "model": model,
            "seed": seed,
            "row": row,
            "samples": arguments.samples,
        }
        line["faster_deltanet"] = arguments.faster_deltanet
        line |= {"machine": arguments.machine} if arguments.machine else {}
        command = [pythons[ROWS[row]], HERE / "peer_recipes.py", row, source, target]
        command += [
            "--text",
            text,
            "--conversations",
            conversations,
            "--samples",
            arguments.samples,
            "--seed",
            seed,
        ]
        command += ["--faster-deltanet"] if arguments.faster_deltanet else []
        line |= measured_run([str(c) for c in command], target, arguments.threads)
        if not line.get("error"):
            line |= {"linears": quantized(target), "bytes": ModelFolder(target).weight_bytes}
            line |= {"tokens": held_out.tokens, "decisions": held_out.decisions}
            for kind in NUMERICS:
                line |= held_out.compare(target, kind)
            shutil.rmtree(target)
        print(json.dumps(line), flush=True)
        with file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


def source_of(name: str, output: Path) -> Path:
    """Return the folder of tiny-annie, of one of its variants, which is saved first, or `name` if it is a folder."""
    if name == TINY.name:
        return TINY
    if name not in MODELS:
        return Path(name).resolve()
    from tiny_variants import save_variant  # type: ignore[import-not-found]

    folder = output / "sources" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        save_variant(name, folder)
    return folder


def calibration_text(model: Path, seed: int, samples: int, output: Path) -> tuple[Path, Path]:
    """Return the conversations of a seed, and a file with their token sequences for the peers."""
    tokenizer = "" if model.name in MODELS else f"-{model.name}"
    conversations, text = (
        output / f"calibration-{seed}.jsonl",
        output / f"calibration-{seed}-{samples}-ids{tokenizer}.jsonl",
    )
    if not conversations.is_file():
        generate("annie", teacher="offline", n=500, output=conversations, seed=seed)
    if not text.is_file():
        write_sequences(model, read_conversations(conversations, samples), text)
    return conversations, text


def write_sequences(model: Path, rows: list[dict[str, Any]], text: Path) -> None:
    """Write the token sequences of conversations, one per line, for the peers.

    A sequence that another one begins with is left out: the longer one has all of its tokens.
    """
    ids = sorted({sample.ids for sample in samples_of_rows(model, rows)})
    longest = [a for a, b in zip(ids, [*ids[1:], ()], strict=True) if b[: len(a)] != a]
    text.write_text("".join(json.dumps(sequence) + "\n" for sequence in longest))


def measured_run(command: list[str], target: Path, threads: int) -> dict[str, Any]:
    """Run a recipe in its own process. Returns its figures, or {"error": its last line}."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = (
        os.environ
        | dict.fromkeys(names, str(threads))
        | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    )
    start, before = time.monotonic(), os.times()
    log = target.with_name(f"{target.name}.log")
    with log.open("w") as stream:
        status = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=stream, env=environment, check=False, text=True
        )
    after = os.times()
    lines = status.stdout.splitlines()
    if status.returncode:
        errors = [
            line
            for line in log.read_text().splitlines()
            if re.match(r"[\w.]*(Error|Exception)\b", line)
        ]
        return {"error": (errors or [f"exit {status.returncode}"])[-1]}
    return {
        **json.loads(lines[-1]),
        "process_s": round(time.monotonic() - start, 1),
        "process_cpu_s": round(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system,
            1,
        ),
    }


def quantized(folder: Path) -> int:
    """Return how many linears of a checkpoint are NVFP4."""
    return sum(linear.format == "nvfp4" for linear in linears(ModelFolder(folder)).values())


def stored(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def tables(file: Path) -> str:
    """Return the finished runs as markdown: figures by row and model, and our rows against each peer."""
    runs = [r for r in stored(file) if not r.get("error")]
    columns = list(dict.fromkeys((r["model"], r["samples"]) for r in runs))
    rows = list(dict.fromkeys(run["row"] for run in runs))
    lines = []
    for kind in NUMERICS:
        for measure in ("", "decision_") if all("decisions" in r for r in runs) else ("",):
            of = " of the tokens that decide" if measure else ""
            lines += [
                f"{kind.upper()}: mean KL{of}, 1e-3 nats per token (least to most over seeds); flips",
                "",
            ]
            lines += [
                "| | " + " | ".join(f"{m}, {n} rows" for m, n in columns) + " |",
                "|---" * (len(columns) + 1) + "|",
            ]
            for row in rows:
                cells = [
                    cell(
                        [r for r in runs if (r["row"], r["model"], r["samples"]) == (row, *c)],
                        f"{kind}_{measure}",
                    )
                    for c in columns
                ]
                lines.append(f"| {row} | " + " | ".join(cells) + " |")
            lines.append("")
    lines += against(runs, rows)
    for machine in sorted({r.get("machine", "") for r in runs}):
        lines += ["", *([f"{machine}:", ""] if machine else []), *times(runs, rows, machine)]
    return "\n".join(lines)


def cell(runs: list[dict[str, Any]], prefix: str) -> str:
    """Return the figures of the runs of one row, model and size. prefix: of the figures, such as "w4a4_decision_"."""
    if not runs:
        return "–"
    kl = [1e3 * r[f"{prefix}kl"] for r in runs]
    flips = statistics.fmean(r[f"{prefix}flips"] for r in runs)
    spread = f" ({min(kl):.2f}–{max(kl):.2f})" if len(kl) > 1 else ""
    count = runs[0]["decisions" if "decision" in prefix else "tokens"]
    return f"{statistics.fmean(kl):.2f}{spread}; {flips:.0f} of {count:,}"


def against(runs: list[dict[str, Any]], rows: list[str]) -> Iterator[str]:
    """Yield a table: in how many pairs of one model, size and seed our row is lower than another one, and the mean ratio.

    The others are the peers, naive, and those of our rows that take less time.
    """
    by_key = {(r["model"], r["samples"], r["seed"], r["row"]): r for r in runs}
    pairs = sorted({(r["model"], r["samples"], r["seed"]) for r in runs})
    measures = MEASURES if all("decisions" in r for r in runs) else MEASURES[:2]
    columns = [
        f"{kind.upper()} {what.replace('_', ' ').replace('kl', 'KL')}"
        for kind in NUMERICS
        for what in measures
    ]
    figures = [f"{kind}_{what}" for kind in NUMERICS for what in measures]
    yield "| ours, other | pairs | " + " | ".join(f"{c}: lower, ratio, p" for c in columns) + " |"
    yield "|---" * (len(columns) + 2) + "|"
    ours = [r for r in rows if r == "gptq" or r.startswith("best ")]
    for i, own in enumerate(ours):
        for peer in (r for r in rows if r not in ours[i:]):
            both = [
                (by_key[(*p, own)], by_key[(*p, peer)])
                for p in pairs
                if {(*p, own), (*p, peer)} <= by_key.keys()
            ]
            if both:
                cells = [compared([(a[f], b[f]) for a, b in both]) for f in figures]
                yield f"| {own}, {peer} | {len(both)} | " + " | ".join(cells) + " |"


def compared(pairs: list[tuple[float, float]]) -> str:
    """Return how many first figures are lower, the geometric mean of the ratios, and the one-sided p of a sign test."""
    lower, higher = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    n = lower + higher
    p = sum(math.comb(n, k) for k in range(lower, n + 1)) / 2**n
    logs = [math.log(a / b) for a, b in pairs if a > 0 and b > 0]
    ratio = math.exp(statistics.fmean(logs)) if logs else math.nan
    return f"{lower} of {len(pairs)}, {ratio:.2f}, {p:.2g}"


def times(runs: list[dict[str, Any]], rows: list[str], machine: str) -> Iterator[str]:
    """Yield a table of the CPU seconds of a row's own work on one machine, without imports and without loading the model."""
    yield "| | CPU seconds, median (least to most) | wall seconds | runs | linears | MB |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        own = [r for r in runs if (r["row"], r.get("machine", "")) == (row, machine)]
        if not own:
            continue
        cpu, wall = [r["cpu_s"] for r in own], [r["seconds"] for r in own]
        yield (
            f"| {row} | {statistics.median(cpu):.0f} ({min(cpu):.0f} to {max(cpu):.0f}) | {statistics.median(wall):.0f} "
            f"| {len(own)} | {own[0]['linears']} | {own[0]['bytes'] / 1e6:.2f} |"
        )


if __name__ == "__main__":
    main()
