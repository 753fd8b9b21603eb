"""Score of models on the leaderboard's cases, by its own checker: lost and won answers against bf16, by category.

    python tests/perf/bfcl_models.py DIR [CHECKPOINT:NUMERICS ...] --answers answers.jsonl --leave-out rows.jsonl
    python tests/perf/bfcl_models.py --table answers.jsonl

DIR is the bf16 model; CHECKPOINT:w4a4 answers with the arithmetic of that profile. At most --cases of a category are asked, evenly
over its order (--leave-out: without the prompts of these calibration rows). Answers are greedy, 512 tokens at most, one line per
answer; a finished model is not asked again. Needs bfcl-eval, and mpmath for --categories multi_turn_base.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bfcl_checkers import leaderboard
from scipy.stats import binomtest

from annie_quant.data.rows import read_conversations
from annie_quant.documents import Answer
from annie_quant.judge import bfcl
from annie_quant.judge.gates import faults
from annie_quant.judge.workloads import Case, Workload
from annie_quant.offline.decoding import generate
from annie_quant.offline.emulation import emulate
from annie_quant.offline.engine import Engine
from annie_quant.offline.loading import load
from annie_quant.offline.profiles import find_profile
from annie_quant.offline.prompts import Template

CATEGORIES = (*bfcl.CATEGORIES, *bfcl.LIVE)
SOURCE = "bf16"


def asked(categories: str, cases: int, left_out: set[str]) -> list[tuple[Workload, Case]]:
    chosen = []
    for name in categories.split(","):
        workload = bfcl.load(name)
        own = [c for c in workload.cases if c.messages[-1]["content"] not in left_out]
        count = min(cases, len(own))
        chosen += [(workload, own[i * len(own) // count]) for i in range(count)]
    return chosen


def answer(
    folder: Path, numerics: str, cases: list[tuple[Workload, Case]], name: str
) -> Iterator[dict[str, Any]]:
    """Yield one row per case: the model's calls, and the faults that our gates find."""
    template = Template(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = (
        load(folder, dtype=dtype, device=device)
        if numerics == SOURCE
        else load(folder, cache="bf16", dtype=dtype, device=device)
    )
    requests = [template.request(*c) for c in cases]
    with contextlib.nullcontext() if numerics == SOURCE else emulate(model, find_profile(numerics)):
        done = generate(
            Engine(model),
            [r.prompt for r in requests],
            [r.max_tokens for r in requests],
            template.end_tokens,
        )
    for (workload, case), request, completion in zip(cases, requests, done, strict=True):
        given = template.answer(request, completion)
        yield {
            "model": name, "numerics": numerics, "category": case.category, "id": case.id,
            "calls": [[c.get("name"), c.get("arguments")] for c in given.tool_calls],
            "ours": own_verdict(given, case, workload), "finished": completion.finished,
        }  # fmt: skip


def own_verdict(given: Answer, case: Case, workload: Workload) -> bool:
    found = faults(given, case, workload)
    return not any(found[g] for g in ("abstention", "tool_values") if found.get(g) is not None)


class Leaderboard:
    """The package's own verdicts."""

    def __init__(self) -> None:
        self.check, root = leaderboard(), bfcl._package_data()
        self.cases: dict[str, Any] = {}
        for category in (c for c in CATEGORIES if not c.endswith("irrelevance")):
            file = f"BFCL_v4_{category}.json"
            truth = {
                r["id"]: r["ground_truth"] for r in bfcl._rows(root / "possible_answer" / file)
            }
            self.cases |= {
                r["id"]: (r["function"], truth[r["id"]]) for r in bfcl._rows(root / file)
            }

    def right(self, row: dict[str, Any]) -> bool:
        """Return its verdict; where no tool fits an answer is right without a call that can be read, as there."""
        calls = []
        for name, arguments in row["calls"]:
            try:
                values = json.loads(arguments) if isinstance(arguments, str) else arguments
            except ValueError:
                values = None
            calls.append({name: values} if isinstance(values, dict) else None)
        if row["id"] not in self.cases:
            return (
                not calls if row["category"].endswith("irrelevance") else row["ours"]
            )  # multi-turn: see bfcl.py
        if None in calls or not calls:
            return False
        functions, truth = copy.deepcopy(self.cases[row["id"]])
        return bool(
            self.check(functions, calls, truth, row["category"].removeprefix("live_"))["valid"]
        )


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the score by category with lost, won and the p of a sign test, and the agreement of both checkers."""
    judge = Leaderboard()
    verdicts: dict[tuple[str, str], dict[str, dict[str, bool]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    agreement: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        right = judge.right(row)
        model = row["model"] if row["numerics"] == SOURCE else f"{row['model']} {row['numerics']}"
        verdicts[row["source"], model][row["category"]][row["id"]] = right
        agreement[
            "same" if right == row["ours"] else f"only {'ours' if row['ours'] else 'theirs'} right"
        ].append(f"{row['category']}/{row['id']}")
    categories = [
        c for c in (*CATEGORIES, *bfcl.MULTI_TURN) if any(c in v for v in verdicts.values())
    ]
    yield "| model | " + " | ".join([*categories, "all: right; lost, won, p"]) + " |"
    yield "|---" * (len(categories) + 2) + "|"
    for (source, model), own in verdicts.items():
        reference = verdicts.get((source, SOURCE), {})
        cells, lost, won, right, n = [], 0, 0, 0, 0
        for category in categories:
            results, theirs = own.get(category, {}), reference.get(category, {})
            both = [i for i in results if i in theirs]
            down, up = (
                sum(theirs[i] > results[i] for i in both),
                sum(theirs[i] < results[i] for i in both),
            )
            lost, won, right, n = (
                lost + down,
                won + up,
                right + sum(results.values()),
                n + len(results),
            )
            cells.append(
                f"{sum(results.values())} of {len(results)}"
                + (f"; {down}, {up}" if model != SOURCE else "")
            )
        p = binomtest(lost, lost + won).pvalue if lost + won else 1.0
        cells.append(f"{right} of {n}" + (f"; {lost}, {won}, {p:.2g}" if model != SOURCE else ""))
        yield f"| {source}: {model} | " + " | ".join(cells) + " |"
    yield ""
    yield "Both checkers: " + ", ".join(f"{k} {len(v):,}" for k, v in agreement.items())
    for kind, ids in agreement.items():
        if kind != "same":
            counts = {i: ids.count(i) for i in dict.fromkeys(ids)}
            yield f"{kind}: " + ", ".join(
                f"{i} ({c})" for i, c in sorted(counts.items(), key=lambda x: -x[1])[:12]
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", metavar="DIR")
    parser.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT:NUMERICS")
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--categories", default=",".join(CATEGORIES))
    parser.add_argument(
        "--cases", type=int, default=150, help="of each category, at most, evenly over its order"
    )
    parser.add_argument("--leave-out", type=Path, help="calibration rows")
    arguments = parser.parse_args()
    if arguments.table:
        print("\n".join(table([json.loads(x) for x in arguments.table.read_text().splitlines()])))
        return
    rows = read_conversations(arguments.leave_out) if arguments.leave_out else []
    left_out = {m["content"] for r in rows for m in r["messages"] if m["role"] == "user"}
    cases = asked(arguments.categories, arguments.cases, left_out)
    lines = arguments.answers.read_text().splitlines() if arguments.answers.is_file() else []
    done = {(x["source"], x["model"], x["numerics"]) for x in map(json.loads, lines)}
    for item in (SOURCE, *arguments.checkpoints):
        folder, _, numerics = item.rpartition(":")
        path, name = (Path(folder), Path(folder).name) if folder else (arguments.model, SOURCE)
        if (arguments.model.name, name, numerics) in done:
            continue
        found = [r | {"source": arguments.model.name} for r in answer(path, numerics, cases, name)]
        with arguments.answers.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)
        print(
            f"{name} {numerics}: {len(found)} answers, {sum(r['ours'] for r in found)} right",
            flush=True,
        )


if __name__ == "__main__":
    main()
