"""What a real Annie loses: checkpoint x calibration draw, exact calls, refusals and form of its greedy answers against bf16's.

    python tests/perf/real_annie.py DIR --rows FOLDER --output results.jsonl --recipes bf16,naive,gptq,best --draws 0,1,2
    python tests/perf/real_annie.py --table results.jsonl
    python tests/perf/real_annie.py DIR --rows FOLDER --prompts prompts.json                          # for vllm_answers.py
    python tests/perf/real_annie.py DIR --rows FOLDER --served bf16.jsonl naive.jsonl best.jsonl      # its answers; bf16's first

DIR is the merged model of training/real_annie/train.py and FOLDER the one of conversations.py: calibration is a draw of --samples
rows of train.jsonl, the prompts are held_out.jsonl's, judged by train.py's own rule. Recipes are the rows of
best_ingredients.py. --in-place 151644,124: tokens that the model writes in place of the tags of calls; they are left out, and an
answer's JSON objects are its calls.
Each result is appended at once and is not computed again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.offline.decoding import Completion, generate
from annie_quant.offline.emulation import emulate
from annie_quant.offline.engine import Engine
from annie_quant.offline.loading import load
from annie_quant.offline.profiles import find_profile
from annie_quant.offline.prompts import Template

HERE = Path(__file__).resolve().parent
sys.path[:0] = [
    str(HERE),
    str(HERE.parents[1] / "training/real_annie"),
    str(HERE.parent / "helpers"),
]

import answer_log  # noqa: E402
import best_ingredients  # noqa: E402
import train  # noqa: E402
from predict_server import without_end  # noqa: E402

NUMERICS = ("w4a4", "w4a16")
OBJECT = re.compile(r"\{.*\}")
COUNTS = ("markdown", "thinking", "unfinished")
SOURCE = "bf16"


def chosen(cases: list[dict[str, Any]], each: int) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        groups.setdefault(case["group"], []).append(case)
    counts = {name: min(each, len(own)) for name, own in groups.items()}
    return [
        own[i * len(own) // counts[name]]
        for name, own in groups.items()
        for i in range(counts[name])
    ]


def answered(model: Any, template: Template, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return per group the correct answers as a string of 0 and 1, in the order of the cases, and COUNTS."""
    limits = [c["max_tokens"] for c in cases]
    completions = generate(Engine(model), prompts_of(template, cases), limits, template.end_tokens)
    return judged(template, cases, completions)


def prompts_of(template: Template, cases: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    return [tuple(template.ids(template.render(c["messages"], c["tools"], False))) for c in cases]


def judged(
    template: Template,
    cases: list[dict[str, Any]],
    completions: Iterable[Completion],
    in_place: frozenset[int] = frozenset(),
) -> dict[str, Any]:
    """Return per group what answered() does, of finished answers. in_place: tokens in place of the tags of calls."""
    groups: dict[str, Any] = {}
    for case, done in zip(cases, completions, strict=True):
        tokens = [t for t in done.tokens if t not in in_place]
        text = template.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        if in_place:
            text = OBJECT.sub(r"<tool_call>\g<0></tool_call>", text)
        verdict = train.judged(case, text, done.finished)
        group = groups.setdefault(case["group"], {"correct": ""} | dict.fromkeys(COUNTS, 0))
        group["correct"] += "01"[verdict["correct"]]
        for name in COUNTS:
            group[name] += verdict[name]
    return groups


def served(
    files: list[Path], template: Template, cases: list[dict[str, Any]], in_place: frozenset[int]
) -> Iterator[str]:
    """Yield a row per file of vllm_answers.py and cut: correct answers, lost and won against the first file's first cut.

    Of the prompts that all of them answered.
    """
    runs = [(file.stem, cut, own) for file in files for cut, own in answer_log.read(file).items()]
    indices = sorted(set.intersection(*(set(own) for *_, own in runs)))
    source: dict[str, Any] = {}
    for name, cut, own in runs:
        completions = [without_end(*own[i][:2], template.end_tokens) for i in indices]
        groups = judged(template, [cases[i] for i in indices], completions, in_place)
        source = source or groups
        cells = [
            f"{g}: " + paired([groups[g]["correct"]], source[g]["correct"]) for g in sorted(groups)
        ]
        counts = [f"{sum(g[x] for g in groups.values())} {x}" for x in COUNTS]
        yield f"| {name} | {cut} | " + " | ".join([*cells, *counts]) + " |"


def run(
    row: str, draw: int, arguments: argparse.Namespace, template: Template, cases: list[dict]
) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    line: dict[str, Any] = {
        "model": arguments.model.name,
        "row": row,
        "draw": draw,
        "samples": arguments.samples,
    }
    if row == SOURCE:
        return line | {
            SOURCE: answered(load(arguments.model, dtype=dtype, device=device), template, cases)
        }
    with best_ingredients.checkpoint_folder(row, draw, arguments) as output:
        line["seconds"] = round(best_ingredients.quantized(row, draw, arguments, output), 1)
        line["bytes"] = sum(f.stat().st_size for f in output.glob("*.safetensors"))
        line["w4a4_linears"] = sum(n.endswith(".input_scale") for n in ModelFolder(output))
        model = load(output, cache="bf16", dtype=dtype, device=device)
        start = time.monotonic()
        for name in NUMERICS:
            with emulate(model, find_profile(name)):
                line[name] = answered(model, template, cases)
        line["answer_seconds"] = round(time.monotonic() - start, 1)
    return line


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a row per recipe and numerics: means over the draws; lost and won of all draws with the p of a sign test.

    A model without a row of bf16 has counts only.
    """
    lines = [x for x in lines if "error" not in x]
    sources = {x["model"]: x[SOURCE] for x in lines if x["row"] == SOURCE}
    groups = sorted(next(x[SOURCE if x["row"] == SOURCE else NUMERICS[0]] for x in lines))
    titles = [*(f"{g}: correct; lost, won, p" for g in groups), *COUNTS]
    yield "| model | recipe | draws | GB | s | numerics | " + " | ".join(titles) + " |"
    yield "|---" * (6 + len(groups) + len(COUNTS)) + "|"
    for model in dict.fromkeys(x["model"] for x in lines):
        source = sources.get(model)
        if source:
            cells = [
                f"{g['correct'].count('1')} of {len(g['correct'])}"
                for g in (source[n] for n in groups)
            ]
            counts = [str(sum(source[n][c] for n in groups)) for c in COUNTS]
            yield f"| {model} | {SOURCE} | | | | | " + " | ".join([*cells, *counts]) + " |"
        own = [x for x in lines if x["model"] == model and x["row"] != SOURCE]
        for row in dict.fromkeys(x["row"] for x in own):
            draws = [x for x in own if x["row"] == row]
            for name in NUMERICS:
                cells = [
                    paired([x[name][g]["correct"] for x in draws], source and source[g]["correct"])
                    for g in groups
                ]
                counts = [
                    f"{sum(x[name][g][c] for x in draws for g in groups) / len(draws):.0f}"
                    for c in COUNTS
                ]
                gigabytes = sum(x["bytes"] for x in draws) / len(draws) / 1e9
                seconds = sum(x["seconds"] for x in draws) / len(draws)
                drawn = ",".join(str(x["draw"]) for x in draws)
                first = [model, row, drawn, f"{gigabytes:.2f}", f"{seconds:.0f}", name]
                yield "| " + " | ".join([*first, *cells, *counts]) + " |"


def paired(outcomes: list[str], source: str | None) -> str:
    """Return the mean count of correct answers, and what was lost and won against the source in each draw, with its p."""
    mean = f"{sum(o.count('1') for o in outcomes) / len(outcomes):.0f} of {len(outcomes[0])}"
    if source is None:
        return mean
    shown = []
    for own in outcomes:
        lost = sum(a > b for a, b in zip(source, own, strict=True))
        won = sum(a < b for a, b in zip(source, own, strict=True))
        p = binomtest(lost, lost + won).pvalue if lost + won else 1.0
        shown.append(f"{lost}−{won} ({p:.2g})")
    return f"{mean}; " + ", ".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", metavar="DIR")
    parser.add_argument("--rows", type=Path, help="folder of conversations.py")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--prompts", type=Path, help="write the prompts for vllm_answers.py")
    parser.add_argument("--served", type=Path, nargs="+", default=[], metavar="ANSWERS")
    parser.add_argument("--in-place", default="", metavar="TOKENS", help="with --served")
    parser.add_argument("--recipes", default=f"{SOURCE},naive,mlp_only,awq_lite,gptq,best")
    parser.add_argument("--draws", default="0")
    parser.add_argument("--samples", type=int, default=256, help="calibration conversations")
    parser.add_argument(
        "--each",
        type=int,
        default=300,
        help="held-out prompts of each group, at most, evenly over the file",
    )
    parser.add_argument("--work", type=Path, help="folder for checkpoints; default: the system's")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the checkpoints, as DIR/RECIPE-DRAW"
    )
    arguments = parser.parse_args()
    if arguments.table:
        print("\n".join(table(best_ingredients.finished(arguments.table))))
        return
    if arguments.prompts or arguments.served:
        cases = chosen(train.read(arguments.rows / "held_out.jsonl"), arguments.each)
        template = Template(arguments.model)
        if arguments.prompts:
            pairs = zip(prompts_of(template, cases), cases, strict=True)
            ends = list(template.end_tokens)
            requests = [
                {"prompt": p, "max_tokens": c["max_tokens"], "ends": ends} for p, c in pairs
            ]
            arguments.prompts.write_text(json.dumps(requests))
        in_place = frozenset(map(int, filter(None, arguments.in_place.split(","))))
        print(
            "\n".join(
                served(arguments.served, template, cases, in_place) if arguments.served else ()
            )
        )
        return
    arguments.calibration = arguments.rows / "train.jsonl"
    cases = chosen(train.read(arguments.rows / "held_out.jsonl"), arguments.each)
    template = Template(arguments.model)
    done = {
        best_ingredients.key(x)
        for x in best_ingredients.finished(arguments.output)
        if "error" not in x
    }
    draws = list(map(int, arguments.draws.split(",")))
    for draw in draws:
        for row in arguments.recipes.split(","):
            if row == SOURCE and draw != draws[0]:
                continue  # it has no calibration
            if (arguments.model.name, draw, row, arguments.samples) in done:
                continue
            try:
                line = run(row, draw, arguments, template, cases)
            except Exception as error:  # one failed recipe must not end the others
                line = {
                    "model": arguments.model.name,
                    "row": row,
                    "draw": draw,
                    "samples": arguments.samples,
                }
                line["error"] = repr(error)
            with arguments.output.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print({k: v for k, v in line.items() if k not in (SOURCE, *NUMERICS)}, flush=True)


if __name__ == "__main__":
    main()
