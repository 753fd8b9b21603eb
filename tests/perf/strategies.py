"""All strategies on one model: quantize, audit, evaluate; writes the table of tests/perf/strategies.md.

python tests/perf/strategies.py --output runs/strategies --n 100             # one after the other, finished ones are skipped
python tests/perf/strategies.py --output runs/strategies --only gptq,best     # only these
python tests/perf/strategies.py --output runs/strategies --table             # the table of the finished ones
python tests/perf/strategies.py --spread runs/a runs/b runs/c                # components of the spread

The folders of --spread are those of `annie-quant search --all --seeds 3`, one per fine-tune (one folder: the spread
of that model), with the same prompts. Its columns
per factor: standard error of the mean difference, in points, and in brackets the standard deviation of one further level.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import annie_quant
from annie_quant import checkpoint, judge, quantize, runtime
from annie_quant.checkpoint.linears import is_linear
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.files import read_json, write_json
from annie_quant.data import generate
from annie_quant.documents import Evaluation
from annie_quant.judge.decision.wording import points
from annie_quant.judge.gates import decides

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
import variance
from variance import FACTORS, right_answers

TINY = Path(annie_quant.__file__).parent / "assets/tiny-annie"
# Row → (strategy, exclude, settings). `bits` is set so that B and the rows compared with it have equal sizes.
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "naive": ("naive", "", {}),
    "direct": ("direct", "", {}),
    "direct four_over_six": ("direct", "", {"scale": "four_over_six"}),
    "direct sweep": ("direct", "", {"scale": "sweep"}),
    "awq_lite": ("awq_lite", "", {}),
    "mlp_only": ("mlp_only", "", {}),
    "auto_mixed": ("auto_mixed", "", {}),
    "auto_mixed 6 bits": ("auto_mixed", "", {"bits": 6.0}),
    "w4a16_mixed": ("w4a16_mixed", "", {}),
    "gptq": ("gptq", "", {}),
    "gptq W4A16": ("gptq", "", {"activations": 16}),
    "best": ("best", "", {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--output", type=Path, default=Path("runs/strategies"))
    parser.add_argument(
        "--spread",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="print the components of the spread and stop",
    )
    parser.add_argument(
        "--calib-data", type=Path, help="default: 500 conversations by the offline teacher, seed 0"
    )
    parser.add_argument("--calib-samples", type=int, default=256)
    parser.add_argument("--n", type=int, default=100, help="prompts a gate")
    parser.add_argument("--only", default=",".join(ROWS), help="rows, comma-separated")
    parser.add_argument(
        "--device", help="of the evaluation: cpu or cuda; default: a GPU where there is one"
    )
    parser.add_argument(
        "--table", action="store_true", help="print the table of finished rows and stop"
    )
    arguments = parser.parse_args()
    if arguments.spread:
        print(spread_table(arguments.spread))
        return
    if not arguments.table:
        arguments.output.mkdir(parents=True, exist_ok=True)
        calibration = arguments.calib_data or arguments.output / "calibration.jsonl"
        if not calibration.is_file():
            generate("annie", teacher="offline", n=500, output=calibration)
        for row in arguments.only.split(","):
            one(row, arguments, calibration)
    print(table(arguments.output, arguments.model))


def one(row: str, arguments: argparse.Namespace, calibration: Path) -> None:
    strategy, exclude, settings = ROWS[row]
    name = re.sub(r"\W+", "_", row)
    target, file = arguments.output / "models" / name, arguments.output / f"{name}.json"
    if file.is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    quantized = quantize.run(
        strategy,
        arguments.model,
        target,
        calib_data=calibration,
        calib_samples=arguments.calib_samples,
        exclude=exclude,
        force=True,
        report=lambda line: (
            print(f"{row}: {line}", flush=True) if "MB written" not in line else None
        ),
        **settings,
    )
    audit = checkpoint.audit(target, source=arguments.model)
    workloads = judge.sample(judge.load_workloads(), arguments.n)
    start = time.monotonic()
    result = runtime.evaluate(
        target,
        arguments.model,
        workloads,
        cache=arguments.output / "reference",
        dtype="float32",
        device=arguments.device,
    )
    stored = {
        key: {k: side[k] for k in ("gates", "kl", "same_answers", "paired")}
        | {"verdict": result["verdict"]["profiles"][key]}
        for key, side in result["numerics"].items()
    }
    write_json(
        file,
        {
            "row": row,
            "strategy": strategy,
            "settings": settings,
            "made": msgspec.to_builtins(quantized),
            "bits": bits(target),
            "audit": [f.message for f in audit.findings] if not audit.ok else [],
            "numerics": stored,
            "reference_gates": result["reference_gates"],
            "seconds_evaluate": time.monotonic() - start,
        },
    )
    print(json.dumps({"row": row, "seconds": quantized.seconds, "audit": audit.ok}), flush=True)


def bits(folder: Path) -> float:
    """Return bits per weight over the decoder's linears, including scales, from the files on disk."""
    model = ModelFolder(folder)
    size = weights = 0
    for name in model:
        info = model.info(name)
        if ".layers." not in name or not is_linear(name, info.shape):
            continue
        module = name.removesuffix(".weight")
        size += sum(
            model.info(t).size_bytes for t in (name, f"{module}.weight_scale") if t in model
        )
        weights += info.elements * (2 if info.dtype == "U8" else 1)
    return 8 * size / weights


def table(folder: Path, model: Path) -> str:
    """Markdown: one line per row and numerics."""
    result = [read_json(p) for p in sorted(folder.glob("*.json"))]
    result = sorted(
        (f for f in result if f.get("row") in ROWS), key=lambda f: list(ROWS).index(f["row"])
    )
    if not result:
        return "nothing is finished yet"
    deciding = sorted(g for g, v in result[0]["reference_gates"].items() if not v.get("advisory"))
    lines = [
        "| strategy | numerics | verdict | tool calls (95 % interval) | gates lost or undecided | mean KL | flips | same answers "
        "| MB | bits | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = result[0]["reference_gates"]["tool_call"]
    lines.append(
        f"| bf16 | – | reference | {rate(base)} | – | – | – | – | {ModelFolder(model).weight_bytes / 1e6:.2f} | 16 | – |"
    )
    for f in result:
        for numerics, side in f["numerics"].items():
            bad = [
                f"{g} {points(p['difference'])} ({points(p['low'])} to {points(p['high'])}) {p['verdict']}"
                for g in deciding
                if (p := side["paired"].get(g)) and p["verdict"] != "keeps"
            ]
            kl, same = side["kl"], side["same_answers"]
            lines.append(
                f"| {f['row']} | {numerics} | {side['verdict']} | {rate(side['gates']['tool_call'])} | {'; '.join(bad) or 'none'} "
                f"| {kl['mean']:.5f} | {kl['flips']} of {kl['n_tokens']:,} | {same['same']} of {same['n']} "
                f"| {f['made']['size_bytes'] / 1e6:.2f} | {f['bits']:.2f} | {f['made']['seconds']:.0f} |"
            )
    return "\n".join(lines)


def spread_table(folders: list[Path]) -> str:
    """Markdown: answers lost against bf16, with the components of the spread, and the orders of strategies that it allows.

    The outcome of a prompt is 1 if the answer passes all deciding gates, less the same of its fine-tune's bf16 answer. So a
    fine-tune that is worse in bf16 already does not count as spread of a strategy.
    """
    evaluations = [
        {p.stem: Evaluation.load(p) for p in sorted((folder / "eval").glob("*.json"))}
        for folder in folders
    ]
    names = [
        n
        for n in evaluations[0]
        if f"{n}-draw1" in evaluations[0] and all(n in e for e in evaluations)
    ]
    factors = (*FACTORS, "fine-tune")
    lines = [
        "| strategy | numerics | right answers (bf16's) | points against bf16, 95 % | "
        + " | ".join(factors)
        + " | interactions (the largest) |",
        "|---|---|---|---|" + "---|" * (len(factors) + 1),
    ]
    tables: dict[str, dict[str, Any]] = {}
    for name in names:
        draws = [
            [e[name], *(e[f"{name}-draw{k}"] for k in range(1, len(e)) if f"{name}-draw{k}" in e)]
            for e in evaluations
        ]
        for kind in draws[0][0].numerics:
            right = same_shape(
                name, kind, [right_answers(own, kind) for own in draws], draws, evaluations
            )
            bf16 = np.stack([right_answers([e["bf16"]], "bf16") for e in evaluations], axis=-1)
            tables.setdefault(kind, {})[name] = right - bf16
            own = variance.spread(right - bf16, factors)
            parts = [own.components.get(f) for f in factors]
            rest = {key: c.of_mean for key, c in own.components.items() if key not in factors}
            largest = max(rest, key=lambda key: rest[key])
            lines.append(
                f"| {name} | {kind} | {100 * right.mean():.1f} % ({100 * bf16.mean():.1f} %) of "
                f"{'×'.join(map(str, right.shape))} | "
                f"{points(own.mean)} ({points(own.low)} to {points(own.high)}) | "
                + " | ".join(
                    f"{100 * c.of_mean**0.5:.2f} ({100 * max(c.variance, 0) ** 0.5:.1f})"
                    if c
                    else "–"
                    for c in parts
                )
                + f" | {100 * sum(rest.values()) ** 0.5:.2f} ({largest} {100 * rest[largest] ** 0.5:.2f}) |"
            )
    for kind, by_strategy in tables.items():
        ranked = variance.ranking(by_strategy, factors) if len(by_strategy) > 1 else []
        lines += [
            f"- {kind}: {a} before {b}, {points(d.mean)} points, p {p:.2g}" for a, b, d, p in ranked
        ]
        lines += [] if ranked else [f"- {kind}: the spread allows no order"]
    return "\n".join(lines)


def same_shape(
    name: str,
    kind: str,
    parts: list[Any],
    draws: list[list[Evaluation]],
    evaluations: list[dict[str, Evaluation]],
) -> Any:
    """Return the fine-tunes' outcomes as one table [prompts, draws, arithmetics, fine-tunes]; stops if they do not match."""
    everything = [e for own in draws for e in own] + [e["bf16"] for e in evaluations]
    # A gate's prompts may depend on bf16's answers (only text can have markdown), all together do not.
    prompts = [
        list(dict.fromkeys(p for gate in e.prompts if decides(gate) for p in e.prompts[gate]))
        for e in everything
    ]
    if len({part.shape for part in parts}) > 1 or any(own != prompts[0] for own in prompts):
        raise SystemExit(
            f"{name}, {kind}: the folders differ in prompts, draws or arithmetics; search them with the same options"
        )
    return np.stack(parts, axis=-1)


def rate(gate: dict[str, Any]) -> str:
    return f"{gate['passes']}/{gate['n']} ({100 * gate['low']:.0f}–{100 * gate['high']:.0f} %)"


if __name__ == "__main__":
    main()
